"""Arrival times of requests (pure): at once, at a rate, in bursts, or ever faster."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

INFINITE = float("inf")


class ArrivalProcess(msgspec.Struct, frozen=True, kw_only=True):
    request_rate: float = INFINITE
    """Requests per second; infinite: all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps between requests.

    1 is Poisson, less has more bursts, more is steadier.
    """
    burst_size: int | None = None
    """Requests that come together, instead of a rate ..."""
    burst_interval: float = 1.0
    """... so many seconds apart."""
    ramp_up: str | None = None
    """linear or exponential: the rate goes from ``ramp_start`` to ``ramp_end`` over the requests."""
    ramp_start: float = 1.0
    ramp_end: float = 1.0


def pauses(arrivals: ArrivalProcess, rng: random.Random, count: int) -> Iterator[float]:
    """Seconds to wait after each of ``count`` requests."""
    for number in range(count):
        if arrivals.burst_size is not None:
            yield arrivals.burst_interval if (number + 1) % arrivals.burst_size == 0 else 0.0
            continue
        rate = arrivals.request_rate
        if arrivals.ramp_up is not None:
            part = number / max(1, count - 1)
            start, end = arrivals.ramp_start, arrivals.ramp_end
            rate = (
                start + (end - start) * part
                if arrivals.ramp_up == "linear"
                else start * (end / start) ** part
            )
        if rate == INFINITE:
            yield 0.0
        else:
            yield rng.gammavariate(arrivals.burstiness, 1 / (rate * arrivals.burstiness))
