"""Members connect to each other over real sockets."""

from __future__ import annotations

import gc
import os
import resource
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from parallel.links.connecting import SILENCE_SECONDS
from parallel.links.encryption import can_encrypt
from parallel.links.errors import CollectiveError
from parallel.links.handshake import FULL_BYTES, Offer
from parallel.links.introduction import introduce
from parallel.links.keys import LinkKey
from parallel.links.meeting import MeetingHost
from parallel.links.meeting_contract import Meeting
from tests.parallel.links.forming import HOST, KEY, OTHER_KEY, PATIENCE, Settings, form, formed

SOON = 2.0
"""Seconds within which an error comes that needs no timeout."""


@pytest.fixture
def meeting() -> Iterator[MeetingHost]:
    """A meeting place; afterwards there are no more descriptors than before."""
    can_encrypt()  # finds out once
    gc.collect()  # what other tests left is closed now, not meanwhile
    before = len(os.listdir("/proc/self/fd"))
    host = MeetingHost(HOST)
    yield host
    host.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def only_error(found: list[object]) -> CollectiveError:
    (error,) = found
    assert isinstance(error, CollectiveError)
    return error


@pytest.mark.parametrize("key", [KEY, None])
@pytest.mark.parametrize(("size", "streams"), [(1, 1), (2, 1), (4, 2)])
def test_each_pair_has_its_links(size: int, streams: int, key: LinkKey | None, meeting: MeetingHost) -> None:
    members = formed(meeting, size, Settings(key=key, streams=streams))
    for rank, mine in enumerate(members):
        assert set(mine.data) == set(mine.control) == set(range(size)) - {rank}
        for peer in mine.control:
            assert len(mine.data[peer]) == streams
            for number, link in enumerate([*mine.data[peer], mine.control[peer]]):
                assert link.getblocking() is False
                link.send(f"{rank} {number}".encode())
    for rank, mine in enumerate(members):
        for peer in mine.control:
            for number, link in enumerate([*mine.data[peer], mine.control[peer]]):
                assert select.select([link], [], [], PATIENCE)[0]
                assert link.recv(100) == f"{peer} {number}".encode(), (rank, peer)
    for each in members:
        each.close()


def test_links_have_the_options_that_find_a_silent_host(meeting: MeetingHost) -> None:
    members = formed(meeting, 2, Settings(timeout=7.0, forming_timeout=PATIENCE))
    for mine in members:
        ((data,),) = mine.data.values()
        (control,) = mine.control.values()
        for link, silence in ((data, 7.0), (control, SILENCE_SECONDS)):
            assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * silence
            assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 2
        mine.close()


def test_members_bind_the_address_that_is_named(meeting: MeetingHost) -> None:
    members = formed(meeting, 2, Settings(), Settings(host="127.0.0.2"))
    assert members[1].control[0].getsockname()[0] == "127.0.0.2"
    assert members[0].control[1].getpeername()[0] == "127.0.0.2"
    for each in members:
        each.close()


def test_members_connect_over_version_6_of_ip(meeting: MeetingHost) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no ::1")
    for each in formed(meeting, 2, Settings(host="::1")):
        each.close()


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Settings(key=OTHER_KEY), "it has another mesh key"),
        (Settings(key=None), "it has a mesh key and this process has none"),
        (Settings(name="epoch/2/all/t"), "it is in another group or epoch"),
        (Settings(size=3), "its group has another number of members"),
    ],
    ids=["key", "no key", "epoch", "size"],
)
def test_a_member_that_does_not_belong_is_refused_and_both_know_why(
    other: Settings, expected: str, meeting: MeetingHost
) -> None:
    if other.size == 3:
        meeting.set("links/member/2", b"127.0.0.1 1")  # the third, which only one of them expects
    began = time.monotonic()
    host, guest = form(meeting, 2, Settings(), other)
    assert time.monotonic() - began < SOON
    assert isinstance(guest, CollectiveError)
    assert isinstance(host, CollectiveError)
    assert "forming the group: rank 0 at 127.0.0.1:" in str(guest)
    assert f"is refused: {expected}" in str(guest)
    assert (guest.rank, guest.evidence) == (0, "closed")
    assert str(host).startswith("forming the group: rank 1 gave up: rank 0 at 127.0.0.1:")
    assert expected in str(host)
    assert host.rank == 1


def test_those_who_only_hear_that_two_do_not_reach_each_other_accuse_nobody(meeting: MeetingHost) -> None:
    """Rank 2 cannot reach rank 1; rank 0 reaches both."""
    with socket.create_server((HOST, 0)) as gone:
        port = gone.getsockname()[1]
    changed = ChangedMeeting(meeting, f"{HOST} {port}".encode(), of=1)
    with ThreadPoolExecutor(3) as pool:
        first, second, third = (
            pool.submit(form, place, 1, Settings(size=3), first=rank)
            for rank, place in enumerate((meeting, meeting, changed))
        )
        blames = [only_error(each.result(PATIENCE)).rank for each in (first, second, third)]
    assert blames == [None, 2, 1]


def test_a_member_that_does_not_come_is_named(meeting: MeetingHost) -> None:
    began = time.monotonic()
    error = only_error(form(meeting, 1, Settings(size=2, timeout=0.3)))
    assert 0.3 <= time.monotonic() - began < SOON
    assert str(error) == "forming the group: rank 1 did not come within 0.3 s"
    assert (error.rank, error.evidence) == (1, "deadline")


def test_a_member_that_tells_its_address_and_no_more_is_named(meeting: MeetingHost) -> None:
    meeting.set("links/member/1", b"127.0.0.1 1")
    error = only_error(form(meeting, 1, Settings(size=2, timeout=0.3)))
    assert str(error).startswith("forming the group: rank 1 did not connect to 127.0.0.1:")
    assert str(error).endswith(" within 0.3 s")
    assert (error.rank, error.evidence) == (1, "deadline")


@pytest.mark.parametrize("said", [b"", b"127.0.0.1", b"127.0.0.1 x", b"127.0.0.1 70000", b"\xff 1", b"a.b 1"])
def test_what_is_no_address_is_refused(said: bytes, meeting: MeetingHost) -> None:
    meeting.set("links/member/0", said)
    error = only_error(form(meeting, 1, Settings(size=2), first=1))
    assert "rank 0 tells no address but" in str(error)
    assert error.rank == 0


@pytest.mark.parametrize(
    ("host", "expected"),
    [("203.0.113.7", "cannot listen on 203.0.113.7"), ("eth9.invalid", "cannot listen on eth9.invalid")],
)
def test_an_address_that_is_not_there_is_named(host: str, expected: str, meeting: MeetingHost) -> None:
    error = only_error(form(meeting, 1, Settings(size=2, host=host)))
    assert expected in str(error)
    assert "--instance-address takes an address of an interface that is up" in str(error)
    assert (error.rank, error.evidence) == (0, "aborted")


def test_a_port_where_nobody_listens_any_more_is_named_at_once(meeting: MeetingHost) -> None:
    with socket.create_server((HOST, 0)) as gone:
        port = gone.getsockname()[1]
    meeting.set("links/member/0", f"{HOST} {port}".encode())
    error = only_error(form(meeting, 1, Settings(size=2), first=1))
    assert f"rank 0 cannot be reached at {HOST}:{port} from {HOST} (Connection refused)" in str(error)
    assert (error.rank, error.evidence) == (0, "closed")


def test_a_network_without_a_route_is_named(meeting: MeetingHost) -> None:
    """From an address of loopback nothing leads to another network."""
    meeting.set("links/member/0", b"198.51.100.1 9")
    error = only_error(form(meeting, 1, Settings(size=2), first=1))
    assert "rank 0 cannot be reached at 198.51.100.1:9 from 127.0.0.1" in str(error)


def test_a_port_that_does_not_answer_is_named_within_seconds(
    meeting: MeetingHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue is full, so that the kernel drops what comes, as a firewall does."""
    monkeypatch.setattr("parallel.links.dialing.HANDSHAKE_SECONDS", 0.4)
    with socket.socket() as full:
        full.bind((HOST, 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        port = full.getsockname()[1]
        meeting.set("links/member/0", f"{HOST} {port}".encode())
        error = only_error(form(meeting, 1, Settings(size=2), first=1))
        for filler in fillers:
            filler.close()
    assert f"rank 0 did not answer {HOST} at {HOST}:{port} within 0.4 s: a firewall there may drop" in str(
        error
    )
    assert (error.rank, error.evidence) == (0, "closed")


def test_a_port_that_answers_and_does_not_shake_hands_is_named(
    meeting: MeetingHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallel.links.dialing.HANDSHAKE_SECONDS", 0.4)
    with socket.create_server((HOST, 0)) as mute:
        meeting.set("links/member/0", f"{HOST} {mute.getsockname()[1]}".encode())
        error = only_error(form(meeting, 1, Settings(size=2), first=1))
    assert "did not shake hands within 0.4 s" in str(error)
    assert (error.rank, error.evidence) == (0, "deadline")


def test_a_connection_that_is_closed_in_its_handshake_is_made_again(meeting: MeetingHost) -> None:
    """The first ones are dropped, as a flooded member drops them."""
    with socket.create_server((HOST, 0)) as relay, ThreadPoolExecutor(2) as pool:
        real = pool.submit(form, meeting, 1, Settings(size=2))
        while not meeting.check(["links/member/0"]):
            time.sleep(0.001)
        target = meeting.get("links/member/0").decode().split()
        changed = ChangedMeeting(meeting, f"{HOST} {relay.getsockname()[1]}".encode())
        guest = pool.submit(form, changed, 1, Settings(size=2), first=1)
        for _ in range(3):
            relay.accept()[0].close()
        pairs = []
        while len(pairs) < 2:
            inside = relay.accept()[0]
            outside = socket.create_connection((target[0], int(target[1])))
            pairs.append((inside, outside))
            pool_relay(inside, outside)
        for side in (*real.result(PATIENCE), *guest.result(PATIENCE)):
            assert not isinstance(side, CollectiveError), side
            side.close()
        for inside, outside in pairs:
            inside.close()
            outside.close()


class ChangedMeeting:
    """A meeting place with another address of one member."""

    def __init__(self, inner: Meeting, address: bytes, of: int = 0) -> None:
        self._inner, self._address, self._of = inner, address, of

    def set(self, key: str, value: bytes) -> None:
        self._inner.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def find(self, keys: list[str], seconds: float) -> list[bytes] | None:
        found = self._inner.find(keys, seconds)
        if found is not None:
            found[self._of] = self._address
        return found


def pool_relay(inside: socket.socket, outside: socket.socket) -> None:
    """Pass a handshake on: hello, answer, proof, verdict."""
    for source, target, length in (
        (inside, outside, FULL_BYTES),
        (outside, inside, FULL_BYTES),
        (inside, outside, 32),
        (outside, inside, 33),
    ):
        target.sendall(source.recv(length, socket.MSG_WAITALL))


def test_forming_ends_when_it_is_stopped(meeting: MeetingHost) -> None:
    for told in (False, True):  # before and after addresses are known
        if told:
            meeting.set("links/member/1", b"127.0.0.1 1")
        began = time.monotonic()
        stop = Settings(size=2, should_stop=lambda began=began: time.monotonic() > began + 0.1)
        error = only_error(form(meeting, 1, stop))
        assert time.monotonic() - began < SOON
        assert str(error) == "forming the group: it was stopped from outside"
        assert (error.rank, error.evidence) == (None, "aborted")


def test_whether_to_stop_is_asked_often(meeting: MeetingHost) -> None:
    for told in (False, True):
        if told:
            meeting.set("links/member/1", b"127.0.0.1 1")
        asked = 0

        def should_stop() -> bool:
            nonlocal asked
            asked += 1
            return asked > 10

        began = time.monotonic()
        only_error(form(meeting, 1, Settings(size=2, should_stop=should_stop)))
        assert time.monotonic() - began < SOON, told


def test_a_member_that_goes_away_while_others_connect_is_named(meeting: MeetingHost) -> None:
    """It has made one of its links and ends then, as if killed."""
    meeting.set("links/member/1", b"127.0.0.1 1")
    with ThreadPoolExecutor(1) as pool:
        host = pool.submit(form, meeting, 1, Settings(size=2))
        while not meeting.check(["links/member/0"]):
            time.sleep(0.001)
        address, port = meeting.get("links/member/0").decode().split()
        with socket.create_connection((address, int(port))) as link:
            introduce(link, Offer("group/" + Settings().name, "control", 1, 0, 2), KEY)
        error = only_error(host.result(PATIENCE))
    assert str(error) == "forming the group: rank 1 is gone, or gave up, while others were connecting"
    assert (error.rank, error.evidence) == (1, "closed")


def test_too_many_open_files_are_named(meeting: MeetingHost) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    texts = []
    for spare in range(1, 14):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit_for(spare), hard))
        try:
            found = form(meeting, 2, Settings(name=str(spare), timeout=0.5), part=f"{spare}")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in found:
            if isinstance(each, CollectiveError):
                texts.append(str(each))
            else:
                each.close()
    assert texts
    assert all(text.startswith("forming the group: ") for text in texts), texts
    assert any("too many open files: raise `ulimit -n` there" in text for text in texts)


def limit_for(spare: int) -> int:
    """A limit of descriptors that leaves room for so many more."""
    used = set(map(int, os.listdir("/proc/self/fd")))  # with that of the listing, which is closed again
    limit = 0
    while spare > 1 or limit in used:
        spare -= limit not in used
        limit += 1
    return limit
