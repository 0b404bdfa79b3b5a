"""The tier in files with its threads: what is written, found, and held."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.pieces.pool import PiecePool
from engine.tiers import file_tier
from engine.tiers.block_files import BlockFiles, file_bytes
from engine.tiers.file_tier import FileTier
from engine.transfers.block_memory import BlockMemory, CacheMemory
from engine.transfers.fetching import FILES, TransferEnded, TransferOutcome, Wanted
from tests.engine.copying_device import staged
from tests.waiting import PATIENCE

NAMES = [bytes([number]) * 16 for number in range(1, 60)]
NUM_BLOCKS = 64
WIDTHS = 96, 32


class Cache:
    """One instance's cache, with its tier."""

    memory_of: Callable[[Any], CacheMemory] = BlockMemory

    def __init__(self, root: Path, seed: int = 1, most_bytes: int = 1 << 20) -> None:
        draw = np.random.default_rng(seed)
        self.parts = [draw.integers(0, 255, (NUM_BLOCKS, width), dtype=np.uint8) for width in WIDTHS]
        self.pool = PiecePool(NUM_BLOCKS)
        self.files = BlockFiles(root, "model/class", "same")
        self.tier = FileTier(self.pool, self.memory_of(self.parts), self.files, most_bytes, lambda: None)
        self.tier.start()

    def compute(self, names: list[bytes]) -> list[int]:
        blocks = self.pool.take(len(names))
        assert blocks is not None
        for block, name in zip(blocks, names, strict=True):
            self.pool.name(block, name)
        self.pool.release(blocks)
        return blocks

    def turn(self) -> None:
        self.tier.turn(set)

    def write(self, names: list[bytes]) -> list[int]:
        blocks = self.compute(names)
        self.until(lambda: self.tier.count(names) == len(names))
        self.until(lambda: self.pool.num_used == 0)
        return blocks

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < deadline
            self.turn()
            time.sleep(0.001)

    def read(
        self, names: list[bytes], blocks: list[int], number: int = 1, seconds: float = 10.0
    ) -> TransferEnded:
        self.tier.fetch(Wanted(number, FILES, names, blocks, seconds))
        found: list[TransferEnded] = []

        def ended() -> bool:
            found.extend(self.tier.take_events())
            return bool(found)

        self.until(ended)
        return found[0]


@pytest.fixture(autouse=True, params=[BlockMemory, staged], ids=["host", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All caches are of one sort."""
    monkeypatch.setattr(Cache, "memory_of", staticmethod(request.param))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    made = Cache(tmp_path)
    yield made
    made.tier.close()


@pytest.fixture
def later(tmp_path: Path, cache: Cache) -> Iterator[Callable[[], Cache]]:
    """Makes caches of instances that start later."""
    made: list[Cache] = []

    def make() -> Cache:
        made.append(Cache(tmp_path, seed=2))
        return made[-1]

    yield make
    for each in made:
        each.tier.close()


def same(one: Cache, blocks: list[int], other: Cache, others: list[int]) -> bool:
    return all((a[blocks] == b[others]).all() for a, b in zip(one.parts, other.parts, strict=True))


def test_an_instance_that_starts_later_finds_what_was_computed(
    cache: Cache, later: Callable[[], Cache]
) -> None:
    blocks = cache.write(NAMES[:20])
    other = later()
    assert other.tier.count([*NAMES[:20], bytes(16)]) == 20
    target = list(range(40, 60))
    end = other.read(NAMES[:20], target)
    assert (end.outcome, end.count, end.num_bytes) == (TransferOutcome.WHOLE, 20, 20 * sum(WIDTHS))
    assert same(other, target, cache, blocks)
    counters = other.tier.counters()
    assert (counters.found_blocks, counters.queried_blocks) == (20, 21)
    assert counters.read_bytes == end.num_bytes
    assert cache.tier.counters().written_bytes == 20 * file_bytes(sum(WIDTHS))


def test_a_directory_that_others_can_change_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o770)
    with pytest.raises(PermissionError, match="chmod go-w"):
        Cache(tmp_path / "kv")
    assert not [each for each in threading.enumerate() if each.name.startswith(("kv-reader", "kv-writer"))]


def test_deletions_are_logged_with_their_number_and_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    cache = Cache(tmp_path)
    cache.write(NAMES[:9])
    cache.tier.forget(NAMES[:2])
    cache.tier.clear()
    cache.until(lambda: cache.tier.is_clear)
    cache.pool.unname(NAMES[:9])
    cache.write(NAMES[:6])
    cache.tier.close()
    Cache(tmp_path, most_bytes=4 * file_bytes(sum(WIDTHS))).tier.close()
    folder = cache.files.folder
    assert f"2 wrong files of KV blocks are deleted in {folder}" in caplog.messages
    assert f"7 files of KV blocks are deleted in {folder}" in caplog.messages
    assert f"3 files of KV blocks, used least lately, are deleted below {tmp_path}" in caplog.messages


def test_an_instance_that_closes_writes_what_waits(
    cache: Cache, later: Callable[[], Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_tier, "FLUSH", PATIENCE)  # a busy disk may take more than it has
    cache.compute(NAMES)
    cache.tier.close()
    assert later().tier.count(NAMES) == len(NAMES)
    assert cache.pool.num_used == 0


def test_a_flipped_bit_costs_only_its_block(cache: Cache) -> None:
    blocks = cache.write(NAMES[:9])
    path = cache.files.path(NAMES[5])
    data = bytearray(path.read_bytes())
    data[-3] ^= 16
    path.write_bytes(data)
    target = list(range(40, 49))
    end = cache.read(NAMES[:9], target)
    assert (end.outcome, end.count, end.for_good) == (TransferOutcome.WRONG, 5, False)
    assert same(cache, target[:5], cache, blocks[:5])
    assert not path.exists()
    assert cache.tier.count(NAMES[:9]) == 5


def test_a_file_that_is_deleted_meanwhile_is_not_there(cache: Cache) -> None:
    cache.write(NAMES[:4])
    for gone, count, outcome in ((NAMES[2], 2, TransferOutcome.WHOLE), (NAMES[0], 0, TransferOutcome.ABSENT)):
        cache.files.drop(gone)
        end = cache.read(NAMES[:4], [50, 51, 52, 53])
        assert (end.outcome, end.count) == (outcome, count)


def test_a_file_that_cannot_be_read_is_counted(cache: Cache) -> None:
    cache.write(NAMES[:2])
    path = cache.files.path(NAMES[1])
    path.unlink()
    path.mkdir()
    end = cache.read(NAMES[:2], [50, 51])
    assert (end.outcome, end.count) in ((TransferOutcome.LOST, 1), (TransferOutcome.WRONG, 1))


def test_a_full_disk_is_counted_and_holds_nothing(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int, _parts: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    cache.compute(NAMES[:30])
    cache.until(lambda: cache.tier.counters().write_failures > 0 and cache.pool.num_used == 0)
    assert cache.tier.count(NAMES[:1]) == 0
    assert cache.tier.counters().skipped_blocks > 0


def test_a_disk_that_hangs_holds_few_blocks_and_no_step(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, writev = threading.Event(), os.writev

    def hang(descriptor: int, parts: list[memoryview]) -> int:
        goes_on.wait(PATIENCE)
        return writev(descriptor, parts)

    monkeypatch.setattr(os, "writev", hang)
    cache.compute(NAMES[:30])
    for _ in range(50):
        cache.turn()
    assert cache.pool.num_used == cache.tier.policy.num_held == NUM_BLOCKS // file_tier.WINDOW_PART
    goes_on.set()
    cache.until(lambda: cache.tier.count(NAMES[:30]) == 30)


def test_a_read_can_be_cancelled_and_is_not_begun_after_its_time(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write(NAMES[:3])
    assert cache.read(NAMES[:3], [50, 51, 52], seconds=-1.0).outcome is TransferOutcome.CANCELLED
    began, goes_on, read = threading.Event(), threading.Event(), cache.files.read
    names_begun: list[bytes] = []

    def slow(name: bytes, parts: list[memoryview]) -> None:
        names_begun.append(name)
        began.set()
        goes_on.wait(PATIENCE)
        read(name, parts)

    monkeypatch.setattr(cache.files, "read", slow)
    cache.tier.fetch(Wanted(7, FILES, NAMES[:3], [50, 51, 52], 10.0))
    assert began.wait(PATIENCE)
    cache.tier.cancel(7)
    goes_on.set()
    ends: list[TransferEnded] = []

    def ended() -> bool:
        ends.extend(cache.tier.take_events())
        return bool(ends)

    cache.until(ended)
    # usually one: a second reader begins as well if it was not asleep yet
    assert (ends[0].outcome, ends[0].count) == (TransferOutcome.CANCELLED, len(names_begun))
    assert len(names_begun) <= file_tier.READERS < 3


def test_a_directory_does_not_outgrow_its_bound(tmp_path: Path) -> None:
    cache = Cache(tmp_path, most_bytes=10 * (sum(WIDTHS) + 32))
    try:
        for first in range(0, 48, 8):
            cache.compute(NAMES[first : first + 8])
            cache.until(lambda: cache.pool.num_used == 0 and len(cache.tier.policy) == 0)
        assert 5 <= len(list(tmp_path.rglob("*.kv"))) <= 10
        counters = cache.tier.counters()
        assert counters.dropped_files >= 38
        assert counters.directory_bytes <= 10 * file_bytes(sum(WIDTHS))
    finally:
        cache.tier.close()


def test_clearing_leaves_no_file_and_begins_anew(cache: Cache) -> None:
    cache.write(NAMES[:6])
    cache.tier.clear()
    assert cache.tier.count(NAMES[:6]) == 0
    cache.until(lambda: cache.tier.is_clear)
    assert not list(cache.files._root.rglob("*.kv"))
    cache.pool.unname(NAMES[:6])
    cache.write(NAMES[:6])


def test_blocks_that_others_write_are_found_after_a_while(
    cache: Cache, later: Callable[[], Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_tier, "RESCAN", 0.02)
    other = later()
    cache.write(NAMES[:3])
    other.until(lambda: other.tier.count(NAMES[:3]) == 3)


def test_a_tier_that_is_abandoned_reads_and_writes_nothing(
    cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write(NAMES[:4])
    cache.tier.abandon()
    assert "is not used any more: empty it, and see who else can write there" in caplog.text
    assert cache.tier.count(NAMES[:4]) == 0
    cache.compute(NAMES[4:8])
    cache.turn()
    assert not len(cache.tier.policy)
    assert not cache.tier.policy.num_held
    assert len(cache.files.names()) == 4, "somebody may want to look at them"


def test_only_what_this_instance_has_written_is_dropped(cache: Cache, tmp_path: Path) -> None:
    other = Cache(tmp_path)
    other.write(NAMES[:3])
    other.tier.close()
    cache.write(NAMES[3:7])
    cache.tier.drop_written()
    cache.until(lambda: cache.files.names() == set(NAMES[:3]))
    assert cache.tier.count(NAMES[3:7]) == 0
    cache.pool.unname(NAMES)
    cache.write(NAMES[3:7])
    assert cache.tier.count(NAMES[3:7]) == 4, "it goes on writing"
