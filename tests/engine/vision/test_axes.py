"""Positions of tokens on three axes, and grids that cannot be placed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.prompt_images import GRID, ImageTensor, PromptImage, problem_with_grids
from engine.vision.axes import RequestAxes

MERGE = 2
sides = st.integers(1, 5)


def image(first: int, height: int, width: int, frames: int = 1) -> PromptImage:
    """An image of so many rows along each side."""
    grid = np.array([frames, MERGE * height, MERGE * width], dtype=np.int64)
    return PromptImage(
        first, first + height * width, b"d" * 16, (ImageTensor(GRID, "int64", (1, 3), grid.tobytes()),)
    )


def walked(images: list[PromptImage], count: int) -> list[tuple[int, ...]]:
    """Positions of tokens, one after the other."""
    found, at = [], 0
    beginning = {each.first: each for each in images}
    while len(found) < count:
        here = beginning.get(len(found))
        if here is None:
            found.append((at, at, at))
            at += 1
            continue
        _, height, width = (side // MERGE or 1 for side in here.grid)
        found += [(at, at + row, at + column) for row in range(height) for column in range(width)]
        at += max(height, width)
    return found[:count]


@given(
    st.lists(st.tuples(sides, sides, st.integers(1, 4)), max_size=3), st.integers(0, 90), st.integers(1, 40)
)
def test_chunks_have_the_positions_of_a_walk(
    sizes: list[tuple[int, int, int]], start: int, count: int
) -> None:
    images: list[PromptImage] = []
    for height, width, text in sizes:
        images.append(image((images[-1].end if images else 0) + text, height, width))
    axes = RequestAxes(images, MERGE)
    found = np.repeat(np.arange(start, start + count)[None], 3, axis=0)
    axes.write(start, found)
    assert [tuple(column) for column in found.T.tolist()] == walked(images, start + count)[start:]
    bare = RequestAxes([each.without_pixels() for each in images], MERGE)
    assert bare.behind == axes.behind >= 0


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (image(3, 2, 3), None),
        (image(3, 2, 3, frames=2), "has no grid of one frame"),
        (PromptImage(3, 9, b"d" * 16), "has no grid of one frame"),
        (PromptImage(3, 8, b"d" * 16, image(3, 2, 3).tensors), "has 5 tokens and 6 rows"),
    ],
)
def test_grids_that_cannot_be_placed_are_named(bad: PromptImage, problem: str | None) -> None:
    found = problem_with_grids([bad], MERGE)
    assert (found is None) == (problem is None), found
    assert problem is None or problem in (found or "")
    assert problem_with_grids([bad], 0) is None, "of models without axes"
