"""Memory that processes of one host share, and watches for their deaths.

This module loads no torch.

A segment is in no directory: it is a memfd, which the others open through /proc while its owner holds it
open. So nothing can be left behind, however a process ends, and the size of /dev/shm does not matter.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import time

import msgspec

from parallel.ending_processes import is_ending
from parallel.links.errors import CollectiveError

LOOK_INTERVAL = 0.005
"""Seconds between two looks for processes that are ending, at least."""


class SegmentAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address at which the others find a member's segment."""

    host: str
    """One boot of one machine and one namespace of process ids.

    Within it, ``pid`` means the same to all.
    """
    pid: int
    descriptor: int
    name: str
    """A name that no other segment has.

    Once the owner has closed the descriptor, its number may be another file's.
    """


class Segment:
    """Memory that one member writes and all members of the group map."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.memory = mmap.mmap(descriptor, num_bytes)
        self.words = memoryview(self.memory).cast("q")


class OwnSegment(Segment):
    """A new segment; until :meth:`conceal` others can open it at :attr:`address`."""

    def __init__(self, num_bytes: int) -> None:
        name = f"lockstep-{secrets.token_hex(8)}"
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)  # pages come when they are first written
        super().__init__(descriptor, num_bytes)
        self.address = SegmentAddress(this_host(), os.getpid(), descriptor, name)
        self._concealed = False

    def conceal(self) -> None:
        """Close the descriptor by which others map the memory, once all have."""
        if not self._concealed:
            self._concealed = True
            os.close(self.address.descriptor)


class ProcessWatch:
    """Watches for processes of members that have ended (a pidfd each), or are ending."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        """Process ids by descriptor."""
        self._poll = select.poll()
        self._ending: set[int] = set()
        """Descriptors of processes that were ending at the last look."""
        self._looked_at = 0.0

    def add(self, rank: int, pid: int) -> None:
        descriptor = os.pidfd_open(pid)
        self._ranks[descriptor], self._pids[descriptor] = rank, pid
        self._poll.register(descriptor, select.POLLIN)

    def dead(self, wait: float = 0.0) -> list[int]:
        """Ranks of processes that have ended or are ending; waits for the first end."""
        ended = {descriptor for descriptor, _ in self._poll.poll(wait * 1000)}
        if (now := time.monotonic()) > self._looked_at + LOOK_INTERVAL:
            self._looked_at = now
            self._ending = {descriptor for descriptor, pid in self._pids.items() if is_ending(pid)}
        return sorted(self._ranks[descriptor] for descriptor in ended | self._ending)

    def close(self) -> None:
        self._pids.clear()
        self._ending.clear()
        while self._ranks:
            descriptor, _ = self._ranks.popitem()
            self._poll.unregister(descriptor)
            os.close(descriptor)


def this_host() -> str:
    """Name of this boot and process-id namespace, the same for all processes in it."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def open_segment(rank: int, address: SegmentAddress, num_bytes: int, watch: ProcessWatch) -> Segment:
    """The segment of member ``rank``, which is watched from now on.

    Raises:
        CollectiveError: it has died, or gave the group up.
        ValueError: its memory cannot be shared with this process.
    """
    if address.host != this_host():
        raise ValueError(
            f"shared memory needs all members on one host and in one container, rank {rank} is elsewhere:"
            " use tcp (--all2all-backend tcp)"
        )
    try:
        watch.add(rank, address.pid)
    except OSError as error:
        raise CollectiveError(f"forming the group: rank {rank} has died", rank, "exited") from error
    try:
        descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except PermissionError as error:
        raise ValueError(
            f"shared memory of rank {rank} belongs to another user: use tcp (--all2all-backend tcp)"
        ) from error
    except OSError as error:  # its number means nothing any more
        raise _gone(rank, watch) from error
    try:
        if not _is_segment(descriptor, address.name, num_bytes):
            raise _gone(rank, watch)
        return Segment(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _is_segment(descriptor: int, name: str, num_bytes: int) -> bool:
    target = os.readlink(f"/proc/self/fd/{descriptor}")
    return target.startswith(f"/memfd:{name}") and os.fstat(descriptor).st_size >= num_bytes


def _gone(rank: int, watch: ProcessWatch) -> CollectiveError:
    if rank in watch.dead():
        return CollectiveError(f"forming the group: rank {rank} has died", rank, "exited")
    return CollectiveError(f"forming the group: rank {rank} has given it up", rank, "closed")
