"""Memory that outlives its owner: real files, and a real process that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.inheritance.heir import LIVING, Heir
from engine.inheritance.names import FILE_NAME
from engine.inheritance.shared_cache import SharedCache, release
from engine.transfers.block_memory import BlockMemory
from engine.transfers.fetching import DEAD, TransferEnded, TransferOutcome, Wanted

BLOCKS, SIZE = 8, 48
OWNER = f"""
import sys, time, torch
from engine.inheritance.shared_cache import SharedCache
cache = SharedCache(sys.argv[1])
cache.reserve({BLOCKS})
stored = [cache.zeros(({BLOCKS}, {SIZE}), torch.uint8) for _ in "kv"]
table = cache.table("identity", stored)
for block in range(5):
    stored[0][block], stored[1][block] = block + 1, block + 101
    table.set(block, bytes([block]) * 16)
print(cache.address, flush=True)
time.sleep(60)
"""
NAMES = [bytes([number]) * 16 for number in range(BLOCKS)]


class Taker:
    """A cache that inherits."""

    def __init__(self, identity: str = "identity") -> None:
        self.parts = [np.zeros((BLOCKS, SIZE), dtype=np.uint8) for _ in "kv"]
        self.woken = threading.Event()
        self.heir = Heir(BlockMemory(self.parts), identity, self.woken.set)

    def take(self, source: str, names: list[bytes], seconds: float = 10.0) -> TransferEnded:
        self.woken.clear()
        self.heir.fetch(Wanted(1, source, names, list(range(len(names)))[::-1], seconds))
        assert self.woken.wait(10)
        (end,) = self.heir.take_events()
        return end


@pytest.fixture
def taker() -> Iterator[Taker]:
    taker = Taker()
    yield taker
    taker.heir.close()


@pytest.fixture
def path() -> Iterator[str]:
    file = os.memfd_create(f"{FILE_NAME}-test", os.MFD_CLOEXEC)
    yield f"/proc/{os.getpid()}/fd/{file}"
    os.close(file)


@pytest.fixture
def owner(path: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, path], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    )
    assert process.stdout is not None
    with process:
        yield process, process.stdout.readline().strip()
        process.kill()


@pytest.mark.timeout(60)
def test_blocks_of_a_killed_process_are_copied_and_those_of_a_living_one_are_not(
    owner: tuple[subprocess.Popen[str], str], taker: Taker, path: str
) -> None:
    process, address = owner
    alive = taker.take(address, NAMES)
    assert (alive.count, alive.outcome) == (0, TransferOutcome.LOST)
    assert alive.seconds > LIVING
    assert taker.take(address, NAMES).seconds < LIVING / 2, "nobody waits again"
    process.send_signal(signal.SIGKILL)  # and nobody waits for it: the lock says when it is gone
    fresh = Taker()
    assert fresh.take(address, NAMES[:1]).count == 1
    fresh.heir.close()
    end = taker.take(address, NAMES[:6])
    assert (end.count, end.outcome, end.num_bytes) == (5, TransferOutcome.WHOLE, 5 * 2 * SIZE)
    for block in range(5):
        assert (taker.parts[0][5 - block] == block + 1).all()
        assert (taker.parts[1][5 - block] == block + 101).all()
    assert taker.take(address, [NAMES[6]]).outcome is TransferOutcome.ABSENT
    assert taker.take(f"{DEAD}{path}#another", NAMES).outcome is TransferOutcome.LOST
    other = Taker("other identity")
    assert other.take(address, NAMES).outcome is TransferOutcome.LOST
    other.heir.close()
    release(path)
    assert os.stat(path).st_size == 0
    end = taker.take(address, NAMES)
    assert (end.count, end.outcome) == (0, TransferOutcome.LOST)


@pytest.mark.parametrize("source", ["/proc/1/fd/0#x", "/nothing/here#x", "", "/dev/zero#x"])
def test_other_files_are_not_opened(taker: Taker, source: str) -> None:
    end = taker.take(DEAD + source, NAMES)
    assert (end.count, end.outcome) == (0, TransferOutcome.LOST)


def test_two_owners_cannot_share_a_file(path: str) -> None:
    script = "import sys; from engine.inheritance.shared_cache import SharedCache; SharedCache(sys.argv[1])"
    here = SharedCache(path)
    here.reserve(BLOCKS)
    assert (here.zeros((BLOCKS, 3), torch.float32) == 0).all()
    done = subprocess.run(
        [sys.executable, "-c", script, path],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "BlockingIOError" in done.stderr
