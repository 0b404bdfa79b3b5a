"""Images in a prompt: places, names, and what an encoder reads (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

DIGEST_BYTES = 16
"""Bytes of an image's name: nobody can craft another image with the same one."""

FAMILIES = frozenset({"idefics3", "internvl", "llava", "mistral3", "smolvlm"})
"""Model types whose text model takes an image as rows of its stream.

Others give images positions of their own, let them look ahead, or add to them behind some layers: of these
the language part is served alone.
"""
TOKEN = ("image_token_id", "image_token_index")
"""Names that configurations have for the placeholder."""


class ImageTensor(msgspec.Struct, frozen=True, array_like=True):
    """An array of an image for its encoder, as bytes in C order."""

    name: str
    """Name of the encoder's argument, like ``pixel_values``."""
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
    """Names of images that begin at positions [start, end); empty for none.

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


def image_token(config: Mapping[str, Any]) -> int | None:
    """Placeholder of an image's rows in prompts; None: no images.

    ``config``: of config.json.
    """
    if config.get("model_type") not in FAMILIES:
        return None
    found = next((config[name] for name in TOKEN if config.get(name) is not None), None)
    return found if isinstance(found, int) and found >= 0 else None
