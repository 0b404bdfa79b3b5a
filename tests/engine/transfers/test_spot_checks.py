"""Spot checks of the cache: wrong pieces are found, healthy sources are not blamed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest

from engine.kernels.core import library
from engine.messages import Submit
from engine.sampling import SamplingParams
from engine.transfers import checking
from engine.transfers.fetching import DEAD, FILES
from tests.engine.copying_device import load_on_device
from tests.engine.invariance.answers import ALONE, Answers, How, Instance, load
from tests.engine.invariance.mixed import requests
from tests.engine.invariance.test_table import VOCAB, directory_of
from tests.engine.transfers.test_bits import Serving, is_cheap, serve

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")
__all__ = ["is_cheap"]
INTERVAL = 16
"""Pieces of which one is checked."""
NUM_BLOCKS = 20


@pytest.fixture(scope="module", params=[load, load_on_device])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Instance, Instance]:
    directory = directory_of("llama", tmp_path_factory)
    return request.param(directory), request.param(directory)


@pytest.fixture(scope="module")
def instance(pair: tuple[Instance, Instance]) -> Instance:
    return pair[0]


@pytest.fixture(scope="module")
def other(pair: tuple[Instance, Instance]) -> Instance:
    return pair[1]


def prompt(number: int, salt: str = "") -> Submit:
    """A prompt: 20 blocks that all of these share, then tokens of its own."""
    shared = [5 + index * 7 % 280 for index in range(NUM_BLOCKS * 16)]
    own = [3 + number * 11 % 250, 4 + number % 200, 9]
    params = SamplingParams(max_tokens=3, temperature=0.0)
    return Submit(number, f"request {number}", shared + own, params, 0, cache_salt=salt)


@pytest.fixture(scope="module")
def alone(instance: Instance) -> Answers:
    return instance.answers([prompt(number) for number in range(60)], ALONE)[0]


@pytest.fixture
def serving(instance: Instance, alone: Answers) -> Iterator[Serving]:
    made = Serving(instance, How(cache=4096), check_interval=INTERVAL)
    yield made
    made.mover.close()


def spot_counts(serving: Serving) -> tuple[dict[str, int], dict[str, int]]:
    exchange = serving.core.sharing.exchange
    assert exchange is not None
    counters = exchange.counters()
    return counters.spot_checked, counters.spot_wrong


def until_found(serving: Serving) -> int:
    """Number of the request after which a wrong piece has been found."""
    for number in range(1, 10 * INTERVAL + 1):
        serving.submit([prompt(number % 50)])
        serve(serving)
        if sum(spot_counts(serving)[1].values()):
            return number
    raise AssertionError("nothing was found")


def test_checks_change_no_answer_and_no_count(instance: Instance) -> None:
    submits = requests(11, count=24, vocab_size=VOCAB, longest=300, most=8, greedy=False)
    expected = instance.answers(submits, ALONE)[0]
    serving = Serving(instance, How(cache=16384), check_interval=1)
    try:
        for first in range(2):
            again = [msgspec.structs.replace(each, request=each.request + 100 * first) for each in submits]
            serving.submit(again)
            serve(serving)
        assert {key % 100: answer for key, answer in serving.found.items()} == expected
        checked, wrong = spot_counts(serving)
        assert (checked.keys(), sum(wrong.values())) == ({"own"}, 0)
        assert checked["own"] > 5
        begun = [each for each in submits if not each.output_ids]
        counters = serving.core.scheduler.counters()
        assert counters.prompt_tokens == 2 * sum(len(each.prompt_ids) for each in begun)
        assert serving.core.reports.report(0, 0).blocks_used == 0
    finally:
        serving.mover.close()


@pytest.mark.parametrize("place", [0, 7, NUM_BLOCKS - 1])
@pytest.mark.parametrize("source", ["", "tcp://there", f"{DEAD}/x#1"])
def test_a_flipped_bit_is_found_wherever_its_block_came_from(
    serving: Serving, alone: Answers, place: int, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    serving.submit([prompt(0)])
    serve(serving)
    exchange = serving.core.sharing.exchange
    assert exchange is not None
    assert exchange.spot_checks is not None
    names = serving.core.pool.known
    chain = [name for name in names if serving.pool.find_prefix([name])]
    assert len(chain) >= NUM_BLOCKS
    block = serving.pool.find_prefix(chain[place : place + 1])[0]
    flipped = serving.memory.read([block])[0] ^ 0x21
    serving.memory.write(block, flipped.data)
    for name in chain[: NUM_BLOCKS // 2]:  # of a healthy source
        exchange.spot_checks._origins.came(name, "tcp://healthy")
    if source:
        exchange.spot_checks._origins.came(chain[place], source)
    number = until_found(serving)
    assert number <= 10 * INTERVAL
    kind = {"": "instance" if place < NUM_BLOCKS // 2 else "own", "tcp://there": "instance"}.get(
        source, "memory"
    )
    assert +Counter(spot_counts(serving)[1]) == {kind: 1}
    blamed = source or ("tcp://healthy" if place < NUM_BLOCKS // 2 else "")
    assert [not exchange.sources.trusts(each) for each in ("tcp://healthy", source) if each] == [
        each == blamed for each in ("tcp://healthy", source) if each
    ]
    assert "a piece of the cache is not what is computed here" in caplog.text
    serving.submit([prompt(number) for number in range(50, 56)])
    serve(serving)
    assert {key: serving.found[key] for key in range(50, 56)} == {key: alone[key] for key in range(50, 56)}
    assert serving.core.reports.report(0, 0).blocks_used == 0


@pytest.mark.parametrize("fault", ["one bit", "another block", "half written"])
def test_each_fault_of_a_block_is_found(serving: Serving, alone: Answers, fault: str) -> None:
    serving.submit([prompt(0)])
    serve(serving)
    blocks = [
        serving.pool.find_prefix([name])[0] for name in serving.pool.known if serving.pool.find_prefix([name])
    ]
    content = bytearray(serving.memory.read([blocks[7]])[0].tobytes())
    if fault == "one bit":
        content[1] ^= 0x02  # of an exponent
    elif fault == "another block":
        content[:] = serving.memory.read([blocks[8]])[0].tobytes()
    else:
        content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    serving.memory.write(blocks[7], memoryview(content))
    until_found(serving)
    assert +Counter(spot_counts(serving)[1]) == {"own": 1}
    serving.submit([prompt(number) for number in range(50, 56)])
    serve(serving)
    assert {key: serving.found[key] for key in range(50, 56)} == {key: alone[key] for key in range(50, 56)}


def test_a_source_that_computed_wrongly_is_named(
    instance: Instance, other: Instance, alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transfers are not checked here: the spot check finds it among what came."""
    monkeypatch.setattr(checking, "CHECK_INTERVAL", 1 << 30)
    source = Serving(other, How(cache=4096))
    taker = Serving(instance, How(cache=4096), check_interval=INTERVAL)
    try:
        source.submit([prompt(0)])
        serve(source)
        chain = [name for name in source.pool.known if source.pool.find_prefix([name])]
        for name in chain[5:]:
            (block,) = source.pool.find_prefix([name])
            source.memory.write(block, (source.memory.read([block])[0] ^ 0x21).data)
        taker.submit([prompt(1)], source.mover.address)
        serve(source, taker)
        until_found(taker)
        assert +Counter(spot_counts(taker)[1]) == {"instance": 1}
        exchange = taker.core.sharing.exchange
        assert exchange is not None
        assert not exchange.sources.trusts(source.mover.address)
        assert exchange.sources.trusts(FILES)
        taker.submit([prompt(50)], source.mover.address)
        serve(source, taker)
        assert taker.found[50] == alone[50]
    finally:
        source.mover.close()
        taker.mover.close()


def test_running_requests_that_found_a_wrong_piece_are_computed_again(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    serving.submit([prompt(0)])
    serve(serving)
    chain = [name for name in serving.pool.known if serving.pool.find_prefix([name])]
    (block,) = serving.pool.find_prefix(chain[3:4])
    flipped = serving.memory.read([block])[0] ^ 0x21
    serving.memory.write(block, flipped.data)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    serving.submit([msgspec.structs.replace(prompt(number), params=params) for number in range(100, 110)])
    serve(serving)
    assert sum(spot_counts(serving)[1].values()) == 1
    listed = re.search("([0-9]+) requests that found something are computed again: (.*)", caplog.text)
    assert listed is not None
    again = listed[2].split(", ")
    assert (len(again), len(set(again))) == (int(listed[1]), int(listed[1]))
    assert 0 < len(again) == serving.core.scheduler.counters().preemptions
    before = re.search("([0-9]+) requests had found it, or what stands behind it: (.*)", caplog.text)
    assert before is not None
    assert set(again) <= set(before[2].split(", "))
    assert len(before[2].split(", ")) == int(before[1])
    (block,) = serving.pool.find_prefix(chain[3:4])
    assert not (serving.memory.read([block])[0] == flipped).all(), "by now it was computed here"


def test_a_request_that_computed_a_wrong_block_is_computed_again(
    instance: Instance,
) -> None:
    """A bit flips beneath a request that found nothing."""
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    first = msgspec.structs.replace(prompt(0), params=params)
    serving = Serving(instance, How(cache=4096), check_interval=INTERVAL)
    try:
        serving.submit([first])
        while len(serving.found[0].token_ids) < 2:
            serving.turn()
        (running,) = serving.core.scheduler.queues.running
        assert running.num_cached == 0
        block = running.blocks[3]
        serving.memory.write(block, (serving.memory.read([block])[0] ^ 0x21).data)
        number = 1
        while not sum(spot_counts(serving)[1].values()):
            assert number < 8, "it still runs"
            serving.submit([prompt(number)])
            while len(serving.found[number].token_ids) < 3:
                serving.turn()
            number += 1
        serve(serving)
        further = first.prompt_ids + serving.found[0].token_ids[:50]
        again = msgspec.structs.replace(first, request=99, prompt_ids=further)
        serving.submit([again])
        serve(serving)
        assert serving.core.scheduler.counters().prefix_cache_hits > len(first.prompt_ids)
    finally:
        serving.mover.close()
    assert serving.found[99] == instance.answers([again], ALONE)[0][99]


def test_a_check_is_no_load(instance: Instance) -> None:
    """In steps of eight tokens each check takes several."""
    serving = Serving(instance, How(cache=4096, budget=8), check_interval=1)
    try:
        serving.submit([prompt(0)])
        serve(serving)
        chain = [name for name in serving.pool.known if serving.pool.find_prefix([name])]
        (block,) = serving.pool.find_prefix(chain[3:4])
        serving.memory.write(block, (serving.memory.read([block])[0] ^ 0x21).data)
        seen = set()
        for number in range(1, 5):
            serving.submit([prompt(number)])
            while not serving.core.is_empty:
                serving.turn()
                requests = list(serving.core.scheduler.queues.requests)
                if len(requests) == 1 and requests[0].request_id == "cache check":
                    snapshot = serving.core.reports.snapshot
                    assert snapshot[:5] == (0, 0, 0, 0, 0)
                    assert snapshot.blocks_used == 0
                    seen.add(requests[0].most_cached)
        assert len(seen) > 1, "a search for a source, too"
    finally:
        serving.mover.close()


def test_a_reset_of_the_cache_ends_checks_of_what_was_found_before(serving: Serving) -> None:
    """Else blocks computed since would be compared with those before, which may be wrong."""
    serving.submit([prompt(0)])
    serve(serving)
    exchange = serving.core.sharing.exchange
    assert exchange is not None
    checks = exchange.spot_checks
    assert checks is not None
    serving.submit([prompt(number) for number in range(1, 4)])
    while not checks._samples:
        serving.turn()
    assert checks.begin(is_busy=False) is not None
    exchange.reset()
    assert not checks.wants_step
    assert len(checks.take_over()) == 1
    serve(serving)
    assert sum(spot_counts(serving)[1].values()) == 0
    assert serving.core.reports.report(0, 0).blocks_used == 0


@pytest.mark.parametrize(("cache", "place", "source"), [
    (336, 7, "own"), (352, 7, "own"), (512, 7, "own"), (336, 15, "unknown"), (352, 15, "unknown"),
])  # fmt: skip
def test_a_check_that_finds_no_room_ends(
    instance: Instance, alone: Answers, cache: int, place: int, source: str
) -> None:
    """A prompt that fills the cache leaves no room to look for a source."""
    serving = Serving(instance, How(cache=cache), check_interval=1)
    try:
        serving.submit([prompt(0)])
        serve(serving)
        chain = [name for name in serving.pool.known if serving.pool.find_prefix([name])]
        (block,) = serving.pool.find_prefix(chain[place : place + 1])
        serving.memory.write(block, (serving.memory.read([block])[0] ^ 0x21).data)
        for number in range(1, 8):
            serving.submit([prompt(number)])
            serve(serving)
        assert serving.found[7] == alone[7]
        assert +Counter(spot_counts(serving)[1]) == {source: 1}
        exchange = serving.core.sharing.exchange
        assert exchange is not None
        assert exchange.is_open
        assert serving.core.reports.report(0, 0).blocks_used == 0
    finally:
        serving.mover.close()
