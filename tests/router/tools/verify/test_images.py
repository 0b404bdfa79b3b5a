"""``lockstep verify`` of answers about images, truthful or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.kernels.core import library
from engine.sampling import SamplingParams
from router.capsule import Capsule, CapsuleTensor, ReplayImage, read, written
from router.tools.verify.command import main
from router.tools.verify.verdict import VerifyStatus
from tests.router.tools.verify.answers import ROOM, SAMPLED, Server, save

pytest.importorskip("PIL.Image")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]


def seen(directory: Path) -> tuple[Server, list[int], tuple[ReplayImage, ...]]:
    """A model, and a prompt with three images of which two are equal."""
    from PIL import Image

    from router.images.placing import images_in
    from router.images.preparer import load_processor, prepare
    from tests.engine.vision.tiny_vision_models import make_tiny_chat_model

    make_tiny_chat_model(directory)
    processor = load_processor(str(directory))
    pictures = [Image.linear_gradient("L").rotate(90 * turn).convert("RGB") for turn in (0, 1, 0)]
    prepared = [prepare(processor, each) for each in pictures]
    text = "Which of ".join(each.text for each in prepared)
    ids = processor.tokenizer("See: " + text + " differs?", add_special_tokens=False)["input_ids"]
    token = processor.tokenizer.convert_tokens_to_ids("<image>")
    images = tuple(
        ReplayImage(
            each.first,
            each.end,
            tuple(CapsuleTensor(one.name, one.dtype, one.shape, one.data) for one in each.tensors),
        )
        for each in images_in(ids, token, "<image>", prepared)
    )
    return Server(directory), ids, images


def changed(capsule: Capsule, **fields: Any) -> Capsule:
    return read(written(replace(capsule, **fields)))


def test_pixels_decide_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "llava"
    server, ids, images = seen(directory)
    flags = ["--model", str(directory), "--cpu-threads", "1", "--kv-cache-memory-bytes", str(ROOM)]

    def verify(capsule: Capsule) -> tuple[int, str]:
        status = main([save(tmp_path / "capsule.json", [capsule]), *flags])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    capsule = server.answer(SamplingParams(**SAMPLED), ids=ids, images=images)
    assert (capsule.format, len(capsule.images), len(capsule.places)) == (5, 2, 3)
    status, text = verify(capsule)
    assert status == VerifyStatus.EQUAL, text

    one, other = capsule.images
    swapped = (replace(one, digest=other.digest), replace(other, digest=one.digest))
    status, text = verify(changed(capsule, images=swapped))
    assert status not in (VerifyStatus.EQUAL, VerifyStatus.UNUSABLE), text
    for bad, problem in (
        ({"images": capsule.images[:1]}, "lacks the pixels of image"),
        (
            {"places": (replace(capsule.places[0], end=len(ids) + 9), *capsule.places[1:])},
            "outside the prompt",
        ),
        ({"places": capsule.places[:2]}, "has placeholders for images that the request does not have"),
        ({"images": (replace(one, tensors=()), other)}, "has 0 tensors"),
    ):
        status, text = verify(changed(capsule, **bad))
        assert status != VerifyStatus.EQUAL
        assert problem in text
        assert "Traceback" not in text
