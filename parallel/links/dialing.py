"""Connections that a member makes to others, all at once, with their handshakes.

A connection that is closed in its handshake is tried again, since the other side may have been flooded with
connections of strangers. All other ends are errors, each with a text of its own that says where to look.
A way between two members that does not carry them is evidence of the kind "closed": only they know about it.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from typing import NamedTuple

from parallel.links.errors import CollectiveError, Evidence
from parallel.links.handshake import HANDSHAKE_SECONDS, Connecting, HandshakeRefused, Offer
from parallel.links.introduction import mtu_hole
from parallel.links.keys import LinkKey

REDIAL_PAUSE = 0.05
"""Seconds before a connection is tried again."""
_PREFIX = "forming the group: "
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


class ListenAddress(NamedTuple):
    """Address of a member's listening socket."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Dialed(NamedTuple):
    """An established connection whose handshake succeeded."""

    connection: socket.socket
    """Nonblocking; its user closes it."""
    offer: Offer
    handshake: Connecting


class GoneError(CollectiveError):
    """A member has ended, or has given up and may have left the reason."""


class _Dial:
    """One outgoing connection attempt with its retries and handshake."""

    def __init__(self, offer: Offer, address: ListenAddress, now: float) -> None:
        self.offer, self.address = offer, address
        self.began, self.deadline = now, now + HANDSHAKE_SECONDS
        self.connection: socket.socket | None = None
        self.handshake: Connecting | None = None
        self.is_connected = False
        self.again_at: float | None = None
        self.problem = ""
        """Why the last try failed."""


class Dialer:
    """Opens all outgoing connections of a member at once, with handshakes and retries."""

    def __init__(self, host: str, rank: int, key: LinkKey | None, *, can_encrypt: bool = False) -> None:
        """``host``: the address of this member from which it connects."""
        self._host, self._rank = host, rank
        self._key = key
        self._can_encrypt = can_encrypt
        self._selector = selectors.DefaultSelector()
        self._dials: list[_Dial] = []

    def __repr__(self) -> str:
        return f"<Dialer of rank {self._rank}, {len(self._dials)} under way>"

    def fileno(self) -> int:
        """File descriptor that is readable when a connection attempt can advance."""
        return self._selector.fileno()

    def dial(self, offer: Offer, address: ListenAddress) -> None:
        """Begin to connect.

        Raises:
            CollectiveError: this host cannot connect there; the text says why.
        """
        dial = _Dial(offer, address, time.monotonic())
        self._dials.append(dial)
        self._try(dial)

    def dialed(self) -> list[Dialed]:
        """Advance all connection attempts; returns those whose handshake succeeded.

        Raises:
            CollectiveError: one cannot be made; names the member at the other end.
        """
        done = []
        for key, _ in self._selector.select(0):
            dial: _Dial = key.data
            try:
                if (dialed := self._go_on(dial)) is not None:
                    done.append(dialed)
            except BaseException:
                for each in done:
                    each.connection.close()
                raise
        now = time.monotonic()
        for dial in self._dials:
            if now > dial.deadline:
                for each in done:
                    each.connection.close()
                raise self._late(dial)
            if dial.again_at is not None and now >= dial.again_at:
                self._try(dial)
        return done

    def late(self) -> CollectiveError | None:
        """Timeout error about an unfinished connection; None if there is none."""
        return self._late(self._dials[0]) if self._dials else None

    def close(self) -> None:
        """Abandon all unfinished connections; may be called again."""
        for dial in self._dials:
            if dial.connection is not None:
                dial.connection.close()
        self._dials.clear()
        self._selector.close()

    # ----

    def _try(self, dial: _Dial) -> None:
        dial.again_at, dial.is_connected = None, False
        dial.handshake = Connecting(dial.offer, self._key, can_encrypt=self._can_encrypt, is_large=True)
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(
                dial.address.host, dial.address.port, type=socket.SOCK_STREAM
            )[0]
            connection = dial.connection = socket.socket(family, kind, protocol)
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.bind((self._host, 0, *where[2:]))  # over the interface that was named
            failed = connection.connect_ex(where)
            if failed not in (0, errno.EINPROGRESS):
                raise OSError(failed, os.strerror(failed))
        except OSError as error:
            raise self._unreachable(dial, error) from error
        self._selector.register(connection, selectors.EVENT_WRITE, dial)

    def _go_on(self, dial: _Dial) -> Dialed | None:
        connection, handshake = dial.connection, dial.handshake
        assert connection is not None
        assert handshake is not None
        try:
            if not dial.is_connected:
                failed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if failed:
                    raise self._unreachable(dial, OSError(failed, os.strerror(failed)))
                dial.is_connected = True
                _send(connection, handshake.hello)
                self._selector.modify(connection, selectors.EVENT_READ, dial)
            while not handshake.is_done:
                content = connection.recv(handshake.wanted)
                if not content:
                    self._try_later(dial, "it closed the connection in the handshake")
                    return None
                answer = handshake.feed(content)
                if answer:
                    _send(connection, answer)
        except BlockingIOError:
            return None
        except OSError as error:
            self._try_later(dial, error.strerror or str(error))
            return None
        except HandshakeRefused as refused:
            peer = dial.offer.to
            raise _error(f"rank {peer} at {dial.address} is refused: {refused}", peer) from refused
        self._selector.unregister(connection)
        self._dials.remove(dial)
        return Dialed(connection, dial.offer, handshake)

    def _try_later(self, dial: _Dial, problem: str) -> None:
        assert dial.connection is not None
        self._selector.unregister(dial.connection)
        dial.connection.close()
        dial.connection, dial.problem = None, problem
        dial.again_at = time.monotonic() + REDIAL_PAUSE

    def _late(self, dial: _Dial) -> CollectiveError:
        peer, address = dial.offer.to, dial.address
        if dial.problem:
            text = f"{_PREFIX}rank {peer} at {address} breaks off the handshake ({dial.problem})"
            return GoneError(text, peer)
        if dial.is_connected:
            assert dial.connection is not None
            assert dial.handshake is not None
            hole = mtu_hole(dial.connection, dial.handshake)
            reason = hole or "its process is stopped or too busy, or none of this mesh"
            text = f"rank {peer} at {address} did not shake hands within {_age(dial)}: {reason}"
            return _error(text, peer, "closed" if hole else "deadline")
        return self._silent(dial)

    def _silent(self, dial: _Dial) -> CollectiveError:
        peer = dial.offer.to
        return _error(
            f"rank {peer} did not answer {self._host} at {dial.address} within {_age(dial)}: "
            "a firewall there may drop what goes to the ports of net.ipv4.ip_local_port_range, "
            "or its host or cable is down",
            peer,
        )

    def _unreachable(self, dial: _Dial, error: OSError) -> CollectiveError:
        peer, number = dial.offer.to, error.errno
        why = f"rank {peer} cannot be reached at {dial.address} from {self._host} ({error.strerror or error})"
        if number in TOO_MANY_FILES:
            return too_many_files(self._rank)
        if number == errno.ETIMEDOUT:
            return self._silent(dial)
        if number == errno.ECONNREFUSED:
            why += ": it has given the group up, or a firewall rejects the connection"
            return GoneError(_PREFIX + why, peer)
        elif number in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            why += ": no route leads there; --instance-address names the address to use on each host"
        elif number == errno.EADDRNOTAVAIL:
            why += f": no more free ports on {self._host}, or it is no address of this host"
        return _error(why, peer)


def _send(connection: socket.socket, content: bytes) -> None:
    """Send a short handshake message, which always fits an empty socket buffer."""
    if connection.send(content) != len(content):
        raise ConnectionError("the kernel takes too few bytes at once: see net.ipv4.tcp_wmem")


def _age(dial: _Dial) -> str:
    return f"{time.monotonic() - dial.began:.1f} s"


def too_many_files(rank: int) -> CollectiveError:
    """The error of a process that can open no more sockets."""
    return _error(f"rank {rank} has too many open files: raise `ulimit -n` there", rank, "aborted")


def _error(text: str, rank: int, evidence: Evidence = "closed") -> CollectiveError:
    return CollectiveError(_PREFIX + text, rank, evidence)
