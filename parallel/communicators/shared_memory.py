"""A communicator for members on one host: each writes into memory of its own, the others read it there.

Collectives go in rounds. In round k a member writes its part into one of its two slots (k modulo 2), then
sets its counter to k, and reads the others' slots when their counters have reached k. Whoever publishes
round k has finished reading round k - 1, so when all counters stand at k, the slots of round k - 1 are free
for round k + 1: two slots suffice, and nobody ever acknowledges anything. Tensors larger than a slot take
several rounds. What the members must agree on stands beside each slot (the note), so that calls that do not
belong together end in an error and not in wrong numbers.

Send and receive have two slots of their own (letters), since only two members take part in them.

A waiting member watches the processes of the others, their state words, its own abort and the deadline;
see ``waiting`` for how it waits, ``segments`` for the memory and ``slots`` for how it is cut.

Memory order: data is written before the counter and read after it, with plain stores and loads from Python.
That is enough on x86-64, whose stores become visible in their order and whose loads are made in theirs (total
store order; an aligned 8-byte word is never torn; the C library fences its streaming copies). Elsewhere it is
not, and the communicator refuses to be made.
"""

from __future__ import annotations

import platform
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec
import torch
from torch.distributed import Store

from parallel.communicators.arithmetic import (
    check_own,
    check_rows,
    check_sizes,
    even_sizes,
    plain,
    sum_in_rank_order,
)
from parallel.communicators.base import CollectiveError, Evidence
from parallel.communicators.rendezvous import exchange
from parallel.communicators.segments import Address, OwnSegment, Watch, open_segment
from parallel.communicators.slots import Slots, segment_bytes, span_of, spans_of
from parallel.communicators.waiting import Patience
from parallel.topology import usable_cores

SLOT_BYTES = 1 << 20
"""Of each of the two slots and two letters of a member; memory is used as far as tensors fill them."""
ARENA_BYTES = 1 << 30
"""Of what each member has besides, for native code; memory is used as far as it is written."""

_TWO_STEP_BYTES = 64 << 10  # tensors of more bytes are reduced in parts, if there are more than two members
_OPEN, _CLOSED, _ABORTED = 0, 1, 2  # values of a state word; above: aborted because of rank value - 3
_CALLS = ("all_gather_ints", "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast")


class SharedMemoryCommunicator:
    """One member; see :class:`parallel.communicators.base.Communicator`. The store is the group's own."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout: float,
        should_stop: Callable[[], bool] | None = None,
        forming_timeout: float | None = None,
        slot_bytes: int = SLOT_BYTES,
        arena_bytes: int = ARENA_BYTES,
    ) -> None:
        if platform.machine() not in ("x86_64", "AMD64"):
            raise ValueError(
                f"shared memory relies on the memory order of x86-64, this is {platform.machine()}: use gloo"
            )
        self.rank, self.size = rank, size
        self._timeout = timeout
        self._slot_bytes = slot_bytes
        self.arena_bytes = arena_bytes
        """Of the memory at each of :attr:`arenas`."""
        self._region_bytes = slot_bytes // size // 64 * 64  # of a slot, what is for one member
        self._peers = [peer for peer in range(size) if peer != rank]
        self._patience = Patience(crowded=size > usable_cores())
        self._reason: str | None = None
        self._blamed: int | None = None
        self._evidence: Evidence = "aborted"
        self._lock = threading.RLock()  # abort may come from a signal handler
        self._call = "forming the group"
        self._deadline = time.monotonic() + timeout
        self._round = 0
        self._letters = 0
        self._letter_users: list[tuple[int, int] | None] = [None, None]
        self._watch = Watch()
        self._members: list[Slots] = []
        self._should_stop = should_stop
        self.processes: dict[int, int] = {}
        self.on_broken: Callable[[CollectiveError], None] | None = None  # deaths are seen by who waits
        try:
            self._map(store, timeout if forming_timeout is None else forming_timeout)
        except BaseException:
            self.close()
            raise
        self._should_stop = None

    def _map(self, store: Store, patience: float) -> None:
        """Make this member's segment known and map those of the others."""
        num_bytes = segment_bytes(self.size, self._slot_bytes, self.arena_bytes)
        own = OwnSegment(num_bytes)
        try:
            said = exchange(
                store, self.rank, self.size, msgspec.json.encode(own.address),
                timeout=patience, should_stop=self._should_stop,
            )  # fmt: skip
            addresses = [msgspec.json.decode(each, type=Address) for each in said]
            self.processes = {peer: addresses[peer].pid for peer in self._peers}
            for member, address in enumerate(addresses):
                others = member != self.rank
                segment = open_segment(member, address, num_bytes, self._watch) if others else own
                self._members.append(Slots(segment, self.size, self._slot_bytes, self.arena_bytes))
            self.all_gather_ints([self.rank])  # whoever took part has mapped everything
        finally:
            own.conceal()

    def __repr__(self) -> str:
        return f"<SharedMemoryCommunicator rank {self.rank} of {self.size}, {self._reason or 'open'}>"

    # ---- the contract

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        note = self._begin("all_gather_ints", 8 * len(row))
        packing = struct.Struct(f"={len(row)}q")
        assert packing.size <= self._slot_bytes, "a row is a header, not a tensor"
        slot = self._take_slot()
        own = self._members[self.rank]
        packing.pack_into(own.memory, own.slot_offsets[slot], *row)
        self._publish(slot, note)
        rows = []
        for rank, member in enumerate(self._members):
            self._await_round(rank, slot, note)
            rows.append(list(packing.unpack_from(member.memory, member.slot_offsets[slot])))
        return rows

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        check_sizes("all_gather", sizes, self.size)
        check_rows("all_gather", part, sizes[self.rank])
        part = plain(part)
        whole = part.new_empty(sum(sizes), *part.shape[1:])
        note = self._begin("all_gather", whole.nbytes)
        spans, mine = spans_of(whole, sizes), span_of(part)
        mine.copy_to(spans[self.rank].address)
        step = self._slot_bytes
        for low in range(0, max(span.length for span in spans), step):
            slot = self._take_slot()
            mine.copy_to(self._place(self.rank, slot), low, step)
            self._publish(slot, note)
            for peer in self._peers:
                self._await_round(peer, slot, note)
                spans[peer].copy_from(self._place(peer, slot), low, step)
        return whole

    def reduce_scatter(self, whole: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        check_sizes("reduce_scatter", sizes, self.size)
        check_rows("reduce_scatter", whole, sum(sizes))
        whole = plain(whole)
        note = self._begin("reduce_scatter", whole.nbytes)
        spans = spans_of(whole, sizes)
        mine = whole.split(list(sizes))[self.rank]
        total = torch.empty_like(mine)
        step = self._region_bytes
        for low in range(0, max(span.length for span in spans), step):
            slot = self._take_slot()
            for peer in self._peers:
                spans[peer].copy_to(self._place(self.rank, slot, peer), low, step)
            self._publish(slot, note)
            for peer in self._peers:
                self._await_round(peer, slot, note)
            self._sum(slot, self.rank * step, mine, total, low, step)
        return total

    def all_to_all(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> torch.Tensor:
        check_sizes("all_to_all", send_sizes, self.size)
        check_sizes("all_to_all", receive_sizes, self.size)
        check_rows("all_to_all", outgoing, sum(send_sizes))
        check_own("all_to_all", send_sizes[self.rank], receive_sizes[self.rank])
        outgoing = plain(outgoing)
        incoming = outgoing.new_empty(sum(receive_sizes), *outgoing.shape[1:])
        note = self._begin("all_to_all", 0)
        sent, received = spans_of(outgoing, send_sizes), spans_of(incoming, receive_sizes)
        sent[self.rank].copy_to(received[self.rank].address)
        step = self._region_bytes
        # Nobody knows how much the others send each other: each says how many rounds it needs itself.
        rounds = max([1, *(-(-sent[peer].length // step) for peer in self._peers)])
        low = 0
        while low < rounds * step:
            slot = self._take_slot()
            if low == 0:
                announced = self._members[self.rank].notes[slot]
                announced[1] = rounds
                for peer in self._peers:
                    announced[2 + peer] = sent[peer].length
            for peer in self._peers:
                sent[peer].copy_to(self._place(self.rank, slot, peer), low, step)
            self._publish(slot, note)
            for peer in self._peers:
                self._await_round(peer, slot, note)
                if low == 0:
                    announced = self._members[peer].notes[slot]
                    rounds = max(rounds, announced[1])
                    self._check_bytes(peer, announced[2 + self.rank], received[peer].length)
                received[peer].copy_from(self._place(peer, slot, self.rank), low, step)
            low += step
        return incoming

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        given = plain(tensor)
        if self.size > 2 and given.nbytes > _TWO_STEP_BYTES:
            sizes = even_sizes(given.numel(), self.size)
            return self.all_gather(self.reduce_scatter(given.view(-1), sizes), sizes).view(tensor.shape)
        note = self._begin("all_reduce", given.nbytes)
        total, span, step = torch.empty_like(given), span_of(given), self._slot_bytes
        for low in range(0, span.length, step):
            slot = self._take_slot()
            span.copy_to(self._place(self.rank, slot), low, step)
            self._publish(slot, note)
            for peer in self._peers:
                self._await_round(peer, slot, note)
            self._sum(slot, 0, given, total, low, step)
        return total

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        given = plain(tensor)
        note = self._begin("broadcast", given.nbytes)
        result = given.clone() if source == self.rank else torch.empty_like(given)
        span, step = span_of(result), self._slot_bytes
        for low in range(0, span.length, step):
            slot = self._take_slot()
            if source == self.rank:
                span.copy_to(self._place(source, slot), low, step)
            self._publish(slot, note)
            if source != self.rank:
                self._await_round(source, slot, note)
                span.copy_from(self._place(source, slot), low, step)
        return result

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._begin("send", 0)
        given, own, step = plain(tensor), self._members[self.rank], self._slot_bytes
        span = span_of(given)
        for low in range(0, span.length, step):
            letter = self._letters % 2
            user = self._letter_users[letter]
            if user is not None:  # what was in it before has been read
                self._await(user[0], self._members[user[0]].taken[self.rank], user[1])
            num_bytes = span.copy_to(own.letter_addresses[letter], low, step)
            number = own.sent[to][0]
            own.envelopes[to][number % 2] = letter + 2 * num_bytes
            own.sent[to][0] = number + 1
            self._letter_users[letter] = to, number + 1
            self._letters += 1

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        self._begin("receive", 0)
        result, step = torch.empty_like(plain(like)), self._slot_bytes
        own, peer, span = self._members[self.rank], self._members[source], span_of(result)
        for low in range(0, span.length, step):
            number = own.taken[source][0]
            self._await(source, peer.sent[self.rank], number + 1)
            num_bytes, letter = divmod(peer.envelopes[self.rank][number % 2], 2)
            self._check_bytes(source, num_bytes, min(step, span.length - low))
            span.copy_from(peer.letter_addresses[letter], low, step)
            own.taken[source][0] = number + 1
        return result

    def abort(self) -> None:
        self._leave(_ABORTED, "it was aborted")

    def close(self) -> None:
        self._leave(_CLOSED, "it was closed")
        self._members.clear()
        self._watch.close()

    # ---- for native code that exchanges by itself

    @property
    def arenas(self) -> list[Slots]:
        """By rank, who has an arena: zeros at first, written by that member alone, read by all. It stays
        mapped as long as the holder keeps these."""
        return list(self._members)

    @property
    def is_crowded(self) -> bool:
        """Whether there are more members than cores."""
        return self.size > usable_cores()

    def begin_exchange(self, call: str) -> None:
        """A call that waits by itself begins: its deadline is the communicator's.

        Raises:
            CollectiveError: the group is broken.
        """
        self._begin(call, 0)

    def check_exchange(self, rank: int, has_arrived: Callable[[], bool]) -> None:
        """To be called every few milliseconds while waiting for member ``rank``.

        Raises:
            CollectiveError: the wait can no longer end well; from now on all calls fail, here and at the
                others.
        """
        blame = self._hopeless(rank)
        if blame is not None and not has_arrived():  # it may have come before it went
            self._fail(*blame)

    # ---- rounds

    def _begin(self, call: str, num_bytes: int) -> int:
        """A call begins; returns the note that all members must have beside the slots of its rounds."""
        self._call = call
        if self._reason is not None:
            raise self._error(call)
        self._deadline = time.monotonic() + self._timeout
        return _CALLS.index(call) + num_bytes * len(_CALLS) if call in _CALLS else 0

    def _take_slot(self) -> int:
        """The slot of the next round, when all others have read what was in it."""
        for peer in self._peers:
            self._await(peer, self._members[peer].counter, self._round)
        return (self._round + 1) % 2

    def _publish(self, slot: int, note: int) -> None:
        own = self._members[self.rank]
        own.notes[slot][0] = note
        self._round += 1
        own.counter[0] = self._round

    def _await_round(self, rank: int, slot: int, note: int) -> None:
        """Until this member's slot of the current round can be read."""
        member = self._members[rank]
        self._await(rank, member.counter, self._round)
        if member.notes[slot][0] != note:
            num_bytes, call = divmod(member.notes[slot][0], len(_CALLS))
            self._fail(f"rank {rank} calls {_CALLS[call]} of {num_bytes} bytes", rank, "closed")

    def _place(self, rank: int, slot: int, region: int = 0) -> int:
        """Address of a member's slot, or of what is in it for one member."""
        return self._members[rank].slot_addresses[slot] + region * self._region_bytes

    def _sum(self, slot: int, at: int, mine: torch.Tensor, total: torch.Tensor, low: int, step: int) -> None:
        """Of ``total``, the elements that this round brings: at most ``step`` bytes from ``low`` on, which
        stand in the others' slots ``at`` this byte. ``mine`` is this member's own term of the total."""
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
            self._patience.wait(word, target, lambda: self._check(rank, word, target))

    def _check(self, rank: int, word: memoryview, target: int) -> None:
        """Raise if the wait for this word of member ``rank`` can no longer end well."""
        self.check_exchange(rank, lambda: word[0] >= target)

    def _hopeless(self, rank: int) -> tuple[str, int | None, Evidence] | None:
        """Why a wait for member ``rank`` is in vain, whose fault it is, and how that is known."""
        if self._reason is not None:
            return self._reason, self._blamed, self._evidence
        if self._should_stop is not None and self._should_stop():
            return "it was stopped from outside", None, "aborted"
        dead = self._watch.dead()
        states = [member.state[0] for member in self._members]  # after the dead: a last word counts
        for peer in dead:
            if states[peer] == _OPEN:
                return f"rank {peer} has died", peer, "exited"
        for peer in self._peers:
            if states[peer] == _ABORTED:
                return f"rank {peer} has aborted", None, "closed"
            if states[peer] > _ABORTED:
                blamed = states[peer] - _ABORTED - 1
                return f"rank {peer} has given up because of rank {blamed}", blamed, "closed"
        if states[rank] == _CLOSED:
            return f"rank {rank} has closed its end", rank, "closed"
        if time.monotonic() > self._deadline:
            return f"rank {rank} did not come within {self._timeout:g} s", rank, "deadline"
        return None

    def _check_bytes(self, rank: int, sent: int, expected: int) -> None:
        if sent != expected:
            self._fail(f"rank {rank} sends {sent} bytes where {expected} are expected", rank, "closed")

    def _fail(self, reason: str, rank: int | None, evidence: Evidence) -> NoReturn:
        self._leave(_ABORTED if rank is None else _ABORTED + 1 + rank, reason, rank, evidence)
        raise self._error(self._call)

    def _error(self, call: str) -> CollectiveError:
        return CollectiveError(f"{call} on rank {self.rank}: {self._reason}", self._blamed, self._evidence)

    def _leave(
        self, state: int, reason: str, rank: int | None = None, evidence: Evidence = "aborted"
    ) -> None:
        """From now on all calls fail, here and soon at the others."""
        with self._lock:
            if self._reason is None:
                self._reason, self._blamed, self._evidence = reason, rank, evidence
                if len(self._members) > self.rank:
                    self._members[self.rank].state[0] = state


def _elements(tensor: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """Of a contiguous tensor, flat. Views cost time, so none is made without need."""
    flat = tensor if tensor.dim() == 1 else tensor.view(-1)
    return flat if stop - first == len(flat) else flat[first:stop]
