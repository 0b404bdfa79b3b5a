"""Accepts connections and lets those in that prove the mesh's key.

All of it happens in the caller's loop and without waiting, many handshakes at once, each within its own few
seconds. Connections that say nothing, or nonsense, cost the others nothing.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from typing import NamedTuple

from parallel.links.handshake import HANDSHAKE_SECONDS, Accepting, Admit, HandshakeRefused, Offer
from parallel.links.keys import LinkKey

logger = logging.getLogger(__name__)

MOST_PENDING = 256
"""Handshakes under way at once; for one more the oldest is given up."""
KEPT_SECONDS = 0.25
"""Seconds that a handshake has however many come after it; members need milliseconds."""
MOST_AT_ONCE = 64
"""Connections accepted in one go, so that the caller's loop goes on."""
BACKLOG = 1024
"""Connections that may wait to be accepted; the kernel takes at most ``net.core.somaxconn``."""
LOG_INTERVAL = 10.0
"""Seconds between two lines about refused connections."""
_ACCEPT_PAUSE = 0.1
"""Seconds without accepting when this process has too many open files."""
_MOST_UNREAD = 64 << 10
"""Bytes of a refused connection that are read before it is closed."""


class Accepted(NamedTuple):
    """A connection whose other side has proven the key."""

    connection: socket.socket
    """Nonblocking; its user closes it."""
    handshake: Accepting

    @property
    def offer(self) -> Offer:
        return self.handshake.offer


class _Pending:
    """A connection in its handshake."""

    def __init__(self, connection: socket.socket, peer: str, handshake: Accepting, now: float) -> None:
        self.connection, self.peer = connection, peer
        self.handshake = handshake
        self.began = now
        self.has_spoken = False

    @property
    def deadline(self) -> float:
        return self.began + HANDSHAKE_SECONDS


class LinkAcceptor:
    """The handshakes of one listening socket, which its user closes.

    Its user waits for :meth:`fileno` to be readable, or for :attr:`patience` seconds, then calls
    :meth:`accepted`. All calls come from one thread; the counters may be read from any.
    """

    def __init__(
        self, listener: socket.socket, admit: Admit, key: LinkKey | None, *, can_encrypt: bool = False
    ) -> None:
        """``admit`` judges what a link is for, once its other side has proven the key."""
        listener.setblocking(False)
        self._listener = listener
        self._admit = admit
        self._key = key
        self._can_encrypt = can_encrypt
        self._pending: dict[socket.socket, _Pending] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._accepts_from: float | None = None
        self.refused = 0
        """Connections that were not let in."""
        self.problem = ""
        """Why connections could not be accepted, the last time that they could not."""
        self._log = _RareLog()

    def __repr__(self) -> str:
        return f"<LinkAcceptor {len(self._pending)} pending, {self.refused} refused>"

    def fileno(self) -> int:
        """Descriptor that is readable when there is something to do."""
        return self._selector.fileno()

    @property
    def num_pending(self) -> int:
        """Handshakes under way."""
        return len(self._pending)

    @property
    def patience(self) -> float | None:
        """Seconds until something must be done even if nothing comes; None: nothing is under way."""
        times = [] if self._accepts_from is None else [self._accepts_from]
        times += [each.deadline for each in list(self._pending.values())[:1]]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def accepted(self) -> list[Accepted]:
        """Advance all handshakes; returns the connections whose handshake has succeeded."""
        now = time.monotonic()
        if self._accepts_from is not None and now >= self._accepts_from:
            self._accepts_from = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        done, may_accept = [], False
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                may_accept = True
            elif (accepted := self._go_on(key.data)) is not None:
                done.append(accepted)
        while (oldest := self._oldest()) is not None and oldest.deadline <= now:
            self._refuse(oldest, f"its handshake did not end within {HANDSHAKE_SECONDS:g} s")
        if may_accept:  # after those that are here: what they have sent is read before they may be given up
            self._accept(now)
        return done

    def close(self) -> None:
        """Abandon all handshakes under way; may be called again."""
        for each in list(self._pending.values()):
            self._forget(each)
        self._selector.close()

    # ----

    def _oldest(self) -> _Pending | None:
        return next(iter(self._pending.values()), None)

    def _accept(self, now: float) -> None:
        for _ in range(MOST_AT_ONCE):
            oldest = self._oldest()
            if oldest is not None and len(self._pending) >= MOST_PENDING:
                if now < oldest.began + KEPT_SECONDS:
                    self._pause(oldest.began + KEPT_SECONDS)
                    return
                self._refuse(oldest, f"{MOST_PENDING} handshakes were under way at once")
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:  # gone before it was accepted
                continue
            except OSError as error:  # too many open files, above all: it would be tried again at once
                self.problem = error.strerror or str(error)
                self._log.warn("a connection cannot be accepted: %s", self.problem)
                self._pause(now + _ACCEPT_PAUSE)
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake = Accepting(self._admit, self._key, can_encrypt=self._can_encrypt)
            pending = self._pending[connection] = _Pending(connection, str(address[0]), handshake, now)
            self._selector.register(connection, selectors.EVENT_READ, pending)

    def _pause(self, until: float) -> None:
        """Accept nobody until then; connections wait in the kernel."""
        self._selector.unregister(self._listener)
        self._accepts_from = until

    def _go_on(self, pending: _Pending) -> Accepted | None:
        handshake = pending.handshake
        try:
            while not handshake.is_done:  # each round has at least a byte, or ends it
                content = pending.connection.recv(handshake.wanted)
                if not content:
                    self._gone(pending)
                    return None
                pending.has_spoken = True
                answer = handshake.feed(content)
                if answer and pending.connection.send(answer) != len(answer):  # so few always fit
                    raise ConnectionError("it takes no answer")
        except BlockingIOError:
            return None
        except OSError as error:
            self._refuse(pending, f"its connection broke: {error.strerror or error}")
            return None
        except HandshakeRefused as refused:
            self._refuse(pending, str(refused))
            return None
        del self._pending[pending.connection]
        self._selector.unregister(pending.connection)
        return Accepted(pending.connection, handshake)

    def _gone(self, pending: _Pending) -> None:
        if pending.has_spoken:
            self._refuse(pending, "it went away in its handshake")
        else:  # it only looked whether this port can be reached, as instances do for the coordinator
            self._forget(pending)

    def _refuse(self, pending: _Pending, reason: str) -> None:
        self.refused += 1
        _process.add_one()
        if pending.handshake.last_word:
            with contextlib.suppress(OSError):
                pending.connection.send(pending.handshake.last_word)
        self._forget(pending)
        self._log.refused(pending.peer, reason)

    def _forget(self, pending: _Pending) -> None:
        del self._pending[pending.connection]
        self._selector.unregister(pending.connection)
        _close_with_its_word(pending.connection)


class _Refusals:
    """Connections refused by all acceptors of this process; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = 0

    def add_one(self) -> None:
        with self._lock:
            self.total += 1


_process = _Refusals()


def total_refused() -> int:
    """Connections that this process refused on all ports of links, for its metrics."""
    return _process.total


class _RareLog:
    """Lines of the log about what may happen a thousand times a second."""

    def __init__(self) -> None:
        self._unlogged = 0
        self._logged_at: dict[str, float] = {}

    def refused(self, peer: str, reason: str) -> None:
        self._unlogged += 1
        if self._is_time("refused"):
            logger.warning("%d connections refused, the last one from %s: %s", self._unlogged, peer, reason)
            self._unlogged = 0

    def warn(self, text: str, *arguments: object) -> None:
        if self._is_time(text):
            logger.warning(text, *arguments)

    def _is_time(self, what: str) -> bool:
        now = time.monotonic()
        if now - self._logged_at.get(what, -LOG_INTERVAL) < LOG_INTERVAL:
            return False
        self._logged_at[what] = now
        return True


def _close_with_its_word(connection: socket.socket) -> None:
    """Close so that the last word arrives.

    With unread bytes the kernel would reset the connection, and the other side might never read why.
    """
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        connection.recv(_MOST_UNREAD)
    connection.close()
