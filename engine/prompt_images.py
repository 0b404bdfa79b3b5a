"""Images in a prompt: places, names, and what an encoder reads (pure)."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

DIGEST_BYTES = 16
"""Bytes of an image's name: nobody can craft another image with the same one."""

IN_LINE = frozenset(
    {
        "cohere2_vision",
        "gemma4",
        "idefics3",
        "internvl",
        "lfm2_vl",
        "llama4",
        "llava",
        "llava_onevision",
        "mistral3",
        "smolvlm",
    }
)
"""Model types in which an image's rows stand at positions of the text."""
ON_AXES = frozenset(
    {"glm4v", "glm4v_moe", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"}
)
"""Model types in which each row has positions on three axes, see :mod:`engine.vision.axes`."""
WHOLE = frozenset({"gemma3"})
"""Model types in which each row of an image sees all of it."""
WHOLE_IN_WINDOWS = "gemma4"
"""Model type in which only layers with a window may do so."""
FAMILIES = IN_LINE | ON_AXES | WHOLE
"""Model types whose images are served; of others the language part is served alone."""
GRID = "image_grid_thw"
"""Name of the tensor with an image's frames, and its patches along height and width."""
PLACES = "image_position_ids"
"""Name of the tensor with each patch's column and row, -1 in padding."""
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
    def grid(self) -> tuple[int, ...]:
        """Frames, and patches along height and width; empty where the processor names none."""
        found = next((each for each in self.tensors if each.name == GRID), None)
        if found is None or found.dtype != "int64" or len(found.data) != 24:
            return ()
        return struct.unpack("<3q", found.data)

    def without_pixels(self) -> PromptImage:
        """The same with its grid alone, by which later positions are found."""
        return PromptImage(
            self.first, self.end, self.digest, tuple(each for each in self.tensors if each.name == GRID)
        )

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


def problem_with_marks(images: Sequence[PromptImage], prompt_ids: Sequence[int]) -> str | None:
    """Why these images cannot be seen whole; None if they can."""
    for each in images:
        if len(set(prompt_ids[each.first : each.end])) > 1:
            return f"the image at token {each.first} has text between its rows, which this model cannot place"
    return None


def problem_with_grids(images: Sequence[PromptImage], merge: int) -> str | None:
    """Why these images' grids do not go with their placeholders; None if they do.

    ``merge``: see :func:`image_merge`; 0: there are no grids.
    """
    for each in images if merge else ():
        grid = each.grid
        if len(grid) != 3 or grid[0] != 1 or min(grid) < 1 or grid[1] % merge or grid[2] % merge:
            return f"the image at token {each.first} has no grid of one frame that this model can place"
        rows = (grid[1] // merge) * (grid[2] // merge)
        if rows != each.end - each.first:
            return f"the image at token {each.first} has {each.end - each.first} tokens and {rows} rows"
    return None


def image_merge(config: Mapping[str, Any]) -> int:
    """Patches along each side of an image's row; 0 where rows have no axes.

    ``config``: of config.json.
    """
    if config.get("model_type") not in ON_AXES:
        return 0
    vision = config.get("vision_config")
    found = vision.get("spatial_merge_size", 2) if isinstance(vision, Mapping) else 2
    return found if isinstance(found, int) and found > 0 else 2


def images_are_whole(config: Mapping[str, Any]) -> bool:
    """Whether each row of an image sees all of it, in some layers at least.

    ``config``: of config.json.
    """
    text = config.get("text_config")
    by_choice = isinstance(text, Mapping) and text.get("use_bidirectional_attention") == "vision"
    return config.get("model_type") in WHOLE or (config.get("model_type") == WHOLE_IN_WINDOWS and by_choice)


def image_token(config: Mapping[str, Any]) -> int | None:
    """Placeholder of an image's rows in prompts; None: no images.

    ``config``: of config.json.
    """
    if config.get("model_type") not in FAMILIES or config.get("vision_config", {}) is None:
        return None
    found = next((config[name] for name in TOKEN if config.get(name) is not None), None)
    return found if isinstance(found, int) and found >= 0 else None
