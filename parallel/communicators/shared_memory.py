"""A communicator for members on one host: each writes into memory of its own, the others read it there.

Collectives go in rounds. In round k a member writes its part into one of its two slots (k modulo 2), then
sets its counter to k, and reads the others' slots when their counters have reached k. Whoever publishes
round k has finished reading round k - 1, so when all counters stand at k, the slots of round k - 1 are free
for round k + 1: two slots suffice, and nobody ever acknowledges anything. Tensors larger than a slot take
several rounds. What the members must agree on stands beside each slot (the note), so that calls that do not
belong together end in an error and not in wrong numbers.

Send and receive have two slots of their own (letters), since only two members take part in them.

The rounds are in ``native_rounds`` (one call into C++ for a whole collective) and, where nothing can be
compiled, in ``rounds``; both do the same with the same memory, so members of a group need not agree. See
``waiting`` for how a member waits, ``standing`` for when it gives up, ``segments`` for the memory and
``slots`` for how it is cut.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch.distributed import Store

from parallel.communicators.arithmetic import check_own, check_rows, check_sizes, plain, rows_like
from parallel.communicators.base import CollectiveError
from parallel.communicators.native_rounds import load, make_rounds
from parallel.communicators.rendezvous import exchange
from parallel.communicators.rounds import Rounds
from parallel.communicators.segments import Address, OwnSegment, Segment, open_segment
from parallel.communicators.slots import Layout, Slots
from parallel.communicators.standing import Standing
from parallel.topology import usable_cores

SLOT_BYTES = 1 << 20
"""Of each of the two slots and two letters of a member; memory is used as far as tensors fill them."""
ARENA_BYTES = 1 << 30
"""Of what each member has besides, for native code; memory is used as far as it is written."""


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
        native: bool = True,
    ) -> None:
        """Without ``native`` this member keeps to Python, whatever the others do."""
        if platform.machine() not in ("x86_64", "AMD64"):
            raise ValueError(
                f"shared memory relies on the memory order of x86-64, this is {platform.machine()}: use gloo"
            )
        self.rank, self.size = rank, size
        self.arena_bytes = arena_bytes
        """Of the memory at each of :attr:`arenas`."""
        self.processes: dict[int, int] = {}
        self.on_broken: Callable[[CollectiveError], None] | None = None  # deaths are seen by who waits
        self._standing = Standing(rank, timeout, should_stop)
        self._members: list[Slots] = []
        self._rounds: Rounds | None = None
        library = load() if native else None  # compiled before others wait for this member
        layout = Layout.of(size, slot_bytes, arena_bytes)
        patience = timeout if forming_timeout is None else forming_timeout
        try:
            own = OwnSegment(layout.num_bytes)
            try:
                self._members = self._map(store, patience, own, layout, should_stop)
                self._rounds = make_rounds(
                    library, rank, layout, self._members, self._standing, self.is_crowded
                )
                self._rounds.all_gather_ints([rank])  # whoever took part has mapped everything
            finally:
                own.conceal()
        except BaseException:
            self.close()
            raise
        self._standing.formed()

    def _map(
        self,
        store: Store,
        patience: float,
        own: OwnSegment,
        layout: Layout,
        should_stop: Callable[[], bool] | None,
    ) -> list[Slots]:
        """Make this member's segment known and map those of the others."""
        mine = Slots(own, layout)
        self._standing.know(self.rank, mine.state)
        said = exchange(
            store,
            self.rank,
            self.size,
            msgspec.json.encode(own.address),
            timeout=patience,
            should_stop=should_stop,
        )
        addresses = [msgspec.json.decode(each, type=Address) for each in said]
        members = []
        for member, address in enumerate(addresses):
            if member == self.rank:
                members.append(mine)
                continue
            self.processes[member] = address.pid
            segment: Segment = open_segment(member, address, layout.num_bytes, self._standing.watch)
            members.append(Slots(segment, layout))
            self._standing.know(member, members[-1].state)
        return members

    def __repr__(self) -> str:
        return (
            f"<SharedMemoryCommunicator rank {self.rank} of {self.size}, {self._standing.reason or 'open'}>"
        )

    # ---- the contract

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        return self._begin("all_gather_ints").all_gather_ints(row)

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        total = check_sizes("all_gather", sizes, self.size)
        check_rows("all_gather", part, sizes[self.rank])
        part = plain(part)
        whole = rows_like(part, total)
        self._begin("all_gather").all_gather(part, whole, sizes)
        return whole

    def reduce_scatter(self, whole: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        check_rows("reduce_scatter", whole, check_sizes("reduce_scatter", sizes, self.size))
        whole = plain(whole)
        total = rows_like(whole, sizes[self.rank])
        self._begin("reduce_scatter").reduce_scatter(whole, total, sizes)
        return total

    def all_to_all(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> torch.Tensor:
        check_rows("all_to_all", outgoing, check_sizes("all_to_all", send_sizes, self.size))
        total = check_sizes("all_to_all", receive_sizes, self.size)
        check_own("all_to_all", send_sizes[self.rank], receive_sizes[self.rank])
        outgoing = plain(outgoing)
        incoming = rows_like(outgoing, total)
        self._begin("all_to_all").all_to_all(outgoing, incoming, send_sizes, receive_sizes)
        return incoming

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        given = plain(tensor)
        total = torch.empty_like(given)
        self._begin("all_reduce").all_reduce(given, total)
        return total

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        given = plain(tensor)
        result = given.clone() if source == self.rank else torch.empty_like(given)
        self._begin("broadcast").broadcast(result, source)
        return result

    def send(self, tensor: torch.Tensor, to: int) -> None:
        given = plain(tensor)
        self._begin("send").send(given, to)

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        result = torch.empty_like(plain(like))
        self._begin("receive").receive(result, source)
        return result

    def abort(self) -> None:
        self._standing.abort()

    def close(self) -> None:
        self._standing.close()
        self._members, self._rounds = [], None

    def _begin(self, call: str) -> Rounds:
        """Its deadline counts from now. Who holds the rounds holds the memory, whoever closes this."""
        rounds = self._rounds
        self._standing.begin(call)
        assert rounds is not None, "it is open"
        return rounds

    # ---- for native code that exchanges by itself

    @property
    def is_native(self) -> bool:
        """Whether collectives are calls into C++."""
        return self._rounds is not None and self._rounds.is_native

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
        self._standing.begin(call)

    def check_exchange(self, rank: int, has_arrived: Callable[[], bool]) -> None:
        """To be called every few milliseconds while waiting for member ``rank``.

        Raises:
            CollectiveError: the wait can no longer end well; from now on all calls fail, here and at the
                others.
        """
        self._standing.check(rank, has_arrived)
