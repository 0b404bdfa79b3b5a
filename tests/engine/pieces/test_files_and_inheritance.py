"""Toy states read from files of another instance, and inherited from a killed one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.inheritance.heir import Heir
from engine.inheritance.names import FILE_NAME
from engine.tiers.block_files import BlockFiles
from engine.tiers.file_tier import FileTier
from engine.transfers.fetching import FILES, TransferEnded, TransferOutcome, Wanted
from tests.engine.pieces.toy_cache import (
    KINDS,
    NUM_BLOCKS,
    NUM_STATES,
    STATE_WIDTHS,
    WIDTHS,
    ToyCache,
    chain,
)
from tests.waiting import PATIENCE


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Tiered:
    """A toy cache with files."""

    def __init__(self, root: Path, seed: int = 1) -> None:
        self.cache = ToyCache(seed)
        self.files = BlockFiles(root, "model/class", "same")
        self.tier = FileTier(self.cache.pool, self.cache.memory, self.files, 1 << 20, lambda: None)
        self.tier.start()

    def turn(self) -> bool:
        self.tier.turn(set)
        return True

    def read(self, links: list[bytes], blocks: list[int], boundary: list[int]) -> TransferEnded:
        self.tier.fetch(Wanted(1, FILES, links, blocks, 10.0, boundary=boundary))
        found: list[TransferEnded] = []
        until(lambda: self.turn() and (found.extend(self.tier.take_events()) or bool(found)))
        return found[0]


def test_states_are_written_to_files_and_read_with_the_blocks_before_them(tmp_path: Path) -> None:
    first, links = Tiered(tmp_path), chain(8)
    first.cache.compute(links, [4, 8])
    until(lambda: first.turn() and len(first.files.names()) == 8 + 2)
    first.tier.close()

    second = Tiered(tmp_path, seed=2)
    assert second.tier.count([*links, bytes(16)]) == 8
    blocks, boundary = list(range(10, 18)), [NUM_BLOCKS + 3]
    end = second.read(links, blocks, boundary)
    assert (end.outcome, end.count) == (TransferOutcome.WHOLE, 9)
    assert end.num_bytes == 8 * sum(WIDTHS) + sum(STATE_WIDTHS)
    names, slots = KINDS.placed(links, blocks, boundary)
    for name, slot in zip(names, slots, strict=True):
        assert second.cache.bytes_in(slot) == first.cache.bytes_of(name)

    second.tier.forget(KINDS.boundary_names(links[7]))
    assert second.tier.count(links) == 4, "a context goes on behind a state only"
    second.tier.forget(KINDS.boundary_names(links[3]))
    assert second.tier.count(links) == 0
    second.tier.close()


def test_a_wrong_file_of_a_state_is_found(tmp_path: Path) -> None:
    first, links = Tiered(tmp_path), chain(2)
    first.cache.compute(links, [2])
    until(lambda: first.turn() and len(first.files.names()) == 3)
    (state,) = KINDS.boundary_names(links[1])
    path = first.files.path(state)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    end = first.read(links, [10, 11], [NUM_BLOCKS + 3])
    assert (end.outcome, end.count) == (TransferOutcome.WRONG, 2)
    assert not path.exists()
    first.tier.close()


OWNER = f"""
import sys, time, torch
from engine.inheritance.shared_cache import SharedCache
from tests.engine.pieces.toy_cache import KINDS, ToyCache, chain
toy = ToyCache()
toy.compute(chain(8), [4, 8])
cache = SharedCache(sys.argv[1])
cache.reserve({NUM_BLOCKS}, {NUM_STATES})
stored = []
for tensors in (toy.blocks, toy.states):
    stored.append([cache.zeros(each.shape, torch.uint8) for each in tensors])
    for to, each in zip(stored[-1], tensors):
        to.copy_(torch.from_numpy(each))
table = cache.table("identity", *stored)
for name in toy.pool.known:
    table.set(toy.pool.slot_of(name), name)
print(cache.address, flush=True)
time.sleep(60)
"""


@pytest.mark.timeout(60)
def test_states_of_a_killed_process_are_inherited() -> None:
    file = os.memfd_create(f"{FILE_NAME}-test", os.MFD_CLOEXEC)
    command = [sys.executable, "-c", OWNER, f"/proc/{os.getpid()}/fd/{file}"]
    dead, cache, woken = ToyCache(), ToyCache(seed=2), threading.Event()
    links = chain(8)
    dead.compute(links, [4, 8])
    heir = Heir(cache.memory, "identity", woken.set, cache.pool.kinds)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as owner:
        assert owner.stdout is not None
        address = owner.stdout.readline().strip()
        owner.send_signal(signal.SIGKILL)
        blocks, boundary = list(range(12, 19)), [NUM_BLOCKS + 5]
        heir.fetch(Wanted(1, address, links[:7], blocks, 10.0, boundary=boundary))
        assert woken.wait(10)
        (end,) = heir.take_events()
        heir.close()
    os.close(file)
    assert (end.outcome, end.count) == (TransferOutcome.WHOLE, 5), "up to the last state of these"
    assert (end.names, end.slots) == KINDS.placed(links[:4], blocks, boundary)
    assert end.num_bytes == 4 * sum(WIDTHS) + sum(STATE_WIDTHS)
    for name, slot in zip(end.names, end.slots, strict=True):
        assert cache.bytes_in(slot) == dead.bytes_of(name)
