"""What only links over UCX do, beside what ``test_tcp_links`` asks of all."""

from __future__ import annotations

import os
import random
import time

import pytest

from parallel.links.ucx_links import UcxLinks, describe, load
from tests.parallel.link_pairs import UCX_WAYS, needs_ucx, ucx_linked
from tests.parallel.links.test_tcp_links import SECONDS, Memory, take

MOST_AHEAD = 9 << 20
"""Bytes that may wait at a member that takes nothing."""


@pytest.mark.parametrize("way", UCX_WAYS)
@pytest.mark.parametrize("part", [3000, 100_000])
def test_who_takes_nothing_holds_up_the_sender(way: str, part: int) -> None:
    one, other = ucx_linked(2, way)
    content = random.Random(part).randbytes(24 << 20)
    memory = Memory(content)
    assert one.post(1, memory.parts(*range(part, len(content), part))) == 0
    room = Memory(1)
    for _ in range(300):
        assert one.flush() == 0
        other.sleep(0.0)  # which lets UCX receive what comes
    assert 0 < one.bytes_sent[1] < MOST_AHEAD
    assert take(other, 0, len(content), one) == content
    ends = time.monotonic() + SECONDS
    while not one.flush():
        other.sleep(0.0)
        assert time.monotonic() < ends
    assert other.take(0, room.address, 1) == 0
    one.close()
    other.close()


def test_no_thread_and_no_descriptor_stays() -> None:
    needs_ucx()
    load()
    before = sorted(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    for way in UCX_WAYS:
        links = ucx_linked(3, way)
        assert len(os.listdir("/proc/self/fd")) > before[1]
        for each in links:
            each.close()
            each.abort()
            assert repr(each) == f"<UcxLinks rank {each.rank} of 3, closed>"
    assert (sorted(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))) == before


def test_abort_gives_the_memory_back_before_it_returns() -> None:
    one, other = ucx_linked(2, "UCX over TCP")
    large, room = Memory(bytes(8 << 20)), Memory(8 << 20)
    assert one.post(1, large.parts()) == 0
    other.take(0, room.address, room.num_bytes)
    other.abort()
    began = time.monotonic()
    assert other.take(0, room.address, room.num_bytes) == -1
    assert time.monotonic() - began < 1.0
    before = room.content
    for _ in range(100):
        one.flush()
    assert room.content == before
    one.close()
    other.close()


def test_a_device_that_is_not_there_is_named() -> None:
    needs_ucx()
    with pytest.raises(OSError, match="UCX cannot be used on nothing0: "):
        UcxLinks(load(), 0, 2, "nothing0", "tcp")
    assert ("tcp", "lo") in describe()
