"""Meeting places over real sockets: values, bounds, and ends that go away."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import psutil
import pytest

from parallel.links import meeting_server, meeting_values
from parallel.links.errors import CollectiveError
from parallel.links.frames import LARGEST_FRAME, Frames, FrameTooLarge, framed
from parallel.links.handshake import Offer
from parallel.links.introduction import introduce
from parallel.links.keys import LinkKey
from parallel.links.meeting import MeetingClient, MeetingHost, join_meeting
from parallel.links.meeting_contract import Meeting, Prefixed
from parallel.links.meeting_values import NoRoom, Values

PATIENCE = 20.0
SOON = 2.0
"""Seconds within which an end is known; without other work it takes a millisecond."""


@pytest.fixture
def host() -> Iterator[MeetingHost]:
    host = MeetingHost("127.0.0.1")
    yield host
    host.close()


def client_of(host: MeetingHost) -> MeetingClient:
    return MeetingClient("127.0.0.1", host.port, timeout=PATIENCE)


def connection_to(host: MeetingHost) -> socket.socket:
    """A connection that is let in, for what no client of ours would send."""
    connection = socket.create_connection(("127.0.0.1", host.port))
    introduce(connection, Offer(meeting_server.PURPOSE), None)
    return connection


def await_clients(host: MeetingHost, number: int) -> None:
    """Until the host has so many clients left."""
    deadline = time.monotonic() + PATIENCE
    while host.num_clients != number:
        assert time.monotonic() < deadline, host.num_clients
        time.sleep(0.001)


# ---- pure parts


def test_frames_are_cut_wherever_the_stream_is() -> None:
    contents = [b"", b"a", b"bc" * 300]
    stream = b"".join(map(framed, contents))
    for step in (1, 3, 7, len(stream)):
        frames, found = Frames(), []
        for at in range(0, len(stream), step):
            found += frames.take_in(stream[at : at + step])
        assert found == contents


def test_a_frame_too_many_bytes_long_is_refused_by_its_length_alone() -> None:
    with pytest.raises(FrameTooLarge, match=f"a frame of {LARGEST_FRAME + 1} bytes is announced"):
        list(Frames().take_in((LARGEST_FRAME + 1).to_bytes(4, "big")))
    with pytest.raises(FrameTooLarge):
        framed(bytes(LARGEST_FRAME + 1))


def test_values_are_bounded_in_size_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_values, "MOST_VALUES", 2)
    monkeypatch.setattr(meeting_values, "MOST_VALUE_BYTES", 20)
    values = Values()
    values.set("a", b"12345678")
    with pytest.raises(NoRoom, match="holds 20 bytes"):
        values.set("b", bytes(11))
    values.set("b", bytes(10))
    values.set("a", b"1")  # in place of the one before
    with pytest.raises(NoRoom, match="holds 2 values"):
        values.set("c", b"")
    with pytest.raises(NoRoom, match="too large"):
        values.set("a", bytes(meeting_values.LARGEST_VALUE + 1))
    with pytest.raises(NoRoom, match="name of 513 characters"):
        values.set("k" * 513, b"")
    assert values.find(["a", "b"]) == [b"1", bytes(10)]
    assert values.find(["a", "c"]) is None
    assert values.first_missing(["a", "c"]) == "c"


# ---- over sockets


def test_all_see_the_values_of_all(host: MeetingHost) -> None:
    one, other = client_of(host), join_meeting(f"127.0.0.1:{host.port}", None)
    one.set("key", b"first")
    one.set("key", b"value")
    assert [each.get("key") for each in (host, one, other)] == [b"value"] * 3
    assert other.check(["key"])
    assert not other.check(["key", "none"])
    with pytest.raises(CollectiveError, match="has no value none"):
        one.get("none")
    host.set("large", bytes(meeting_values.LARGEST_VALUE))
    assert one.find(["key", "large"], 0.0) == [b"value", bytes(meeting_values.LARGEST_VALUE)]


def test_names_of_groups_do_not_meet(host: MeetingHost) -> None:
    one, other = Prefixed(client_of(host), "epoch/1/all"), Prefixed(host, "epoch/2/all")
    one.set("member/0", b"one")
    assert not other.check(["member/0"])
    other.set("member/0", b"other")
    assert (one.get("member/0"), other.find(["member/0"], 0.0)) == (b"one", [b"other"])
    assert host.get("epoch/1/all/member/0") == b"one"


def test_who_waits_has_the_values_as_soon_as_they_are_there(host: MeetingHost) -> None:
    waiting: list[Meeting] = [client_of(host), client_of(host), host]
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(each.find, ["a", "b"], 1.0) for each in waiting]
        setter = client_of(host)
        setter.set("b", b"2")
        began = time.monotonic()
        setter.set("a", b"1")
        assert [each.result() for each in found] == [[b"1", b"2"]] * 3
        assert time.monotonic() - began < 0.9  # not only when the time of the question was over
    began = time.monotonic()
    assert client_of(host).find(["none"], 0.05) is None
    assert time.monotonic() - began >= 0.05


def test_a_host_that_closes_ends_all_waiting_at_once(host: MeetingHost) -> None:
    clients = [client_of(host) for _ in range(3)]
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(each.find, ["never"], 1.0) for each in clients]
        here = pool.submit(host.find, ["never"], 1.0)
        time.sleep(0.05)  # most have asked by then; the others find it closed
        began = time.monotonic()
        host.close()
        for each in waiting:
            with pytest.raises(CollectiveError, match="is gone"):
                each.result()
        assert here.result() is None
        assert time.monotonic() - began < 0.9
    for call in (lambda: clients[0].set("a", b""), lambda: host.set("a", b"")):
        with pytest.raises(CollectiveError, match=r"the meeting place at 127\.0\.0\.1"):
            call()
    with pytest.raises(CollectiveError, match="no meeting place answers"):
        client_of(host)


HOST = """
import sys, time
from parallel.links.handshake import Offer
from parallel.links.introduction import introduce
from parallel.links.keys import LinkKey
from parallel.links.meeting import MeetingHost
host = MeetingHost("127.0.0.1")
print(host.port, flush=True)
sys.stdin.read()
assert "torch" not in sys.modules
"""


@pytest.mark.mesh
def test_a_host_that_dies_is_an_error_at_once_and_a_stopped_one_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from parallel.links import meeting

    with (
        subprocess.Popen(
            [sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child,
        contextlib.ExitStack() as ended,
    ):
        assert child.stdout is not None
        port = int(child.stdout.readline())
        ended.callback(child.kill)
        killed, stopped = MeetingClient("127.0.0.1", port), MeetingClient("127.0.0.1", port)
        child.send_signal(signal.SIGSTOP)
        while psutil.Process(child.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        monkeypatch.setattr(meeting, "ANSWER_TIMEOUT", 0.2)
        with pytest.raises(CollectiveError, match=r"does not answer within 0\.2 s") as caught:
            stopped.set("a", b"")
        assert caught.value.evidence == "deadline"
        monkeypatch.setattr(meeting, "ANSWER_TIMEOUT", PATIENCE)
        threading.Timer(0.1, child.kill).start()
        began = time.monotonic()
        with pytest.raises(CollectiveError, match="is gone"):
            killed.find(["never"], 1.0)
        assert time.monotonic() - began < SOON


def test_clients_that_die_in_the_middle_disturb_nobody(host: MeetingHost) -> None:
    with ThreadPoolExecutor(1) as pool:
        lost = client_of(host)
        lost.set("before", b"1")
        waiting = pool.submit(lost.find, ["never"], 1.0)
        time.sleep(0.05)
        lost.close()
        with pytest.raises(CollectiveError):
            waiting.result()
    half = connection_to(host)
    half.sendall(framed(b"half a frame")[:6])
    half.close()
    await_clients(host, 0)
    assert client_of(host).get("before") == b"1"


def test_slow_readers_and_senders_hold_nobody_up(host: MeetingHost) -> None:
    """A client that reads no answers is read no more; slow senders are waited for."""
    host.set("large", bytes(meeting_values.LARGEST_VALUE))
    question = framed(msgspec.msgpack.encode(meeting_server.Find(["large"] * 8, 0.0)))
    deaf = connection_to(host)
    deaf.settimeout(0.1)
    with contextlib.suppress(TimeoutError):
        while True:
            deaf.sendall(question)
    slow, asked = connection_to(host), framed(msgspec.msgpack.encode(meeting_server.Find(["large"], 0.0)))
    for byte in asked[:-1]:
        slow.send(bytes([byte]))
    began = time.monotonic()
    for number in range(20):
        client_of(host).set(str(number), b"")
    assert time.monotonic() - began < SOON
    slow.send(asked[-1:])
    slow.settimeout(PATIENCE)
    assert len(slow.recv(1 << 16)) > 4
    deaf.close()
    slow.close()


@pytest.mark.parametrize(
    "content",
    [
        (LARGEST_FRAME + 1).to_bytes(4, "big"),
        framed(b"garbage"),
        framed(msgspec.msgpack.encode(["find", ["a"], 1e9])),
        framed(msgspec.msgpack.encode(["find", ["a"] * (meeting_values.MOST_KEYS_AT_ONCE + 1), 0.0])),
        framed(msgspec.msgpack.encode(["set", "k" * (meeting_values.LONGEST_KEY + 1), b""])),
        2 * framed(msgspec.msgpack.encode(["find", ["never"], 1.0])) + framed(b"garbage"),
    ],
    ids=["too large", "garbage", "too long a wait", "too many names", "too long a name", "impatient"],
)
def test_who_does_not_speak_as_a_client_is_cut_off(host: MeetingHost, content: bytes) -> None:
    other = client_of(host)
    stranger = connection_to(host)
    stranger.settimeout(PATIENCE)
    stranger.sendall(content)
    while stranger.recv(1 << 16):
        pass  # an answer to what came before
    stranger.close()
    await_clients(host, 1)
    other.set("a", b"")


def test_beyond_the_bounds_a_client_is_told_and_goes_on(
    host: MeetingHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting_values, "MOST_VALUES", 1)
    client = client_of(host)
    client.set("a", b"1")
    with pytest.raises(CollectiveError, match="the meeting place is full: it holds 1 values"):
        client.set("b", b"")
    with pytest.raises(CollectiveError, match="bytes are too many for a frame"):
        client.set("a", bytes(LARGEST_FRAME + 1))
    host.set("a", bytes(meeting_values.LARGEST_VALUE))
    with pytest.raises(CollectiveError, match="bytes are too many for a frame"):
        client.find(["a"] * 20, 0.0)
    assert client.check(["a"])


def test_many_clients_at_once_and_no_more_than_are_allowed(
    host: MeetingHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting_server, "MOST_CLIENTS", 64)
    keys = [str(number) for number in range(64)]
    clients = [client_of(host) for _ in keys]

    def meet(number: int) -> list[bytes] | None:
        clients[number].set(keys[number], str(number).encode())
        found = None
        while found is None:
            found = clients[number].find(keys, 1.0)
        return found

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(meet, range(64))) == [[key.encode() for key in keys]] * 64
    with pytest.raises(CollectiveError):
        client_of(host).check(["0"])
    assert host.refused == 1
    for each in clients[1:]:
        each.close()
    await_clients(host, 1)
    assert client_of(host).check(["0"])


def test_a_host_listens_on_its_address_only(host: MeetingHost) -> None:
    listening = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == host.port
    ]
    assert listening == ["127.0.0.1"]


def test_a_host_that_nobody_holds_any_more_closes() -> None:
    host = MeetingHost("127.0.0.1")
    port, client = host.port, client_of(host)
    del host
    with pytest.raises(CollectiveError, match=f"127.0.0.1:{port}: it is gone"):
        client.check(["a"])


def test_who_may_be_early_waits_for_the_host() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(CollectiveError, match=f"no meeting place answers at 127.0.0.1:{port} "):
            MeetingClient("127.0.0.1", port, timeout=0.2)
    kept: list[MeetingHost] = []
    late = threading.Timer(0.2, lambda: kept.append(MeetingHost("127.0.0.1", port)))
    late.start()
    early = MeetingClient("127.0.0.1", port, timeout=PATIENCE, may_be_early=True)
    late.join()
    early.set("key", b"value")
    assert kept[0].get("key") == b"value"
    kept[0].close()


# ---- the key


KEY, OTHER = LinkKey(bytes(range(32))), LinkKey(bytes(range(1, 33)))


@pytest.mark.parametrize(
    ("of_host", "of_client", "reason"),
    [
        (KEY, None, "it has a mesh key and this process has none"),
        (None, KEY, "it has no mesh key and this process has one"),
        (KEY, OTHER, "it has another mesh key"),
    ],
)
def test_without_the_key_nobody_gets_in_and_hears_why(
    of_host: LinkKey | None, of_client: LinkKey | None, reason: str
) -> None:
    host = MeetingHost("127.0.0.1", key=of_host)
    with pytest.raises(CollectiveError, match=f"127.0.0.1:{host.port} is not to be used: {reason}"):
        MeetingClient("127.0.0.1", host.port, of_client)
    deadline = time.monotonic() + PATIENCE
    while host.refused != 1:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    MeetingClient("127.0.0.1", host.port, of_host).set("a", b"1")
    assert host.get("a") == b"1"
    host.close()


def test_what_is_no_meeting_place_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from parallel.links import meeting

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with ThreadPoolExecutor(1) as pool:
            for answer, reason in (
                (b"HTTP/1.1 400 Bad Request\r\n" * 9, "what answers is no process of a mesh"),
                (b"", "ends the connection in its handshake"),
            ):
                asking = pool.submit(MeetingClient, "127.0.0.1", port, KEY)
                with server.accept()[0] as accepted:
                    accepted.recv(1 << 16)
                    accepted.sendall(answer)
                with pytest.raises(CollectiveError, match=reason):
                    asking.result()
        monkeypatch.setattr(meeting, "HANDSHAKE_SECONDS", 0.1)
        with pytest.raises(CollectiveError, match=r"does not shake hands within 0\.1 s") as caught:
            MeetingClient("127.0.0.1", port, KEY)
        assert caught.value.evidence == "deadline"


def test_who_only_looks_whether_a_port_can_be_reached_is_no_stranger(host: MeetingHost) -> None:
    for _ in range(3):
        socket.create_connection(("127.0.0.1", host.port)).close()
    client_of(host).set("a", b"1")
    with socket.create_connection(("127.0.0.1", host.port)) as stranger:
        stranger.sendall(b"L")
    deadline = time.monotonic() + PATIENCE
    while host.refused != 1:
        assert time.monotonic() < deadline, host.refused
        time.sleep(0.001)


def test_strangers_who_say_nothing_delay_nobody(host: MeetingHost) -> None:
    strangers = [socket.create_connection(("127.0.0.1", host.port)) for _ in range(100)]
    began = time.monotonic()
    client_of(host).set("a", b"1")
    assert time.monotonic() - began < SOON
    for each in strangers:
        each.close()
