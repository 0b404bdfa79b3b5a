"""An image in a prompt: where it stands, its name, and what its encoder reads (no torch)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

DIGEST_BYTES = 16
"""Bytes of an image's name: nobody can craft another image with the same one."""


class ImageTensor(msgspec.Struct, frozen=True, array_like=True):
    """One array that a processor makes of an image, as bytes in the order of C."""

    name: str
    """Of the encoder's argument, like ``pixel_values``."""
    dtype: str
    """As numpy names it: ``float32``, ``int64`` ..."""
    shape: tuple[int, ...]
    data: bytes


class PromptImage(msgspec.Struct, frozen=True, array_like=True):
    """An image in a prompt.

    Among the tokens [first, end) each placeholder stands for one row of its encoder; others are text, such as
    marks of lines.
    """

    first: int
    end: int
    digest: bytes
    """:data:`DIGEST_BYTES` that pixels, grid and settings of the processor decide."""
    tensors: tuple[ImageTensor, ...] = ()
    """Empty where only its name is needed."""

    @property
    def num_bytes(self) -> int:
        return sum(len(each.data) for each in self.tensors)


def names_between(images: Sequence[PromptImage], start: int, end: int) -> bytes:
    """Names of the images that begin at positions [start, end), with their places; empty for none.

    A block's name has those of its own tokens. Later blocks have them by their parent's name.
    """
    return b"".join(
        (each.first - start).to_bytes(4, "little") + each.digest
        for each in images
        if start <= each.first < end
    )


def names_of(images: Sequence[PromptImage]) -> tuple[PromptImage, ...]:
    """The same images without what their encoder reads."""
    return tuple(PromptImage(each.first, each.end, each.digest) for each in images)


def problem_with(images: Sequence[PromptImage], prompt_ids: Sequence[int], placeholder: int) -> str | None:
    """Why these cannot be the images of a prompt; None if they can."""
    at = 0
    for each in images:
        if not at <= each.first < each.end <= len(prompt_ids):
            return f"an image at tokens {each.first} to {each.end} is outside the prompt or overlaps another"
        if len(each.digest) != DIGEST_BYTES:
            return f"the name of an image has {len(each.digest)} bytes, not {DIGEST_BYTES}"
        if placeholder not in prompt_ids[each.first : each.end]:
            return f"no placeholder stands for the image at token {each.first}"
        if not each.tensors:
            return f"the image at token {each.first} has no pixels"
        at = each.end
    num_placed = sum(prompt_ids[each.first : each.end].count(placeholder) for each in images)
    if prompt_ids.count(placeholder) != num_placed:
        return "the prompt has placeholders for images that the request does not have"
    return None
