"""Length of a step over a link: computing, delays, bytes (pure).

A step makes a known number of exchanges, each of which can begin only when the one before has ended. One
takes the link's delay, and its bytes divided by the rate. So

    step = compute + exchanges * delay + bytes / rate

where ``compute`` is the same step over a link without delay and bound, everything else that sockets cost
included, and ``delay`` is by how much longer a small message takes than there, as measured. What members
compute while bytes are under way hides a part of the delay; then the measured step is shorter than this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Exchanges:
    """What one step waits for."""

    count: float
    """Exchanges, one after the other."""
    num_bytes: float
    """Bytes of all of them in the direction that has more."""


def exchanges_of(layout: str, layers: int, num_bytes: float, requests: int) -> Exchanges:
    """The exchanges of a decode step with so many requests, by the layout's name.

    ``ep``: in each layer tokens to their experts and results home; before them a header, which an instance
    without requests has sent long before. ``tp``: two sums in each layer, the worker's orders before, the
    logits at the end. ``pp``: the hidden states there, and the tokens back.

    Raises:
        ValueError: no such layout.
    """
    match layout:
        case "ep":
            return Exchanges(2 * layers + (requests > 1), num_bytes)
        case "tp":
            return Exchanges(2 * layers + 2, num_bytes)
        case "pp":
            return Exchanges(2, num_bytes)
        case "independent":
            return Exchanges(0, 0.0)
    raise ValueError(f"no layout is called {layout!r}")


def predicted(compute: float, exchanges: Exchanges, delay: float, gbits: float) -> float:
    """Seconds of a step, from those over a link without delay; 0 ``gbits``: no bound."""
    on_wire = 8 * exchanges.num_bytes / (1e9 * gbits) if gbits else 0.0
    return compute + exchanges.count * delay + on_wire


def slope(steps: Sequence[tuple[float, float]]) -> float:
    """Exchanges per step that fit measured steps best (least squares).

    ``steps``: pairs of a link's delay and the step over it, in seconds.

    Raises:
        ValueError: all links have the same delay.
    """
    mean = sum(delay for delay, _ in steps) / len(steps)
    mean_step = sum(seconds for _, seconds in steps) / len(steps)
    spread = sum((delay - mean) ** 2 for delay, _ in steps)
    if spread == 0:
        raise ValueError("exchanges are counted over links of several delays")
    return sum((delay - mean) * (seconds - mean_step) for delay, seconds in steps) / spread
