"""A communicator over TCP: torch's gloo process group, made directly, with no default world.

gloo's send and receive run in the caller's thread, take any type and size, and are twice as fast here as
gloo's own collectives, which pass through another thread.

gloo has no way to end a waiting call from another thread, except one: when a receive of one's own times
out, gloo closes all connections of the group, and whatever waits on them fails. :class:`_Connections` uses
that. It also listens on the connection to the member before this one, where nothing ever comes but a
farewell: so a death is noticed around the ring, even by those that wait for somebody else.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import msgspec
import torch
from torch.distributed import ProcessGroupGloo, Store

from parallel.communicators.base import CollectiveError, Evidence
from parallel.communicators.process_group import (
    Messages,
    ProcessGroupCommunicator,
    first_line,
    local_processes,
)
from parallel.links.forming_group import FormingGroup
from parallel.links.meeting_contract import Meeting
from parallel.rounds.segments import ProcessWatch, this_host

_DATA, _FAREWELL, _NOTHING = 0, 1, 2
"""Tags of messages; no message has the last one."""

_CONNECT_SECONDS = 10.0  # when all members are there, how long connecting may take
_FAREWELL_SECONDS = 0.1
_DEATH_SECONDS = 0.02  # from a closed socket to the end of its process
_LEAVE_SECONDS = 1.0  # for a call of another thread to fail when this end is closed
_FOREVER = timedelta(days=1000)


class MeetingStore(Store):  # type: ignore[misc]
    """A meeting place as gloo wants it: torch's store, of which connecting uses four calls."""

    def __init__(self, meeting: Meeting, seconds: float) -> None:
        """``seconds``: how long a value is waited for that is not there."""
        super().__init__()
        self._meeting = meeting
        self._seconds = seconds

    def set(self, key: str, value: str | bytes) -> None:
        self._meeting.set(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._meeting.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return self._meeting.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        while self._meeting.find(keys, deadline - time.monotonic()) is None:
            if time.monotonic() > deadline:
                names = ", ".join(keys)
                raise CollectiveError(f"no value {names} came within {seconds:g} s", None, "deadline")


class _Connections:
    """The connections of one member to all others, and why they were cut."""

    def __init__(
        self, meeting: Meeting, rank: int, size: int, host: str, timeout: float, processes: Mapping[int, int]
    ) -> None:
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout)
        options._threads = 1
        self._group = ProcessGroupGloo(MeetingStore(meeting, timeout), rank, size, options)
        self.reason: str | None = None
        self.blamed: int | None = None
        self.evidence: Evidence = "aborted"
        self.on_broken: Callable[[CollectiveError], None] | None = None
        self._processes = ProcessWatch()
        for peer, pid in processes.items():
            with contextlib.suppress(OSError):  # it has ended: the connections will tell
                self._processes.add(peer, pid)
        self._in_gloo = threading.Lock()
        self._peers = [peer for peer in range(size) if peer != rank]
        self._before, self._after = (rank - 1) % size, (rank + 1) % size
        self._lock = threading.RLock()  # abort may come from a signal handler
        self._watcher = threading.Thread(target=self._watch, name=f"gloo-watch-{rank}", daemon=True)
        self._watcher.start()

    def cut(self, reason: str, blamed: int | None = None, evidence: Evidence = "aborted") -> None:
        """Close all connections, so that everything that waits on them, here or there, fails."""
        with self._lock:
            if self.reason is not None:
                return
            self._set_reason(reason, blamed, evidence)
        for peer in self._peers:  # a receive from one that is gone fails instead of timing out: try them all
            with contextlib.suppress(RuntimeError):
                never = self._group.recv([torch.empty(1)], peer, _NOTHING)
                never.wait(timedelta(milliseconds=1))

    def transfer(self, outgoing: Messages, incoming: Messages, seconds: float) -> RuntimeError | None:
        """Send and receive all of these.

        What gloo says if that fails, and then everything is cut.
        """
        with self._in_gloo:
            return self._transfer(outgoing, incoming, seconds)

    def _transfer(self, outgoing: Messages, incoming: Messages, seconds: float) -> RuntimeError | None:
        deadline = time.monotonic() + seconds
        begun = []
        peer = self._before
        try:
            for peer, tensor in incoming:
                if tensor.numel():
                    begun.append((peer, self._group.recv([tensor], peer, _DATA)))
            for peer, tensor in outgoing:
                if tensor.numel():
                    begun.append((peer, self._group.send([tensor], peer, _DATA)))
            for message in begun:
                peer, work = message
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            late = time.monotonic() > deadline - 0.01  # gloo counts whole milliseconds
            self._broke(peer)
            if late and self.evidence == "closed":  # gloo closes everything then, and the watcher may notice
                # that first
                self._set_reason(f"rank {peer} did not come within {seconds:g} s", peer, "deadline")
            return error.with_traceback(None)  # whose frames would keep gloo's objects
        return None

    def leave(self) -> None:
        """Announce an orderly exit, close, and wait until no thread is in gloo.

        The announcement keeps the others from taking the closed connections for a death.
        """
        if self.reason is None:
            with contextlib.suppress(RuntimeError):
                farewell = self._group.send([torch.zeros(1)], self._after, _FAREWELL)
                farewell.wait(timedelta(seconds=_FAREWELL_SECONDS))
        self.cut("it was closed")
        self._watcher.join()
        with self._lock:
            self._processes.close()
        if self._in_gloo.acquire(timeout=_LEAVE_SECONDS):
            self._group = None
            self._in_gloo.release()

    def _broke(self, peer: int) -> None:
        """Handle a broken connection.

        Where the processes can be watched, a death is distinguished from an orderly exit: sockets are closed
        a moment before a process has ended.
        """
        with self._lock:
            if self.reason is not None:
                return
            dead = self._processes.dead(_DEATH_SECONDS)
        if dead:
            self.cut(f"rank {dead[0]} has died", dead[0], "exited")
        else:
            self.cut(f"the connection to rank {peer} broke", peer, "closed")

    def _set_reason(self, reason: str, blamed: int | None, evidence: Evidence) -> None:
        self.blamed, self.evidence, self.reason = blamed, evidence, reason

    def _watch(self) -> None:
        try:
            self._group.recv([torch.zeros(1)], self._before, _FAREWELL).wait(_FOREVER)
        except RuntimeError:
            known = self.reason is not None
            self._broke(self._before)
            if not known and self.on_broken is not None:
                self.on_broken(CollectiveError(str(self.reason), self.blamed, self.evidence))


class GlooCommunicator(ProcessGroupCommunicator):
    """One member over gloo; see :class:`parallel.communicators.base.Communicator`."""

    def __init__(self, forming: FormingGroup, *, host: str = "127.0.0.1") -> None:
        """``host`` is this member's address for the others."""
        rank, size = forming.rank, forming.size
        super().__init__(rank, size, forming.timeout)
        if size == 1:
            return
        said = forming.exchange(msgspec.json.encode((this_host(), os.getpid())))
        self.processes = local_processes([msgspec.json.decode(each, type=tuple[str, int]) for each in said])
        self.processes.pop(rank, None)
        try:
            self.wire = connections = _Connections(
                forming.meeting, rank, size, host, min(forming.timeout, _CONNECT_SECONDS), self.processes
            )
        except RuntimeError as error:
            raise CollectiveError(f"connecting rank {rank} of {size}: {first_line(error)}") from error
        # At exit too: a thread that wakes up while Python ends would abort the process.
        self._leave_once = weakref.finalize(self, connections.leave)
        self.all_gather_ints([rank])  # after this, nobody needs the meeting place

    def _leave(self) -> None:
        self._leave_once()
