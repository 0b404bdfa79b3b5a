"""Accepts connections and lets those in that prove the mesh's key.

All of it happens in the caller's loop and without waiting, many handshakes at once, each within its own few
seconds. Somebody who connects and says nothing, or nonsense, costs the others nothing.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from typing import NamedTuple

from parallel.links.handshake import HANDSHAKE_SECONDS, Accepting, Admit, Offer, Refused
from parallel.links.keys import LinkKey

logger = logging.getLogger(__name__)

MOST_PENDING = 256
"""Handshakes under way at once; for one more the oldest is given up."""
MOST_AT_ONCE = 64
"""Connections accepted in one go, so that the caller's loop goes on."""
LOG_INTERVAL = 10.0
"""Seconds between two lines about refused connections."""
_ACCEPT_PAUSE = 0.1
"""Seconds without accepting when this process has too many open files."""


class Accepted(NamedTuple):
    """A connection whose other side has proven the key."""

    connection: socket.socket
    """Nonblocking."""
    handshake: Accepting

    @property
    def offer(self) -> Offer:
        return self.handshake.offer


class _Pending:
    """A connection in its handshake."""

    def __init__(self, connection: socket.socket, peer: str, handshake: Accepting, deadline: float) -> None:
        self.connection, self.peer = connection, peer
        self.handshake = handshake
        self.deadline = deadline
        self.incoming = b""


class Acceptor:
    """The handshakes of one listening socket, which its user closes.

    Its user waits for :meth:`fileno` to be readable, or for :attr:`patience` seconds, then calls
    :meth:`accepted`.
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
        self._pending: dict[socket.socket, _Pending] = {}
        self._selector = selectors.EpollSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._accepts_from = 0.0
        self.refused = 0
        """Connections that were not let in."""
        self._unlogged = 0
        self._logged_at = -LOG_INTERVAL

    def __repr__(self) -> str:
        return f"<Acceptor {len(self._pending)} pending, {self.refused} refused>"

    def fileno(self) -> int:
        """Descriptor that is readable when there is something to do."""
        return self._selector.fileno()

    @property
    def patience(self) -> float | None:
        """Seconds until something must be given up; None: nothing is under way."""
        if self._accepts_from:
            return max(0.0, self._accepts_from - time.monotonic())
        first = next(iter(self._pending.values()), None)
        return None if first is None else max(0.0, first.deadline - time.monotonic())

    def accepted(self) -> list[Accepted]:
        """Go on with all handshakes; returns those that have ended well."""
        now = time.monotonic()
        if self._accepts_from and now >= self._accepts_from:
            self._accepts_from = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        done = []
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept(now)
            elif (accepted := self._go_on(key.data)) is not None:
                done.append(accepted)
        for each in list(self._pending.values()):
            if each.deadline > now:
                break  # they are in the order of their deadlines
            self._refuse(each, f"its handshake did not end within {HANDSHAKE_SECONDS:g} s")
        return done

    def close(self) -> None:
        """Give up all handshakes under way."""
        for each in list(self._pending.values()):
            self._forget(each)
        self._selector.close()

    # ----

    def _accept(self, now: float) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # too many open files, above all: it would be tried again at once
                logger.warning("a connection cannot be accepted: %s", error.strerror or error)
                self._selector.unregister(self._listener)
                self._accepts_from = now + _ACCEPT_PAUSE
                return
            connection.setblocking(False)
            if len(self._pending) >= MOST_PENDING:
                self._refuse(next(iter(self._pending.values())), "too many connect at once")
            handshake = Accepting(self._admit, self._key, can_encrypt=self._can_encrypt)
            pending = _Pending(connection, str(address[0]), handshake, now + HANDSHAKE_SECONDS)
            self._pending[connection] = pending
            self._selector.register(connection, selectors.EVENT_READ, pending)

    def _go_on(self, pending: _Pending) -> Accepted | None:
        handshake = pending.handshake
        try:
            content = pending.connection.recv(handshake.wanted - len(pending.incoming))
            if not content:
                self._refuse(pending, "it went away in its handshake")
                return None
            pending.incoming += content
            if len(pending.incoming) == handshake.wanted:
                incoming, pending.incoming = pending.incoming, b""
                answer = handshake.take(incoming)
                if answer and pending.connection.send(answer) != len(answer):  # a few bytes always fit
                    raise ConnectionError("it takes no answer")
        except BlockingIOError:
            return None
        except OSError as error:
            self._refuse(pending, f"its connection broke: {error.strerror or error}")
            return None
        except Refused as refused:
            with contextlib.suppress(OSError):
                pending.connection.send(handshake.last_word)
            self._refuse(pending, str(refused))
            return None
        if not handshake.is_done:
            return None
        del self._pending[pending.connection]
        self._selector.unregister(pending.connection)
        return Accepted(pending.connection, handshake)

    def _refuse(self, pending: _Pending, reason: str) -> None:
        self._forget(pending)
        self.refused += 1
        self._unlogged += 1
        now = time.monotonic()
        if now - self._logged_at >= LOG_INTERVAL:
            logger.warning(
                "%d connections refused, the last one from %s: %s", self._unlogged, pending.peer, reason
            )
            self._unlogged, self._logged_at = 0, now

    def _forget(self, pending: _Pending) -> None:
        del self._pending[pending.connection]
        self._selector.unregister(pending.connection)
        pending.connection.close()
