"""Weights of bfloat16 in 12 bits each, without loss, as ``compressed.hpp`` reads and writes them.

A step of few rows takes as long as its weights take to come from memory. Exponents of a model's weights lie
close together: the upper bytes of nearly all weights of a matrix are among sixteen, so four bits say which,
and the few others are patched in. Products have the same bits as with the weights as they were.
"""

from __future__ import annotations

import os

import numpy as np
import torch

from engine.kernels.core.library import KernelLibrary
from engine.kernels.core.operations import COMPRESSED, RecordedWeights
from engine.kernels.core.pages import Arena

TILE = 16
"""Lines of a tile, each of 16 words."""
TILE_WEIGHTS = 512
TILE_BYTES = 768
CODES = 16
MOST_PATCHES = 0.02
"""Largest part of all weights that patches may replace.

With more, the weights are kept as they are (a patch takes four bytes, and time).
"""
OFF = "LOCKSTEP_COMPRESS_WEIGHTS"
"""Environment variable: 0 keeps weights as they are."""


class Compressed(RecordedWeights):
    """The panels of a matrix, or of some matrices, in 12 bits a weight."""

    flag = COMPRESSED

    def __init__(
        self, library: KernelLibrary, panels: torch.Tensor, tiles: torch.Tensor, survey: Survey
    ) -> None:
        """``tiles``: uint8 [tiles, TILE_BYTES], to be written."""
        self.tiles, self._uppers, self._begins = tiles, survey.uppers, survey.begins
        self._patches = np.empty(survey.num_patches, dtype=np.uint32)
        library.call(
            "compress",
            panels.data_ptr(),
            len(tiles),
            self._uppers.ctypes.data,
            self._begins.ctypes.data,
            self._patches.ctypes.data,
            tiles.data_ptr(),
            torch.get_num_threads(),
        )
        arrays = [array.ctypes.data for array in (self._uppers, self._begins, self._patches)]
        self.record = np.array([tiles.data_ptr(), *arrays], dtype=np.int64)
        """Addresses that the kernels get."""

    def __repr__(self) -> str:
        return f"<Compressed {len(self.tiles)} tiles, {len(self._patches)} patches>"

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads."""
        arrays = (self._uppers, self._begins, self._patches)
        return int(self.tiles.numel() + sum(array.nbytes for array in arrays))


class Survey:
    """Codes for the upper bytes of weights, and the weights left to patch."""

    def __init__(self, library: KernelLibrary, panels: torch.Tensor) -> None:
        tiles = panels.numel() // TILE_WEIGHTS
        self.uppers = np.empty(CODES, dtype=np.uint8)
        self.begins = np.empty(tiles + 1, dtype=np.uint32)
        self.num_patches = library.call(
            "survey",
            panels.data_ptr(),
            tiles,
            self.uppers.ctypes.data,
            self.begins.ctypes.data,
            torch.get_num_threads(),
        )


def can_compress(library: KernelLibrary, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether products read panels [..., inputs / 2, 16, 2] of this shape in tiles."""
    wanted = library.compresses and os.environ.get(OFF) != "0"
    return wanted and library.has_tiles and dtype == torch.bfloat16 and shape[-3] % TILE == 0


def compressed(library: KernelLibrary, panels: torch.Tensor, arena: Arena) -> Compressed | None:
    """Compressed panels in memory of the arena; None if too many weights have no code."""
    survey = Survey(library, panels)
    if survey.num_patches > MOST_PATCHES * panels.numel():
        return None
    tiles = arena.zeros((panels.numel() // TILE_WEIGHTS, TILE_BYTES), torch.uint8)
    return Compressed(library, panels, tiles, survey)
