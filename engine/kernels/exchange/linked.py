"""Exchange with members on other hosts inside a step.

Messages over links stand in place of shared memory.

``linked.hpp`` does it, through the table of links that the communicator owns. There is a mirror here of the
arena of each member on another host, which its messages fill. So the kernels read the rows, results and sums
of all members alike.

A member's own memory is read by its links until they have sent it. That is when a step ends, unless it fails,
and then the links are of no use any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NoReturn, Protocol

import numpy as np

from engine.kernels.core.library import KernelLibrary
from engine.kernels.core.pages import ALIGNMENT, mapped
from engine.kernels.core.rows import pitch_of
from engine.kernels.exchange.exchange import ArenaLayout, ExpertExchange, ExpertShape, signature_of
from engine.kernels.exchange.hosts import Hosts
from engine.kernels.exchange.layouts import LINKAGE, PEER
from engine.kernels.exchange.peer_waits import ExchangingGroup, NativeWaits
from engine.kernels.exchange.sums import Sums
from parallel.communicators.base import CollectiveError
from parallel.expert_parallel import ExpertParallel
from parallel.links.native_links import LinksTable
from parallel.placement import Placement
from parallel.replicas import replicas_at
from parallel.rounds.messages import LinkHealth
from parallel.rounds.notes import call_of

ARENA_BYTES = 1 << 30
"""Size of a member's arena with its mirrors.

Memory is used as far as it is written.
"""
MOST_ROWS = (1 << 24) - 1
"""Most rows of one member in a layer.

A message's note has no more bits for them.
"""
_MESSAGES = {1: "an expert layer's rows", 2: "an expert layer's results", 3: "a sum over ranks"}
"""Kinds of messages, in the highest byte of their notes."""


class LinkedGroup(ExchangingGroup, Protocol):
    """A communicator whose links native code may use between two calls."""

    rank: int
    size: int
    links_address: int
    """Address of the table of ``links.hpp``; 0 where the links are Python's."""


class OverlapPolicy(IntEnum):
    """Overlap policy: whether local rows are computed before remote rows arrive.

    As the times of the last layers suggest; always; never.
    """

    LEARNED = 0
    NEVER_WAIT = 1
    ALWAYS_WAIT = 2


class _Problem(IntEnum):
    NONE = 0
    BROKEN = 1
    UNEXPECTED = 2
    GIVEN_UP = 3


def has_links(group: object) -> bool:
    """Whether members of this kind of group have links, native or Python's.

    The answer is the same at all members.
    """
    return hasattr(group, "links_address")


def linked(group: Any) -> LinkedGroup | None:
    """The group, if kernels may use its links; None where it has none, or Python's."""
    native: LinkedGroup | None = group if has_links(group) and group.links_address else None
    return native


def hosts_of(group: LinkedGroup) -> Hosts:
    """The hosts of a group's members; each has its own if nobody shares memory."""
    return Hosts(group.rank, getattr(group, "hosts", range(group.size)))


class Memory:
    """A member's arena, those of its host's other members, and mirrors of all others'.

    Members of one host find the mirrors in one another's arenas, behind what these hold themselves.
    """

    def __init__(self, group: LinkedGroup, num_bytes: int, mirror_bytes: int) -> None:
        """``num_bytes``: of an arena. ``mirror_bytes``: of what is mirrored, from its beginning."""
        hosts, local = hosts_of(group), getattr(group, "local", None)
        self._kept: list[Any]
        if local is None:
            self._kept = [mapped(num_bytes + hosts.num_mirrors * mirror_bytes)]
            begins = {group.rank: int(self._kept[0].data_ptr())}
        else:
            assert num_bytes + hosts.num_mirrors * mirror_bytes <= local.arena_bytes
            self._kept = list(local.arenas)
            begins = {rank: each.arena for rank, each in zip(hosts.local, self._kept, strict=True)}
        self.arenas: list[int] = []
        """Addresses by rank."""
        for rank in range(group.size):
            if rank in begins:
                self.arenas.append(begins[rank])
            else:
                keeper, number = hosts.mirror_of(rank)
                self.arenas.append(begins[keeper] + num_bytes + number * mirror_bytes)

    def results(self, hosts: Hosts, num_bytes: int) -> list[int]:
        """Addresses by rank of arenas with results.

        Those of members on other hosts come into memory of this member's own.
        """
        found = list(self.arenas)
        for rank in set(range(len(found))) - set(hosts.local):
            self._kept.append(mapped(num_bytes))
            found[rank] = int(self._kept[-1].data_ptr())
        return found


class Linkage:
    """Record of a group's links and messages for the kernels."""

    def __init__(
        self, library: KernelLibrary, group: LinkedGroup, what: str, exchange: np.ndarray[Any, Any]
    ) -> None:
        """``what``: the call that errors name. ``exchange``: the record that gets this."""
        self._group = group
        network: Any = getattr(group, "network", group)
        self._health: LinkHealth = network.health
        hosts = hosts_of(group)
        self.peers = np.zeros(group.size, dtype=PEER)
        self._hosts = np.array(hosts.numbers, dtype=np.int64)
        self._roles = np.array(hosts.roles(), dtype=np.int64)
        self.most = np.zeros(group.size, dtype=np.int64)
        self.record = np.zeros((), dtype=LINKAGE)
        self.record["links"], self.record["budget"] = group.links_address, 1e-3
        for name, array in (
            *(("peers", self.peers), ("hosts", self._hosts)),
            *(("roles", self._roles), ("most", self.most)),
        ):
            self.record[name] = array.ctypes.data
        exchange["linkage"] = self.record.ctypes.data
        exchange["crowded"] = group.is_crowded
        address = exchange.ctypes.data
        self.waits = NativeWaits(
            group,
            what,
            lambda rank, word, target: library.call("has_arrived", address, rank, word, target) != 0,
        )
        exchange["check"] = self.waits.address

    @property
    def error(self) -> BaseException | None:
        """Why a step was given up, if it was.

        The group is of no use any more.
        """
        if self.waits.error is not None:
            return self.waits.error
        problem, rank = _Problem(int(self.record["problem"])), int(self.record["problem_rank"])
        try:
            if problem is _Problem.UNEXPECTED:
                self._refuse(rank)
            if problem is _Problem.BROKEN:
                self._blame(rank)
        except CollectiveError as error:
            return error
        return None

    def _refuse(self, rank: int) -> NoReturn:
        """Give the group up for a message that is not the one expected."""
        note, num_bytes = int(self.record["problem_note"]), int(self.record["problem_bytes"])
        what = _MESSAGES.get(note >> 56)
        if what is None:
            what = f"calls {call_of(note)}"
        else:
            what = f"sends {what} of {num_bytes} bytes (number {note >> 24 & 0xFFFFFFFF}), which do not fit"
        self._health.fail(f"rank {rank} {what}", rank, "closed")

    def _blame(self, rank: int) -> NoReturn:
        """Raise what the communicator knows of a broken link."""
        table = LinksTable.from_address(self._group.links_address)
        peer, error = int(table.broken_peer), int(table.broken_error)
        if peer < 0 and not error:  # nobody has noticed it yet but the kernels
            peer = rank
        self._health.fail_on_links(None if peer < 0 else peer, error)


class LinkedExchange(ExpertExchange):
    """Exchange of one member with a group on several hosts."""

    def __init__(
        self,
        library: KernelLibrary,
        group: LinkedGroup,
        placement: Placement,
        shape: ExpertShape,
        num_layers: int,
        experts: ExpertParallel,
        *,
        arena_bytes: int = ARENA_BYTES,
    ) -> None:
        """``experts``: tells the others this member's signature, and counts pairs.

        ``arena_bytes``: of a member's arena and mirrors, as much as members of one host share.
        """
        hosts = hosts_of(group)
        room = ArenaLayout.room(shape, arena_bytes, hosts.num_mirrors)
        super().__init__(shape, room, replicas_at(placement, group.rank))
        self._group, self._experts = group, experts
        self._memory = Memory(group, self.layout.num_bytes, self.layout.places_at)
        self._place(self._memory.arenas)
        results = self._memory.results(hosts, self.layout.num_bytes)
        self.keep("returned", np.array(results, dtype=np.int64))
        self._counted = experts.tokens_per_expert
        self.record["row_bytes"] = pitch_of(shape.hidden, shape.dtype) * shape.dtype.itemsize
        self.linkage = Linkage(library, group, "an expert layer", self.record)
        experts.signature = signature_of(library.key, *shape, num_layers, arena_bytes)

    def __repr__(self) -> str:
        return f"<LinkedExchange rank {self._group.rank} of {self._group.size}, up to {self.rows} rows>"

    @property
    def error(self) -> BaseException | None:
        """Why a step was given up, if it was."""
        return self.linkage.error

    @property
    def look(self) -> OverlapPolicy:
        """When own rows are computed before others' have come; bits do not depend on it."""
        return OverlapPolicy(int(self.linkage.record["look"]))

    @look.setter
    def look(self, look: OverlapPolicy) -> None:
        self.linkage.record["look"] = look

    def can(self, sizes: Sequence[int]) -> bool:
        """Whether a step with these sizes is exchanged here.

        That is known after the step's headers, and the same at all members.
        """
        return self._experts.have_one_signature and sum(sizes) <= self.rows and max(sizes) <= MOST_ROWS

    def begin(self, sizes: Sequence[int]) -> None:
        """See :class:`ExpertExchange`.

        Raises:
            parallel.communicators.base.CollectiveError: the group is broken.
        """
        super().begin(sizes)
        self.linkage.most[:] = sizes
        pairs = np.array(sizes, dtype=np.int64) * self.shape.top_k
        self.firsts[:] = pairs.cumsum() - pairs
        self.linkage.waits.begin()


class LinkedSums(Sums):
    """Sums among ranks on several hosts."""

    def __init__(
        self, library: KernelLibrary, group: LinkedGroup, width: int, *, arena_bytes: int = ARENA_BYTES
    ) -> None:
        self._size = group.size
        num_bytes = arena_bytes // (1 + hosts_of(group).num_mirrors) // ALIGNMENT * ALIGNMENT
        self._memory = Memory(group, num_bytes, num_bytes)
        super().__init__(group.rank, self._memory.arenas, num_bytes, width)
        self.linkage = Linkage(library, group, "a sum over ranks", self.record)
        self.linkage.record["are_sums"] = 1

    def __repr__(self) -> str:
        return f"<LinkedSums of {self._size} ranks, up to {self.rows} rows>"

    @property
    def given(self) -> int:
        """Number of sums that this rank's arena has counted so far."""
        return int(self._rounds[0])

    def start_at(self, given: int) -> None:
        """Count from here on: the same at all ranks, and no arena has seen more."""
        self._rounds[0] = given

    def begin(self) -> None:
        """See :class:`Sums`."""
        self.linkage.waits.begin()

    @property
    def error(self) -> BaseException | None:
        """Why a step was given up, if it was."""
        return self.linkage.error
