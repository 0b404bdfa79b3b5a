"""Blocks whose shards lie in the memory of other processes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from engine.executor import shard_memory
from engine.executor.messages import CacheAt
from engine.executor.shard_memory import ShardMemory, WorkerCache
from engine.transfers.block_memory import CacheGone
from engine.transfers.fetching import TransferEnded, TransferOutcome, Wanted
from engine.transfers.identity import CacheFacts, identity_of
from engine.transfers.lending import Lookup
from engine.transfers.mover import BlockMover
from engine.transfers.piece_memory import PieceMemory
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory of workers is reached on Linux only")
NUM_BLOCKS = 9
WORKER = """
import ctypes, sys
steps, sizes = ctypes.c_int64(0), [int(text) for text in sys.argv[2:]]
tensors = [(ctypes.c_uint8 * (size * int(sys.argv[1])))() for size in sizes]
print(ctypes.addressof(steps), *map(ctypes.addressof, tensors), flush=True)
for line in sys.stdin:
    match line.split():
        case ["done"]:
            steps.value += 1
            print(steps.value, flush=True)
        case ["tell", tensor, block]:
            begin = int(block) * sizes[int(tensor)]
            print(bytes(tensors[int(tensor)])[begin : begin + sizes[int(tensor)]].hex(), flush=True)
"""


class FakeWorker:
    """A process with a cache, and no model."""

    def __init__(self, name: str, sizes: Sequence[int]) -> None:
        command = [sys.executable, "-c", WORKER, str(NUM_BLOCKS), *map(str, sizes)]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ended = os.pidfd_open(self.child.pid)
        assert self.child.stdout is not None
        steps, *tensors = map(int, self.child.stdout.readline().split())
        cache = CacheAt(steps, list(zip(tensors, sizes, strict=True)))
        self.cache = WorkerCache(name, self.child.pid, self.ended, cache)

    def ask(self, line: str) -> str:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        print(line, file=self.child.stdin, flush=True)
        return self.child.stdout.readline().strip()

    def end(self) -> None:
        self.child.kill()
        self.child.wait()
        for stream in (self.child.stdin, self.child.stdout):
            assert stream is not None
            stream.close()
        os.close(self.ended)


class Cache:
    """The cache of an instance with such workers."""

    def __init__(self, layouts: Sequence[Sequence[int]]) -> None:
        self.workers = [FakeWorker(f"Worker_{rank}", sizes) for rank, sizes in enumerate(layouts)]
        self.num_finished = 0
        caches = [worker.cache for worker in self.workers]
        self.memory = ShardMemory(caches, NUM_BLOCKS, lambda: self.num_finished)

    def end(self) -> None:
        for worker in self.workers:
            worker.end()


Make = Callable[..., Cache]


@pytest.fixture
def make() -> Iterator[Make]:
    caches: list[Cache] = []

    def made(*layouts: Sequence[int]) -> Cache:
        caches.append(Cache(layouts))
        return caches[-1]

    yield made
    for each in caches:
        each.end()


def test_a_block_is_its_shards_by_rank(make: Make) -> None:
    cache = make((64, 40), (8, 100, 5000))
    memory = cache.memory
    assert memory.problem() == ""
    assert (memory.layout, memory.shards) == ((64, 40, 8, 100, 5000), (2, 3))
    assert memory.block_bytes == 5212
    data = np.random.default_rng(1).integers(0, 256, (2, 5212), dtype=np.uint8)
    memory.write(7, data[0].data)
    with memory.filling(2) as parts:
        (part,) = parts
        part[:] = data[1].data
    assert (memory.read([2, 7, 2]) == data[[1, 0, 1]]).all()
    assert bytes(memory.parts_of(7)[0]) == data[0].tobytes()
    assert not memory.read([0, 1, 3, 6, 8]).any(), "no other block is touched"
    assert cache.workers[0].ask("tell 1 7") == data[0, 64:104].tobytes().hex()
    assert cache.workers[1].ask("tell 0 2") == data[1, 104:112].tobytes().hex()
    assert cache.workers[1].ask("tell 2 8") == bytes(5000).hex()


def test_pieces_of_a_further_kind_are_their_shards_too(make: Make) -> None:
    """A stage without such layers has no tensors of that kind."""
    cache = make((64, 40), (8,))
    (first, second), size = (worker.cache for worker in cache.workers), 40
    blocks, states = first.cache.tensors[:1], first.cache.tensors[1:]
    split = replace(first, cache=CacheAt(first.cache.steps, blocks, [states]))
    without = replace(second, cache=CacheAt(second.cache.steps, second.cache.tensors, [[]]))
    regions = [ShardMemory([split, without], NUM_BLOCKS, lambda: 0, kind) for kind in (0, 1)]
    memory = PieceMemory(regions)
    assert (memory.layout, memory.shards) == ((64, 8, size), (1, 1, 1, 0))
    data = np.random.default_rng(2).integers(0, 256, size, dtype=np.uint8)
    memory.write(NUM_BLOCKS + 4, data.data)
    assert cache.workers[0].ask("tell 1 4") == data.tobytes().hex()
    assert (memory.read([NUM_BLOCKS + 4])[0] == data).all()
    assert not memory.read([3, 4, 5]).any(), "no block is touched"


def test_nothing_is_in_the_cache_before_its_bytes_are_right(make: Make) -> None:
    memory = make((16,)).memory

    def torn() -> None:
        with memory.filling(3) as parts:
            parts[0][:] = bytes([7]) * 16
            raise ValueError("a wrong digest")

    with pytest.raises(ValueError, match="digest"):
        torn()
    assert not memory.read([3]).any()


def test_more_tensors_than_one_call_takes(make: Make) -> None:
    memory = make([8] * (2 * shard_memory.MOST_PIECES + 3)).memory
    row = np.random.default_rng(2).integers(0, 256, memory.block_bytes, dtype=np.uint8)
    memory.write(4, row.data)
    assert (memory.read([4])[0] == row).all()


def test_a_copy_waits_until_all_workers_have_ended_the_step(make: Make) -> None:
    cache = make((8,), (8,))
    cache.num_finished = 1
    cache.workers[0].ask("done")
    copied = threading.Event()

    def read() -> None:
        cache.memory.read([0])
        copied.set()

    reading = threading.Thread(target=read)
    reading.start()
    assert not copied.wait(0.1)
    cache.workers[1].ask("done")
    reading.join(10)
    assert copied.is_set()


def test_a_worker_that_does_not_end_its_step_is_not_awaited_for_ever(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_memory, "SETTLE_TIMEOUT", 0.05)
    cache = make((8,))
    cache.num_finished = 1
    with pytest.raises(CacheGone, match="Worker_0 is at step 0, not 1"):
        cache.memory.write(0, bytes(8))
    cache.workers[0].ask("done")
    assert not cache.memory.read([0]).any()


def test_the_memory_of_a_worker_that_has_ended_is_gone(make: Make) -> None:
    cache = make((8,), (8,))
    cache.workers[1].child.kill()
    cache.workers[1].child.wait()  # its number may be another process's from now on
    for use in (lambda: cache.memory.read([0]), lambda: cache.memory.write(0, bytes(16))):
        with pytest.raises(CacheGone, match="Worker_1 has ended"):
            use()
    assert "Worker_1 has ended" in cache.memory.problem()


@pytest.mark.parametrize("dies", [None, "source", "taker"])
def test_movers_copy_shards_and_a_worker_that_dies_costs_its_transfer_only(
    make: Make, dies: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    caches = [make((3000, 40), (8, 100)) for _ in range(2)]
    names = [bytes([number]) * 16 for number in range(4)]
    rows = np.random.default_rng(3).integers(0, 256, (4, caches[0].memory.block_bytes), dtype=np.uint8)
    for block, row in enumerate(rows):
        caches[0].memory.write(block, row.data)
    source, taker = (
        BlockMover(each.memory, "same", "tcp://127.0.0.1:0", None, lambda: None) for each in caches
    )
    try:
        source.start()
        taker.start()
        if dies is not None:
            worker = caches[dies == "taker"].workers[1].child
            worker.kill()
            worker.wait()
        taker.fetch(Wanted(1, source.address, names, [8, 7, 6, 5], 5.0))
        ends: list[TransferEnded] = []

        def is_over() -> bool:
            for event in source.take_events():
                if isinstance(event, Lookup):
                    source.found(event.loan, [0, 1, 2, 3])
            ends.extend(each for each in taker.take_events() if isinstance(each, TransferEnded))
            return bool(ends) or taker.has_ended

        until(is_over)
        if dies is None:
            assert (ends[0].count, ends[0].outcome) == (4, TransferOutcome.WHOLE)
            assert (caches[1].memory.read([8, 7, 6, 5]) == rows).all()
        elif dies == "source":
            assert ends[0].count == 0
            until(lambda: source.has_ended)
        else:
            assert not ends, "no transfer is reported"
        assert "Traceback" not in caplog.text
        assert ("no KV blocks are fetched or lent any more: Worker_1 has ended" in caplog.text) == (
            dies is not None
        )
    finally:
        for each in (source, taker):
            each.close()


def test_caches_of_one_worker_and_of_two_take_nothing_from_each_other(make: Make) -> None:
    """Though their blocks have the same bytes, and nobody else says that they differ."""
    caches = make((64, 64)), make((64,), (64,))
    movers = []
    for ranks, cache in enumerate(caches, 1):
        memory = cache.memory
        facts = CacheFacts(
            numerics="fp_1", dtype="bfloat16", block_size=16, layout=memory.layout, shards=memory.shards,
            tensor_parallel_size=ranks,
        )  # fmt: skip
        movers.append(BlockMover(memory, identity_of(facts), "tcp://127.0.0.1:0", None, lambda: None))
    began = time.monotonic()
    try:
        for each in movers:
            each.start()
        for taker, source in (movers, movers[::-1]):
            taker.fetch(Wanted(1, source.address, [bytes(16)], [0], 5.0))
            ends: list[TransferEnded] = []

            def is_over(
                taker: BlockMover = taker, source: BlockMover = source, ends: list[TransferEnded] = ends
            ) -> bool:
                assert not source.take_events(), "it is not even looked up"
                ends.extend(each for each in taker.take_events() if isinstance(each, TransferEnded))
                return bool(ends)

            until(is_over)
            assert (ends[0].count, ends[0].outcome, ends[0].for_good) == (0, TransferOutcome.REFUSED, True)
    finally:
        for each in movers:
            each.close()
    assert time.monotonic() - began < 4.0, "at once, not when the transfer is overdue"
