"""Prefixes that were read from files give the bits of computed ones."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engine.core import EngineCore
from engine.kernels.core import library
from engine.messages import Submit
from engine.tiers.block_files import BlockFiles
from engine.tiers.file_tier import FileTier
from engine.transfers import price
from engine.transfers.mover import BlockMover
from tests.engine.copying_device import load_on_device
from tests.engine.invariance.answers import ALONE, PEER, Answer, Answers, How, Instance, load, step
from tests.engine.invariance.mixed import requests
from tests.engine.invariance.test_table import VOCAB, directory_of
from tests.waiting import PATIENCE

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")


@pytest.fixture(autouse=True)
def is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read even the little that tiny models compute faster."""
    monkeypatch.setattr(price, "WORTH", float("inf"))
    monkeypatch.setattr(price, "FEWEST", 16)


class Serving:
    """An instance with files, from its start to its end."""

    def __init__(self, instance: Instance, root: Path) -> None:
        self.core: EngineCore = instance.core(How(cache=16384))
        memory = instance.executor.block_memory()
        assert memory is not None
        files = BlockFiles(root, "llama/tested", "tested")
        self.tier = FileTier(self.core.pool, memory, files, 1 << 30, lambda: None)
        self.tier.start()
        self.mover = BlockMover(memory, "tested", "tcp://127.0.0.1:0", None, lambda: None)
        self.mover.start()
        self.core.sharing.exchange_blocks(
            self.mover, address="", identity="tested", token_bytes=1.0, checks=True, tier=self.tier
        )

    def answers(self, submits: list[Submit]) -> Answers:
        found: Answers = {}
        for each in submits:
            found[each.request] = Answer(list(each.output_ids))
            assert self.core.submit(PEER, each) is None
        deadline = time.monotonic() + PATIENCE
        while not self.core.is_empty:
            assert time.monotonic() < deadline
            self.core.take_fetched()
            step(self.core, found, lambda: time.sleep(0.0005))
        return found

    def close(self) -> None:
        self.tier.close()
        self.mover.close()


@pytest.fixture(scope="module", params=[load, load_on_device])
def instance(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Instance:
    loaded: Instance = request.param(directory_of("llama", tmp_path_factory))
    return loaded


def test_an_instance_that_starts_again_gives_the_same_bits(instance: Instance, tmp_path: Path) -> None:
    submits = requests(1, count=12, vocab_size=VOCAB, longest=300, most=8, greedy=False)
    alone = instance.answers(submits, ALONE)[0]
    first = Serving(instance, tmp_path)
    assert first.answers(submits) == alone
    first.close()
    again = Serving(instance, tmp_path)
    assert again.answers(submits) == alone
    again.close()
    assert again.core.sharing.exchange is not None
    counters = again.core.reports.report(0, 0).transfers
    assert counters is not None
    assert counters.prompt_tokens > 300
    assert counters.wrong_blocks == 0

    flipped = 0
    for path in sorted(tmp_path.rglob("*.kv"))[::2]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        flipped += 1
    last = Serving(instance, tmp_path)
    assert last.answers(submits) == alone
    last.close()
    assert last.core.sharing.exchange is not None
    assert 0 < last.core.sharing.exchange.counters().wrong_blocks <= flipped


def test_blocks_that_their_writer_computed_wrongly_are_found_by_computing_one(
    instance: Instance, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No answer is wrong, also of those that come at once."""
    submits = requests(1, count=16, vocab_size=VOCAB, longest=300, most=4, greedy=True)
    alone = instance.answers(submits, ALONE)[0]
    first = Serving(instance, tmp_path)
    first.answers(submits)
    memory = instance.executor.block_memory()
    assert memory is not None
    names = list(first.core.pool.known)
    first.close()
    for name in names:  # a digest that is right, of bytes that are not
        (block,) = first.core.pool.find_prefix([name])
        wrong = memory.read([block])[0]
        wrong[3] ^= 64
        first.tier._files.write(name, [wrong.data])
    again = Serving(instance, tmp_path)
    assert again.answers(submits) == alone
    again.close()
    assert again.core.sharing.exchange is not None
    counters = again.core.sharing.exchange.counters()
    # one is computed of each transfer that ended before the first was compared
    assert 1 <= counters.checked_blocks == counters.wrong_blocks <= 4
    assert "KV blocks of files are not asked for any more" in caplog.text
    assert "is not used any more" in caplog.text
    assert again.answers(submits[:2]) == {each.request: alone[each.request] for each in submits[:2]}
    assert again.core.sharing.exchange.counters().outcomes == counters.outcomes, "no file was read since"
