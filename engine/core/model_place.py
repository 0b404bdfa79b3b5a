"""Facts about what computes the model, for the scheduler's limits (pure)."""

from __future__ import annotations

import msgspec

from engine.pieces.kinds import BoundarySlots


class ModelPlace(msgspec.Struct, frozen=True):
    """Device and kernels of an instance's model, and the instances beside it."""

    has_gpu: bool = False
    """Whether the model is on a GPU."""
    is_native: bool = False
    """Whether native kernels compute it: for them memory is left for larger prefill chunks."""
    keeps_experts: bool = False
    """Whether the experts of a request's tokens can be returned."""
    at_once: float | None = None
    """Instances of this host that compute at the same time; None: unknown."""
    boundaries: list[BoundarySlots] = []
    """Kinds of state beside keys and values, with their slots."""
