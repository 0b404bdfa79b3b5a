"""Rounds in shared memory, in Python: all reads and writes of a member.

``native/collectives.cpp`` does the same in one call each; this remains where it cannot be compiled.
:mod:`parallel.communicators.shared_memory` says why two slots suffice.

Memory order: data is written before the counter and read after it, with plain stores and loads from Python.
An aligned 8-byte word is never torn, and the C library fences its streaming copies. What a CPU needs beside
that is the fence of :mod:`parallel.rounds.memory_order`. It stands before each word that publishes something,
and behind each wait.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from parallel.rounds.arithmetic import TWO_STEP_BYTES, even_sizes, sum_in_rank_order
from parallel.rounds.contract import CallForm, Sizes, bound_method
from parallel.rounds.notes import call_of, note_of
from parallel.rounds.shared_memory_health import SharedMemoryHealth
from parallel.rounds.slots import VIEWS, GroupMemory, span_of, spans_of
from parallel.rounds.waiting import SpinWait


class SharedMemoryRounds:
    """One member's exchanges through shared memory; see :mod:`parallel.rounds.contract`."""

    is_native = False

    def __init__(self, memory: GroupMemory, health: SharedMemoryHealth, *, crowded: bool) -> None:
        """``crowded``: there are more members than cores."""
        self.rank, self._layout, self._members, self._fence = memory
        self.size = self._layout.size
        self._slot_bytes = self._layout.slot_bytes
        self._region_bytes = self._layout.region_bytes
        self._num_views = 0
        self._health = health
        self._peers = [peer for peer in range(self.size) if peer != self.rank]
        self._spin = SpinWait(crowded)
        self._letters = 0
        self._letter_users: list[tuple[int, int] | None] = [None, None]

    def prepare(self, form: CallForm) -> Callable[..., Any]:
        """The call bound to sizes; those for views return a buffer: (given) -> buffer."""
        return bound_method(self, form)

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        """Every member's row of 64-bit integers, by rank."""
        packing = struct.Struct(f"={len(row)}q")
        note = note_of("all_gather_ints", packing.size)
        slot = self._take_slot()
        own = self._members[self.rank]
        packing.pack_into(own.memory, own.slot_offsets[slot], *row)
        self._publish(slot, note)
        rows = []
        for rank, member in enumerate(self._members):
            self._await_round(rank, slot, note)
            rows.append(list(packing.unpack_from(member.memory, member.slot_offsets[slot])))
        return rows

    def all_gather(self, part: torch.Tensor, whole: torch.Tensor, sizes: Sequence[int]) -> None:
        """Gather parts of ``sizes[rank]`` rows into the whole."""
        note = note_of("all_gather", whole.nbytes)
        spans, mine = spans_of(whole, sizes), span_of(part)
        mine.copy_to(spans[self.rank].address)
        step = self._slot_bytes
        for low in range(0, max(span.length for span in spans), step):
            slot = self._take_slot()
            mine.copy_to(self._region_address(self.rank, slot), low, step)
            self._publish(slot, note)
            for peer in self._peers:
                self._await_round(peer, slot, note)
                spans[peer].copy_from(self._region_address(peer, slot), low, step)

    def reduce_scatter(self, whole: torch.Tensor, total: torch.Tensor, sizes: Sequence[int]) -> None:
        """Sum all wholes into this member's total."""
        note = note_of("reduce_scatter", whole.nbytes)
        spans = spans_of(whole, sizes)
        mine = whole.split(list(sizes))[self.rank]
        step = self._region_bytes
        for low in range(0, max(span.length for span in spans), step):
            slot = self._take_slot()
            for peer in self._peers:
                spans[peer].copy_to(self._region_address(self.rank, slot, peer), low, step)
            self._publish(slot, note)
            for peer in self._peers:
                self._await_round(peer, slot, note)
            self._sum(slot, self.rank * step, mine, total, low, step)

    def all_to_all(
        self, outgoing: torch.Tensor, incoming: torch.Tensor, send_sizes: Sizes, receive_sizes: Sizes
    ) -> None:
        """Exchange rows with all members, in rank order."""
        note = note_of("all_to_all", 0)
        sent, received = spans_of(outgoing, send_sizes), spans_of(incoming, receive_sizes)
        sent[self.rank].copy_to(received[self.rank].address)
        step = self._region_bytes
        # Nobody knows how much the others send each other: each says how many rounds it needs itself.
        rounds = max([1, *(-(-sent[peer].length // step) for peer in self._peers)])
        low = 0
        while low < rounds * step:
            slot = self._take_slot()
            if low == 0:
                announced = self._members[self.rank].announced[slot]
                announced[0] = rounds
                for peer in self._peers:
                    announced[1 + peer] = sent[peer].length
            for peer in self._peers:
                sent[peer].copy_to(self._region_address(self.rank, slot, peer), low, step)
            self._publish(slot, note)
            for peer in self._peers:
                self._await_round(peer, slot, note)
                if low == 0:
                    announced = self._members[peer].announced[slot]
                    rounds = max(rounds, announced[0])
                    self._check_bytes(peer, announced[1 + self.rank], received[peer].length)
                received[peer].copy_from(self._region_address(peer, slot, self.rank), low, step)
            low += step

    def all_gather_view(self, part: torch.Tensor, sizes: Sequence[int]) -> int:
        """Write this member's part into the segment of rank 0, beside the others' parts.

        Returns the buffer.
        """
        row_bytes = math.prod(part.shape[1:]) * part.itemsize
        note = note_of("all_gather_view", sum(sizes) * row_bytes)
        slot, buffer = self._take_slot(), self._take_view()
        target = self._members[0].address + self._layout.view_at(buffer)
        span_of(part).copy_to(target + sum(sizes[: self.rank]) * row_bytes)
        self._publish(slot, note)
        for peer in self._peers:
            self._await_round(peer, slot, note)
        return buffer

    def all_to_all_views(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> int:
        """Write what goes to others into this member's segment.

        Its own part is written, too, if that is small. Returns the buffer, or :data:`VIEWS` if the data of
        some member does not fit.
        """
        note = note_of("all_to_all_views", 0)
        row_bytes = math.prod(outgoing.shape[1:]) * outgoing.itemsize
        sent = spans_of(outgoing, send_sizes)
        slot, buffer = self._take_slot(), self._take_view()
        fits = all(sent[peer].length <= self._layout.view_region_bytes for peer in self._peers)
        own = self._members[self.rank]
        own.announced[slot][0] = fits
        for peer in self._peers:
            own.announced[slot][1 + peer] = sent[peer].length
            if fits:
                sent[peer].copy_to(own.address + self._layout.view_at(buffer, peer))
        if sent[self.rank].length <= self._layout.own_bytes:
            sent[self.rank].copy_to(own.address + self._layout.view_at(buffer, self.rank))
        self._publish(slot, note)
        for peer in self._peers:
            self._await_round(peer, slot, note)
            announced = self._members[peer].announced[slot]
            self._check_bytes(peer, announced[1 + self.rank], receive_sizes[peer] * row_bytes)
            fits = fits and announced[0] == 1
        return buffer if fits else VIEWS

    def all_reduce(self, given: torch.Tensor, total: torch.Tensor) -> None:
        """Sum over all members into the total."""
        if self.size > 2 and given.nbytes > TWO_STEP_BYTES:
            sizes = even_sizes(given.numel(), self.size)
            flat = total.view(-1)
            mine = flat.new_empty(sizes[self.rank])
            self.reduce_scatter(given.view(-1), mine, sizes)
            self.all_gather(mine, flat, sizes)
            return
        note = note_of("all_reduce", given.nbytes)
        span, step = span_of(given), self._slot_bytes
        for low in range(0, span.length, step):
            slot = self._take_slot()
            span.copy_to(self._region_address(self.rank, slot), low, step)
            self._publish(slot, note)
            for peer in self._peers:
                self._await_round(peer, slot, note)
            self._sum(slot, 0, given, total, low, step)

    def broadcast(self, data: torch.Tensor, source: int) -> None:
        """Send the source's tensor to all others."""
        note = note_of("broadcast", data.nbytes)
        span, step = span_of(data), self._slot_bytes
        for low in range(0, span.length, step):
            slot = self._take_slot()
            if source == self.rank:
                span.copy_to(self._region_address(source, slot), low, step)
            self._publish(slot, note)
            if source != self.rank:
                self._await_round(source, slot, note)
                span.copy_from(self._region_address(source, slot), low, step)

    def send(self, given: torch.Tensor, to: int) -> None:
        """Send a tensor to one member."""
        own, step = self._members[self.rank], self._slot_bytes
        span = span_of(given)
        for low in range(0, span.length, step):
            letter = self._letters % 2
            user = self._letter_users[letter]
            if user is not None:  # what was in it before has been read
                self._await(user[0], self._members[user[0]].taken[self.rank], user[1])
            num_bytes = span.copy_to(own.letter_addresses[letter], low, step)
            number = own.sent[to][0]
            own.envelopes[to][number % 2] = letter + 2 * num_bytes
            self._fence()
            own.sent[to][0] = number + 1
            self._letter_users[letter] = to, number + 1
            self._letters += 1

    def receive(self, data: torch.Tensor, source: int) -> None:
        """Receive a tensor from one member."""
        own, peer = self._members[self.rank], self._members[source]
        span, step = span_of(data), self._slot_bytes
        for low in range(0, span.length, step):
            number = own.taken[source][0]
            self._await(source, peer.sent[self.rank], number + 1)
            num_bytes, letter = divmod(peer.envelopes[self.rank][number % 2], 2)
            self._check_bytes(source, num_bytes, min(step, span.length - low))
            span.copy_from(peer.letter_addresses[letter], low, step)
            self._fence()
            own.taken[source][0] = number + 1

    # ---- one round

    def _take_slot(self) -> int:
        """The slot of the next round, when all others have read what was in it."""
        done = self._members[self.rank].counter[0]
        for peer in self._peers:
            self._await(peer, self._members[peer].counter, done)
        return (done + 1) % 2

    def _take_view(self) -> int:
        """The next buffer for views, once :meth:`_take_slot` has let this member go on.

        A member that began the previous call no longer reads what was in the buffer.
        """
        self._num_views += 1
        return (self._num_views - 1) % VIEWS

    def _publish(self, slot: int, note: int) -> None:
        own = self._members[self.rank]
        own.notes[slot] = note
        self._fence()
        own.counter[0] += 1

    def _await_round(self, rank: int, slot: int, note: int) -> None:
        """Wait until a member's slot of the current round can be read."""
        member = self._members[rank]
        self._await(rank, member.counter, self._members[self.rank].counter[0])
        if member.notes[slot] != note:
            self._fail_on_note(rank, member.notes[slot])

    def _region_address(self, rank: int, slot: int, region: int = 0) -> int:
        """Address of a member's slot, or of what is in it for one member."""
        start: int = self._members[rank].slot_addresses[slot]
        return start + region * self._region_bytes

    def _sum(self, slot: int, at: int, mine: torch.Tensor, total: torch.Tensor, low: int, step: int) -> None:
        """Sum the elements of ``total`` that this round brings.

        These are at most ``step`` bytes from ``low`` on; in the others' slots they begin at byte ``at``.
        ``mine`` is this member's own term of the total.
        """
        size = mine.element_size()
        first, stop = low // size, min((low + step) // size, mine.numel())
        if first >= stop:
            return
        at //= size
        terms = [
            _elements(mine, first, stop)
            if rank == self.rank
            else member.slot(slot, mine.dtype)[at : at + stop - first]
            for rank, member in enumerate(self._members)
        ]
        sum_in_rank_order(terms, out=_elements(total, first, stop))

    # ---- waiting and failing

    def _await(self, rank: int, word: memoryview, target: int) -> None:
        if word[0] < target:
            self._spin.wait(word, target, lambda: self._health.check(rank, lambda: bool(word[0] >= target)))
        self._fence()

    def _check_bytes(self, rank: int, sent: int, expected: int) -> None:
        if sent != expected:
            self._health.fail_on_bytes(rank, sent, expected)

    def _fail_on_note(self, rank: int, note: int) -> None:
        name = self._health.name(rank)
        self._health.fail(f"rank {name} calls {call_of(note)}", name, "closed")


def _elements(tensor: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """The elements of a contiguous tensor, flat.

    Views cost time, so none is made without need.
    """
    flat = tensor if tensor.dim() == 1 else tensor.view(-1)
    return flat if stop - first == len(flat) else flat[first:stop]
