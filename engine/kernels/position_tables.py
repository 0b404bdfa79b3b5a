"""Tables by position that a program's steps read: rotary angles, and factors on queries.

The model's own rotary embeddings compute the angles, for a power of two of positions at a time.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.base import Int64s
from engine.kernels.decoder import DecoderModel
from engine.kernels.lowering.parts import PositionTable

MIN_POSITIONS = 1024
"""Positions that the first tables have."""


class TurnedTokens(NamedTuple):
    """Angles of a step's tokens, some of which have a position on each axis."""

    rows: Int64s
    """[tokens] row of the tables, or -1 - (row of its own angles)."""
    own: list[tuple[torch.Tensor, torch.Tensor]]
    """Cosines and sines [tokens with differing positions, half] of each rotary embedding."""

    @property
    def own_angles(self) -> Int64s:
        """Addresses and widths of the own angles, as a step reads them."""
        return _records(self.own)


def _records(angles: list[tuple[torch.Tensor, torch.Tensor]]) -> Int64s:
    records = [(cosines.data_ptr(), sines.data_ptr(), cosines.shape[-1]) for cosines, sines in angles]
    return np.array(records, dtype=np.int64)


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
        self.angles = _records(self._angles)
        return bool(self._kinds)

    @cached_property
    def _axes(self) -> list[torch.Tensor]:
        return [rotary.axes() for rotary in self._rotaries]

    def turned(self, axes: Int64s) -> TurnedTokens:
        """Angles of tokens by their positions [3, tokens] on three axes.

        All come from the tables, so that their bits do not depend on what else a step has.
        """
        rows, apart = axes[0].copy(), (axes != axes[0]).any(0)
        count = int(apart.sum())
        if not count:
            return TurnedTokens(rows, [])
        rows[apart] = -1 - np.arange(count)
        positions = torch.from_numpy(axes[:, apart])
        own = []
        for angles, axis in zip(self._angles, self._axes, strict=True):
            at = positions[axis].T  # [count, half]
            cosines, sines = angles
            own.append((cosines.gather(0, at), sines.gather(0, at)))
        return TurnedTokens(rows, own)
