"""A disk that hangs: an instance goes on computing, with nearly all of its cache."""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.messages import FileCounters
from engine.pieces.pool import BlockHash, hash_block
from engine.tiers import file_tier
from engine.tiers.block_files import BlockFiles
from engine.tiers.file_tier import READERS, FileTier
from engine.transfers import sources
from engine.transfers.block_memory import BlockMemory
from engine.transfers.price import FetchPrice
from tests.engine.core.test_engine_core import INFO, PEER, submit
from tests.engine.simulated_executor import VOCAB, SimulatedExecutor, expected_output
from tests.engine.transfers.test_exchange import FakeMover
from tests.waiting import until

SIZE, NUM_BLOCKS, WIDTH = 16, 300, 96
KNOWN = [[first, *range(30)] * 23 for first in range(30, 40)]
"""Prompts of 713 tokens, whose 44 full blocks have files."""
NEW = [7, 3, 5] * 300
"""One of 900 tokens, which no file has."""


def names_of(prompt: list[int]) -> list[BlockHash]:
    names: list[BlockHash] = []
    for start in range(0, (len(prompt) - 1) // SIZE * SIZE, SIZE):
        names.append(hash_block(names[-1] if names else None, prompt[start : start + SIZE]))
    return names


class Serving:
    """An instance of 300 blocks, whose prompts of some kind have files."""

    def __init__(self, root: Path) -> None:
        config = EngineConfig(
            cache=CacheConfig(block_size=SIZE),
            scheduler=SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=64),
        )
        executor: Any = SimulatedExecutor(block_size=SIZE, budget=512, max_rows=64)
        info = msgspec.structs.replace(INFO, context_length=2048)
        self.core = EngineCore(config, info, executor, num_blocks=NUM_BLOCKS, max_model_len=2048)
        self.memory = BlockMemory([np.zeros((NUM_BLOCKS, WIDTH), dtype=np.uint8)])
        self.files = BlockFiles(root, "model/class", "same")
        self.files.prepare()
        for prompt in KNOWN:
            for name in names_of(prompt):
                self.files.write(name, [memoryview(bytes(WIDTH))])
        self.tier = FileTier(self.core.pool, self.memory, self.files, 1 << 30, lambda: None)
        self.tier.start()
        self.core.sharing.exchange_blocks(
            FakeMover(), address="", identity="same", token_bytes=8.0, tier=self.tier
        )
        self.answers: defaultdict[int, list[int]] = defaultdict(list)
        self.asked: dict[int, list[int]] = {}

    def ask(self, prompt: list[int]) -> None:
        number = len(self.asked) + 1
        self.asked[number] = prompt
        assert self.core.submit(PEER, submit(number, prompt_ids=prompt)) is None

    def turn(self) -> None:
        self.core.take_fetched()
        if self.core.has_work:
            for delta in self.core.step().get(PEER, ()):
                self.answers[delta.request] += delta.token_ids

    def serve(self, seconds: float) -> None:
        """Serve all that was asked."""

        def is_done() -> bool:
            self.turn()
            return self.core.is_empty

        until(is_done, seconds)
        for number, prompt in self.asked.items():
            assert self.answers[number] == expected_output(prompt, 4)

    @property
    def counters(self) -> FileCounters:
        files = self.core.reports.report(0, 0).files
        assert files is not None
        return files


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    monkeypatch.setattr(sources, "LEAST_SECONDS", 0.05)
    monkeypatch.setattr(sources, "MOST_SECONDS", 0.05)
    monkeypatch.setattr(sources, "FetchPrice", Cheap)
    assert VOCAB > 40
    made = Serving(tmp_path)
    yield made
    made.tier.close()


class Cheap(FetchPrice):
    """Reads whatever reading has cost before."""

    def pays(self, tokens: int, now: float) -> bool:
        return tokens > 0


def test_readers_that_hang_keep_a_block_each_and_new_prompts_are_served(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.tiers.reads.HANGS", 0.02)
    goes_on, read = threading.Event(), serving.files.read

    def stop(name: BlockHash, parts: list[memoryview]) -> None:
        goes_on.wait()
        read(name, parts)

    monkeypatch.setattr(serving.files, "read", stop)
    try:
        for prompt in KNOWN:
            serving.ask(prompt)
        serving.serve(20.0)
        serving.ask(NEW)
        serving.serve(20.0)
        until(lambda: serving.turn() or serving.core.pool.num_used <= READERS)  # the rest is written
        assert not serving.core.sharing.is_lending
        until(lambda: serving.turn() or serving.counters.hung_seconds > 0)
        assert serving.tier.count(names_of(KNOWN[0])) == 0, "nothing is asked of a disk that hangs"
        assert "hangs: prompts are computed until it answers" in caplog.text
    finally:
        goes_on.set()
    with caplog.at_level(logging.WARNING):
        until(lambda: serving.turn() or serving.core.pool.num_used == 0)
    assert serving.counters.hung_seconds == 0
    assert "answers again" in caplog.text
    assert serving.tier.count(names_of(KNOWN[0])) == len(names_of(KNOWN[0]))
    serving.core.pool.unname(list(serving.core.pool.known))
    before = serving.counters.read_bytes
    serving.ask(KNOWN[0])
    until(lambda: serving.core.take_fetched() or serving.counters.read_bytes > before)


def test_a_fifo_in_the_place_of_a_block_is_not_opened(serving: Serving) -> None:
    for prompt in KNOWN:
        path = serving.files.path(names_of(prompt)[0])
        path.unlink()
        os.mkfifo(path)
        serving.ask(prompt)
    serving.ask(NEW)
    serving.serve(20.0)
    until(lambda: serving.turn() or serving.core.pool.num_used == 0)  # some blocks are written
    assert serving.counters.read_failures > 0
    assert serving.counters.hung_seconds == 0


def test_a_writer_that_hangs_is_reported_and_stops_reads(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_tier, "WRITE_HANGS", 0.02)
    goes_on, write = threading.Event(), serving.files.write

    def stop(name: BlockHash, parts: list[memoryview]) -> None:
        goes_on.wait()
        write(name, parts)

    monkeypatch.setattr(serving.files, "write", stop)
    try:
        serving.ask(NEW)
        serving.serve(20.0)
        until(lambda: serving.turn() or serving.counters.hung_seconds > 0)
        assert serving.tier.count(names_of(KNOWN[0])) == 0
    finally:
        goes_on.set()
    until(lambda: serving.turn() or serving.counters.hung_seconds == 0)
    assert serving.tier.count(names_of(KNOWN[0])) > 0


def test_an_instance_starts_on_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_tier, "FIRST_LOOK", 0.02)
    monkeypatch.setattr(file_tier, "WRITE_HANGS", 0.02)
    goes_on, prepare = threading.Event(), BlockFiles.prepare
    calls: list[BlockFiles] = []

    def stop(files: BlockFiles) -> None:
        calls.append(files)
        if len(calls) > 1:  # the first one is this test's own
            goes_on.wait()
        prepare(files)

    monkeypatch.setattr(BlockFiles, "prepare", stop)
    made = Serving(tmp_path)
    try:
        assert "takes long to list" in caplog.text
        made.ask(NEW)
        made.serve(20.0)
        until(lambda: made.turn() or made.counters.hung_seconds > 0)
    finally:
        goes_on.set()
    until(lambda: made.turn() or made.tier.count(names_of(KNOWN[0])) > 0)
    made.tier.close()


def test_wrong_files_are_deleted_beside_the_step_loop(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, drop = threading.Event(), serving.files.drop

    def stop(name: BlockHash) -> None:
        goes_on.wait()
        drop(name)

    monkeypatch.setattr(serving.files, "drop", stop)
    name = names_of(KNOWN[0])[0]
    waits = threading.Timer(20.0, goes_on.set)
    waits.start()
    serving.tier.forget([name])
    assert not goes_on.is_set(), "the step loop has waited for the disk"
    goes_on.set()
    waits.cancel()
    until(lambda: not serving.files.path(name).exists())
