"""Whether a group of members with sockets between them is whole, and how one leaves.

This module loads no torch.

Between each two members is a control connection, on which nothing comes but a last word: the state with which
a member leaves (:mod:`parallel.communicators.group_health`), 8 bytes. A connection that ends without one is a
death, or a broken network. A thread waits for these. What it hears breaks the group at once: the others get
this member's last word, the links are aborted, so that a call that waits comes out, and ``on_broken`` is
called.

A member that has closed its end in good order does not break the group: others may still take what it sent.
A call that waits for more of it sees the end of its data.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import NoReturn

from parallel.communicators.base import CollectiveError
from parallel.communicators.group_health import (
    ABORTED,
    CLOSED,
    Blame,
    GroupHealth,
    has_closed,
    has_given_up,
)

_WORD = struct.Struct("<q")
_DEATH_SECONDS = 0.02  # from a closed socket to the end of its process
_EVIDENCE_SECONDS = 0.2  # for which a call with a broken link waits for what the control connection brings
_LEAVE_SECONDS = 1.0  # for the thread to end


class NetworkHealth(GroupHealth):
    """Health of a group as one member sees it.

    Only :meth:`abort` may be called from another thread than that of the calls.
    """

    def __init__(
        self,
        rank: int,
        timeout: float,
        should_stop: Callable[[], bool] | None,
        control: Mapping[int, socket.socket],
        abort_links: Callable[[], None],
        processes: Mapping[int, int],
    ) -> None:
        """``control``: a nonblocking connection to each other member, which is closed with this.

        ``abort_links`` ends calls that wait for links, from any thread. ``processes``: ids of members that
        can be watched from here.
        """
        super().__init__(rank, timeout, should_stop)
        self.on_broken: Callable[[CollectiveError], None] | None = None
        self._control = dict(control)
        self._abort_links = abort_links
        self._heard = threading.Condition(self._lock)
        self._last_words = dict.fromkeys(control, b"")
        self._have_closed: set[int] = set()
        self._most = max(rank, *control) if control else rank
        self._watching = threading.Lock()
        for peer, pid in processes.items():
            with contextlib.suppress(OSError):  # it has ended: its connection will say so
                self.watch.add(peer, pid)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._peers = {each.fileno(): peer for peer, each in self._control.items()}
        for descriptor in self._peers:
            self._poll.register(descriptor, select.POLLIN)
        self._is_closed = False
        self._thread = threading.Thread(target=self._listen, name=f"health-{rank}", daemon=True)
        self._thread.start()

    def fail_on_links(self, peer: int | None, error: int) -> NoReturn:
        """A link is broken, or all were aborted: raise the reason.

        ``error`` is the errno; 0: the peer closed its end.
        """
        with self._heard:
            self._heard.wait_for(
                lambda: self.reason is not None or peer in self._have_closed, _EVIDENCE_SECONDS
            )
        if self.reason is not None:
            raise self._error(self._call)
        if peer is None:
            self.fail("it was aborted", None, "aborted")
        if peer in self._have_closed:
            self.fail(*has_closed(peer))
        self.fail(*self._lost(peer, error))

    def close(self) -> None:
        """Take leave of the others, and release all; no call comes any more."""
        self._leave(CLOSED, "it was closed")
        if self._is_closed:
            return
        self._is_closed = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not threading.current_thread():
            self._thread.join(_LEAVE_SECONDS)
        os.close(self._wake)
        with self._watching:
            self.watch.close()
        for each in self._control.values():
            each.close()

    def _hopeless(self, rank: int) -> Blame | None:
        """Why a wait for this member is in vain.

        The thread sees to deaths and last words.
        """
        if self.reason is not None:
            return self.blame
        if self._should_stop is not None and self._should_stop():
            return "it was stopped from outside", None, "aborted"
        return self._late(rank)

    def _publish(self, state: int) -> None:
        word = _WORD.pack(state)
        for each in self._control.values():
            with contextlib.suppress(OSError):  # it knows that the group is broken, or will
                each.send(word)
        if state != CLOSED:
            self._abort_links()
        self._heard.notify_all()

    def _lost(self, peer: int, error: int) -> Blame:
        """Blame of a member whose connection has ended without a last word."""
        with self._watching:  # sockets are closed a moment before a process has ended
            if peer in self.watch.dead(_DEATH_SECONDS):
                return f"rank {peer} has died", peer, "exited"
        why = f" ({os.strerror(error)})" if error else ""
        return f"the connection to rank {peer} broke{why}", peer, "closed"

    # ---- in the thread

    def _listen(self) -> None:
        while not self._is_closed:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._wake or self._is_closed:
                    return
                self._hear(self._peers[descriptor], descriptor)

    def _hear(self, peer: int, descriptor: int) -> None:
        """Receive from a peer: its last word, or the end of its connection."""
        problem = 0
        try:
            received = self._control[peer].recv(_WORD.size)
        except BlockingIOError:
            return
        except OSError as error:
            received, problem = b"", error.errno or 0
        self._last_words[peer] += received
        if received and len(self._last_words[peer]) < _WORD.size:
            return
        self._poll.unregister(descriptor)
        state = self._state_of(peer)
        if state is None:
            self._break(self._lost(peer, problem))
        elif state == CLOSED:
            with self._heard:
                self._have_closed.add(peer)
                self._heard.notify_all()
        else:
            self._break(has_given_up(peer, state))

    def _state_of(self, peer: int) -> int | None:
        """The state in a last word; None if it is none."""
        word = self._last_words[peer]
        if len(word) != _WORD.size:
            return None
        (state,) = _WORD.unpack(word)
        return state if CLOSED <= state <= ABORTED + 1 + self._most else None

    def _break(self, blame: Blame) -> None:
        """Give the group up, unless it is broken already."""
        with self._lock:
            if self.reason is not None:
                return
            self.give_up(*blame)
        if self.on_broken is not None:
            self.on_broken(CollectiveError(*blame))
