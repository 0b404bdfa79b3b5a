"""Images of capsules, checked and named anew: they may come from anybody."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import prod
from struct import calcsize
from typing import Any

import msgspec

from engine.prompt_images import DIGEST_BYTES, ImageTensor, PromptImage
from router.capsule import CapsuleTensor, ReplayImage
from router.errors import refuse

FORMATS = {"float32": "f", "int64": "q", "int32": "i", "uint8": "B", "bool": "B"}
"""Types of numbers, with their letters for memory views."""
FEW = 16
"""Numbers of a tensor that may be sizes.

Longer ones are masks: each number is 0 or 1.
"""
ORIGINAL = "image_sizes"
"""Name of the tensor with that size."""
MOST_PIXELS = 1 << 26
"""Pixels of an image before it was cut and scaled."""
MOST_TENSORS = 8
"""Arrays of an image."""


def taken_from(images: Sequence[ReplayImage]) -> tuple[PromptImage, ...]:
    """Images for instances.

    Their names are those of no image of a request. A capsule may come from anybody: by the name that it
    gives, others would find its pixels.

    Raises:
        ApiError: one has numbers that no processor writes (400).
    """
    found = []
    for number, image in enumerate(images):
        _check(image, f"images[{number}]")
        tensors = tuple(ImageTensor(each.name, each.dtype, each.shape, each.data) for each in image.tensors)
        data = msgspec.msgpack.encode(tensors)
        digest = blake2b(data, digest_size=DIGEST_BYTES, person=b"replay").digest()
        found.append(PromptImage(image.first, image.end, digest, tensors))
    return tuple(found)


def _check(image: ReplayImage, path: str) -> None:
    """Refuse sizes beyond the pixels: an encoder would make tables of them."""
    if not 0 < len(image.tensors) <= MOST_TENSORS:
        refuse(f"{path} has {len(image.tensors)} tensors, not 1 to {MOST_TENSORS}.", path)
    views = [_view(each, path) for each in image.tensors]
    pixels = max((len(view) for view in views if view.format == "f"), default=0)
    for tensor, view in zip(image.tensors, views, strict=True):
        if view.format == "f" or not len(view):
            continue
        product = prod(max(1, each) for each in view) if len(view) <= FEW else max(view)
        most = MOST_PIXELS if tensor.name == ORIGINAL else pixels if len(view) <= FEW else 1
        if min(view) < 0 or product > most:
            refuse(f"{path}.tensors: {tensor.name[:40]} is larger than the image's pixels.", path)


def _view(tensor: CapsuleTensor, path: str) -> memoryview:
    letter = FORMATS.get(tensor.dtype)
    if letter is None:
        refuse(f"{path}.tensors has numbers of type {tensor.dtype[:20]!r}.", path)
    if len(tensor.data) != prod(tensor.shape) * calcsize(letter):
        refuse(f"{path}.tensors: {tensor.name[:40]} has other bytes than its shape.", path)
    data: Any = memoryview(tensor.data)
    return data.cast(letter)  # type: ignore[no-any-return]
