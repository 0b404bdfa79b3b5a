"""Rounds over links of any kind, in Python.

``native/network_collectives.cpp`` does the same in one call each, with the same messages: a header with the
note of the call, then the data. So members of one group need not agree.

All that a call sends is queued before it takes anything, to and from all members at once. Sums go in rank
order, by the same code as those of shared memory, so they have the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from parallel.rounds.arithmetic import TWO_STEP_BYTES, even_sizes, sum_in_rank_order
from parallel.rounds.contract import CallForm, Sizes, bound_method
from parallel.rounds.messages import LinkHealth, MessageLinks, Messages, Outgoing
from parallel.rounds.notes import note_of
from parallel.rounds.slots import MemorySpan, span_of, spans_of

SPREAD_BYTES = 256 << 10
"""Tensors of more bytes are broadcast in parts, if there are more than two members."""


class RankedLinks(MessageLinks, Protocol):
    """A member's links, with its rank and the size of the group."""

    rank: int
    size: int


class NetworkRounds:
    """One member's exchanges over links; see :mod:`parallel.rounds.contract`."""

    is_native = False

    def __init__(self, links: RankedLinks, health: LinkHealth, *, crowded: bool) -> None:
        """The links remain the caller's, who closes them after the last call."""
        self.rank, self.size = links.rank, links.size
        self.two_step_bytes = TWO_STEP_BYTES
        """Tensors of more bytes are reduced in parts, if there are more than two members.

        All members have the same here, and change it before the first call that it matters to.
        """
        self.spread_bytes = SPREAD_BYTES
        """Tensors of more bytes are broadcast in parts, as above."""
        self.messages = Messages(links, health, crowded=crowded)
        """What calls are made from; a caller may exchange further messages between two calls."""
        # The successor first, so that not all begin with the same member.
        self._peers = [(self.rank + number) % self.size for number in range(1, self.size)]

    def prepare(self, form: CallForm) -> Callable[..., Any]:
        """The call of this name, bound to sizes."""
        return bound_method(self, form)

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        """Every member's row of 64-bit integers, by rank."""
        width, size = len(row), self.size
        room = (ctypes.c_int64 * max(1, size * width))(*([0] * (self.rank * width)), *row)
        address, num_bytes = ctypes.addressof(room), 8 * width
        spans = [MemorySpan(address + rank * num_bytes, num_bytes) for rank in range(size)]
        self._gather(note_of("all_gather_ints", num_bytes), spans[self.rank], spans)
        numbers: list[int] = room[:]
        return [numbers[width * rank : width * (rank + 1)] for rank in range(size)]

    def all_gather(self, part: torch.Tensor, whole: torch.Tensor, sizes: Sequence[int]) -> None:
        """Gather parts of ``sizes[rank]`` rows into the whole."""
        spans, mine = spans_of(whole, sizes), span_of(part)
        self._gather(note_of("all_gather", whole.nbytes), mine, spans)
        if mine.address != spans[self.rank].address:
            mine.copy_to(spans[self.rank].address)

    def reduce_scatter(self, whole: torch.Tensor, total: torch.Tensor, sizes: Sequence[int]) -> None:
        """Sum all wholes into this member's total."""
        terms = self._terms(whole.split(list(sizes))[self.rank])
        spans = spans_of(whole, sizes)
        self.exchange(
            note_of("reduce_scatter", whole.nbytes),
            [(peer, *spans[peer]) for peer in self._peers],
            [(peer, *span_of(terms[peer])) for peer in self._peers],
        )
        sum_in_rank_order(terms, out=total)

    def all_to_all(
        self, outgoing: torch.Tensor, incoming: torch.Tensor, send_sizes: Sizes, receive_sizes: Sizes
    ) -> None:
        """Exchange rows with all members, in rank order."""
        sent, received = spans_of(outgoing, send_sizes), spans_of(incoming, receive_sizes)
        self.exchange(
            note_of("all_to_all", 0),
            [(peer, *sent[peer]) for peer in self._peers],
            [(peer, *received[peer]) for peer in self._peers],
        )
        sent[self.rank].copy_to(received[self.rank].address)

    def all_reduce(self, given: torch.Tensor, total: torch.Tensor) -> None:
        """Sum over all members into the total."""
        if self.size > 2 and given.nbytes > self.two_step_bytes:
            sizes = even_sizes(given.numel(), self.size)
            flat = total.view(-1)
            self.reduce_scatter(given.view(-1), flat.split(sizes)[self.rank], sizes)
            spans = spans_of(flat, sizes)
            self._gather(note_of("all_gather", given.nbytes), spans[self.rank], spans)
            return
        terms = self._terms(given)
        self._gather(note_of("all_reduce", given.nbytes), span_of(given), [span_of(each) for each in terms])
        sum_in_rank_order(terms, out=total)

    def broadcast(self, data: torch.Tensor, source: int) -> None:
        """Send the source's tensor to all others."""
        note, whole = note_of("broadcast", data.nbytes), span_of(data)
        if self.size > 2 and data.nbytes > self.spread_bytes:
            self._spread(note, whole, source)
        elif source == self.rank:
            self.exchange(note, [(peer, *whole) for peer in self._peers], [])
        else:
            self.exchange(note, [], [(source, *whole)])

    def send(self, given: torch.Tensor, to: int) -> None:
        """Send a tensor to one member."""
        self.exchange(note_of("send", 0), [(to, *span_of(given))], [])

    def receive(self, data: torch.Tensor, source: int) -> None:
        """Receive a tensor from one member."""
        self.exchange(note_of("send", 0), [], [(source, *span_of(data))])

    def exchange(self, note: int, outgoing: Iterable[Outgoing], incoming: Iterable[Outgoing]) -> None:
        """Send and receive messages: (peer, address, bytes) of each."""
        self.messages.exchange(note, outgoing, incoming)

    # ---- what it is built from

    def _gather(self, note: int, mine: MemorySpan, spans: Sequence[MemorySpan]) -> None:
        """Send this member's part to all others, and receive theirs into spans by rank."""
        self.exchange(
            note, [(peer, *mine) for peer in self._peers], [(peer, *spans[peer]) for peer in self._peers]
        )

    def _terms(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Room for the terms of all members by rank; this member's own is in place."""
        room = mine.new_empty((self.size, *mine.shape))
        return [mine if rank == self.rank else room[rank] for rank in range(self.size)]

    def _spread(self, note: int, whole: MemorySpan, source: int) -> None:
        """Broadcast in parts, each of which one member passes on to all others.

        So the source sends all of it twice, however many members there are.
        """
        sizes = even_sizes(whole.length, self.size)
        lows = [sum(sizes[:rank]) for rank in range(self.size)]
        parts = [MemorySpan(whole.address + low, length) for low, length in zip(lows, sizes, strict=True)]
        mine = parts[self.rank]
        if source != self.rank:
            self.exchange(note, [], [(source, *mine)])
            self.exchange(
                note,
                [(peer, *mine) for peer in self._peers if peer != source],
                [(peer, *parts[peer]) for peer in self._peers],
            )
        else:
            both = [(peer, *part) for peer in self._peers for part in (parts[peer], mine)]
            self.exchange(note, both, [])
