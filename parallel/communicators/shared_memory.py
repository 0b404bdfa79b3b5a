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

The rounds are in :mod:`parallel.rounds`: one call into C++ for a whole collective and, where nothing can be
compiled, Python. Both do the same with the same memory, so members of a group need not agree. See
``waiting`` there for how a member waits, ``shared_memory_health`` for when it gives up, ``segments`` for the
memory and ``slots`` for how it is cut.
"""

from __future__ import annotations

import platform

import msgspec

from parallel.communicators.rounds_communicator import RoundsCommunicator
from parallel.links.forming_group import FormingGroup
from parallel.rounds import memory_order
from parallel.rounds.native_shared_memory_rounds import load, make_rounds
from parallel.rounds.plans import Plans
from parallel.rounds.segments import OwnSegment, SegmentAddress, open_segment
from parallel.rounds.shared_memory_health import SharedMemoryHealth
from parallel.rounds.slots import USUAL_SIZES, GroupMemory, SegmentLayout, SegmentSizes, Slots
from parallel.rounds.views import SharedMemoryViews
from parallel.topology import usable_cores


class SharedMemoryCommunicator(RoundsCommunicator):
    """One member whose group shares memory; see :class:`parallel.communicators.base.Communicator`."""

    def __init__(
        self,
        forming: FormingGroup,
        *,
        sizes: SegmentSizes = USUAL_SIZES,
        native: bool = True,
        health: SharedMemoryHealth | None = None,
    ) -> None:
        """Without ``native`` this member keeps to Python, whatever the others do.

        ``health`` is that of a part of a larger group; the deadlines of calls are its own, then.

        Raises:
            CollectiveError: somebody does not come, or forming was stopped.
            ValueError: memory cannot be shared here; the message says why.
        """
        fence = memory_order.fence_here()
        if fence is None:
            raise ValueError(
                f"shared memory on {platform.machine()} needs a compiled fence, and there is none:"
                " install g++, or use tcp (--all2all-backend tcp)"
            )
        self._health = health or SharedMemoryHealth(forming.rank, forming.timeout, forming.should_stop)
        super().__init__(forming.rank, forming.size, self._health)
        self.is_crowded = self.size > usable_cores()
        self.arena_bytes = sizes.arena_bytes
        """Size of the memory at each of :attr:`arenas`."""
        self._members: list[Slots] = []
        if native:
            load()  # compiled before others wait for this member
        layout = SegmentLayout.of(self.size, sizes)
        try:
            own = OwnSegment(layout.num_bytes)
            try:
                self._members = self._map(forming, own, layout)
                memory = GroupMemory(self.rank, layout, self._members, fence)
                rounds = make_rounds(memory, self._health, crowded=self.is_crowded, native=native)
                views = SharedMemoryViews(memory, rounds, self._health)
                self.plans = Plans(rounds, self._health.begin, views.prepare)
                rounds.all_gather_ints([self.rank])  # each member that takes part has mapped everything
            finally:
                own.conceal()
        except BaseException:
            self.close()
            raise
        self._health.formed()

    def _map(self, forming: FormingGroup, own: OwnSegment, layout: SegmentLayout) -> list[Slots]:
        """Make this member's segment known and map those of the others."""
        mine = Slots(own, layout)
        self._health.know(self.rank, mine.state)
        names = [self._health.name(member) for member in range(self.size)]
        said = forming.exchange(msgspec.json.encode(own.address), names)
        members = []
        for member, name in enumerate(names):
            if member == self.rank:
                members.append(mine)
                continue
            address = msgspec.json.decode(said[member], type=SegmentAddress)
            self.processes[member] = address.pid
            segment = open_segment(name, address, layout.num_bytes, self._health.watch)
            members.append(Slots(segment, layout))
            self._health.know(member, members[-1].state)
        return members

    def close(self) -> None:
        super().close()
        self._members = []

    @property
    def arenas(self) -> list[Slots]:
        """Segments by rank, each with an arena for native code.

        An arena is zeros at first, written by its own member alone, and read by all. It stays mapped as long
        as the caller keeps these.
        """
        return list(self._members)
