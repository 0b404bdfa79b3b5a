"""A meeting place over TCP: its host, and its clients.

The members of a group tell each other here where they are reached. It is needed only until a group is formed;
its host keeps it that long, and no group suffers when it goes away afterwards. Each group has names of its
own in it, so several can share one.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from parallel.links.errors import CollectiveError, Evidence
from parallel.links.frames import Frames, FrameTooLarge, framed
from parallel.links.handshake import HANDSHAKE_SECONDS, HandshakeRefused, Offer
from parallel.links.introduction import introduce
from parallel.links.keys import LinkKey
from parallel.links.meeting_server import (
    LONGEST_WAIT,
    PURPOSE,
    Answer,
    Find,
    Found,
    Kept,
    MeetingServer,
    NotKept,
    Question,
    Set,
)
from parallel.links.meeting_values import NoRoom

CONNECT_TIMEOUT = 5.0
"""Timeout of connecting to a meeting place, in seconds."""
ANSWER_TIMEOUT = 10.0
"""Timeout of an answer in seconds, beyond the time that a query may wait."""
PAUSE = 0.05
"""Retry interval in seconds while the meeting place does not listen yet."""
_BACKLOG = 1024  # all members connect at once
_READ_BYTES = 64 << 10

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

Kind = TypeVar("Kind", Kept, Found)


class MeetingHost:
    """A meeting place that this process keeps (:class:`parallel.links.meeting_contract.Meeting`)."""

    def __init__(self, host: str, port: int | None = None, key: LinkKey | None = None) -> None:
        """Listens on this one address, without a port on a free one.

        ``key``: what clients prove; None: a mesh without a key.

        Raises:
            OSError: it cannot.
        """
        listener = _listen(host, port or 0)
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._server = MeetingServer(listener, key)
        self.close = weakref.finalize(self, self._server.close)
        """Closes the meeting place and all its clients; also runs on garbage collection."""

    def __repr__(self) -> str:
        return f"<MeetingHost {self.host}:{self.port}>"

    @property
    def refused(self) -> int:
        """Number of refused connections and disconnected clients."""
        return self._server.refused

    @property
    def num_clients(self) -> int:
        return self._server.num_clients

    def set(self, key: str, value: bytes) -> None:
        self._check_open()
        try:
            self._server.set(key, value)
        except NoRoom as error:
            raise CollectiveError(str(error)) from error

    def check(self, keys: Sequence[str]) -> bool:
        return self.find(keys, 0.0) is not None

    def get(self, key: str) -> bytes:
        return _only(self.find([key], 0.0), key)

    def find(self, keys: Sequence[str], seconds: float) -> list[bytes] | None:
        self._check_open()
        return self._server.find(keys, min(seconds, LONGEST_WAIT))

    def _check_open(self) -> None:
        if not self.close.alive:
            raise CollectiveError(f"the meeting place at {self.host}:{self.port} is closed", None, "aborted")


class MeetingClient:
    """Client of a meeting place in another process (:class:`parallel.links.meeting_contract.Meeting`).

    Threads may share one; their questions wait for each other.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: LinkKey | None = None,
        timeout: float = CONNECT_TIMEOUT,
        *,
        may_be_early: bool = False,
    ) -> None:
        """Connects within ``timeout`` seconds, and proves the key.

        A port that refuses is one whose host is gone, unless this one ``may_be_early``, because the port was
        agreed before anybody listened there: then it is tried again until the time is over.

        Raises:
            CollectiveError: nobody listens there, or it is no meeting place of this mesh.
        """
        self._where = f"{host}:{port}"
        self._lock = threading.Lock()
        self._frames = Frames()
        self._problem: str | None = None
        self._connection = _connect(host, port, timeout, may_be_early)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._shake_hands(key)
        except BaseException:
            self._connection.close()
            raise
        weakref.finalize(self, self._connection.close)  # who forms a group lets go of it afterwards

    def __repr__(self) -> str:
        return f"<MeetingClient of {self._where}>"

    def set(self, key: str, value: bytes) -> None:
        self._ask(Set(key, value), 0.0, Kept)

    def check(self, keys: Sequence[str]) -> bool:
        return self.find(keys, 0.0) is not None

    def get(self, key: str) -> bytes:
        return _only(self.find([key], 0.0), key)

    def find(self, keys: Sequence[str], seconds: float) -> list[bytes] | None:
        seconds = max(0.0, min(seconds, LONGEST_WAIT))
        return self._ask(Find(list(keys), seconds), seconds, Found).values

    def close(self) -> None:
        """Close the connection to the meeting place; may be called twice."""
        self._give_up("it was closed")

    def _ask(self, question: Question, seconds: float, kind: type[Kind]) -> Kind:
        try:
            frame = framed(_encoder.encode(question))
        except FrameTooLarge as error:
            raise CollectiveError(str(error)) from error
        with self._lock:
            if self._problem is not None:
                raise self._error()
            try:
                self._connection.settimeout(seconds + ANSWER_TIMEOUT)
                self._connection.sendall(frame)
                answer = _decoder.decode(self._receive(time.monotonic() + seconds + ANSWER_TIMEOUT))
            except TimeoutError:
                self._give_up(f"it does not answer within {ANSWER_TIMEOUT:g} s")
                raise self._error("deadline") from None
            except OSError as error:
                self._give_up(f"it is gone ({error.strerror or error})")
                raise self._error() from error
            except (FrameTooLarge, msgspec.MsgspecError) as error:
                self._give_up(f"it does not answer as one ({error})")
                raise self._error() from error
        if isinstance(answer, NotKept):
            raise CollectiveError(f"at the meeting place {self._where}: {answer.reason}")
        if not isinstance(answer, kind):
            self._give_up(f"it answers {type(answer).__name__} to a question for {kind.__name__}")
            raise self._error()
        return answer

    def _shake_hands(self, key: LinkKey | None) -> None:
        """Run the handshake that proves the mesh's key on both sides.

        Raises:
            CollectiveError: it is none of this mesh, or does not answer.
        """
        try:
            introduce(self._connection, Offer(PURPOSE), key, HANDSHAKE_SECONDS)
        except HandshakeRefused as refused:
            problem = f"the meeting place at {self._where} is not to be used: {refused}"
            raise CollectiveError(problem) from refused
        except TimeoutError:
            seconds = f"{HANDSHAKE_SECONDS:g} s"
            problem = f"{self._where} does not shake hands within {seconds}: it hangs, or is none of ours"
            raise CollectiveError(problem, None, "deadline") from None
        except OSError as error:
            problem = f"{self._where} ends the connection in its handshake ({error.strerror or error})"
            raise CollectiveError(problem) from error

    def _receive(self, deadline: float) -> bytes:
        while True:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            content = self._connection.recv(_READ_BYTES)
            if not content:
                raise ConnectionResetError("closed by its host")
            for frame in self._frames.take_in(content):  # one at most: each answer is asked for
                return frame

    def _give_up(self, problem: str) -> None:
        if self._problem is None:
            self._problem = problem
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # a thread may wait in it
        self._connection.close()

    def _error(self, evidence: Evidence = "closed") -> CollectiveError:
        return CollectiveError(f"the meeting place at {self._where}: {self._problem}", None, evidence)


def join_meeting(address: str, key: LinkKey | None) -> MeetingClient:
    """The meeting place at ``host:port``, whose host listens there already."""
    host, _, port = address.rpartition(":")
    return MeetingClient(host.strip("[]"), int(port), key)


def _connect(host: str, port: int, timeout: float, may_be_early: bool) -> socket.socket:
    deadline = time.monotonic() + timeout
    while True:
        patience = min(CONNECT_TIMEOUT, max(deadline - time.monotonic(), PAUSE))
        try:
            return socket.create_connection((host, port), patience)
        except TimeoutError as error:
            raise CollectiveError(
                f"no answer at all from {host}:{port} within {patience:g} s: a firewall drops what goes to "
                "that port, or the cable is out",
                0,
                "deadline",
            ) from error
        except OSError as error:
            if not may_be_early or time.monotonic() + PAUSE > deadline:
                why = error.strerror or error
                raise CollectiveError(f"no meeting place answers at {host}:{port} ({why})", 0) from error
        time.sleep(PAUSE)


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _only(values: list[bytes] | None, key: str) -> bytes:
    if values is None:
        raise CollectiveError(f"the meeting place has no value {key}")
    return values[0]
