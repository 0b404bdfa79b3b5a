"""Rows of images, encoded when a step first reaches them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import Int64s
from engine.prompt_images import PromptImage
from engine.vision.tower import ImageTower

MOST_BYTES = 256 << 20
"""Bytes of rows that are kept; the image used least lately goes first."""


@dataclass(frozen=True)
class RowImages:
    """A row of a step whose request has images."""

    images: Sequence[PromptImage]
    token_ids: Int64s
    """The request's tokens from its beginning on."""
    start: int
    """Position of the row's first token."""
    at: int
    """Its index in the step."""
    count: int


class EncodedImages:
    """A tower, and the rows of images that it encoded lately."""

    def __init__(self, tower: ImageTower, placeholder: int, most_bytes: int = MOST_BYTES) -> None:
        """``placeholder``: the token that stands for each row."""
        self._tower = tower
        self._placeholder = placeholder
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._bytes = 0
        self.num_encoded = 0
        """Images that the tower was run for."""

    def __repr__(self) -> str:
        return f"<EncodedImages, {len(self._kept)} kept, {self.num_encoded} encoded>"

    def place(self, rows: Sequence[RowImages], input_ids: Int64s) -> torch.Tensor | None:
        """What the stream begins with at placeholders of a step; None if it has none.

        ``input_ids``: the step's tokens; placeholders become -1 - (index of their row in the result).
        """
        parts: list[torch.Tensor] = []
        placed = 0
        for row in rows:
            for image in row.images:
                first, end = max(image.first, row.start), min(image.end, row.start + row.count)
                if first >= end:
                    continue
                before = int((row.token_ids[image.first : first] == self._placeholder).sum())
                here = np.flatnonzero(row.token_ids[first:end] == self._placeholder)
                if not len(here):
                    continue
                parts.append(self._rows_of(image, row.token_ids)[before : before + len(here)])
                input_ids[row.at + first - row.start + here] = -1 - (placed + np.arange(len(here)))
                placed += len(here)
        return torch.cat(parts) if parts else None

    def _rows_of(self, image: PromptImage, token_ids: Int64s) -> torch.Tensor:
        found = self._kept.pop(image.digest, None)
        if found is None:
            found = self._tower.encode(image)
            self.num_encoded += 1
            self._bytes += found.nbytes
        wanted = int((token_ids[image.first : image.end] == self._placeholder).sum())
        if len(found) != wanted:
            raise ValueError(f"an image has {len(found)} rows for {wanted} placeholders")
        self._kept[image.digest] = found
        while self._bytes > self._most_bytes and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return found
