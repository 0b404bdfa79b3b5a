"""A communicator for members on several hosts: shared memory on each host, links between hosts.

What another host needs is sent there once, and passed on inside by shared memory:
:mod:`parallel.rounds.host_routes` says who sends what to whom. Between hosts go messages
(:mod:`parallel.rounds.messages`) over the links of a network communicator that has all members, so
that all deaths are noticed there.

A group breaks as a whole. Waits in shared memory end when the network communicator is broken, and what breaks
the shared memory of a host breaks the network communicator, by which the other hosts know. Ranks in errors
are always those of the whole group.

A wait may be one for a member that waits for another one. So that the member that does not come is blamed,
and not the one that waits for it, later stages of a call have a later deadline.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from parallel.communicators.base import CollectiveError
from parallel.communicators.network import NetworkCommunicator
from parallel.communicators.shared_memory import SharedMemoryCommunicator
from parallel.links.counts import LinkCount
from parallel.links.last_words import Blame
from parallel.links.meeting_contract import Meeting, Prefixed
from parallel.links.native_links import NativeLinks
from parallel.rounds import native_network_rounds
from parallel.rounds.arithmetic import (
    add_in_rank_order,
    check_own,
    check_rows,
    check_sizes,
    even_sizes,
    plain,
    sum_in_rank_order,
    sum_type,
)
from parallel.rounds.group_health import GroupHealth
from parallel.rounds.host_routes import ChainLane, HostRoutes
from parallel.rounds.messages import Incoming, Messages
from parallel.rounds.native_network_rounds import NativeNetworkRounds
from parallel.rounds.network_rounds import note_of, what_is
from parallel.rounds.segments import this_host
from parallel.rounds.shared_memory_health import SharedMemoryHealth
from parallel.rounds.slots import MemorySpan, span_of, spans_of
from parallel.topology import usable_cores

STAGE_SECONDS = 0.25
"""Least seconds between the deadlines of a call's successive stages.

A member that is late by less, and waits for one that does not come, is not blamed in its place.
"""
STAGE_PART = 0.25
"""The same as part of the time that a call has."""
CHAIN_BYTES = 256 << 10
"""Bytes of a sum in one message from host to host.

Hosts add up one while others are sent.
"""


class HostHealth(SharedMemoryHealth):
    """Health of the members on one host: broken as soon as the whole group is."""

    def __init__(
        self,
        rank: int,
        names: Sequence[int],
        timeout: float,
        why_broken: Callable[[], Blame | None],
        should_stop: Callable[[], bool],
    ) -> None:
        super().__init__(rank, timeout, should_stop, names)
        self._why_broken = why_broken
        self.whole_call: str | None = None
        """The call of the whole group that the next calls are parts of."""

    def begin(self, call: str) -> None:
        super().begin(self.whole_call or call)

    def _hopeless(self, rank: int) -> Blame | None:
        if self.reason is None and (blame := self._why_broken()) is not None:
            return blame
        return super()._hopeless(rank)


class _Failing:
    """Context of a call: what breaks one part of the group breaks the others."""

    def __init__(self, *parts: GroupHealth) -> None:
        self._parts = parts

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        blame = next((part.blame for part in self._parts if part.blame is not None), None)
        # An error that is none of the group's leaves the call half made, too.
        reason, rank, evidence = blame or ("it was aborted", None, "aborted")
        for part in self._parts:
            part.give_up(reason, rank, evidence)


class MixedCommunicator:
    """One member; see :class:`parallel.communicators.base.Communicator`. The meeting is the group's own."""

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        size: int,
        *,
        timeout: float,
        network: NetworkCommunicator,
        host_name: str | None = None,
        should_stop: Callable[[], bool] | None = None,
        forming_timeout: float | None = None,
        native: bool = True,
        **of_shared_memory: Any,
    ) -> None:
        """``network`` connects all members, and is closed with this, also if forming fails.

        Without ``native`` this member keeps to Python, whatever the others do.
        Members share memory if they can, and have the same ``host_name``.
        ``of_shared_memory`` are further arguments of the communicator on each host.
        """
        self.rank, self.size = rank, size
        self.local: SharedMemoryCommunicator | None = None
        """The members of this host; None if this is its only one."""
        self.network = network
        """The communicator that has all members."""
        self._stage_seconds = max(STAGE_SECONDS, STAGE_PART * timeout)
        patience = timeout if forming_timeout is None else forming_timeout
        health = network.health

        def is_vain() -> bool:
            return health.blame is not None or (should_stop is not None and should_stop())

        try:
            # Shared memory needs the same user, too.
            name = f"{host_name or ''} {this_host()} {os.getuid()}".encode()
            digest = int.from_bytes(hashlib.sha256(name).digest()[:8], "big", signed=True)
            hosts = [str(row[0]) for row in network.all_gather_ints([digest])]
            self._routes = routes = HostRoutes(hosts, rank)
            self._part = HostHealth(routes.local_rank, routes.local, timeout, lambda: health.blame, is_vain)
            if len(routes.local) > 1:
                self.local = SharedMemoryCommunicator(
                    Prefixed(meeting, f"host {routes.host}"), routes.local_rank, len(routes.local),
                    timeout=timeout, should_stop=is_vain, forming_timeout=patience, native=native,
                    health=self._part,
                    **of_shared_memory,
                )  # fmt: skip
        except BaseException as error:
            blame = health.blame
            network.abort()
            network.close()
            if isinstance(error, CollectiveError) and blame is not None:
                reason, blamed, evidence = blame
                raise CollectiveError(f"forming the group: {reason}", blamed, evidence) from error
            raise
        self._messages = Messages(network.links, health, what_is, crowded=self.is_crowded)
        self._native: NativeNetworkRounds | None = None
        if (
            native
            and isinstance(network.links, NativeLinks)
            and (library := native_network_rounds.load()) is not None
        ):
            self._native = NativeNetworkRounds(library, network.links, health, crowded=self.is_crowded)
        self._failing = _Failing(self._part, health)

    def __repr__(self) -> str:
        blame = self.network.health.blame
        hosts = len(self._routes.members)
        return (
            f"<MixedCommunicator of {hosts} hosts, rank {self.rank} of {self.size},"
            f" {blame[0] if blame else 'open'}>"
        )

    @property
    def processes(self) -> dict[int, int]:
        return self.network.processes

    @property
    def on_broken(self) -> Callable[[CollectiveError], None] | None:
        return self.network.on_broken

    @on_broken.setter
    def on_broken(self, call: Callable[[CollectiveError], None] | None) -> None:
        self.network.on_broken = call

    def link_counts(self) -> list[LinkCount]:
        """What the links to the others have carried, by rank."""
        return self.network.link_counts()

    def _call(self, call: str) -> _Failing:
        """A call begins.

        Raises:
            CollectiveError: the group is broken.
        """
        self.network.health.begin(call)
        self._part.whole_call = call
        self._stage(0)
        return self._failing

    def _stage(self, number: int) -> None:
        """What follows waits for members that have so many stages behind them."""
        self._part.grace = self.network.health.grace = number * self._stage_seconds

    # ---- the contract

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        routes, width = self._routes, len(row)
        low, num_bytes = routes.span.low, 8 * width
        longest = max(span.high - span.low for span in routes.spans)  # all of a host give equally many
        room = (ctypes.c_int64 * (longest * width))()
        room[(self.rank - low) * width : (self.rank - low + 1) * width] = list(row)
        start = ctypes.addressof(room)
        with self._call("all_gather_ints"):
            mine = MemorySpan(start + (self.rank - low) * num_bytes, num_bytes)
            self._exchange(
                note_of("all_gather_ints", num_bytes),
                [(to, mine) for to in routes.sends],
                [
                    (source, MemorySpan(start + (source - low) * num_bytes, num_bytes))
                    for source in routes.receives
                ],
            )
            numbers = room[:]
            blocks = [numbers]
            if self.local is not None:
                self._stage(1)
                blocks = self.local.all_gather_ints(numbers)
        return [
            block[at * width : (at + 1) * width]
            for block, span in zip(blocks, routes.spans, strict=True)
            for at in range(span.high - span.low)
        ]

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        given = self._checked("all_gather", part, sizes)
        with self._call("all_gather"):
            return self._all_gather("all_gather", given, sizes, stage=0)

    def all_gather_view(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        given = self._checked("all_gather_view", part, sizes)
        with self._call("all_gather_view"):
            mine = self._gather_span("all_gather_view", given, sizes)
            if self.local is None:
                return mine
            self._stage(1)
            return self.local.all_gather_view(mine, self._routes.span_sizes(sizes))

    def reduce_scatter(self, whole: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        check_sizes("reduce_scatter", sizes, self.size)
        check_rows("reduce_scatter", whole, sum(sizes))
        given = plain(whole)
        with self._call("reduce_scatter"):
            return self._reduce_scatter(given, sizes)

    def all_to_all(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> torch.Tensor:
        given = self._checked_all_to_all("all_to_all", outgoing, send_sizes, receive_sizes)
        incoming = given.new_empty(sum(receive_sizes), *given.shape[1:])
        with self._call("all_to_all"):
            received = spans_of(incoming, receive_sizes)
            self._exchange_with_others("all_to_all", given, send_sizes, received)
            parts = incoming.split(list(receive_sizes))
            for rank, part in zip(
                self._routes.local,
                self._local_parts("all_to_all", given, send_sizes, receive_sizes),
                strict=True,
            ):
                parts[rank].copy_(part)
        return incoming

    def all_to_all_views(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        given = self._checked_all_to_all("all_to_all_views", outgoing, send_sizes, receive_sizes)
        from_others = [0 if rank in self._routes.local else n for rank, n in enumerate(receive_sizes)]
        incoming = given.new_empty(sum(from_others), *given.shape[1:])
        with self._call("all_to_all_views"):
            received = spans_of(incoming, from_others)
            self._exchange_with_others("all_to_all_views", given, send_sizes, received)
            parts = list(incoming.split(from_others))
            for rank, part in zip(
                self._routes.local,
                self._local_parts("all_to_all_views", given, send_sizes, receive_sizes),
                strict=True,
            ):
                parts[rank] = part
        return parts

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = plain(tensor).reshape(-1)
        summed = sum_type(flat.dtype)
        speed = self.network.speed
        way = self._routes.way(
            flat.nbytes,
            summed.itemsize // flat.dtype.itemsize,
            latency=speed.latency,
            bandwidth=speed.bandwidth,
        )
        with self._call("all_reduce"):
            if way == "chain":
                total = self._reduce_in_chain(flat)
            elif way == "scatter":
                sizes = even_sizes(flat.numel(), self.size)
                mine = self._reduce_scatter(flat, sizes)
                total = self._all_gather("all_reduce", mine, sizes, stage=2)
            else:
                terms = self._all_gather("all_reduce", flat, [flat.numel()] * self.size, stage=0)
                total = sum_in_rank_order(terms.view(self.size, -1).unbind(), out=torch.empty_like(flat))
        return total.reshape(tensor.shape)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        given = plain(tensor)
        result = given.clone() if source == self.rank else torch.empty_like(given)
        first = self._routes.broadcast_source(source)
        with self._call("broadcast"):
            note = note_of("broadcast", result.nbytes)
            if source == self.rank:
                self._exchange(note, [(to, span_of(result)) for to in self._routes.sends], [])
            elif source in self._routes.receives:
                self._exchange(note, [], [(source, span_of(result))])
            if self.local is not None:
                self._stage(1)
                self.local.broadcast_into(result, first)
        return result

    def send(self, tensor: torch.Tensor, to: int) -> None:
        given = plain(tensor)
        with self._call("send"):
            if to in self._routes.local:
                self._beside(to).send(given, self._routes.local.index(to))
            else:
                self._exchange(note_of("send", 0), [(to, span_of(given))], [])

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        result = torch.empty_like(plain(like))
        with self._call("receive"):
            if source in self._routes.local:
                return self._beside(source).receive(result, self._routes.local.index(source))
            self._exchange(note_of("send", 0), [], [(source, span_of(result))])
        return result

    def abort(self) -> None:
        self.network.abort()
        self._part.abort()

    def close(self) -> None:
        self.network.close()
        self._part.close()
        if self.local is not None:
            self.local.close()

    # ---- for native code that exchanges by itself

    @property
    def hosts(self) -> Sequence[int]:
        """Numbers of the members' hosts, by rank."""
        return self._routes.hosts

    @property
    def links_address(self) -> int:
        """Address of the table of links to all members; 0 if they are Python's."""
        return self.network.links_address

    @property
    def is_crowded(self) -> bool:
        """Whether this host has more members than cores."""
        return len(self._routes.local) > usable_cores()

    def begin_exchange(self, call: str) -> None:
        """Begin a call that waits by itself; its deadline is the communicator's.

        Raises:
            CollectiveError: the group is broken.
        """
        with self._call(call):
            self._part.begin(call)

    def check_exchange(self, rank: int, has_arrived: Callable[[], bool]) -> None:
        """Check a wait for member ``rank``; called every few milliseconds.

        Raises:
            CollectiveError: the wait can no longer end well; from now on all calls fail, here and at the
                others.
        """
        is_beside = self.local is not None and rank in self._routes.local
        with self._failing:
            if is_beside:
                self._stage(1)  # it may wait for a member of another host
                self._part.check(self._routes.local.index(rank), has_arrived)
            else:
                self.network.health.check(rank, has_arrived)

    # ---- what it is built from

    def _beside(self, rank: int) -> SharedMemoryCommunicator:
        """The communicator that this member shares with another one of its host."""
        if self.local is None or rank == self.rank:
            raise ValueError(f"rank {self.rank} cannot send to itself")
        return self.local

    def _checked(self, call: str, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        check_sizes(call, sizes, self.size)
        check_rows(call, part, sizes[self.rank])
        return plain(part)

    def _checked_all_to_all(
        self, call: str, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> torch.Tensor:
        check_sizes(call, send_sizes, self.size)
        check_sizes(call, receive_sizes, self.size)
        check_rows(call, outgoing, sum(send_sizes))
        check_own(call, send_sizes[self.rank], receive_sizes[self.rank])
        return plain(outgoing)

    def _gather_span(self, call: str, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Exchange parts between hosts; returns the rows of this member's span.

        They are in a new tensor, but where they are the part alone, and a call in shared memory follows.
        """
        span, row_bytes = self._routes.span, math.prod(part.shape[1:]) * part.itemsize
        if self.local is not None and not self._routes.receives:
            note = note_of(call, sum(sizes) * row_bytes)
            self._exchange(note, [(to, span_of(part)) for to in self._routes.sends], [])
            return part
        of_span = sizes[span.low : span.high]
        mine = part.new_empty(sum(of_span), *part.shape[1:])
        places = spans_of(mine, of_span)
        span_of(part).copy_to(places[self.rank - span.low].address)
        self._exchange(
            note_of(call, sum(sizes) * row_bytes),
            [(to, span_of(part)) for to in self._routes.sends],
            [(source, places[source - span.low]) for source in self._routes.receives],
        )
        return mine

    def _all_gather(self, call: str, part: torch.Tensor, sizes: Sequence[int], stage: int) -> torch.Tensor:
        self._stage(stage)
        mine = self._gather_span(call, part, sizes)
        if self.local is None:
            return mine
        self._stage(stage + 1)
        return self.local.all_gather(mine, self._routes.span_sizes(sizes))

    def _reduce_scatter(self, whole: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """All terms of this member's piece of the sum, added up here."""
        own = sizes[self.rank]
        received = whole.new_empty(self.size, own, *whole.shape[1:])
        self._exchange_with_others(
            "reduce_scatter", whole, sizes, [span_of(each) for each in received.unbind()], whole.nbytes
        )
        terms = list(received.unbind())
        local = self._local_parts("all_to_all", whole, sizes, [own] * self.size)
        for rank, term in zip(self._routes.local, local, strict=True):
            terms[rank] = term
        return sum_in_rank_order(terms, out=torch.empty_like(terms[0]))

    def _reduce_in_chain(self, flat: torch.Tensor) -> torch.Tensor:
        """Sum from host to host, in pieces side by side: each adds its terms."""
        routes = self._routes
        sizes = routes.lane_sizes(flat.numel())
        own, count = sizes[routes.local_rank], len(routes.local)
        terms = flat.view(1, -1)
        if self.local is not None:
            self._stage(1)
            terms = self.local.all_to_all(flat, sizes, [own] * count).view(count, own)
        total = flat.new_empty(own)
        if routes.lane is not None:
            self._stage(2)
            self._add_along(routes.lane, terms, total)
        if self.local is None:
            return total
        self._stage(3)
        return self.local.all_gather(total, sizes)

    def _add_along(self, lane: ChainLane, terms: torch.Tensor, total: torch.Tensor) -> None:
        """Add terms [members of this host, n] along a lane, to the total [n]."""
        note = note_of("all_reduce", total.nbytes)
        summed = sum_type(total.dtype)
        step = CHAIN_BYTES // summed.itemsize
        sums = torch.empty(total.shape, dtype=summed)
        for low in range(0, len(total), step):
            piece = slice(low, low + step)
            new = list(terms[:, piece].unbind())
            if lane.before is None:
                sums[piece].copy_(new.pop(0))
            else:
                self._messages.take(note, [_incoming(lane.before, sums[piece])])
            add_in_rank_order(sums[piece], new)
            if lane.after is not None:
                self._messages.post(note, lane.after, *span_of(sums[piece]))
            else:
                total[piece].copy_(sums[piece])
                for to in lane.ends:
                    self._messages.post(note, to, *span_of(total[piece]))
        if lane.after is not None:
            for low in range(0, len(total), step):
                self._messages.take(note, [_incoming(lane.last, total[low : low + step])])
        self._messages.finish()

    def _exchange_with_others(
        self,
        call: str,
        outgoing: torch.Tensor,
        send_sizes: Sequence[int],
        received: Sequence[MemorySpan],
        num_bytes: int = 0,
    ) -> None:
        """Exchange rows with each member of another host, directly."""
        sent, others = spans_of(outgoing, send_sizes), self._routes.remote
        self._exchange(
            note_of(call, num_bytes), [(to, sent[to]) for to in others], [(by, received[by]) for by in others]
        )

    def _local_parts(
        self, call: str, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> Sequence[torch.Tensor]:
        """Rows for this member from those of its host, in the order of ranks."""
        routes = self._routes
        parts = outgoing.split(list(send_sizes))
        if self.local is None:
            return [parts[self.rank]]
        sizes, received = routes.local_sizes(send_sizes), routes.local_sizes(receive_sizes)
        if routes.local[-1] - routes.local[0] == len(routes.local) - 1:
            first = sum(send_sizes[: routes.local[0]])
            given = outgoing[first : first + sum(sizes)]
        else:
            given = torch.cat([parts[rank] for rank in routes.local])
        self._stage(1)
        if call == "all_to_all_views":
            return self.local.all_to_all_views(given, sizes, received)
        incoming = self.local.all_to_all(given, sizes, received)
        by_member: tuple[torch.Tensor, ...] = incoming.split(received)
        return by_member

    def _exchange(
        self, note: int, outgoing: list[tuple[int, MemorySpan]], incoming: list[tuple[int, MemorySpan]]
    ) -> None:
        """Send and receive all of these, between hosts."""
        if outgoing or incoming:
            messages = [(to, *span) for to, span in outgoing], [(by, *span) for by, span in incoming]
            (self._native or self._messages).exchange(note, *messages)


def _incoming(peer: int, piece: torch.Tensor) -> Incoming:
    return Incoming(peer, *span_of(piece))
