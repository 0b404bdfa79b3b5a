"""Names of blocks with images, and of which images a prompt can have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pieces.pool import NAME_BYTES, hash_block, prefix_names
from engine.prompt_images import (
    ImageTensor,
    PromptImage,
    image_token,
    names_between,
    names_of,
    problem_with,
)

SIZE = 4
PLACEHOLDER = 9
PIXELS = (ImageTensor("pixel_values", "float32", (1,), b"\0" * 4),)
digests = st.binary(min_size=16, max_size=16)


def chain(ids: list[int], images: tuple[PromptImage, ...]) -> list[bytes]:
    names: list[bytes] = []
    for start in range(0, len(ids) // SIZE * SIZE, SIZE):
        parent = names[-1] if names else None
        own = names_between(images, start, start + SIZE)
        names.append(hash_block(parent, ids[start : start + SIZE], images=own))
    return names


@given(digests, digests, st.integers(0, 6), st.integers(1, 9))
def test_images_of_one_size_share_no_block(one: bytes, two: bytes, first: int, count: int) -> None:
    ids = [1] * first + [PLACEHOLDER] * count + [2] * 7
    found = [chain(ids, (PromptImage(first, first + count, each, PIXELS),)) for each in (one, two)]
    before = first // SIZE
    assert found[0][:before] == found[1][:before] == chain(ids, ())[:before]
    for left, right, text in zip(found[0][before:], found[1][before:], chain(ids, ())[before:], strict=True):
        assert (left == right) == (one == two)
        assert text not in (left, right)


@given(st.lists(digests, min_size=1, max_size=3), st.integers(1, 5), st.integers(1, 5))
def test_routers_know_blocks_by_the_same_names(pixels: list[bytes], count: int, between: int) -> None:
    ids, images = [1], []
    for each in pixels:
        images.append(PromptImage(len(ids), len(ids) + count, each, PIXELS))
        ids += [PLACEHOLDER] * count + [3] * between
    expected = [
        int.from_bytes(name[:NAME_BYTES], "big") for name in chain(ids, (*images,))[: (len(ids) - 1) // SIZE]
    ]
    assert (
        prefix_names(ids, SIZE, images=images) == expected == prefix_names(ids, SIZE, images=names_of(images))
    )


def test_the_place_of_an_image_counts() -> None:
    ids = [PLACEHOLDER] * 4
    left = chain(ids, (PromptImage(0, 1, b"a" * 16), PromptImage(1, 4, b"b" * 16)))
    right = chain(ids, (PromptImage(0, 3, b"a" * 16), PromptImage(3, 4, b"b" * 16)))
    assert left != right


@pytest.mark.parametrize(
    ("images", "problem"),
    [
        ((), "the prompt has placeholders for images that the request does not have"),
        ((PromptImage(1, 3, b"a" * 16, PIXELS),), None),
        ((PromptImage(1, 2, b"a" * 16, PIXELS), PromptImage(2, 3, b"a" * 16, PIXELS)), None),
        ((PromptImage(1, 2, b"a" * 16, PIXELS),), "the prompt has placeholders"),
        ((PromptImage(1, 9, b"a" * 16, PIXELS),), "is outside the prompt or overlaps another"),
        ((PromptImage(1, 3, b"a" * 16, PIXELS), PromptImage(2, 3, b"a" * 16, PIXELS)), "overlaps another"),
        ((PromptImage(1, 3, b"a", PIXELS),), "has 1 bytes, not 16"),
        ((PromptImage(0, 1, b"a" * 16, PIXELS),), "no placeholder stands for the image at token 0"),
        ((PromptImage(1, 3, b"a" * 16),), "the image at token 1 has no pixels"),
    ],
)
def test_what_is_wrong_with_images_is_named(images: tuple[PromptImage, ...], problem: str | None) -> None:
    found = problem_with(images, [1, PLACEHOLDER, PLACEHOLDER, 2], PLACEHOLDER)
    assert (found is None) == (problem is None), found
    assert problem is None or problem in (found or "")


def test_a_checkpoint_without_an_encoder_takes_no_images() -> None:
    """As Gemma 4's do whose text alone is stored."""
    config = {"model_type": "gemma4", "image_token_id": 7, "vision_config": {}}
    assert image_token(config) == 7
    assert image_token(config | {"vision_config": None}) is None
