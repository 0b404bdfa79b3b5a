"""Images of capsules: what no processor writes is refused, and names are their own."""

from __future__ import annotations

import struct

import msgspec
import pytest
from msgspec.structs import replace

from engine.prompt_images import ImageTensor, PromptImage
from engine.sampling import SamplingParams
from router.api.headers import RequestTerms
from router.api.request_samples import MOST_PIXEL_BYTES, make_samples
from router.api.understanding import Understood
from router.capsule import (
    Capsule,
    CapsuleError,
    CapsuleModel,
    CapsulePixels,
    CapsulePlace,
    CapsulePrompt,
    CapsuleTensor,
    ReplayImage,
    images_of,
    read,
    written,
)
from router.config import HttpConfig
from router.errors import ApiError
from router.images.replayed import taken_from
from router.openai_api import CompletionRequest
from router.text.prompt_text import PromptText
from router.text.text_model import TextModel
from router.turns.turn_format import TurnFormat

PIXELS = CapsuleTensor("pixel_values", "float32", (4, 2), struct.pack("8f", *range(8)))
GRID = CapsuleTensor("image_grid_thw", "int64", (1, 3), struct.pack("3q", 1, 2, 2))
MASK = CapsuleTensor("pixel_attention_mask", "int64", (1, 20), struct.pack("20q", *[1] * 20))
SHAPES = CapsuleTensor("spatial_shapes", "int64", (3, 2), struct.pack("6q", 1, 2, 2, 2, 1, 2))
IMAGE = ReplayImage(1, 5, (PIXELS, GRID, MASK))


def test_images_have_names_of_their_own() -> None:
    (found,), (other,) = taken_from([IMAGE]), taken_from([replace(IMAGE, tensors=(PIXELS, GRID))])
    assert (found.first, found.end, found.grid) == (1, 5, (1, 2, 2))
    assert len(found.digest) == 16
    assert found.digest != other.digest
    assert taken_from([replace(IMAGE, first=2, end=6)])[0].digest == found.digest


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (replace(PIXELS, data=PIXELS.data[:-4]), "other bytes than its shape"),
        (replace(PIXELS, dtype="object"), "numbers of type 'object'"),
        (replace(GRID, data=struct.pack("3q", 1, 3, 3)), "larger than the image's pixels"),
        (replace(GRID, data=struct.pack("3q", 1, -2, -2)), "larger than the image's pixels"),
        (replace(GRID, name="image_sizes", data=struct.pack("3q", 1, 1 << 14, 1 << 14)), "larger than"),
        (replace(MASK, data=struct.pack("20q", *[1] * 19, 2)), "larger than the image's pixels"),
        (replace(GRID, data=struct.pack("3q", 1 << 62, 1 << 62, 1 << 62)), "larger than the image's pixels"),
        (replace(GRID, data=struct.pack("3q", 0, 3, 3)), "larger than the image's pixels"),
        (replace(SHAPES, data=struct.pack("6q", 1, 2, 2, 2, 1, 3)), "larger than the image's pixels"),
        (replace(SHAPES, data=struct.pack("6q", 2, 1, -1, -1, 1, 1)), "larger than the image's pixels"),
    ],
)
def test_numbers_that_no_processor_writes_are_refused(bad: CapsuleTensor, problem: str) -> None:
    tensors = tuple(
        bad if each.data != PIXELS.data or bad.name == each.name else each for each in IMAGE.tensors
    )
    with pytest.raises(ApiError, match=problem) as caught:
        taken_from([replace(IMAGE, tensors=(PIXELS, *tensors, bad))])
    assert caught.value.status == 400


@pytest.mark.parametrize("tiles", [1, 3, 12])
def test_an_image_in_tiles_has_a_size_for_each(tiles: int) -> None:
    """As LFM2-VL's processor writes them: patches along height and width of each tile."""
    pixels = CapsuleTensor("pixel_values", "float32", (tiles, 32 * 32, 3), bytes(tiles * 32 * 32 * 3 * 4))
    shapes = CapsuleTensor(
        "spatial_shapes", "int64", (tiles, 2), struct.pack(f"{2 * tiles}q", *[32] * 2 * tiles)
    )
    mask = CapsuleTensor(
        "pixel_attention_mask", "int32", (tiles, 32 * 32), struct.pack("i", 1) * tiles * 32 * 32
    )
    (found,) = taken_from([ReplayImage(1, 5, (pixels, shapes, mask))])
    assert [each.name for each in found.tensors] == ["pixel_values", "spatial_shapes", "pixel_attention_mask"]


def test_sizes_before_an_image_was_cut_have_the_bound_of_requests() -> None:
    original = replace(GRID, name="image_sizes", shape=(1, 2), data=struct.pack("2q", 1 << 14, 1 << 13))
    image = replace(IMAGE, tensors=(PIXELS, original))
    with pytest.raises(ApiError, match="larger than"):
        taken_from([image])
    assert taken_from([image], 1 << 27)


def test_patches_that_fill_an_image_up_have_no_place() -> None:
    """As Gemma 4's processor writes them."""
    places = replace(GRID, name="image_position_ids", shape=(1, 2, 2), data=struct.pack("4q", 1, 0, -1, -1))
    assert taken_from([replace(IMAGE, tensors=(PIXELS, places))])
    for wrong in ((1, 0, -2, -2), (1, 0, 1 << 40, 0)):
        bad = replace(places, data=struct.pack("4q", *wrong))
        with pytest.raises(ApiError, match="larger than"):
            taken_from([replace(IMAGE, tensors=(PIXELS, bad))])


def test_arrays_without_numbers_are_taken() -> None:
    empty = [replace(MASK, shape=shape, data=b"") for shape in ((0,), (0, 2), (1 << 31, 0), (0, 1 << 31))]
    assert taken_from([replace(IMAGE, tensors=(PIXELS, *empty))])


def test_too_many_tensors_are_refused() -> None:
    with pytest.raises(ApiError, match="0 tensors"):
        taken_from([replace(IMAGE, tensors=())])
    with pytest.raises(ApiError, match="9 tensors"):
        taken_from([replace(IMAGE, tensors=(PIXELS,) * 9)])


def capsule() -> Capsule:
    prompt = CapsulePrompt((1, 2, 3), SamplingParams(max_tokens=1), "1", ())
    return Capsule(
        format=5, id="chatcmpl-1", created=1, model=CapsuleModel("m", "f", "t", ""), numerics=(),
        prompts=(prompt,), images=(CapsulePixels("ab", (PIXELS,)),),
        places=(CapsulePlace(0, 0, 1, "ab"), CapsulePlace(0, 1, 2, "ab")),
    )  # fmt: skip


def test_pixels_are_once_in_a_capsule_and_cannot_be_edited() -> None:
    text = written(capsule())
    found = read(text)
    assert [each.tensors for each in images_of(found, 0)] == [(PIXELS,), (PIXELS,)]
    assert images_of(found, 1) == ()
    fields = msgspec.json.decode(text)
    fields["images"][0]["tensors"][0]["data"] = "A" + fields["images"][0]["tensors"][0]["data"][1:-2] + "=="
    fields["images"][0]["tensors"][0]["data"] = fields["images"][0]["tensors"][0]["data"].replace("=", "A")
    with pytest.raises(CapsuleError, match="edited"):
        read(msgspec.json.encode(fields))
    with pytest.raises(CapsuleError, match="lacks the pixels of image 'cd'"):
        images_of(replace(capsule(), places=(CapsulePlace(0, 0, 1, "cd"),)), 0)


def test_capsules_have_a_bound_on_pixels(text_model: TextModel) -> None:
    image = PromptImage(
        0, 1, b"d" * 16, (ImageTensor("pixel_values", "float32", (1,), bytes(MOST_PIXEL_BYTES + 4)),)
    )
    prompt = PromptText([1, 2], images=(image,))
    wanted, params = CompletionRequest(prompt="x"), SamplingParams(max_tokens=1)
    understood = Understood(wanted, text_model, params, [prompt], TurnFormat(wanted, HttpConfig()))
    with pytest.raises(ApiError, match="up to 16 MiB of images"):
        make_samples(understood, RequestTerms(id="1", records=True, records_logprobs=True))
    assert make_samples(understood, RequestTerms(id="1"))
