"""Collectives of :mod:`parallel.communicators.network` in Python, over links of either kind.

``native/network_collectives.cpp`` does the same in one call each, with the same messages: a header with the
note of the call, then the data. So members of one group need not agree.

All that a call sends is queued before it takes anything, to and from all members at once. Sums go in rank
order, by the same code as those of shared memory, so they have the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch

from parallel.rounds.arithmetic import even_sizes, sum_in_rank_order
from parallel.rounds.messages import LinkHealth, MessageLinks, Messages
from parallel.rounds.shared_memory_rounds import CALLS, TWO_STEP_BYTES
from parallel.rounds.slots import MemorySpan, span_of, spans_of

SPREAD_BYTES = 256 << 10
"""Tensors of more bytes are broadcast in parts, if there are more than two members."""


class RankedLinks(MessageLinks, Protocol):
    """What is used of a member's links."""

    rank: int
    size: int


class NetworkRounds:
    """One member's part.

    Tensors are contiguous and on the CPU; results go to tensors that are given.
    """

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
        self._messages = Messages(links, health, what_is, crowded=crowded)
        # The successor first, so that not all begin with the same member.
        self._peers = [(self.rank + number) % self.size for number in range(1, self.size)]

    def prepare(
        self,
        call: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        sizes: Sequence[int],
        receive_sizes: Sequence[int] = (),
    ) -> Callable[..., None]:
        """The method of this name, bound to a shape, a type and sizes.

        Only the tensors themselves remain to be given.
        """
        method: Callable[..., None] = getattr(self, call)
        if call == "all_reduce":
            return method
        if call == "all_to_all":
            return partial(method, send_sizes=sizes, receive_sizes=receive_sizes)
        return partial(method, sizes=sizes)

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        """Every member's row of 64-bit integers, by rank."""
        width, size = len(row), self.size
        room = (ctypes.c_int64 * max(1, size * width))(*([0] * (self.rank * width)), *row)
        address, num_bytes = ctypes.addressof(room), 8 * width
        spans = [MemorySpan(address + rank * num_bytes, num_bytes) for rank in range(size)]
        self._exchange(
            note_of("all_gather_ints", num_bytes),
            [(peer, spans[self.rank]) for peer in self._peers],
            [(peer, spans[peer]) for peer in self._peers],
        )
        numbers: list[int] = room[:]
        return [numbers[width * rank : width * (rank + 1)] for rank in range(size)]

    def all_gather(self, part: torch.Tensor, whole: torch.Tensor, sizes: Sequence[int]) -> None:
        """Gather parts of ``sizes[rank]`` rows into the whole."""
        spans, mine = spans_of(whole, sizes), span_of(part)
        self._exchange(
            note_of("all_gather", whole.nbytes),
            [(peer, mine) for peer in self._peers],
            [(peer, spans[peer]) for peer in self._peers],
        )
        if mine.address != spans[self.rank].address:
            mine.copy_to(spans[self.rank].address)

    def reduce_scatter(self, whole: torch.Tensor, total: torch.Tensor, sizes: Sequence[int]) -> None:
        """Sum all wholes into this member's total."""
        mine = whole.split(list(sizes))[self.rank]
        terms = self._terms(mine)
        spans = spans_of(whole, sizes)
        self._exchange(
            note_of("reduce_scatter", whole.nbytes),
            [(peer, spans[peer]) for peer in self._peers],
            [(peer, span_of(terms[peer])) for peer in self._peers],
        )
        sum_in_rank_order(terms, out=total)

    def all_to_all(
        self,
        outgoing: torch.Tensor,
        incoming: torch.Tensor,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
    ) -> None:
        """Exchange rows with all members, in rank order."""
        sent, received = spans_of(outgoing, send_sizes), spans_of(incoming, receive_sizes)
        self._exchange(
            note_of("all_to_all", 0),
            [(peer, sent[peer]) for peer in self._peers],
            [(peer, received[peer]) for peer in self._peers],
        )
        sent[self.rank].copy_to(received[self.rank].address)

    def all_reduce(self, given: torch.Tensor, total: torch.Tensor) -> None:
        """Sum over all members into the total."""
        if self.size > 2 and given.nbytes > self.two_step_bytes:
            sizes = even_sizes(given.numel(), self.size)
            flat = total.view(-1)
            mine = flat.split(sizes)[self.rank]
            self.reduce_scatter(given.view(-1), mine, sizes)
            self._gather_in_place(flat, given.nbytes, sizes)
            return
        terms = self._terms(given)
        self._exchange(
            note_of("all_reduce", given.nbytes),
            [(peer, span_of(given)) for peer in self._peers],
            [(peer, span_of(terms[peer])) for peer in self._peers],
        )
        sum_in_rank_order(terms, out=total)

    def broadcast(self, data: torch.Tensor, source: int) -> None:
        """Send the source's tensor to all others."""
        note, whole = note_of("broadcast", data.nbytes), span_of(data)
        if self.size > 2 and data.nbytes > self.spread_bytes:
            self._spread(note, whole, source)
        elif source == self.rank:
            self._exchange(note, [(peer, whole) for peer in self._peers], [])
        else:
            self._exchange(note, [], [(source, whole)])

    def send(self, given: torch.Tensor, to: int) -> None:
        """Send a tensor to one member."""
        self._exchange(note_of("send", 0), [(to, span_of(given))], [])

    def receive(self, data: torch.Tensor, source: int) -> None:
        """Receive a tensor from one member."""
        self._exchange(note_of("send", 0), [], [(source, span_of(data))])

    # ---- what it is built from

    def _exchange(
        self,
        note: int,
        outgoing: Iterable[tuple[int, MemorySpan]],
        incoming: Iterable[tuple[int, MemorySpan]],
    ) -> None:
        self._messages.exchange(
            note,
            [(peer, span.address, span.length) for peer, span in outgoing],
            [(peer, span.address, span.length) for peer, span in incoming],
        )

    def _terms(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Room for the terms of all members by rank; this member's own is in place."""
        room = mine.new_empty((self.size, *mine.shape))
        return [mine if rank == self.rank else room[rank] for rank in range(self.size)]

    def _gather_in_place(self, whole: torch.Tensor, num_bytes: int, sizes: Sequence[int]) -> None:
        spans = spans_of(whole, sizes)
        self._exchange(
            note_of("all_gather", num_bytes),
            [(peer, spans[self.rank]) for peer in self._peers],
            [(peer, spans[peer]) for peer in self._peers],
        )

    def _spread(self, note: int, whole: MemorySpan, source: int) -> None:
        """Broadcast in parts.

        Each member gets one from the source, and passes it on to all others. So the source sends
        all of it twice, however many members there are.
        """
        sizes = even_sizes(whole.length, self.size)
        lows = [sum(sizes[:rank]) for rank in range(self.size)]
        parts = [MemorySpan(whole.address + low, length) for low, length in zip(lows, sizes, strict=True)]
        if source != self.rank:
            self._exchange(note, [], [(source, parts[self.rank])])
            self._exchange(
                note,
                [(peer, parts[self.rank]) for peer in self._peers if peer != source],
                [(peer, parts[peer]) for peer in self._peers],
            )
        else:
            both = ((peer, part) for peer in self._peers for part in (parts[peer], parts[self.rank]))
            self._exchange(note, both, [])


def note_of(call: str, num_bytes: int) -> int:
    """Number that the headers of a call have on all members."""
    return CALLS.index(call) + num_bytes * len(CALLS)


def what_is(note: int) -> str:
    """The call of a note in words, whatever number it is."""
    num_bytes, call = divmod(note, len(CALLS))
    return f"{CALLS[call]} of {num_bytes} bytes"
