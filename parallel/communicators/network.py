"""A communicator for members that are joined by sockets, on one host or on several.

Each pair has connections for tensors, which the links stripe messages over, and one for last words. A call
sends to all others what they need of this member, and takes what it needs of them. Nothing is acknowledged,
and what comes early waits in the system. Large sums and broadcasts go in two steps where bytes count for more
than the time of a second step: the members measure both while the group forms, and take rank 0's figures.

The calls are in ``native_network_rounds`` (one call into C++ for a whole collective) and, where nothing can
be compiled, in ``network_rounds``. See ``network_health`` for when a member gives up, and ``parallel.links``
for how the members find each other and prove that they belong together.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol

import torch

from parallel.communicators.base import CollectiveError
from parallel.links import native_links
from parallel.links.counts import CountedLinks, LinkCount, counts_of
from parallel.links.native_links import NativeLinks
from parallel.links.python_links import PythonLinks
from parallel.links.sockets import GroupSockets
from parallel.rounds import native_network_rounds
from parallel.rounds.arithmetic import plain
from parallel.rounds.messages import MessageLinks
from parallel.rounds.native_network_rounds import NativeNetworkRounds
from parallel.rounds.network_health import NetworkHealth
from parallel.rounds.network_rounds import NetworkRounds
from parallel.rounds.plans import Key, Plan, PlanCache, shape_of_result
from parallel.rounds.segments import this_host
from parallel.topology import usable_cores

logger = logging.getLogger(__name__)

VIEW_BYTES = 64 << 20
"""Views of more bytes are ordinary tensors."""
_VIEWS = 3  # buffers for views, used in turn: two calls later what a view shows may be over
_LEAST_LIMIT, _MOST_LIMIT = 16 << 10, 4 << 20  # bytes up to which one step is enough, however the links are
_MEASURED_ROUNDS = 5
_MEASURED_BYTES = 128 << 10

Rounds = NetworkRounds | NativeNetworkRounds


class UsedLinks(MessageLinks, CountedLinks, Protocol):
    """What is used of a member's links."""

    address: int
    rank: int
    size: int

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


class NetworkCommunicator:
    """One member; see :class:`parallel.communicators.base.Communicator`."""

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
        self.rank, self.size = rank, size
        self.processes: dict[int, int] = {}
        self.is_crowded = True
        """Whether this host has more members than cores."""
        self.speed = Speed(0.0, 1.0)
        """Speed of the links, the same at all members."""
        self._plans: _Plans | None = None
        with ExitStack() as undo:
            undo.callback(sockets.close)
            try:
                self.links: UsedLinks = links or _links_over(sockets, rank, size, native)
                undo.callback(self.links.close)
                self.health = NetworkHealth(
                    rank, size, sockets.control, timeout, should_stop, self.links.abort
                )
                undo.callback(self.health.close)
                undo.callback(self.health.abort)  # who waits for this member fails
                self._form(native, sockets.is_encrypted)
            except OSError as error:
                problem = f"rank {rank} cannot use its connections: {error.strerror or error}"
                raise CollectiveError(f"forming the group: {problem}", rank, "aborted") from error
            undo.pop_all()

    def _form(self, native: bool, is_encrypted: bool) -> None:
        rounds = _make_rounds(self.links, self.health, native, crowded=True)
        here = int.from_bytes(hashlib.sha256(this_host().encode()).digest()[:8], "big", signed=True)
        said = rounds.all_gather_ints([here, os.getpid()])
        self.processes = {
            peer: pid for peer, (host, pid) in enumerate(said) if host == here and peer != self.rank
        }
        for peer, pid in self.processes.items():
            self.health.watch_process(peer, pid)
        self.is_crowded = len(self.processes) + 1 > usable_cores()
        rounds = _make_rounds(self.links, self.health, native, self.is_crowded)
        self.speed = speed = _agreed_speed(rounds)
        rounds.two_step_bytes = rounds.spread_bytes = two_step_limit(speed, self.size)
        self._plans = _Plans(rounds)
        self.health.formed()
        if self.size > 1:
            logger.info(
                "links of rank %d to %d others: %s, %s; %.0f us, %.2f GB/s; two steps above %d KiB",
                self.rank, self.size - 1, "native" if rounds.is_native else "Python",
                "encrypted" if is_encrypted else "not encrypted", speed.latency * 1e6, speed.bandwidth / 1e9,
                rounds.two_step_bytes >> 10,
            )  # fmt: skip

    def __repr__(self) -> str:
        return f"<NetworkCommunicator rank {self.rank} of {self.size}, {self.health.reason or 'open'}>"

    @property
    def on_broken(self) -> Callable[[CollectiveError], None] | None:
        """See the contract: deaths are noticed between calls too."""
        return self.health.on_broken

    @on_broken.setter
    def on_broken(self, call: Callable[[CollectiveError], None] | None) -> None:
        self.health.on_broken = call

    def link_counts(self) -> list[LinkCount]:
        """What the links to the others have carried, by rank."""
        return counts_of(self.links)

    # ---- the contract

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        return self._begin("all_gather_ints").all_gather_ints(row)

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return self._into_new("all_gather", part, sizes)

    def all_gather_view(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        plans, plan, given = self._start("all_gather_view", part, sizes)
        whole, _ = plans.view(plan)
        plan.run(given, whole)
        return whole

    def reduce_scatter(self, whole: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return self._into_new("reduce_scatter", whole, sizes)

    def all_to_all(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> torch.Tensor:
        return self._into_new("all_to_all", outgoing, send_sizes, receive_sizes)

    def all_to_all_views(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        plans, plan, given = self._start("all_to_all_views", outgoing, send_sizes, receive_sizes)
        whole, parts = plans.view(plan)
        plan.run(given, whole)
        return parts.copy()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._into_new("all_reduce", tensor)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        given = plain(tensor)
        result = given.clone() if source == self.rank else torch.empty_like(given)
        self._begin("broadcast").broadcast(result, source)
        return result

    def send(self, tensor: torch.Tensor, to: int) -> None:
        given = plain(tensor)
        self._check_peer(to)
        self._begin("send").send(given, to)

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        result = torch.empty_like(plain(like))
        self._check_peer(source)
        self._begin("receive").receive(result, source)
        return result

    def abort(self) -> None:
        self.health.abort()

    def close(self) -> None:
        self.health.close()
        self.links.close()
        self._plans = None

    def _check_peer(self, rank: int) -> None:
        if rank == self.rank or not 0 <= rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size} has no link to rank {rank}")

    def _into_new(
        self, call: str, given: torch.Tensor, sizes: Sequence[int] = (), receive_sizes: Sequence[int] = ()
    ) -> torch.Tensor:
        """The call of this name, with its result in a new tensor."""
        _, plan, given = self._start(call, given, sizes, receive_sizes)
        result = torch.empty_like(given) if plan.alike else given.new_empty(plan.fresh)
        plan.run(given, result)
        return result

    def _start(
        self, call: str, tensor: torch.Tensor, sizes: Sequence[int] = (), receive_sizes: Sequence[int] = ()
    ) -> tuple[_Plans, Plan, torch.Tensor]:
        """A call begins: its plan, and the tensor as the transport wants it."""
        self.health.begin(call)
        assert self._plans is not None, "closed without a reason"
        return self._plans, *self._plans.start(call, tensor, sizes, receive_sizes)

    def _begin(self, call: str) -> Rounds:
        """Start the call's deadline."""
        self.health.begin(call)
        assert self._plans is not None, "closed without a reason"
        return self._plans.rounds

    # ---- for native code that exchanges by itself

    @property
    def is_native(self) -> bool:
        """Whether collectives are calls into C++."""
        return self._plans is not None and self._plans.rounds.is_native

    @property
    def links_address(self) -> int:
        """Address of the table of links; 0 if they are Python's, or closed."""
        return self.links.address

    def begin_exchange(self, call: str) -> None:
        """Begin a call that waits by itself; its deadline is the communicator's.

        Raises:
            CollectiveError: the group is broken.
        """
        self.health.begin(call)

    def check_exchange(self, rank: int, has_arrived: Callable[[], bool]) -> None:
        """Check a wait for member ``rank``; called every few milliseconds.

        Raises:
            CollectiveError: the wait can no longer end well; from now on all calls fail, here and at the
                others.
        """
        self.health.check(rank, has_arrived)


class _Plans(PlanCache):
    """One member's plans, and its buffers for views."""

    def __init__(self, rounds: Rounds) -> None:
        super().__init__()
        self.rounds = rounds
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(_VIEWS)]
        self._next = 0

    def _make(self, key: Key, tensor: torch.Tensor) -> Plan:
        call, shape, dtype, sizes, receive_sizes = key
        result = shape_of_result(key, tensor, self.rounds.rank, self.rounds.size)
        name = {"all_gather_view": "all_gather", "all_to_all_views": "all_to_all"}.get(call, call)
        run = self.rounds.prepare(name, shape, dtype, sizes, receive_sizes)
        fits = 0 < math.prod(result) * dtype.itemsize <= VIEW_BYTES
        return Plan(key, result, run, fits, None)

    def view(self, plan: Plan) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Memory for a result in the next buffer, and its parts by member.

        It is kept for the next time.
        """
        if not plan.fits:
            return self._cut(torch.empty(plan.result, dtype=plan.dtype), plan)
        number, self._next = self._next, (self._next + 1) % _VIEWS
        kept = plan.views[number]
        if kept is not None and kept[0] is self._buffers[number]:
            return kept[1], kept[2]
        num_bytes = math.prod(plan.result) * plan.dtype.itemsize
        if self._buffers[number].numel() < num_bytes:
            self._buffers[number] = torch.empty(num_bytes, dtype=torch.uint8)
        buffer = self._buffers[number]
        whole, parts = self._cut(buffer[:num_bytes].view(plan.dtype).view(plan.result), plan)
        plan.views[number] = buffer, whole, parts
        return whole, parts

    def _cut(self, whole: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return whole, list(whole.split(list(plan.receive_sizes))) if plan.receive_sizes else []


def _links_over(sockets: GroupSockets, rank: int, size: int, native: bool) -> NativeLinks | PythonLinks:
    library = native_links.load() if native else None
    if library is None:
        return PythonLinks(rank, size, sockets.data)
    return native_links.make_tcp_links(library, rank, size, sockets.data)


def _make_rounds(links: UsedLinks, health: NetworkHealth, native: bool, crowded: bool) -> Rounds:
    library = native_network_rounds.load() if native and isinstance(links, NativeLinks) else None
    if library is None or not isinstance(links, NativeLinks):
        return NetworkRounds(links, health, crowded=crowded)
    return NativeNetworkRounds(library, links, health, crowded=crowded)


def _agreed_speed(rounds: Rounds) -> Speed:
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
    for _ in range(3):  # the first opens the windows of the connections
        began = time.perf_counter()
        rounds.all_to_all(rows, room, ones, ones)
        times.append(time.perf_counter() - began)
    bandwidth = (rounds.size - 1) * _MEASURED_BYTES / max(min(times) - latency, 1e-6)
    nanoseconds, bytes_per_second = rounds.all_gather_ints([round(latency * 1e9), round(bandwidth)])[0]
    return Speed(nanoseconds / 1e9, float(bytes_per_second))
