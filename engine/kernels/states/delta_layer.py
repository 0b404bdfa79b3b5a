"""Sizes of a gated delta rule, and the record that ``delta.hpp`` reads of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

DELTA_LAYER = np.dtype(
    [(name, np.float64 if name in ("bound", "step_factor", "eps") else np.int64) for name in (
        "heads", "key_heads", "key_dim", "value_dim", "mixed", "decays", "steps", "gates", "mixed_pitch",
        "decays_pitch", "steps_pitch", "gates_pitch", "keys_at", "values_at", "by_channel", "rates", "shifts",
        "norm", "bound", "step_factor", "eps", "gate_kind"
    )]
)  # fmt: skip
"""``DeltaLayer`` in ``delta.hpp``."""


class DeltaSizes(NamedTuple):
    """Heads of a delta rule, and numbers of a key and of a value."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int

    @property
    def keys(self) -> int:
        """Numbers of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of all value heads."""
        return self.heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Numbers of queries, keys and values of all heads."""
        return 2 * self.keys + self.values

    def kept(self, *, by_channel: bool) -> int:
        """Numbers of a head that an open row keeps: key, correction, and decays so far."""
        return self.key_dim + self.value_dim + (self.key_dim if by_channel else 1)


def delta_layer(sizes: DeltaSizes, **fields: Any) -> np.ndarray[Any, Any]:
    """The record of a layer; ``fields``: those that do not follow from its sizes."""
    record = np.zeros((), dtype=DELTA_LAYER)
    own = {**sizes._asdict(), "keys_at": sizes.keys, "values_at": 2 * sizes.keys}
    for field, value in (own | fields).items():
        record[field] = value
    return record
