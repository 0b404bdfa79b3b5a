"""Cost of a request's adapter at an instance (pure)."""

from __future__ import annotations

from collections.abc import Collection

from engine.messages import AdapterUse

SWAP_COST = 128.0
"""Cost of laying out an adapter for the kernels between two steps, in prompt tokens."""
TURN_COST = 2048.0
"""Cost of each adapter whose requests must end before this one runs, in prompt tokens."""


def adapter_cost(adapter: str, use: AdapterUse | None, sent: Collection[str]) -> float:
    """Cost of an adapter at an instance, in prompt tokens to compute; 0 without one.

    ``use`` is the last report, ``sent`` are adapters of this router's requests there.
    """
    if not adapter or use is None:
        return 0.0
    active = {*use.active, *sent}
    if adapter in active:
        return 0.0
    swap = 0.0 if adapter in use.laid_out else SWAP_COST
    return swap + TURN_COST * max(0, len(active) + 1 - use.most)
