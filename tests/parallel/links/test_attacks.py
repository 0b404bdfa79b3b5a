"""Strangers at the ports of a group that forms: none gets in or delays it.

Each attack is under way before the first honest member connects.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from parallel.links.accepting import MOST_PENDING
from parallel.links.encryption import can_encrypt
from parallel.links.errors import CollectiveError
from parallel.links.handshake import (
    HANDSHAKE_SECONDS,
    Accepting,
    Connecting,
    HandshakeRefused,
    HandshakeVerdict,
    Offer,
)
from parallel.links.introduction import introduce
from parallel.links.keys import LinkKey
from parallel.links.meeting import MeetingClient, MeetingHost
from parallel.links.sockets import GroupSockets
from tests.parallel.links.forming import HOST, KEY, OTHER_KEY, PATIENCE, Settings, form

SIZE = 3
OFFER = Offer("group/" + Settings().name, "data/0", 1, 0, SIZE)
MEETING = Offer("meeting")
ANSWER_BYTES = 42
Port = tuple[str, int]


class Attackers:
    """Connections of strangers to one port."""

    def __init__(self, port: Port, offer: Offer, recorded: list[bytes]) -> None:
        self.port, self.offer = port, offer
        self.recorded = recorded
        """Messages of an earlier handshake with the right key: hello, answer, proof, verdict."""
        self.connections: list[socket.socket] = []
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []

    def connect(self, first: bytes = b"") -> socket.socket:
        connection = socket.create_connection(self.port, PATIENCE)
        self.connections.append(connection)
        if first:
            with contextlib.suppress(OSError):  # it may be cut off before it has sent all
                connection.sendall(first)
        return connection

    def go_on(self, action: Callable[[], None]) -> None:
        """Again and again in a thread, until the group has formed."""

        def run() -> None:
            while not self.over.is_set():
                with contextlib.suppress(OSError, HandshakeRefused):
                    action()

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def end(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(PATIENCE)

    def close(self) -> None:
        self.end()
        for connection in self.connections:
            connection.close()


# ---- attacks: each begins, and goes on in threads if it has to


def without_the_key(attackers: Attackers) -> None:
    for _ in range(5):
        with pytest.raises(HandshakeRefused, match="it has a mesh key and this process has none"):
            introduce(attackers.connect(), attackers.offer, None)


def with_another_key(attackers: Attackers) -> None:
    for _ in range(5):
        with pytest.raises(HandshakeRefused, match="it has another mesh key"):
            introduce(attackers.connect(), attackers.offer, OTHER_KEY)


def replaying(attackers: Attackers) -> None:
    hello, _, proof, verdict = attackers.recorded
    for after in (proof, verdict[1:]):
        for _ in range(3):
            connection = attackers.connect(hello)
            assert received(connection, ANSWER_BYTES)  # an answer, with another nonce than then
            with contextlib.suppress(OSError):
                connection.sendall(after)
            assert received(connection, 33)[:1] in (b"", bytes([HandshakeVerdict.WRONG_KEY]))


def reflecting(attackers: Attackers) -> None:
    """What a member says is sent back to it."""
    for _ in range(5):
        connection = attackers.connect(Connecting(attackers.offer, OTHER_KEY).hello)
        answer = received(connection, ANSWER_BYTES)
        with contextlib.suppress(OSError):
            connection.sendall(answer)
        assert received(connection, 33)[:1] in (b"", bytes([HandshakeVerdict.WRONG_KEY]))


def silent(attackers: Attackers) -> None:
    for _ in range(50):
        attackers.connect()


def half_a_hello(attackers: Attackers) -> None:
    for length in range(1, 60):
        attackers.connect(Connecting(attackers.offer, OTHER_KEY).hello[:length])


def no_proof(attackers: Attackers) -> None:
    for _ in range(50):
        attackers.connect(Connecting(attackers.offer, OTHER_KEY).hello)


def garbage(attackers: Attackers) -> None:
    draw = random.Random(1)
    for length in (1, 11, 42, 1000):
        for _ in range(10):
            attackers.connect(draw.randbytes(length))
    attackers.connect(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")


def too_much(attackers: Attackers) -> None:
    """As much as it takes, without an end."""
    hello = Connecting(attackers.offer, OTHER_KEY).hello
    for first in (b"", hello, hello[:9] + b"\xff\xff"):
        attackers.go_on(lambda first=first: attackers.connect(first + bytes(1 << 20)).close())


def dripping(attackers: Attackers) -> None:
    connections = [attackers.connect() for _ in range(20)]
    rest = [Connecting(attackers.offer, OTHER_KEY).hello]

    def drip() -> None:
        piece, rest[0] = rest[0][:1], rest[0][1:]
        for connection in connections if piece else []:
            connection.send(piece)
        time.sleep(0.02)

    attackers.go_on(drip)


def a_thousand(attackers: Attackers) -> None:
    """More than are kept at once, all at once, and silent."""
    assert MOST_PENDING < 1000
    for _ in range(1000):
        connection = socket.socket()
        attackers.connections.append(connection)
        connection.setblocking(False)
        connection.connect_ex(attackers.port)


ATTACKS = [
    without_the_key, with_another_key, replaying, reflecting, silent, half_a_hello, no_proof, garbage, too_much,
    dripping, a_thousand,
]  # fmt: skip


def received(connection: socket.socket, length: int) -> bytes:
    """At most so many bytes, less if the connection ends before."""
    found = b""
    with contextlib.suppress(OSError):
        while len(found) < length and (content := connection.recv(length - len(found))):
            found += content
    return found


def recording(offer: Offer, *, is_large: bool = False) -> list[bytes]:
    """The messages of a handshake with the right key that ended well."""
    one, other = (
        Connecting(offer, KEY, is_large=is_large),
        Accepting(lambda _: HandshakeVerdict.ACCEPTED, KEY),
    )
    hello = one.hello
    answer = other.feed(hello[: other.wanted])
    rest = other.feed(hello[-other.wanted :])
    proof = one.feed(answer) or one.feed(rest)
    verdict = other.feed(proof)
    one.feed(verdict)
    assert one.is_done
    return [hello, answer + rest, proof, verdict]


@pytest.fixture
def meeting() -> Iterator[MeetingHost]:
    """A meeting place with the key; afterwards there are no more descriptors than before."""
    can_encrypt()  # finds out once
    gc.collect()  # what other tests left is closed now, not meanwhile
    before = len(os.listdir("/proc/self/fd"))
    host = MeetingHost(HOST, key=KEY)
    yield host
    host.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def beside(
    attack: Callable[[Attackers], None], target: str, meeting: MeetingHost
) -> tuple[float, list[GroupSockets | CollectiveError], Attackers]:
    """Seconds of the last members of a group beside an attack, and its sockets."""

    def member(rank: int) -> GroupSockets | CollectiveError:
        client = MeetingClient(HOST, meeting.port, KEY)
        try:
            return form(client, 1, Settings(size=SIZE), first=rank)[0]
        finally:
            client.close()

    with ThreadPoolExecutor(SIZE) as pool:
        first = pool.submit(member, 0)
        while not meeting.check(["links/member/0"]):
            time.sleep(0.001)
        host, port = meeting.get("links/member/0").decode().split()
        if target == "member":
            attackers = Attackers((host, int(port)), OFFER, recording(OFFER))
        else:
            attackers = Attackers((HOST, meeting.port), MEETING, recording(MEETING))
        try:
            attack(attackers)
            began = time.monotonic()
            found = [each.result(PATIENCE) for each in [pool.submit(member, 1), pool.submit(member, 2)]]
            seconds = time.monotonic() - began
        finally:
            attackers.end()
        return seconds, [first.result(PATIENCE), *found], attackers


@pytest.mark.mesh
@pytest.mark.parametrize("target", ["member", "meeting"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_stranger_neither_gets_in_nor_delays_a_group(
    attack: Callable[[Attackers], None], target: str, meeting: MeetingHost
) -> None:
    seconds, found, attackers = beside(attack, target, meeting)
    members = [each for each in found if isinstance(each, GroupSockets)]
    assert len(members) == SIZE, found
    assert seconds < HANDSHAKE_SECONDS / 2, seconds
    for rank, mine in enumerate(members):
        for peer, (link,) in mine.data.items():
            link.send(f"{rank} to {peer}".encode())
    for rank, mine in enumerate(members):
        for peer, (link,) in mine.data.items():
            link.settimeout(PATIENCE)
            assert link.recv(100) == f"{peer} to {rank}".encode()
        mine.close()
    if target == "member":
        assert members[0].refused or attack in (silent, half_a_hello, no_proof, dripping)
        assert_cut_off(attackers)
    meeting.close()
    assert_cut_off(attackers)
    attackers.close()


def assert_cut_off(attackers: Attackers) -> None:
    """All connections have ended, with no more than an answer and a refusal."""
    for connection in attackers.connections:
        if connection.fileno() >= 0:
            connection.settimeout(PATIENCE)
            assert len(received(connection, 1 << 20)) <= ANSWER_BYTES + 33


@pytest.mark.mesh
def test_a_silent_stranger_is_given_up_after_its_own_time(
    meeting: MeetingHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallel.links.accepting.HANDSHAKE_SECONDS", 0.5)
    attackers = Attackers((HOST, meeting.port), MEETING, [])
    began = time.monotonic()
    connection = attackers.connect(b"LK")
    assert received(connection, 1) == b""
    assert 0.4 < time.monotonic() - began < HANDSHAKE_SECONDS
    assert meeting.refused == 1
    attackers.close()


def test_an_impostor_at_the_address_of_a_member_learns_nothing_and_is_refused(meeting: MeetingHost) -> None:
    """It replays what a member once answered, and what it once said at the end."""
    _, answer, _, verdict = recording(OFFER._replace(use="control"), is_large=True)
    with socket.create_server((HOST, 0)) as impostor, ThreadPoolExecutor(1) as pool:
        meeting.set("links/member/0", f"{HOST} {impostor.getsockname()[1]}".encode())
        guest = pool.submit(form, meeting, 1, Settings(size=2), first=1)
        with impostor.accept()[0] as one, impostor.accept()[0] as other:
            for connection in (one, other):
                connection.settimeout(PATIENCE)
                with contextlib.suppress(OSError):  # the other one may have ended the group already
                    connection.sendall(answer)
                    connection.sendall(verdict)
            (error,) = guest.result(PATIENCE)
    assert isinstance(error, CollectiveError)
    assert "is refused: it has another mesh key" in str(error)


def test_refusals_are_counted_and_logged_once_in_a_while(
    meeting: MeetingHost, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        with socket.create_connection((HOST, meeting.port)) as connection, pytest.raises(HandshakeRefused):
            introduce(connection, MEETING, LinkKey.derive(b"a third"))
    lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert lines == ["1 connections refused, the last one from 127.0.0.1: it has another mesh key"]
    assert meeting.refused == 20
