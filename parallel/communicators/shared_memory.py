"""A communicator for members on one host, each writing memory that the others read.

Collectives go in rounds. In round k a member writes its part into one of its two slots (k modulo 2), then
sets its counter to k, and reads the others' slots when their counters have reached k. A member that publishes
round k has finished reading round k - 1, so when all counters stand at k, the slots of round k - 1 are free
for round k + 1: two slots suffice, and nobody ever acknowledges anything. Tensors larger than a slot take
several rounds. What the members must agree on stands beside each slot (the note), so that calls that do not
belong together end in an error and not in wrong numbers.

Calls for views leave data where it was written. There are three buffers for them, used in turn: of an
all-gather the one of rank 0, in which all write their parts side by side; of an all-to-all each member's own,
with a region for each of the others. They take one round each. Call v writes over what call v - 3 left once
all have published the round of call v - 1: they have begun it, and so are done with the views of call v - 3,
by the contract, which gives those to call v - 1 at the latest, and calls read what they are given before they
publish.

Send and receive have two slots of their own (letters), since only two members take part in them.

The rounds are in ``parallel.rounds`` (one call into C++ for a whole collective) and, where nothing can be
compiled, in ``rounds``; both do the same with the same memory, so members of a group need not agree. What
can be known before a call is in ``plans``. See ``waiting`` for how a member waits,
``shared_memory_health`` for when it gives up, ``segments`` for the memory and ``slots`` for how it is cut.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec
import torch

from parallel.communicators.base import CollectiveError
from parallel.links.meeting_contract import Meeting
from parallel.links.rendezvous import exchange
from parallel.rounds.arithmetic import plain
from parallel.rounds.native_shared_memory_rounds import load, make_rounds
from parallel.rounds.plans import Plan, Plans
from parallel.rounds.segments import OwnSegment, Segment, SegmentAddress, open_segment
from parallel.rounds.shared_memory_health import SharedMemoryHealth
from parallel.rounds.slots import VIEWS, SegmentLayout, Slots
from parallel.topology import usable_cores

SLOT_BYTES = 1 << 20
"""Size of each of a member's two slots and two letters.

Memory is used as far as tensors fill them.
"""
VIEW_BYTES = 64 << 20
"""Size of each buffer for views; memory is used as far as they are filled."""
ARENA_BYTES = 1 << 30
"""Size of a member's further memory for native code.

Memory is used as far as it is written.
"""


class SharedMemoryCommunicator:
    """One member; see :class:`parallel.communicators.base.Communicator`. The meeting is the group's own."""

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        size: int,
        *,
        timeout: float,
        should_stop: Callable[[], bool] | None = None,
        forming_timeout: float | None = None,
        slot_bytes: int = SLOT_BYTES,
        view_bytes: int = VIEW_BYTES,
        arena_bytes: int = ARENA_BYTES,
        native: bool = True,
        health: SharedMemoryHealth | None = None,
    ) -> None:
        """Without ``native`` this member keeps to Python, whatever the others do.

        ``health`` is that of a part of a larger group; ``timeout`` and ``should_stop`` are its own, then.
        """
        if platform.machine() not in ("x86_64", "AMD64"):
            raise ValueError(
                f"shared memory relies on the memory order of x86-64, this is {platform.machine()}: use gloo"
            )
        self.rank, self.size = rank, size
        self.arena_bytes = arena_bytes
        """Size of the memory at each of :attr:`arenas`."""
        self.processes: dict[int, int] = {}
        self.on_broken: Callable[[CollectiveError], None] | None = None  # deaths are seen by who waits
        self._health = health or SharedMemoryHealth(rank, timeout, should_stop)
        self._members: list[Slots] = []
        self._plans: Plans | None = None
        library = load() if native else None  # compiled before others wait for this member
        layout = SegmentLayout.of(size, slot_bytes, view_bytes, arena_bytes)
        patience = timeout if forming_timeout is None else forming_timeout
        try:
            own = OwnSegment(layout.num_bytes)
            try:
                self._members = self._map(meeting, patience, own, layout, should_stop)
                rounds = make_rounds(library, rank, layout, self._members, self._health, self.is_crowded)
                self._plans = Plans(rank, layout, self._members, rounds)
                rounds.all_gather_ints([rank])  # each member that takes part has mapped everything
            finally:
                own.conceal()
        except BaseException:
            self.close()
            raise
        self._health.formed()

    def _map(
        self,
        meeting: Meeting,
        patience: float,
        own: OwnSegment,
        layout: SegmentLayout,
        should_stop: Callable[[], bool] | None,
    ) -> list[Slots]:
        """Make this member's segment known and map those of the others."""
        mine = Slots(own, layout)
        self._health.know(self.rank, mine.state)
        said = exchange(
            meeting,
            self.rank,
            self.size,
            msgspec.json.encode(own.address),
            timeout=patience,
            should_stop=should_stop,
            names=[self._health.name(member) for member in range(self.size)],
        )
        addresses = [msgspec.json.decode(each, type=SegmentAddress) for each in said]
        members = []
        for member, address in enumerate(addresses):
            if member == self.rank:
                members.append(mine)
                continue
            self.processes[member] = address.pid
            name = self._health.name(member)
            segment: Segment = open_segment(name, address, layout.num_bytes, self._health.watch)
            members.append(Slots(segment, layout))
            self._health.know(member, members[-1].state)
        return members

    def __repr__(self) -> str:
        return f"<SharedMemoryCommunicator rank {self.rank} of {self.size}, {self._health.reason or 'open'}>"

    # ---- the contract

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        return self._begin("all_gather_ints").rounds.all_gather_ints(row)

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return self._into_new("all_gather", part, sizes)

    def all_gather_view(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        plans, plan, given = self._start("all_gather_view", part, sizes)
        if not plan.fits:
            return self.all_gather(given, sizes)
        buffer = plan.run(given)
        whole: torch.Tensor | None = plan.views[buffer]
        return plans.whole(plan, buffer) if whole is None else whole

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
        buffer = plan.run(given)
        if buffer == VIEWS:  # all know by now that the data of some member is too large
            # That takes more than one round, so who goes on to the next call has seen that all others are
            # done with what they gave.
            incoming = self.all_to_all(given, send_sizes, receive_sizes)
            return list(incoming.split(list(receive_sizes)))
        parts: list[torch.Tensor] = (plan.views[buffer] or plans.parts(plan, buffer)).copy()
        if plan.own is not None:
            parts[self.rank] = given[plan.own]
        return parts

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._into_new("all_reduce", tensor)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        given = plain(tensor)
        result = given.clone() if source == self.rank else torch.empty_like(given)
        self.broadcast_into(result, source)
        return result

    def send(self, tensor: torch.Tensor, to: int) -> None:
        given = plain(tensor)
        self._begin("send").rounds.send(given, to)

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        result = torch.empty_like(plain(like))
        self._begin("receive").rounds.receive(result, source)
        return result

    def abort(self) -> None:
        self._health.abort()

    def close(self) -> None:
        self._health.close()
        self._members, self._plans = [], None

    def broadcast_into(self, result: torch.Tensor, source: int) -> None:
        """Fill a contiguous tensor with that of ``source``."""
        self._begin("broadcast").rounds.broadcast(result, source)

    def run_into(
        self,
        call: str,
        given: torch.Tensor,
        result: torch.Tensor,
        sizes: Sequence[int] = (),
        receive_sizes: Sequence[int] = (),
    ) -> None:
        """Make the call of this name, with its result in a given contiguous tensor."""
        _, plan, given = self._start(call, given, sizes, receive_sizes)
        plan.run(given, result)

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
    ) -> tuple[Plans, Plan, torch.Tensor]:
        """A call begins: its plan, and the tensor as the transport wants it."""
        plans = self._plans or self._closed(call)
        plan, given = plans.start(call, tensor, sizes, receive_sizes)
        self._health.begin(call)
        return plans, plan, given

    def _begin(self, call: str) -> Plans:
        """Start the call's deadline; return the plans.

        A holder of the plans holds the memory, even if another thread closes this communicator.
        """
        plans = self._plans or self._closed(call)
        self._health.begin(call)
        return plans

    def _closed(self, call: str) -> NoReturn:
        self._health.begin(call)
        raise AssertionError("the communicator is open")

    # ---- for native code that exchanges by itself

    @property
    def is_native(self) -> bool:
        """Whether collectives are calls into C++."""
        return self._plans is not None and self._plans.rounds.is_native

    @property
    def arenas(self) -> list[Slots]:
        """Segments by rank, each with an arena.

        An arena is zeros at first, written by its own member alone, and read by all. It stays mapped as long
        as the caller keeps these.
        """
        return list(self._members)

    @property
    def is_crowded(self) -> bool:
        """Whether there are more members than cores."""
        return self.size > usable_cores()

    def begin_exchange(self, call: str) -> None:
        """Begin a call that waits by itself; its deadline is the communicator's.

        Raises:
            CollectiveError: the group is broken.
        """
        self._health.begin(call)

    def check_exchange(self, rank: int, has_arrived: Callable[[], bool]) -> None:
        """Check a wait for member ``rank``; called every few milliseconds.

        Raises:
            CollectiveError: the wait can no longer end well; from now on all calls fail, here and at the
                others.
        """
        self._health.check(rank, has_arrived)
