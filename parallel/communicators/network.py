"""A communicator for members that are joined by sockets, on one host or on several.

Each pair has connections for tensors, which the links stripe messages over, and one for last words. A call
sends to all others what they need of this member, and takes what it needs of them. Nothing is acknowledged,
and what comes early waits in the system. Large sums and broadcasts go in two steps where bytes count for more
than the time of a second step: the members measure both while the group forms, and take rank 0's figures.

The rounds are in :mod:`parallel.rounds`: one call into C++ for a whole collective and, where nothing can be
compiled, Python. See ``network_health`` there for when a member gives up, and :mod:`parallel.links` for how
the members find each other and prove that they belong together.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple, Protocol

import torch

from parallel.communicators.base import CollectiveError
from parallel.communicators.rounds_communicator import RoundsCommunicator
from parallel.links.counts import CountedLinks, LinkCount, counts_of
from parallel.links.python_links import links_over
from parallel.links.sockets import GroupSockets
from parallel.rounds.contract import CallForm
from parallel.rounds.native_network_rounds import make_rounds
from parallel.rounds.network_health import NetworkHealth
from parallel.rounds.network_rounds import NetworkRounds, RankedLinks
from parallel.rounds.plans import Plans
from parallel.rounds.segments import this_host
from parallel.rounds.views import NetworkViews
from parallel.topology import usable_cores

logger = logging.getLogger(__name__)

_LEAST_LIMIT, _MOST_LIMIT = 16 << 10, 4 << 20  # bytes up to which one step is enough, however the links are
_MEASURED_ROUNDS = 5
_MEASURED_BYTES = 128 << 10


class UsedLinks(RankedLinks, CountedLinks, Protocol):
    """A member's links with their counters, and how they end."""

    address: int

    def abort(self) -> None: ...
    def close(self) -> None: ...


class Speed(NamedTuple):
    """Speed of a group's links as one member has measured it."""

    latency: float
    """Seconds of a call with hardly any bytes."""
    bandwidth: float
    """Bytes that a member sends per second, to all others together."""


def two_step_limit(speed: Speed, size: int) -> int:
    """Bytes above which sums and broadcasts are faster in two steps: a power of two.

    One step takes the latency, and sends n bytes to size - 1 members; two steps take it twice, and send the
    n-th part of them as often, twice.
    """
    if size <= 2:
        return _MOST_LIMIT
    equal = speed.latency * speed.bandwidth * size / ((size - 1) * (size - 2))
    return min(max(1 << round(math.log2(max(equal, 1.0))), _LEAST_LIMIT), _MOST_LIMIT)


class NetworkCommunicator(RoundsCommunicator):
    """One member with links to all others; see :class:`parallel.communicators.base.Communicator`."""

    health: NetworkHealth

    def __init__(
        self,
        sockets: GroupSockets,
        rank: int,
        size: int,
        *,
        timeout: float,
        should_stop: Callable[[], bool] | None = None,
        native: bool = True,
        links: UsedLinks | None = None,
    ) -> None:
        """``sockets`` belong to this communicator, also if forming fails.

        Without ``native`` this member keeps to Python, whatever the others do. ``links`` carry tensors in
        place of the sockets for them, of which there are none then.

        Raises:
            CollectiveError: a member is lost before all have come, or there are no file descriptors left.
        """
        self.speed = Speed(0.0, 1.0)
        """Speed of the links, the same at all members."""
        with ExitStack() as undo:
            undo.callback(sockets.close)
            try:
                self.links: UsedLinks = links or links_over(sockets.data, rank, size, native=native)
                undo.callback(self.links.close)
                health = NetworkHealth(rank, size, sockets.control, timeout, should_stop, self.links.abort)
                undo.callback(health.close)
                undo.callback(health.abort)  # who waits for this member fails
                super().__init__(rank, size, health)
                self.rounds = self._form()
            except OSError as error:
                problem = f"rank {rank} cannot use its connections: {error.strerror or error}"
                raise CollectiveError(f"forming the group: {problem}", rank, "aborted") from error
            undo.pop_all()
        if size > 1:
            logger.info(
                "links of rank %d to %d others: %s, %s; %.0f us, %.2f GB/s; two steps above %d KiB",
                rank, size - 1, "native" if self.rounds.is_native else "Python",
                "encrypted" if sockets.is_encrypted else "not encrypted", self.speed.latency * 1e6,
                self.speed.bandwidth / 1e9, self.rounds.two_step_bytes >> 10,
            )  # fmt: skip

    def _form(self) -> NetworkRounds:
        """Make the rounds, by what the members tell each other and measure."""
        rounds = make_rounds(self.links, self.health, crowded=True)
        here = int.from_bytes(hashlib.sha256(this_host().encode()).digest()[:8], "big", signed=True)
        said = rounds.all_gather_ints([here, os.getpid()])
        self.processes = {
            peer: pid for peer, (host, pid) in enumerate(said) if host == here and peer != self.rank
        }
        for peer, pid in self.processes.items():
            self.health.watch_process(peer, pid)
        self.is_crowded = len(self.processes) + 1 > usable_cores()
        rounds = make_rounds(self.links, self.health, crowded=self.is_crowded)
        self.speed = _agreed_speed(rounds)
        rounds.two_step_bytes = rounds.spread_bytes = two_step_limit(self.speed, self.size)
        self.plans = Plans(rounds, self.health.begin, NetworkViews(rounds).prepare)
        self.health.formed()
        return rounds

    def link_counts(self) -> list[LinkCount]:
        """What the links to the others have carried, by rank."""
        return counts_of(self.links)

    @property
    def links_address(self) -> int:
        """Address of the table of links; 0 if they are Python's, or closed."""
        return self.links.address

    def close(self) -> None:
        super().close()
        self.links.close()


def _agreed_speed(rounds: NetworkRounds) -> Speed:
    """Speed of the links as rank 0 measures it; takes all members a few milliseconds."""
    if rounds.size == 1:
        return Speed(0.0, 1.0)
    times = []
    for _ in range(_MEASURED_ROUNDS):
        began = time.perf_counter()
        rounds.all_gather_ints([0])
        times.append(time.perf_counter() - began)
    latency = min(times)  # what took longer waited for a core, not for the links
    rows = torch.zeros(rounds.size, _MEASURED_BYTES, dtype=torch.uint8)
    room, ones, times = torch.empty_like(rows), [1] * rounds.size, []
    exchange = rounds.prepare(CallForm("all_to_all", rows.shape, rows.dtype, ones, ones))
    for _ in range(3):  # the first opens the windows of the connections
        began = time.perf_counter()
        exchange(rows, room)
        times.append(time.perf_counter() - began)
    bandwidth = (rounds.size - 1) * _MEASURED_BYTES / max(min(times) - latency, 1e-6)
    nanoseconds, bytes_per_second = rounds.all_gather_ints([round(latency * 1e9), round(bandwidth)])[0]
    return Speed(nanoseconds / 1e9, float(bytes_per_second))
