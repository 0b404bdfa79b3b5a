"""Timings of a group's collectives, measured in bounded time (loads torch late).

All members make the same calls, so after each few calls they tell each other how long those took: the
slowest member's time decides whether there are more. A busy machine means fewer calls, not a longer wait.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from parallel.communicators.base import Communicator

if TYPE_CHECKING:
    import torch

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")
SIZES = (64, 64 << 10, 1 << 20, 8 << 20)
"""Tensor sizes to measure, in bytes per member."""

SECONDS = 0.3
"""Seconds after which no more calls of one collective with one size begin.

The warm-up does not count.
"""
FEWEST, MOST = 3, 100
"""Minimum and maximum number of calls whose median time is taken."""
WARM_UP = 2


def measure(group: Communicator, collective: str, num_bytes: int) -> float:
    """Median seconds of one collective call with float32 tensors of ``num_bytes`` bytes.

    All members must call this.

    Raises:
        CollectiveError: a member is lost.
    """
    call = _call(group, collective, num_bytes)
    for _ in range(WARM_UP):
        call()
    seconds: list[float] = []
    block, spent = FEWEST, 0.0
    while spent < SECONDS and len(seconds) < MOST:
        mine = [_seconds(call) for _ in range(min(block, MOST - len(seconds)))]
        seconds += mine
        slowest = max(row[0] for row in group.all_gather_ints([int(sum(mine) * 1e9)]))
        spent += slowest / 1e9
        block *= 2 if spent < SECONDS / 3 else 1  # the next block must not pass the bound by far
    return statistics.median(seconds)


def bytes_sent(collective: str, num_bytes: int, size: int) -> float:
    """Bytes that each of ``size`` members must send at least, when each gives ``num_bytes``."""
    share = (size - 1) / size
    return {
        "all_reduce": 2 * share * num_bytes,  # a reduce-scatter and an all-gather of parts
        "all_gather": (size - 1) * num_bytes,
        "all_to_all": share * num_bytes,
    }[collective]


def cells() -> Iterator[tuple[str, int]]:
    """All pairs (collective, bytes) that are measured."""
    return ((collective, num_bytes) for num_bytes in SIZES for collective in COLLECTIVES)


def _call(group: Communicator, collective: str, num_bytes: int) -> Callable[[], torch.Tensor]:
    import torch

    from parallel.rounds.arithmetic import even_sizes

    whole = torch.ones(num_bytes // 4)
    by_rank, per_rank = [len(whole)] * group.size, even_sizes(len(whole), group.size)
    mine = [per_rank[group.rank]] * group.size
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "all_reduce": lambda: group.all_reduce(whole),
        "all_gather": lambda: group.all_gather(whole, by_rank),
        "all_to_all": lambda: group.all_to_all(whole, per_rank, mine),
    }
    return calls[collective]


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
