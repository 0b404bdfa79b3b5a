"""A fetched prefix gives the answers that a computed one gives, to the last bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.core import EngineCore
from engine.kernels.core import library
from engine.messages import HandedOver, Prefetch, Submit
from engine.scheduling.request import from_submit
from engine.transfers import checking, fetching, price
from engine.transfers.identity import CacheFacts, identity_of
from engine.transfers.mover import BlockMover
from tests.engine.copying_device import load_on_device
from tests.engine.invariance.answers import ALONE, PEER, Answer, Answers, How, Instance, load, step
from tests.engine.invariance.mixed import requests
from tests.engine.invariance.test_table import VOCAB, directory_of
from tests.waiting import PATIENCE

KERNELS = library.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no AVX2, or no C++ compiler, here")


@pytest.fixture(autouse=True)
def is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch even the little that tiny models compute faster."""
    monkeypatch.setattr(price, "WORTH", float("inf"))
    monkeypatch.setattr(price, "FEWEST", 16)


class Serving:
    """An instance that lends and fetches, without routers."""

    def __init__(
        self, instance: Instance, how: How, dtype: str = "bfloat16", check_interval: int = 0
    ) -> None:
        self.core: EngineCore = instance.core(how)
        memory = instance.executor.block_memory()
        assert memory is not None
        facts = CacheFacts(
            numerics="tested", dtype=dtype, block_size=instance.block_size, layout=memory.layout
        )
        identity = identity_of(facts)
        self.mover = BlockMover(memory, identity, "tcp://127.0.0.1:0", None, lambda: None)
        self.mover.start()
        self.core.sharing.exchange_blocks(
            self.mover,
            address=self.mover.address,
            identity=identity,
            token_bytes=memory.block_bytes / instance.block_size,
            checks=True,
            check_interval=check_interval,
        )
        self.memory, self.pool = memory, self.core.pool
        self.found: Answers = {}
        self.fetched: list[tuple[bytes, object]] = []

    def submit(self, submits: list[Submit], blocks_at: str = "") -> None:
        for each in submits:
            self.found[each.request] = Answer(list(each.output_ids))
            assert self.core.submit(PEER, msgspec.structs.replace(each, blocks_at=blocks_at)) is None

    def turn(self) -> None:
        self.fetched += self.core.take_fetched()
        step(self.core, self.found, lambda: time.sleep(0.0005))


def serve(*instances: Serving) -> None:
    deadline = time.monotonic() + PATIENCE
    while not all(each.core.is_empty and not each.core.sharing.is_lending for each in instances):
        assert time.monotonic() < deadline
        for each in instances:
            each.turn()


@pytest.fixture(scope="module", params=["llama", "mistral", "llama on a device"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Instance, Instance]:
    family, _, where = request.param.partition(" ")
    directory: Path = directory_of(family, tmp_path_factory)
    make = load_on_device if where else load
    return make(directory), make(directory)


@pytest.fixture
def both(pair: tuple[Instance, Instance]) -> Iterator[tuple[Serving, Serving]]:
    made = Serving(pair[0], How(cache=4096)), Serving(pair[1], How(cache=4096))
    yield made
    for each in made:
        each.mover.close()


@pytest.mark.parametrize("greedy", [True, False])
def test_fetched_prefixes_give_the_bits_of_computed_ones(
    pair: tuple[Instance, Instance], both: tuple[Serving, Serving], greedy: bool
) -> None:
    submits = requests(4, count=16, vocab_size=VOCAB, longest=300, most=8, greedy=greedy)
    alone = pair[0].answers(submits, ALONE)[0]
    source, taker = (Serving(each, How(cache=16384)) for each in pair)  # that run took the cache away
    try:
        source.submit(submits)
        serve(source)
        assert source.found == alone
        taker.submit(submits, source.mover.address)
        serve(source, taker)
        assert taker.found == alone
        report = taker.core.reports.report(0, 0)
        counters, found = report.transfers, report.counters
        assert counters is not None
        assert counters.fetched_tokens > 100
        begun = [each for each in submits if not each.output_ids]
        assert found.prompt_tokens == sum(len(each.prompt_ids) for each in begun)
        assert 0 < counters.prompt_tokens <= found.prefix_cache_hits < found.prompt_tokens
        assert counters.outcomes.keys() <= {"whole", "absent"}
        for each in (source, taker):
            assert each.core.reports.report(0, 0).blocks_used == 0
    finally:
        source.mover.close()
        taker.mover.close()


def test_company_chunks_hits_preemption_and_drafts_change_no_bit(pair: tuple[Instance, Instance]) -> None:
    """Also where steps end later, on a pretended device."""
    submits = requests(7, count=16, vocab_size=VOCAB, longest=60, most=20)
    pair[0].check_in_company(submits, pair[0].answers(submits, ALONE)[0])


def test_a_fetched_prefix_is_not_computed(both: tuple[Serving, Serving]) -> None:
    source, taker = both
    (submit,) = requests(5, count=1, vocab_size=VOCAB, longest=20, most=4, greedy=True)
    params = msgspec.structs.replace(submit.params, prompt_logprobs=None, grammar=None)
    submit = msgspec.structs.replace(
        submit, prompt_ids=[5 + index % 300 for index in range(700)], params=params
    )
    source.submit([submit])
    serve(source)
    taker.submit([submit], source.mover.address)
    serve(source, taker)
    assert taker.found == source.found
    assert taker.core.scheduler.counters().prefix_cache_hits == 688
    generated = len(taker.found[0].token_ids)
    assert taker.core.scheduler.counters().scheduled_tokens == 700 - 688 + generated - 1
    assert taker.core.reports.num_block_changes >= 43  # routers learn that they are here, too


def test_a_source_that_dies_costs_its_blocks_only(both: tuple[Serving, Serving]) -> None:
    source, taker = both
    (submit,) = requests(6, count=1, vocab_size=VOCAB, longest=20, most=4, greedy=True)
    params = msgspec.structs.replace(submit.params, prompt_logprobs=None, grammar=None)
    submit = msgspec.structs.replace(
        submit, prompt_ids=[5 + index % 290 for index in range(900)], params=params
    )
    source.submit([submit])
    serve(source)
    source.mover.close()
    taker.submit([submit], source.mover.address)
    serve(taker)
    assert taker.found == source.found
    assert taker.core.reports.report(0, 0).blocks_used == 0


@pytest.mark.parametrize("wrong", [None, -1, -2])
def test_a_source_that_computed_wrongly_is_found_and_costs_no_answer(
    pair: tuple[Instance, Instance],
    wrong: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """``wrong``: index of the block in which bits flip at the source; None for none."""
    monkeypatch.setattr(checking, "CHECK_INTERVAL", 1)
    submits = requests(4, count=16, vocab_size=VOCAB, longest=300, most=8, greedy=True)
    plain = [each for each in submits if each.params.prompt_logprobs is None]
    submit = max(plain, key=lambda each: len(each.prompt_ids))
    alone = pair[0].answers([submit], ALONE)[0]
    source, taker = (Serving(each, How(cache=16384)) for each in pair)
    try:
        source.submit([submit])
        serve(source)
        size = pair[0].block_size
        names = from_submit(submit, PEER, arrival=1, eos_ids=(), max_model_len=10**6).prefix_hashes(size)
        blocks = source.pool.find_prefix(names)
        assert len(blocks) == len(names) > 2
        if wrong is not None:
            flipped = source.memory.read([blocks[wrong]])[0] ^ 0x21
            source.memory.write(blocks[wrong], flipped.data)
        taker.submit([submit], source.mover.address)
        serve(source, taker)
        assert taker.found == alone
        exchange = taker.core.sharing.exchange
        assert exchange is not None
        counters = exchange.counters()
        assert (counters.checked_blocks, counters.wrong_blocks) == (1, int(wrong is not None))
        report = taker.core.reports.report(0, 0)
        assert report.transfers is not None
        fetched = report.counters.prefix_cache_hits
        assert report.transfers.prompt_tokens == fetched
        assert (fetched == 0) == (wrong is not None), "what was thrown away does not count"
        assert counters.outcomes == {"whole": 1}, "its digests were right"
        assert ("is not what was computed here" in caplog.text) == (wrong is not None)
        assert taker.core.reports.report(0, 0).blocks_used == 0
        again = taker.pool.find_prefix(names)
        if wrong is not None:  # what is in the cache by now was computed here
            assert len(again) == len(names)
            assert not (taker.memory.read([again[wrong]])[0] == flipped).all()
            assert not exchange.takes(from_submit(
                msgspec.structs.replace(submit, request=99, cache_salt="x", blocks_at=source.mover.address),
                PEER, arrival=1, eos_ids=(), max_model_len=10**6,
            )), "it is not asked again"  # fmt: skip
    finally:
        for each in (source, taker):
            each.mover.close()


@pytest.mark.parametrize("greedy", [True, False])
def test_requests_are_handed_over_while_they_run_and_nothing_is_computed_again(
    pair: tuple[Instance, Instance],
    both: tuple[Serving, Serving],
    greedy: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each goes on in its partly filled block, with the bits of one that stayed."""
    monkeypatch.setattr(fetching, "STALL", PATIENCE)  # what is late on a busy machine would be computed
    source, taker = both
    submits = [
        msgspec.structs.replace(
            each,
            request=number,
            params=msgspec.structs.replace(
                each.params, prompt_logprobs=None, grammar=None, max_tokens=60, ignore_eos=True, stop_token_ids=[]
            ),
        )
        for number, each in enumerate(
            requests(8, count=6, vocab_size=VOCAB, longest=90, most=8, greedy=greedy), 1
        )
    ]  # fmt: skip
    alone = pair[0].answers(submits, ALONE)[0]
    source, taker = (Serving(each, How(cache=16384)) for each in pair)  # that run took the cache away
    for side in (source, taker):
        side.core.routers[PEER] = "router-1"
    try:
        source.submit(submits)
        while any(len(source.found[each.request].token_ids) < 5 + each.request for each in submits):
            source.turn()
        waiting = {each.request: each for each in submits}
        for each in submits:
            wish = Prefetch(
                each.request, each.prompt_ids, source.mover.address, each.cache_salt, each.request
            )
            taker.core.prefetch(PEER, wish)
        deadline = time.monotonic() + PATIENCE
        while waiting:
            assert time.monotonic() < deadline
            messages, source.fetched = source.fetched, []
            for _, message in messages:
                assert isinstance(message, HandedOver)
                number = message.request
                output = source.found[number].token_ids
                taker.submit([msgspec.structs.replace(waiting.pop(number), output_ids=output, copy=number)])
            if all(len(source.found[number].token_ids) < 30 for number in waiting):
                source.turn()
            else:  # on a busy machine; they would outgrow the room that was kept for them
                source.fetched += source.core.take_fetched()
            taker.turn()
        serve(source, taker)
        assert {number: each.token_ids for number, each in taker.found.items()} == {
            number: each.token_ids for number, each in alone.items()
        }
        for number, answer in alone.items():
            before = source.found[number].logprobs
            assert before + taker.found[number].logprobs == answer.logprobs
        counters = taker.core.scheduler.counters()
        assert counters.scheduled_tokens == counters.generation_tokens, "nothing but new tokens"
        for side in (source, taker):
            assert side.core.reports.report(0, 0).blocks_used == 0
    finally:
        source.mover.close()
        taker.mover.close()
