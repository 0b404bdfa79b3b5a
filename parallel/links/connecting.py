"""Full-mesh connection of a group's members: each pair gets its tensor and control links.

Each member listens on a port of its own and says at the meeting place where. The higher rank of a pair
connects to the lower one, several times: once for each use of the link. Each connection begins with a
handshake (:mod:`parallel.links.handshake`) for this very group. Strangers that connect meanwhile are refused,
and cost the members nothing.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from parallel.links.accepting import BACKLOG, LinkAcceptor
from parallel.links.dialing import TOO_MANY_FILES, Dialer, GoneError, ListenAddress, too_many_files
from parallel.links.encryption import can_encrypt, encrypt, why_not
from parallel.links.errors import CollectiveError, Evidence
from parallel.links.forming_group import FormingGroup
from parallel.links.handshake import Accepting, HandshakeVerdict, Offer, Side
from parallel.links.keys import LinkKey
from parallel.links.sockets import GroupSockets

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.01
"""Polling interval for an abort of the connecting, in seconds."""
CONTROL = "control"
"""Name of a link's use as the control connection for last words."""
SILENCE_SECONDS = 5.0
"""Seconds after which a silent host counts as gone, on connections for last words."""
NEWS_SECONDS = 0.5
"""Interval of looks at the meeting place for members that gave up, in seconds."""
_KEEPALIVE = {socket.TCP_KEEPIDLE: 2, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 3}
_PREFIX = "forming the group: "
_GAVE_UP = "gave up"
"""Prefix of the meeting-place value with the reason why a member gave up."""


def connect(
    forming: FormingGroup, *, host: str, name: str, key: LinkKey | None, streams: int = 1
) -> GroupSockets:
    """Connect this member to all others; returns when that is done.

    Args:
        forming: the group, its meeting place, and bounds of waits. Its ``timeout`` is also how many seconds
            bytes sent later may stay unacknowledged (TCP_USER_TIMEOUT).
        host: the address to listen on, from which this member connects, and on which the others reach it.
        name: of the group, with its epoch and token: no link of another group is taken for one of this.
        key: that both ends of each link prove; None: a mesh without a key.
        streams: connections for tensors per pair; 0: another transport carries them.

    Raises:
        CollectiveError: a member does not come, cannot be reached or is refused; names it, if it is known.
            Nothing stays open then.
    """
    if forming.size == 1:
        return GroupSockets({}, {})
    uses = CONTROL, *(f"data/{number}" for number in range(streams))
    try:
        return _Connecting(forming.at("links"), host, f"group/{name}", key, uses).run()
    except OSError as error:
        if error.errno in TOO_MANY_FILES:
            raise too_many_files(forming.rank) from error
        raise _error(error.strerror or str(error), forming.rank, "aborted") from error


class _Connecting:
    """Connections of one member to all others while the group forms."""

    def __init__(
        self, forming: FormingGroup, host: str, purpose: str, key: LinkKey | None, uses: Sequence[str]
    ) -> None:
        """``purpose`` and ``uses`` are what both ends of each link must mean."""
        self._group = forming
        self._rank, self._size = forming.rank, forming.size
        self._host = host
        self._purpose = purpose
        self._key = key
        self._uses = uses
        self._can_encrypt = key is not None and can_encrypt()
        self._made: dict[tuple[int, str], socket.socket] = {}
        self._encrypted = 0

    def run(self) -> GroupSockets:
        """Connect to all members; after an error, close everything and raise it."""
        try:
            with contextlib.ExitStack() as stack:
                self._selector = stack.enter_context(selectors.DefaultSelector())
                self._listener = stack.enter_context(self._listen())
                self._acceptor = stack.enter_context(
                    contextlib.closing(
                        LinkAcceptor(self._listener, self._admit, self._key, can_encrypt=self._can_encrypt)
                    )
                )
                self._dialer = stack.enter_context(
                    contextlib.closing(
                        Dialer(self._host, self._rank, self._key, can_encrypt=self._can_encrypt)
                    )
                )
                return self._form()
        except BaseException:
            for connection in self._made.values():
                connection.close()
            raise

    def _form(self) -> GroupSockets:
        deadline = time.monotonic() + self._group.patience
        for each in (self._acceptor, self._dialer):
            self._selector.register(each, selectors.EVENT_READ)
        try:
            self._dial(self._addresses())
            self._finish(deadline)
        except _News:
            raise
        except CollectiveError as error:
            if isinstance(error, GoneError):
                self._look_for_news()  # it may have said why it went
            if error.evidence != "aborted":
                self._tell(error)
            raise
        carries_tensors = len(self._uses) > 1
        is_encrypted = carries_tensors and self._encrypted == len(self._made)
        _log_once(_protection(self._key is not None, is_encrypted, carries_tensors))
        return GroupSockets(
            {peer: [self._made[peer, use] for use in self._uses[1:]] for peer in self._peers},
            {peer: self._made[peer, CONTROL] for peer in self._peers},
            is_encrypted=is_encrypted,
            refused=self._acceptor.refused,
        )

    def _should_stop(self) -> bool:
        return self._group.should_stop is not None and self._group.should_stop()

    def _finish(self, deadline: float) -> None:
        news_at = time.monotonic() + NEWS_SECONDS
        while missing := self._missing():
            self._look(LOOK_SECONDS)
            if self._should_stop():
                raise _error("it was stopped from outside", None, "aborted")
            now = time.monotonic()
            if now > deadline:
                raise self._too_late(missing)
            if now > news_at:
                self._look_for_news()
                news_at = time.monotonic() + NEWS_SECONDS

    @property
    def _peers(self) -> list[int]:
        return [peer for peer in range(self._size) if peer != self._rank]

    def _missing(self) -> list[int]:
        return [peer for peer in self._peers if any((peer, use) not in self._made for use in self._uses)]

    # ---- addresses

    def _listen(self) -> socket.socket:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, protocol)
            try:
                listener.bind(address)
                listener.listen(BACKLOG)
            except OSError:
                listener.close()
                raise
        except UnicodeError as error:  # no name could be so
            raise _error(
                f"rank {self._rank} cannot listen on {self._host!r}", self._rank, "aborted"
            ) from error
        except OSError as error:
            if error.errno in TOO_MANY_FILES:
                raise
            advice = ""
            if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                advice = ": --instance-address takes an address of an interface that is up on this host"
            why = f"rank {self._rank} cannot listen on {self._host} ({error.strerror or error}){advice}"
            raise _error(why, self._rank, "aborted") from error
        return listener

    def _addresses(self) -> list[ListenAddress]:
        """Exchange listening addresses with all members; early connections are accepted meanwhile."""

        def look() -> bool:
            self._look(0.0)
            return self._should_stop()

        host, port = self._listener.getsockname()[:2]
        mine = f"{host} {port}".encode()
        said = replace(self._group, should_stop=look).exchange(mine)
        return [self._address(rank, each) for rank, each in enumerate(said)]

    def _address(self, rank: int, said: bytes) -> ListenAddress:
        try:
            host, port = said.decode().split(" ")
            if not 0 < int(port) < 1 << 16:
                raise ValueError
            return ListenAddress(str(ipaddress.ip_address(host)), int(port))
        except ValueError:
            raise _error(f"rank {rank} tells no address but {said[:100]!r}", rank) from None

    # ---- news of members that gave up

    def _tell(self, error: CollectiveError) -> None:
        blamed = self._rank if error.rank is None else error.rank
        text = str(error).removeprefix(_PREFIX)
        with contextlib.suppress(CollectiveError):  # the group fails for its own reason
            self._group.meeting.set(_GAVE_UP, f"{self._rank} {blamed} {text}".encode())

    def _look_for_news(self) -> None:
        """Raise the error that another member left when it gave up, if any."""
        try:
            if not self._group.meeting.check([_GAVE_UP]):
                return
            said = self._group.meeting.get(_GAVE_UP).decode(errors="replace")
        except CollectiveError:
            return  # the meeting place is not needed any more
        teller, blamed, text = said.split(" ", 2)
        # a way between two others is no affair of this member, and it accuses nobody
        rank = int(teller) if int(blamed) == self._rank else None
        raise _News(f"{_PREFIX}rank {teller} gave up: {text}", rank, "closed")

    # ---- links

    def _look(self, seconds: float) -> None:
        """Wait for connection events for a bounded time, and advance all handshakes."""
        for key, _ in self._selector.select(seconds):
            if key.data is not None:
                self._check_alive(key.data)
        accepted = []
        for each in self._acceptor.accepted():
            link = (each.offer.rank, each.offer.use)
            if link in self._made:  # twice at once, by a member that is not as it should be
                each.connection.close()
            else:
                self._made[link] = each.connection
                accepted.append(each)
        dialed = self._dialer.dialed()
        self._made |= {(own.offer.to, own.offer.use): own.connection for own in dialed}
        for each in accepted:
            self._prepare(each.offer.rank, each.offer.use, each.connection, each.handshake)
        for own in dialed:
            self._prepare(own.offer.to, own.offer.use, own.connection, own.handshake)

    def _admit(self, offer: Offer) -> HandshakeVerdict:
        if offer.purpose != self._purpose:
            return HandshakeVerdict.OTHER_PURPOSE
        if offer.size != self._size:
            return HandshakeVerdict.OTHER_SIZE
        if offer.to != self._rank or not self._rank < offer.rank < self._size:
            return HandshakeVerdict.OTHER_RANK
        if offer.use not in self._uses or (offer.rank, offer.use) in self._made:
            return HandshakeVerdict.OTHER_RANK
        return HandshakeVerdict.ACCEPTED

    def _dial(self, addresses: list[ListenAddress]) -> None:
        for peer in range(self._rank):
            for use in self._uses:
                offer = Offer(self._purpose, use, self._rank, peer, self._size)
                self._dialer.dial(offer, addresses[peer])

    def _prepare(self, peer: int, use: str, connection: socket.socket, handshake: Side) -> None:
        set_options(connection, SILENCE_SECONDS if use == CONTROL else self._group.timeout)
        if handshake.is_encrypted:
            try:
                encrypt(connection, handshake, connects=not isinstance(handshake, Accepting))
            except OSError as error:
                raise _error(
                    f"the link to rank {peer} cannot be encrypted ({error.strerror or error})", peer
                ) from error
            self._encrypted += 1
        self._selector.register(connection, selectors.EVENT_READ, (peer, connection))

    def _check_alive(self, link: tuple[int, socket.socket]) -> None:
        """Raise an error if an established link ended while others connect."""
        peer, connection = link
        try:
            is_alive = bool(connection.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return
        except OSError:
            is_alive = False
        if not is_alive:
            text = f"{_PREFIX}rank {peer} is gone, or gave up, while others were connecting"
            raise GoneError(text, peer)
        self._selector.unregister(connection)  # it has begun already; its words are read later

    def _too_late(self, missing: list[int]) -> CollectiveError:
        late = self._dialer.late()
        if late is not None:
            return late
        names = ", ".join(map(str, missing))
        where = ListenAddress(*self._listener.getsockname()[:2])
        text = f"rank {names} did not connect to {where} within {self._group.patience:g} s"
        if self._acceptor.problem:
            text += f"; some could not be accepted ({self._acceptor.problem})"
        elif self._acceptor.refused:
            text += f"; {self._acceptor.refused} connections were refused, the log says why"
        return _error(text, missing[0], "deadline")


def _protection(has_key: bool, is_encrypted: bool, carries_tensors: bool) -> str:
    """Protection of the group's links on the network, as a phrase for the log."""
    if not carries_tensors:
        return "another transport carries tensors between members: it proves no key, and encrypts nothing"
    if not has_key:
        return "links between members are neither authenticated nor encrypted: this mesh has no key"
    if is_encrypted:
        return "links between members prove the mesh's key and are encrypted by the kernel (AES-128-GCM)"
    reason = why_not() or "the kernel of another host has no TLS (`modprobe tls` there loads it)"
    return f"links between members prove the mesh's key; they are not encrypted: {reason}"


@cache
def _log_once(text: str) -> None:
    """Log a line once per process, however often groups form."""
    logger.info("%s", text)


class _News(CollectiveError):
    """An error that another member has already left at the meeting place."""


def set_options(connection: socket.socket, silence: float) -> None:
    """Set socket options: no delay of small messages, timeouts for silent hosts.

    After ``silence`` seconds without acknowledgement the kernel gives the connection up. It looks after a
    connection that carries nothing, too; TCP_USER_TIMEOUT counts in place of a number of probes there.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    milliseconds = min(max(1, int(1000 * silence)), 2**31 - 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _error(text: str, rank: int | None, evidence: Evidence = "closed") -> CollectiveError:
    return CollectiveError(_PREFIX + text, rank, evidence)
