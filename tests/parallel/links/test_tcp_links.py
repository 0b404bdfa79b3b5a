"""Links over TCP and UCX: pipes of bytes between members, all members in this process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from parallel.links import native_links
from parallel.links.native_links import STRIPE_BYTES, BrokenLink, NativeLinks, load, make_tcp_links
from parallel.links.python_links import PythonLinks
from tests.parallel.link_pairs import UCX_WAYS, linked, socket_pair, ucx_linked

SECONDS = 10.0
AnyLinks = NativeLinks | PythonLinks


TCP_WAYS: dict[str, tuple[int, tuple[int, ...]]] = {
    "one stream": (1, ()),
    "three streams": (3, ()),
    "Python": (1, (0, 1)),
    "three streams, one end in Python": (3, (1,)),
}


@pytest.fixture(params=(*TCP_WAYS, *UCX_WAYS))
def pair(request: pytest.FixtureRequest) -> Iterator[Sequence[AnyLinks]]:
    way: str = request.param
    links: Sequence[AnyLinks] = linked(2, *TCP_WAYS[way]) if way in TCP_WAYS else ucx_linked(2, way)
    yield links
    for each in links:
        each.close()


@pytest.fixture
def noticing_pair(pair: Sequence[AnyLinks], request: pytest.FixtureRequest) -> Sequence[AnyLinks]:
    """Links that notice by themselves when a peer closes its end."""
    if "shared memory" in request.node.name:
        pytest.skip("UCX does not tell of peers in shared memory: connections for last words do")
    return pair


class Memory:
    """Bytes at an address that stays."""

    def __init__(self, content: bytes | int) -> None:
        self.room = ctypes.create_string_buffer(
            content, content if isinstance(content, int) else len(content)
        )
        self.address, self.num_bytes = ctypes.addressof(self.room), len(self.room)

    @property
    def content(self) -> bytes:
        return self.room.raw

    def parts(self, *cuts: int) -> list[tuple[int, int]]:
        """The memory cut at these places."""
        edges = [0, *cuts, self.num_bytes]
        return [(self.address + low, high - low) for low, high in itertools.pairwise(edges)]


def take(links: AnyLinks, peer: int, num_bytes: int, sender: AnyLinks | None = None) -> bytes:
    """Receive, sleeping where nothing has come; ``sender`` goes on meanwhile."""
    memory = Memory(num_bytes)
    ends = time.monotonic() + SECONDS
    while not (outcome := links.take(peer, memory.address, num_bytes)):
        assert time.monotonic() < ends
        if sender is None:
            links.sleep(1.0)
        else:
            assert sender.flush() >= 0
    assert outcome == 1, links.broken
    return memory.content


def test_bytes_come_in_order_however_they_are_cut(pair: Sequence[AnyLinks]) -> None:
    draw = random.Random(1)
    content = draw.randbytes(3 * STRIPE_BYTES + 12345)
    memory = Memory(content)
    cuts = sorted(draw.randrange(len(content)) for _ in range(3000))
    parts = memory.parts(*cuts)
    received = bytearray()

    def receive() -> None:
        while len(received) < len(content):
            num_bytes = draw.choice((0, 1, 16, 100, 5000, 70_000, 400_000))
            received.extend(take(pair[1], 0, min(num_bytes, len(content) - len(received))))

    thread = threading.Thread(target=receive)
    thread.start()
    while parts:
        count = draw.choice((1, 2, 1500))
        assert pair[0].post(1, parts[:count]) == 0
        del parts[:count]
    while not pair[0].flush():
        pair[0].sleep(1.0)
    thread.join(SECONDS)
    assert bytes(received) == content
    assert pair[0].bytes_sent == [0, len(content)]
    assert pair[1].bytes_received == [len(content), 0]


def test_large_messages_in_both_directions_at_once(pair: Sequence[AnyLinks]) -> None:
    given = [Memory(random.Random(rank).randbytes(24 << 20)) for rank in range(2)]
    taken = [Memory(each.num_bytes) for each in given]
    done = [False, False]
    for rank in range(2):
        pair[rank].post(1 - rank, given[rank].parts())
    assert not pair[0].flush()  # more than the sockets hold, and nobody has taken anything
    ends = time.monotonic() + SECONDS
    while not all(done) and time.monotonic() < ends:
        for rank in range(2):
            pair[rank].flush()
            if not done[rank]:
                done[rank] = pair[rank].take(1 - rank, taken[rank].address, taken[rank].num_bytes) == 1
    assert [taken[0].content, taken[1].content] == [given[1].content, given[0].content]
    assert [pair[0].flush(), pair[1].flush()] == [1, 1]


def test_parts_that_stand_side_by_side_are_sent_once(pair: Sequence[AnyLinks]) -> None:
    memory = Memory(bytes(range(256)) * 40)
    pair[0].post(1, memory.parts(*range(1, memory.num_bytes)))
    assert take(pair[1], 0, memory.num_bytes, pair[0]) == memory.content


def test_zero_bytes(pair: Sequence[AnyLinks]) -> None:
    empty = Memory(1)
    assert pair[0].post(1, []) == 0
    assert pair[0].post(1, [(empty.address, 0)]) == 0
    assert pair[0].flush() == 1
    assert pair[1].take(0, empty.address, 0) == 1
    assert pair[0].bytes_sent == [0, 0]


def test_what_was_sent_before_the_end_is_received(noticing_pair: Sequence[AnyLinks]) -> None:
    pair = noticing_pair
    memory = Memory(b"last words")
    pair[0].post(1, memory.parts())
    pair[0].close()
    assert take(pair[1], 0, 4) == b"last"
    assert take(pair[1], 0, 6) == b" words"
    assert pair[1].broken is None
    assert pair[1].take(0, memory.address, 1) == -1
    assert pair[1].broken == BrokenLink(0, 0)


def test_end_in_the_middle_of_a_message(noticing_pair: Sequence[AnyLinks]) -> None:
    pair = noticing_pair
    memory, room = Memory(b"half"), Memory(8)
    pair[0].post(1, memory.parts())
    assert take(pair[1], 0, 0) == b""
    ends = time.monotonic() + SECONDS
    while pair[1].bytes_received[0] < 4 and time.monotonic() < ends:
        assert pair[1].take(0, room.address, 8) == 0
    pair[0].close()
    while not (outcome := pair[1].take(0, room.address, 8)):
        assert pair[1].sleep(SECONDS) == 1
    assert outcome == -1
    assert pair[1].broken == BrokenLink(0, 0)
    assert pair[1].post(0, memory.parts()) == -1
    assert "broken" in repr(pair[1])


def test_a_reset_names_its_error_and_others_go_on() -> None:
    links = linked(3)
    try:
        for each in links[2]._sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        memory = Memory(b"0123")
        links[1].post(0, memory.parts())
        links[2].close()
        while not (outcome := links[0].take(2, memory.address, 4)):
            links[0].sleep(1.0)
        assert outcome == -1
        assert links[0].broken == BrokenLink(2, errno.ECONNRESET)
        assert take(links[0], 1, 4) == b"0123"
        assert links[0].post(1, memory.parts()) == 0
        assert links[0].post(2, memory.parts()) == -1
    finally:
        for each in links:
            each.close()


def test_posts_to_a_member_that_has_ended_break() -> None:
    links = linked(2)
    memory = Memory(1 << 20)
    links[1].close()
    ends = time.monotonic() + SECONDS
    while (outcome := links[0].post(1, memory.parts())) == 0 and time.monotonic() < ends:
        links[0].sleep(0.01)
    assert outcome == -1
    assert links[0].broken is not None
    assert links[0].broken.peer == 1
    assert links[0].broken.error in (errno.EPIPE, errno.ECONNRESET)
    assert links[0].flush() == -1
    links[0].close()


def test_abort_ends_a_sleep(pair: Sequence[AnyLinks]) -> None:
    room, outcomes = Memory(8), []
    assert pair[0].take(1, room.address, 8) == 0
    thread = threading.Thread(target=lambda: outcomes.append(pair[0].sleep(SECONDS)))
    thread.start()
    pair[0].abort()
    thread.join(SECONDS / 2)
    assert outcomes == [-1]
    assert pair[0].broken == BrokenLink(None, errno.ECANCELED)
    assert pair[0].take(1, room.address, 8) == pair[0].flush() == pair[0].post(1, room.parts()) == -1
    pair[0].abort()


def test_sleep_lasts_until_its_time_is_over_or_something_comes(pair: Sequence[AnyLinks]) -> None:
    room, memory = Memory(8), Memory(b"12345678")
    assert pair[1].post(0, memory.parts()) == 0  # nobody waits for it
    began = time.monotonic()
    assert pair[0].sleep(0.02) == 0
    assert time.monotonic() - began >= 0.02
    assert take(pair[0], 1, 8) == b"12345678"
    assert pair[0].take(1, room.address, 8) == 0
    pair[1].post(0, memory.parts())
    assert pair[0].sleep(SECONDS) == 1
    assert pair[0].take(1, room.address, 8) == 1


def test_a_rank_that_is_not_there_is_refused(pair: Sequence[AnyLinks]) -> None:
    memory = Memory(8)
    assert pair[0].post(2, memory.parts()) == -1
    assert pair[0].take(0, memory.address, 8) == -1  # this member itself
    assert pair[0].broken == BrokenLink(2, errno.EINVAL)


def test_nothing_is_left_after_close() -> None:
    before = os.listdir("/proc/self/fd")
    links = linked(3, 2)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 3 * 2 * 2 + 3  # an eventfd each
    for each in links:
        each.close()
        each.abort()
        assert each.bytes_sent == [0, 0, 0]
        assert "closed" in repr(each)
    assert os.listdir("/proc/self/fd") == before


def test_sockets_must_fit_the_group() -> None:
    library = load()
    assert library is not None
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(each) for each in socket_pair()]
        with pytest.raises(ValueError, match="rank 2 has 0 sockets, and others 2"):
            make_tcp_links(library, 0, 3, {1: ends})


def test_without_native_code_there_are_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native_links.OFF, "0")
    load.cache_clear()
    try:
        assert load() is None
    finally:
        load.cache_clear()
