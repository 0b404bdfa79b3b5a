"""Shape of a layer's recurrent state, and the records that ``state.hpp`` reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.kernels.core.rows import LINE
from engine.states.grid import NATIVE_GRID
from engine.states.held import State

LAYER_STATE = np.dtype(
    [(name, np.int64) for name in (
        "conv", "recurrent", "conv_step", "recurrent_step", "before", "width", "heads", "key_dim",
        "value_dim", "head_floats", "ring_at", "heads_at"
    )]
)  # fmt: skip
"""Record of one layer's state (``LayerState`` in ``state.hpp``)."""
STATE_ROW = np.dtype(
    [(name, np.int64) for name in ("reads", "from_ring", "to_ring", "num_open", "first_fill", "num_fills")]
)
"""Record of what a row of a step reads and keeps (``StateRow``)."""
STATE_FILL = np.dtype([("position", np.int64), ("slot", np.int64)])
"""Record of a slot that a row fills (``StateFill``)."""


@dataclass(frozen=True)
class StateShape:
    """Sizes of one layer's state at a boundary, and of its rows since then."""

    kernel: int = 1
    """Tokens that a convolution reads; 1: there is none."""
    width: int = 0
    """Numbers of a token that the convolution reads."""
    heads: int = 0
    """Heads with a recurrent state; 0: there is none."""
    key_dim: int = 0
    value_dim: int = 0
    head_floats: int = 0
    """Numbers in float32 that an open row keeps for each head."""

    def like(self, dtype: torch.dtype) -> State:
        """A state [1, ...] of this form: the convolution's last inputs, and the recurrent state."""
        conv = torch.empty(1, self.kernel - 1, self.width, dtype=dtype) if self.width else None
        recurrent = torch.empty(1, self.heads, self.key_dim, self.value_dim) if self.heads else None
        return conv, recurrent

    def heads_at(self, dtype: torch.dtype) -> int:
        """Bytes of a ring's inputs of the convolution, behind which the heads' numbers begin."""
        return _whole_lines(NATIVE_GRID * self.width * int(dtype.itemsize))

    def ring_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one layer's open rows of a cell of the grid."""
        return self.heads_at(dtype) + self.heads * _whole_lines(4 * NATIVE_GRID * self.head_floats)


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE
