"""Pages of a cache are there before they are written to."""

from __future__ import annotations

import mmap
import resource
import sys
import threading
import time

import numpy as np
import pytest

from engine.transfers.block_memory import BlockMemory
from engine.transfers.pages_ahead import HUGE, LEAST_AHEAD, MOST_AHEAD, PagesAhead, wanted_blocks

BLOCK = 8192
"""Bytes of a block in one tensor."""
PER_PAGE = HUGE // BLOCK


def cache(num_blocks: int, tensors: int = 2) -> BlockMemory:
    """A cache that nobody has written to."""
    maps = [mmap.mmap(-1, num_blocks * BLOCK) for _ in range(tensors)]
    return BlockMemory([np.frombuffer(each, dtype=np.uint8).reshape(num_blocks, BLOCK) for each in maps])


def wait_for(pages: PagesAhead, num_blocks: int) -> None:
    deadline = time.monotonic() + 60
    while pages.num_ready < num_blocks:
        assert time.monotonic() < deadline, pages
        time.sleep(0.01)


def faults_of_writing(memory: BlockMemory, blocks: range) -> int:
    """Page faults of this thread while it writes to blocks."""
    data = memoryview(bytes(range(256)) * (memory.block_bytes // 256))
    memory.read([0])
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for block in blocks:
        memory.write(block, data)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_what_is_ready_stays_ahead_of_what_is_used() -> None:
    for ahead in (LEAST_AHEAD, MOST_AHEAD):
        for used in range(4000):
            ready = wanted_blocks(used, 100, 3000, ahead)
            assert ready == 3000 or ahead * 100 < ready - used <= (ahead + 1) * 100
        assert wanted_blocks(0, 100, 30, ahead) == 30


@pytest.mark.skipif(sys.platform != "linux", reason="other systems give pages when they are written to")
def test_a_step_writes_without_a_page_fault() -> None:
    memory = cache(10 * PER_PAGE)
    pages = PagesAhead(memory)
    try:
        ready = (MOST_AHEAD + 1) * PER_PAGE
        wait_for(pages, ready)
        written = range(PER_PAGE, 2 * PER_PAGE)
        assert faults_of_writing(memory, written) < 10
        assert pages.num_ready == ready  # no more than that
        assert faults_of_writing(memory, range(9 * PER_PAGE, 10 * PER_PAGE)) > 10  # so this counts them
        pages.used(2 * PER_PAGE)
        wait_for(pages, ready + 2 * PER_PAGE)
        assert faults_of_writing(memory, range(ready, ready + PER_PAGE)) < 10
        assert bytes(memory.read([PER_PAGE])[0, :256]) == bytes(range(256))  # what was there stays
    finally:
        pages.close()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems give pages when they are written to")
def test_what_is_near_does_not_wait_for_the_thread_that_goes_after_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages that steps will soon need come all the same."""
    memory, going_on = cache(10 * PER_PAGE), threading.Event()
    monkeypatch.setattr(
        "engine.transfers.pages_ahead.be_nicer", lambda niceness: niceness and going_on.wait(60)
    )
    pages = PagesAhead(memory)
    try:
        wait_for(pages, (LEAST_AHEAD + 1) * PER_PAGE)
        pages.used(3 * PER_PAGE)
        wait_for(pages, (3 + LEAST_AHEAD + 1) * PER_PAGE)
        assert pages.num_ready == (3 + LEAST_AHEAD + 1) * PER_PAGE
        going_on.set()
        wait_for(pages, (3 + MOST_AHEAD + 1) * PER_PAGE)
        pages.used(10 * PER_PAGE)
        wait_for(pages, 10 * PER_PAGE)
    finally:
        going_on.set()
        pages.close()


def test_its_end_waits_for_nothing() -> None:
    pages = PagesAhead(cache(3))
    pages.used(3)
    pages.close()
    pages.used(3)
