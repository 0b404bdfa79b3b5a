"""Rounds of a group over several hosts, made of links between them and shared memory.

What another host needs is sent there once, and passed on inside by shared memory:
:mod:`parallel.rounds.host_routes` says who sends what to whom. A call goes in stages, which
:mod:`parallel.rounds.host_health` gives later deadlines one after the other.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from parallel.communicators.network import NetworkCommunicator
from parallel.communicators.shared_memory import SharedMemoryCommunicator
from parallel.rounds.arithmetic import even_sizes, sum_in_rank_order, sum_type
from parallel.rounds.contract import CallForm, Sizes, bound_method
from parallel.rounds.host_chain import add_along
from parallel.rounds.host_health import MixedHealth
from parallel.rounds.host_routes import HostRoutes
from parallel.rounds.messages import Outgoing
from parallel.rounds.notes import note_of
from parallel.rounds.slots import MemorySpan, span_of, spans_of


class HostRounds:
    """One member's exchanges with members of its host and of others; see :mod:`parallel.rounds.contract`."""

    is_native = False
    """Calls are made in Python, of native ones where there are such."""

    def __init__(
        self,
        routes: HostRoutes,
        network: NetworkCommunicator,
        local: SharedMemoryCommunicator | None,
        health: MixedHealth,
    ) -> None:
        """``local``: the members of this host; None if this is its only one."""
        self.rank, self.size = routes.rank, routes.size
        self._routes, self._network, self._local, self._health = routes, network, local, health

    def prepare(self, form: CallForm) -> Callable[..., Any]:
        """The call of this name, bound to sizes."""
        return bound_method(self, form)

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        """Every member's row of 64-bit integers, by rank."""
        routes, width = self._routes, len(row)
        low, num_bytes = routes.span.low, 8 * width
        longest = max(span.high - span.low for span in routes.spans)  # all of a host give equally many
        room = (ctypes.c_int64 * (longest * width))()
        room[(self.rank - low) * width : (self.rank - low + 1) * width] = list(row)

        def place(rank: int) -> MemorySpan:
            return MemorySpan(ctypes.addressof(room) + (rank - low) * num_bytes, num_bytes)

        with self._health:
            self._pass_on(note_of("all_gather_ints", num_bytes), place(self.rank), place)
            numbers = room[:]
            blocks = [numbers]
            if self._local is not None:
                self._health.stage(1)
                blocks = self._local.all_gather_ints(numbers)
        return [
            block[at * width : (at + 1) * width]
            for block, span in zip(blocks, routes.spans, strict=True)
            for at in range(span.high - span.low)
        ]

    def all_gather(self, part: torch.Tensor, whole: torch.Tensor, sizes: Sequence[int]) -> None:
        """Gather parts of ``sizes[rank]`` rows into the whole."""
        with self._health:
            self._all_gather("all_gather", part, whole, sizes, stage=0)

    def all_gather_view(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """All members' parts, where this host's members have gathered them."""
        with self._health:
            mine = self._gather_span("all_gather_view", part, sizes)
            if self._local is None:
                return mine
            self._health.stage(1)
            return self._local.all_gather_view(mine, self._routes.span_sizes(sizes))

    def reduce_scatter(self, whole: torch.Tensor, total: torch.Tensor, sizes: Sequence[int]) -> None:
        """Sum all wholes into this member's total."""
        with self._health:
            self._reduce_scatter(whole, total, sizes)

    def all_to_all(
        self, outgoing: torch.Tensor, incoming: torch.Tensor, send_sizes: Sizes, receive_sizes: Sizes
    ) -> None:
        """Exchange rows with all members, in rank order."""
        with self._health:
            note, received = note_of("all_to_all", 0), spans_of(incoming, receive_sizes)
            self._exchange_with_others(note, spans_of(outgoing, send_sizes), received)
            parts = incoming.split(list(receive_sizes))
            for rank, part in self._from_host("all_to_all", outgoing, send_sizes, receive_sizes):
                parts[rank].copy_(part)

    def all_to_all_views(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """Rows from all members by rank: those of this host where they were written."""
        from_others = [0 if rank in self._routes.local else n for rank, n in enumerate(receive_sizes)]
        incoming = outgoing.new_empty(sum(from_others), *outgoing.shape[1:])
        with self._health:
            note, received = note_of("all_to_all_views", 0), spans_of(incoming, from_others)
            self._exchange_with_others(note, spans_of(outgoing, send_sizes), received)
            parts = list(incoming.split(from_others))
            for rank, part in self._from_host("all_to_all_views", outgoing, send_sizes, receive_sizes):
                parts[rank] = part
        return parts

    def all_reduce(self, given: torch.Tensor, total: torch.Tensor) -> None:
        """Sum over all members into the total, by the way that takes the shortest time."""
        flat, flat_total = given.view(-1), total.view(-1)
        latency, bandwidth = self._network.speed
        widening = sum_type(flat.dtype).itemsize // flat.dtype.itemsize
        way = self._routes.way(flat.nbytes, widening, latency=latency, bandwidth=bandwidth)
        with self._health:
            if way == "chain":
                self._reduce_in_chain(flat, flat_total)
            elif way == "scatter":
                sizes = even_sizes(flat.numel(), self.size)
                mine = flat.new_empty(sizes[self.rank])
                self._reduce_scatter(flat, mine, sizes)
                self._all_gather("all_reduce", mine, flat_total, sizes, stage=2)
            else:
                terms = flat.new_empty(self.size * flat.numel())
                self._all_gather("all_reduce", flat, terms, [flat.numel()] * self.size, stage=0)
                sum_in_rank_order(terms.view(self.size, -1).unbind(), out=flat_total)

    def broadcast(self, data: torch.Tensor, source: int) -> None:
        """Send the source's tensor to all others."""
        note, span = note_of("broadcast", data.nbytes), span_of(data)
        with self._health:
            if source == self.rank:
                self._exchange(note, [(to, *span) for to in self._routes.sends], [])
            elif source in self._routes.receives:
                self._exchange(note, [], [(source, *span)])
            if self._local is not None:
                self._health.stage(1)
                self._local.broadcast_into(data, self._routes.broadcast_source(source))

    def send(self, given: torch.Tensor, to: int) -> None:
        """Send a tensor to one member."""
        with self._health:
            if self._local is not None and to in self._routes.local:
                self._local.send(given, self._routes.local.index(to))
            else:
                self._exchange(note_of("send", 0), [(to, *span_of(given))], [])

    def receive(self, data: torch.Tensor, source: int) -> None:
        """Receive a tensor from one member."""
        with self._health:
            if self._local is not None and source in self._routes.local:
                self._local.receive_into(data, self._routes.local.index(source))
            else:
                self._exchange(note_of("send", 0), [], [(source, *span_of(data))])

    # ---- what it is built from

    def _pass_on(self, note: int, mine: MemorySpan, place: Callable[[int], MemorySpan]) -> None:
        """Send this part to each other host; receive those of this member's span."""
        self._exchange(
            note,
            [(to, *mine) for to in self._routes.sends],
            [(source, *place(source)) for source in self._routes.receives],
        )

    def _gather_span(
        self, call: str, part: torch.Tensor, sizes: Sequence[int], into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Exchange parts between hosts; returns the rows of this member's span.

        They are in ``into`` or in a new tensor, but where they are the part alone, and a call in shared
        memory follows.
        """
        span, row_bytes = self._routes.span, math.prod(part.shape[1:]) * part.itemsize
        note, given = note_of(call, sum(sizes) * row_bytes), span_of(part)
        if self._local is not None and not self._routes.receives:
            self._exchange(note, [(to, *given) for to in self._routes.sends], [])
            return part
        of_span = sizes[span.low : span.high]
        mine = part.new_empty(sum(of_span), *part.shape[1:]) if into is None else into
        places = spans_of(mine, of_span)
        given.copy_to(places[self.rank - span.low].address)
        self._pass_on(note, given, lambda rank: places[rank - span.low])
        return mine

    def _all_gather(
        self, call: str, part: torch.Tensor, whole: torch.Tensor, sizes: Sequence[int], stage: int
    ) -> None:
        self._health.stage(stage)
        if self._local is None:
            self._gather_span(call, part, sizes, whole)
            return
        mine = self._gather_span(call, part, sizes)
        self._health.stage(stage + 1)
        self._local.run_into("all_gather", mine, whole, self._routes.span_sizes(sizes))

    def _reduce_scatter(self, whole: torch.Tensor, total: torch.Tensor, sizes: Sequence[int]) -> None:
        """All terms of this member's piece of the sum, added up here."""
        own = sizes[self.rank]
        terms = list(whole.new_empty(self.size, own, *whole.shape[1:]).unbind())
        note = note_of("reduce_scatter", whole.nbytes)
        self._exchange_with_others(note, spans_of(whole, sizes), [span_of(each) for each in terms])
        for rank, term in self._from_host("all_to_all", whole, sizes, [own] * self.size):
            terms[rank] = term
        sum_in_rank_order(terms, out=total)

    def _reduce_in_chain(self, flat: torch.Tensor, total: torch.Tensor) -> None:
        """Sum from host to host, in pieces side by side: each adds its terms."""
        routes = self._routes
        sizes = routes.lane_sizes(flat.numel())
        own, count = sizes[routes.local_rank], len(routes.local)
        terms, mine = flat.view(1, -1), total
        if self._local is not None:
            self._health.stage(1)
            terms = self._local.all_to_all(flat, sizes, [own] * count).view(count, own)
            mine = flat.new_empty(own)
        if routes.lane is not None:
            self._health.stage(2)
            add_along(self._network.rounds.messages, routes.lane, terms, mine)
        if self._local is not None:
            self._health.stage(3)
            self._local.run_into("all_gather", mine, total, sizes)

    def _exchange_with_others(
        self, note: int, sent: Sequence[MemorySpan], received: Sequence[MemorySpan]
    ) -> None:
        """Exchange rows with each member of another host, directly."""
        others = self._routes.remote
        self._exchange(note, [(to, *sent[to]) for to in others], [(by, *received[by]) for by in others])

    def _from_host(
        self, call: str, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> list[tuple[int, torch.Tensor]]:
        """Rows for this member from each member of its host, with its rank."""
        routes, local = self._routes, self._routes.local
        parts = outgoing.split(list(send_sizes))
        if self._local is None:
            return [(self.rank, parts[self.rank])]
        sizes, received = routes.local_sizes(send_sizes), routes.local_sizes(receive_sizes)
        if local[-1] - local[0] == len(local) - 1:
            first = sum(send_sizes[: local[0]])
            given = outgoing[first : first + sum(sizes)]
        else:
            given = torch.cat([parts[rank] for rank in local])
        self._health.stage(1)
        came: Sequence[torch.Tensor]
        if call == "all_to_all_views":
            came = self._local.all_to_all_views(given, sizes, received)
        else:
            came = self._local.all_to_all(given, sizes, received).split(received)
        return list(zip(local, came, strict=True))

    def _exchange(self, note: int, outgoing: list[Outgoing], incoming: list[Outgoing]) -> None:
        """Send and receive all of these, between hosts."""
        if outgoing or incoming:
            self._network.rounds.exchange(note, outgoing, incoming)
