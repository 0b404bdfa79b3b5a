"""No healthy source is blamed, whatever happens to the cache and to the steps.

Requests of each family find 150 cached blocks for each push, and 4,000 at night: 20,000 of all five. Nearly each
request has one checked. ``LOCKSTEP_HITS`` is another number.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from engine.core.cache_sharing import CacheSharing
from engine.kernels.core import library
from engine.messages import Submit, TransferCounters
from engine.scheduling.step_making import filled_by
from engine.transfers import checking
from engine.transfers.mover import BlockMover
from tests.engine.invariance.answers import ALONE, PEER, Answers, How, Instance, load
from tests.engine.invariance.mixed import longest_of, requests
from tests.engine.invariance.test_table import HYBRIDS, VOCAB, directory_of
from tests.engine.pieces.toy import ToyBench
from tests.engine.scheduling.test_scheduler import tokens
from tests.engine.simulated_executor import expected_output
from tests.engine.states.serving import Serving, serve
from tests.engine.transfers.test_bits import is_cheap
from tests.nightly import NIGHTLY
from tests.waiting import PATIENCE

pytestmark = [
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
    pytest.mark.timeout(1500),
]
__all__ = ["is_cheap"]
HITS = int(os.environ.get("LOCKSTEP_HITS", "4000" if NIGHTLY else "150"))
FAMILIES = [
    "llama",
    "mistral",
    "qwen3_next",
    pytest.param("nemotron_h", marks=pytest.mark.nightly),
    pytest.param("lfm2_moe", marks=pytest.mark.nightly),
]
SETS = 3
"""Sets of requests that come again and again."""


@pytest.fixture(autouse=True)
def checks_each_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "CHECK_INTERVAL", 2)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Instance, Instance]:
    torch.set_num_threads(1)
    directory = directory_of(request.param, tmp_path_factory)
    device = {"batch_invariant": True} if request.param in HYBRIDS else {}
    return load(directory, **device), load(directory, **device)


@pytest.fixture(scope="module")
def sets(pair: tuple[Instance, Instance]) -> list[tuple[Sequence[Submit], Answers]]:
    """Requests of all kinds, with their answers alone."""
    found = []
    for seed in range(SETS):
        drawn = requests(seed, count=20, vocab_size=VOCAB, longest=200, most=30)
        submits = [msgspec.structs.replace(each, request=each.request + 100 * seed) for each in drawn]
        found.append((submits, pair[0].answers(submits, ALONE)[0]))
    return found


@pytest.fixture
def both(
    pair: tuple[Instance, Instance], sets: list[tuple[Sequence[Submit], Answers]], tmp_path: Path
) -> Iterator[tuple[Serving, Serving]]:
    """A source, and a taker with scarce room, chunks, drafts and files."""
    submits = [each for group, _ in sets for each in group]
    drafts = {number: answer for _, alone in sets for number, answer in alone.items()}
    how = How(cache=longest_of(submits) // 16 * 16 + 128, budget=40, drafts=drafts, states=12)
    made = Serving(pair[0]), Serving(pair[1], files=tmp_path, check_interval=1, how=how, submits=submits)
    yield made
    for each in made:
        each.close()


def test_no_healthy_source_is_blamed(
    both: tuple[Serving, Serving], sets: list[tuple[Sequence[Submit], Answers]]
) -> None:
    """With chunks, drafts, preemptions, resets, fetched blocks and files; answers are those of each alone."""
    source, taker = both
    chance, number = random.Random(7), 0
    deadline = time.monotonic() + (1200 if HITS > 1000 else PATIENCE)
    while taker.core.scheduler.counters().prefix_cache_hits // 16 < HITS:
        assert time.monotonic() < deadline
        submits, alone = sets[number % SETS]
        salt = chance.choice(["", "", "salted"])
        again = [msgspec.structs.replace(each, cache_salt=salt) for each in chance.sample(submits, 12)]
        if chance.random() < 0.5:
            source.submit(again)
            serve(source)
        taker.submit(again, source.mover.address)
        while not taker.core.is_empty or taker.core.sharing.is_lending:
            assert time.monotonic() < deadline
            taker.turn()
            source.core.take_fetched()  # it lends
            if chance.random() < 0.004:
                number += 1
                taker.core.sharing.reset(PEER, number)
        taker.core.sharing.take_resets()
        for each in again:
            assert taker.found[each.request] == alone[each.request]
        number += 1
    counters = taker.counters
    check(counters, HITS)
    assert taker.core.scheduler.counters().preemptions > 0
    assert taker.core.scheduler.counters().drafted_tokens > 0
    assert counters.checked_blocks > 0
    exchange = taker.core.sharing.exchange
    assert exchange is not None
    assert exchange.sources.trusts(source.mover.address)
    while taker.core.reports.report(0, 0).blocks_used:  # some are on their way to files
        assert time.monotonic() < deadline
        taker.turn()


def check(counters: TransferCounters, hits: int) -> None:
    """Assert that many pieces of several sources were compared, and none was wrong."""
    print(counters.spot_checked, counters.checked_blocks)
    assert counters.wrong_blocks == sum(counters.spot_wrong.values()) == 0
    assert sum(counters.spot_checked.values()) > hits / 40


class CheckedToy(ToyBench):
    """A toy with several kinds of states, whose cache is checked."""

    def __init__(self, num_kinds: int) -> None:
        super().__init__(num_blocks=60, num_states=9, num_kinds=num_kinds, budget=24)
        self.mover = BlockMover(
            self.memory(), "same", "tcp://127.0.0.1:0", None, lambda: None, self.pool.kinds
        )
        self.mover.start()
        self.sharing = CacheSharing(self.pool, self.scheduler, self.block_size, 1)
        self.sharing.exchange_blocks(
            self.mover, address="", identity="same", token_bytes=16.0, checks=True, check_interval=1
        )

    def begin(self) -> None:
        self.sharing.take_fetched(lambda _: None)
        self.sharing.begin_check()
        super().begin()

    def step(self) -> int:
        self.begin()
        if not self.under_way:
            return 0
        step = self.under_way.popleft()
        result = self.executor.finish()
        self.sharing.check(filled_by(step))
        for outcome in self.scheduler.update(step, result):
            self.outputs[outcome.request.key[1]] += outcome.token_ids
        self.spoil_free()
        return step.num_tokens


@pytest.mark.parametrize("num_kinds", [1, 2, 3])
def test_no_healthy_piece_of_several_kinds_is_blamed(num_kinds: int) -> None:
    toy, chance = CheckedToy(num_kinds), random.Random(3)
    try:
        running: deque[tuple[int, list[int], int]] = deque()
        while toy.scheduler.counters().prefix_cache_hits // toy.block_size < HITS:
            prompt, most = tokens(chance.randrange(4), chance.randrange(1, 90)), chance.randrange(1, 9)
            running.append((toy.add(prompt, most), prompt, most))
            for _ in range(chance.randrange(16)):
                toy.step()
            if chance.random() < 0.02:
                toy.sharing.reset(PEER, 1)
            if chance.random() < 0.05 and running:
                toy.scheduler.abort((PEER, running.pop()[0]))
            while len(running) > 5:
                number, prompt, most = running.popleft()
                while len(toy.outputs[number]) < most:
                    toy.step()
                assert toy.outputs.pop(number) == expected_output(prompt, most)
        while toy.scheduler.queues.has_work or toy.sharing.wants_check:
            toy.step()
        exchange = toy.sharing.exchange
        assert exchange is not None
        check(exchange.counters(), HITS)
        assert (toy.pool.num_used, toy.pool.num_free_boundaries) == (0, 9)
    finally:
        toy.mover.close()
