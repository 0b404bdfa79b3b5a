"""Tables by position that a program's steps read: rotary angles, and factors on queries.

The model's own rotary embeddings compute the angles, for a power of two of positions at a time.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.kernels.decoder import DecoderModel
from engine.kernels.lowering.parts import PositionTable

MIN_POSITIONS = 1024
"""Positions that the first tables have."""


class PositionTables:
    """Rotary angles and other numbers by position, which grow with the longest request."""

    def __init__(self, decoder: DecoderModel) -> None:
        self._rotaries = decoder.rotaries
        self._kinds = {each for mixer in decoder.mixers for each in mixer.tables()}
        self._angles: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Cosines and sines [positions, half] of each rotary embedding."""
        self.angles = np.zeros(0, dtype=np.int64)
        """Addresses and widths of the angles, as a step reads them."""
        self.tables: dict[PositionTable, torch.Tensor] = {}
        """Other tables, to which written lists of operations point."""
        self.num_positions = 0
        """Positions that the tables have."""

    def grow(self, length: int) -> bool:
        """Make tables of at least ``length`` positions; returns whether :attr:`tables` are others now."""
        if length <= self.num_positions:
            return False
        self.num_positions = max(MIN_POSITIONS, 1 << (length - 1).bit_length())
        ids = torch.arange(self.num_positions)
        self._angles = [rotary.halves(ids) for rotary in self._rotaries]
        self.tables = {kind: kind.table(ids) for kind in self._kinds}
        self.angles = np.array(
            [(cosines.data_ptr(), sines.data_ptr(), cosines.shape[-1]) for cosines, sines in self._angles],
            dtype=np.int64,
        )
        return bool(self._kinds)
