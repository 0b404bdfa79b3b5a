"""Images of capsules, checked and named anew: they may come from anybody."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import prod
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.prompt_images import DIGEST_BYTES, PLACES, ImageTensor, PromptImage
from router.capsule import CapsuleTensor, ReplayImage
from router.errors import refuse

FORMATS = {"float32": "<f4", "int64": "<i8", "int32": "<i4", "uint8": "u1", "bool": "u1"}
"""Types of numbers, with how their bytes are read."""
FEW = 4
"""Most numbers of a row that may be sizes of an image or tile.

Longer rows are of masks: each number is 0 or 1.
"""
ORIGINAL = "image_sizes"
"""Name of the tensor with an image's size before it was cut and scaled."""
MOST_PIXELS = 1 << 26
"""Pixels of an image before that, where ``--max-image-pixels`` allows no more."""
MOST_TENSORS = 8
"""Arrays of an image."""


def taken_from(images: Sequence[ReplayImage], most_pixels: int = MOST_PIXELS) -> tuple[PromptImage, ...]:
    """Images for instances, of at most so many pixels before they were cut.

    Their names are those of no image of a request. A capsule may come from anybody: by the name that it
    gives, others would find its pixels.

    Raises:
        ApiError: one has numbers that no processor writes (400).
    """
    found = []
    for number, image in enumerate(images):
        _check(image, f"images[{number}]", most_pixels)
        tensors = tuple(ImageTensor(each.name, each.dtype, each.shape, each.data) for each in image.tensors)
        data = msgspec.msgpack.encode(tensors)
        digest = blake2b(data, digest_size=DIGEST_BYTES, person=b"replay").digest()
        found.append(PromptImage(image.first, image.end, digest, tensors))
    return tuple(found)


def _check(image: ReplayImage, path: str, most_pixels: int) -> None:
    """Refuse sizes beyond the pixels: an encoder would make tables of them."""
    if not 0 < len(image.tensors) <= MOST_TENSORS:
        refuse(f"{path} has {len(image.tensors)} tensors, not 1 to {MOST_TENSORS}.", path)
    found = [_rows(each, path) for each in image.tensors]
    pixels = max((rows.size for rows in found if rows.dtype.kind == "f"), default=0)
    for tensor, rows in zip(image.tensors, found, strict=True):
        if rows.dtype.kind == "f" or not rows.size:
            continue
        least = 0
        if tensor.name == PLACES:
            extent, most, least = rows.max(), pixels, -1
        elif rows.shape[1] > FEW:
            extent, most = rows.max(), 1
        else:  # products of any int64s: in floats, which have no overflow
            extent = np.maximum(rows, 1).astype(np.float64).prod(axis=1).sum()
            most = most_pixels if tensor.name == ORIGINAL else pixels
        if rows.min() < least or extent > most:
            refuse(f"{path}.tensors: {tensor.name[:40]} is larger than the image's pixels.", path)


def _rows(tensor: CapsuleTensor, path: str) -> NDArray[Any]:
    """Numbers of a tensor by the rows of its last axis."""
    if tensor.dtype not in FORMATS:
        refuse(f"{path}.tensors has numbers of type {tensor.dtype[:20]!r}.", path)
    dtype = np.dtype(FORMATS[tensor.dtype])
    if len(tensor.data) != prod(tensor.shape) * dtype.itemsize:
        refuse(f"{path}.tensors: {tensor.name[:40]} has other bytes than its shape.", path)
    width = tensor.shape[-1] if tensor.shape else 1
    return np.frombuffer(tensor.data, dtype).reshape(-1, max(1, width))
