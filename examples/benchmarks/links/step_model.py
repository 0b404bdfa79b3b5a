"""Length of a step over a link: computing, delays, bytes (pure).

A step makes a known number of exchanges, each of which can begin only when the one before has ended. One
takes the link's delay, and its bytes divided by the rate. So

    step = compute + exchanges * delay + bytes / rate

where ``compute`` is the same step over a link without delay and bound, everything else that sockets cost
included. What members compute while bytes are under way hides a part of the delay; then the measured step is
shorter than this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from examples.benchmarks.links.netns import Link


@dataclass(frozen=True)
class Exchanges:
    """What one step waits for."""

    count: float
    """Exchanges, one after the other."""
    num_bytes: float
    """Bytes of all of them in the direction that has more."""


def exchanges_of(layout: str, layers: int, num_bytes: float) -> Exchanges:
    """The exchanges of a decode step by the layout's name.

    ``ep``: a header, and in each layer tokens to their experts and results home. ``tp``: two sums in each
    layer. ``pp``: the hidden states there, and the tokens back.

    Raises:
        ValueError: no such layout.
    """
    match layout:
        case "ep":
            return Exchanges(1 + 2 * layers, num_bytes)
        case "tp":
            return Exchanges(2 * layers, num_bytes)
        case "pp":
            return Exchanges(2, num_bytes)
        case "independent":
            return Exchanges(0, 0.0)
    raise ValueError(f"no layout is called {layout!r}")


def predicted(compute: float, exchanges: Exchanges, link: Link) -> float:
    """Seconds of a step over ``link``, given those over a link without delay."""
    on_wire = link.seconds(exchanges.num_bytes) - link.seconds(0)
    return compute + exchanges.count * link.seconds(0) + on_wire


def slope(steps: Sequence[tuple[Link, float]]) -> float:
    """Exchanges per step that fit measured seconds best (least squares).

    Raises:
        ValueError: all links have the same delay.
    """
    delays = [link.seconds(0) for link, _ in steps]
    mean = sum(delays) / len(delays)
    mean_step = sum(seconds for _, seconds in steps) / len(steps)
    spread = sum((delay - mean) ** 2 for delay in delays)
    if spread == 0:
        raise ValueError("exchanges are counted over links of several delays")
    return (
        sum((delay - mean) * (seconds - mean_step) for delay, (_, seconds) in zip(delays, steps, strict=True))
        / spread
    )
