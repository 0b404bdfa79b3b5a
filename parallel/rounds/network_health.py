"""Health of a group over links as one member sees it, and how it leaves.

This module loads no torch.

A thread sleeps on the control connections and on the processes of members on this host. What it notices
breaks the group: it tells the others by a last word, aborts the links, so that a waiting call ends at once,
and calls ``on_broken``. What all this means is decided in :mod:`parallel.links.last_words`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from parallel.links.errors import CollectiveError, Evidence
from parallel.links.last_words import CLOSED, WORD_BYTES, Blame, LastWords, encoded, word_for
from parallel.rounds.group_health import GroupHealth

_DEATH_SECONDS = 0.02  # from a closed socket to the end of its process
_WORD_SECONDS = 0.05  # from a broken link to what explains it
_LOOK_SECONDS = 0.001


class NetworkHealth(GroupHealth):
    """Health of a group over links, with the thread that watches its members.

    Calls come from one thread, but for :meth:`abort`, which may come from any, and from signal handlers.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        control: Mapping[int, socket.socket],
        timeout: float,
        should_stop: Callable[[], bool] | None,
        abort_links: Callable[[], object],
    ) -> None:
        """``control``: a connection to each other rank, which belongs to this object.

        ``timeout`` (seconds) is that of each call. ``should_stop`` is asked until :meth:`formed`.

        Raises:
            OSError: there are no file descriptors left.
        """
        super().__init__(rank, timeout, should_stop)
        self._abort_links = abort_links
        ends = {peer: addresses_of(connection) for peer, connection in control.items()}
        self._words = LastWords(size, {peer: words for peer, words in ends.items() if words})
        self._control = dict(control)
        self._processes: dict[int, int] = {}
        """Descriptors of processes by rank."""
        self._is_closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        if size > 1:
            self._thread = threading.Thread(target=self._watch, name=f"links-watch-{rank}", daemon=True)
            self._thread.start()

    def watch_process(self, rank: int, pid: int) -> None:
        """Notice the end of a member's process on this host.

        Raises:
            OSError: there are no file descriptors left.
        """
        try:
            self._processes[rank] = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended: the connections tell
            return
        os.eventfd_write(self._wake, 1)

    def check(self, rank: int, has_arrived: Callable[[], bool]) -> None:
        """Check a wait for member ``rank``; called every few milliseconds.

        Raises:
            CollectiveError: the wait can no longer end well; from now on all calls fail, here and at the
                others.
        """
        blame: Blame | None = self.blame
        if blame is None and self._should_stop is not None and self._should_stop():
            blame = "it was stopped from outside", None, "aborted"
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self.timeout + self.grace
        elif blame is None and now > self._deadline:
            # Who was stopped itself finds all deadlines over, and what others have said about that.
            self._listen_for_reasons(rank)
            blame = self.blame or (f"rank {rank} did not come within {self.timeout:g} s", rank, "deadline")
        if blame is not None and not has_arrived():
            self.fail(*blame)

    def give_up(self, reason: str, rank: int | None, evidence: Evidence) -> None:
        """Break the group because of a member, if it is known."""
        self._leave(word_for(rank), reason, rank, evidence)

    def fail_on_links(self, peer: int | None, error: int) -> NoReturn:
        """A link is broken, or all were aborted (no peer).

        ``error`` is the errno, or 0 for the peer's end. A member that closes a link has mostly sent a last
        word, or its process has ended: that is noticed within a moment.
        """
        if peer is None:
            self.fail(f"its links do not work ({os.strerror(error)})", None, "aborted")
        self._listen_for_reasons(peer)
        self.fail(*self._words.lose(peer, error))

    def _listen_for_reasons(self, peer: int) -> None:
        """Give the thread a moment to hear why a member is missed."""
        patience = time.monotonic() + _WORD_SECONDS
        while self.reason is None and peer not in self._words.closed and time.monotonic() < patience:
            time.sleep(_LOOK_SECONDS)

    def abort(self) -> None:
        """Make all calls fail from now on, here and soon at the others."""
        self._leave(word_for(None), "it was aborted", None, "aborted")

    def close(self) -> None:
        """Send the last word and release everything; no call comes any more."""
        self._leave(CLOSED, "it was closed", None, "aborted")
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            os.eventfd_write(self._wake, 1)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for connection in self._control.values():
            connection.close()
        for descriptor in (*self._processes.values(), self._wake):
            os.close(descriptor)

    def _leave(self, word: int, reason: str, rank: int | None, evidence: Evidence) -> bool:
        """Leave the group, if this member has not left it; returns whether."""
        with self._lock:
            if self.reason is not None:
                return False
            self._blamed, self._evidence, self.reason = rank, evidence, reason
            for connection in self._control.values():
                with contextlib.suppress(OSError):  # who is gone, or takes nothing, misses nothing
                    connection.send(encoded(word), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            if word != CLOSED:
                self._abort_links()
            return True

    # ---- the thread

    def _watch(self) -> None:
        poll = select.poll()
        peers = {connection.fileno(): peer for peer, connection in self._control.items()}
        processes: dict[int, int] = {}
        for descriptor in (self._wake, *peers):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                    if self._is_closed:
                        return
                    for peer, process in list(self._processes.items()):
                        if process not in processes:
                            processes[process] = peer
                            poll.register(process, select.POLLIN)
                elif descriptor in peers:
                    if not self._listen(peers[descriptor]):
                        poll.unregister(descriptor)
                        del peers[descriptor]
                elif descriptor in processes:
                    poll.unregister(descriptor)
                    peer = processes[descriptor]
                    if peer in peers.values():
                        self._listen(peer)  # a last word counts
                    self._conclude(self._words.exit(peer))
                if self._is_closed:  # by what was called about a broken group
                    return

    def _listen(self, peer: int) -> bool:
        """Hear what a member has said; False when there is nothing more to hear."""
        error = 0
        try:
            content = self._control[peer].recv(2 * WORD_BYTES, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError as problem:
            content, error = b"", problem.errno or errno.EIO
        if content:
            blame = self._words.hear(peer, content)
            self._conclude(blame)
            return blame is None  # nothing more is heard of one that has left, however much it sends
        self._conclude(self._words.end(peer, error, has_exited=self._has_exited(peer)))
        return False

    def _has_exited(self, peer: int) -> bool:
        """Whether a member's process has ended, which follows the end of its connections."""
        if peer in self._words.closed or peer not in self._processes:
            return False
        poll = select.poll()
        poll.register(self._processes[peer], select.POLLIN)
        return bool(poll.poll(1000 * _DEATH_SECONDS))

    def _conclude(self, blame: Blame | None) -> None:
        if blame is None:
            return
        reason, rank, evidence = blame
        if self._leave(word_for(rank), reason, rank, evidence) and self.on_broken is not None:
            self.on_broken(CollectiveError(reason, rank, evidence))


def addresses_of(connection: socket.socket) -> str:
    """Both addresses of a connection between hosts, in words; else empty."""
    try:
        here, there = connection.getsockname(), connection.getpeername()
    except OSError:
        return ""
    between_hosts = isinstance(here, tuple) and isinstance(there, tuple) and here[0] != there[0]
    return f"{here[0]} to {there[0]}" if between_hosts else ""
