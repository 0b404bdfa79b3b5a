"""States that travel between instances: answers have the bits of those computed in one place."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import pytest
import torch

from engine.messages import HandedOver, Prefetch, Submit
from engine.sampling import SamplingParams
from engine.transfers import checking, fetching, price, sources
from engine.transfers.identity import identity_of
from tests.engine.invariance.answers import ALONE, PEER, Answers, Instance, load
from tests.engine.states.models import make_state_model
from tests.engine.states.serving import Serving, serve
from tests.engine.tiny_models import VOCAB
from tests.waiting import PATIENCE

FAMILIES = [
    pytest.param(("qwen3_next", "bfloat16")),
    pytest.param(("nemotron_h", "bfloat16"), marks=pytest.mark.nightly),
    pytest.param(("lfm2_moe", "float32"), marks=pytest.mark.nightly),
    pytest.param(("kimi_linear", "float32"), marks=pytest.mark.nightly),
    pytest.param(("mamba2", "float32"), marks=pytest.mark.nightly),
]
Pair = tuple[Instance, Instance]


@pytest.fixture(autouse=True)
def is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A price at which everything is fetched, with time for a busy machine."""
    monkeypatch.setattr(price, "WORTH", float("inf"))
    monkeypatch.setattr(price, "FEWEST", 16)
    monkeypatch.setattr(fetching, "STALL", PATIENCE)
    monkeypatch.setattr(sources, "LEAST_SECONDS", PATIENCE)
    monkeypatch.setattr(sources, "MOST_SECONDS", PATIENCE)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, dtype = request.param
    torch.set_num_threads(1)
    directory = make_state_model(tmp_path_factory.mktemp(family), family, getattr(torch, dtype))
    one, other = (load(directory, dtype=dtype, batch_invariant=True) for _ in range(2))
    return one, other


@pytest.fixture(scope="module")
def submits() -> list[Submit]:
    """Prompts that begin alike, and part within a cell of the grid; with log-probabilities."""
    shared = [4 + number * 7 % (VOCAB - 8) for number in range(150)]
    return [
        prompt([*shared, *(5 + each * number % 50 for number in range(20 + 30 * each))], each, 6)
        for each in range(4)
    ]


def prompt(token_ids: list[int], number: int, max_tokens: int) -> Submit:
    params = SamplingParams(max_tokens=max_tokens, logprobs=3, ignore_eos=True)
    return Submit(number, f"r{number}", token_ids, params, seed=number)


@pytest.fixture(scope="module")
def alone(pair: Pair, submits: list[Submit]) -> Answers:
    return pair[0].answers(submits, ALONE)[0]


@pytest.fixture
def both(pair: Pair, alone: Answers) -> Iterator[tuple[Serving, Serving]]:
    made = Serving(pair[0]), Serving(pair[1])
    yield made
    for each in made:
        each.close()


def test_a_prefix_is_fetched_with_its_state_and_not_computed(
    both: tuple[Serving, Serving], submits: list[Submit], alone: Answers
) -> None:
    source, taker = both
    assert source.answers(submits) == alone
    for submit in submits:
        before, size = taker.num_computed, len(submit.prompt_ids)
        assert taker.answers([submit], source.mover.address, source) == {
            submit.request: alone[submit.request]
        }
        end = size // source.grid * source.grid
        new = len(alone[submit.request].token_ids) - 1
        assert taker.num_computed - before == size - end + new, "all but the open cell was fetched"
    assert taker.known_states()
    assert taker.counters.outcomes == {"whole": len(submits)}
    assert taker.counters.fetched_bytes >= len(submits) * taker.memory.bytes_of(taker.pool.num_blocks)
    for each in both:
        assert each.core.reports.report(0, 0).blocks_used == 0


def test_requests_at_once_give_the_bits_of_each_alone(
    both: tuple[Serving, Serving], submits: list[Submit], alone: Answers
) -> None:
    source, taker = both
    source.answers(submits[:2])
    assert taker.answers(submits, source.mover.address, source) == alone
    assert taker.counters.fetched_tokens > 0


def test_states_in_parts_of_several_messages_are_the_same(
    both: tuple[Serving, Serving], submits: list[Submit], alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, taker = both
    size = taker.memory.bytes_of(taker.pool.num_blocks)
    monkeypatch.setattr("engine.transfers.lending.PART_BYTES", size // 7)
    source.answers(submits)
    assert taker.answers(submits, source.mover.address, source) == alone
    assert taker.counters.outcomes.keys() == {"whole"}
    for name in taker.known_states() & source.known_states():
        slots = [each.pool.slot_of(name) for each in both]
        one, other = (each.memory.read([slot])[0] for each, slot in zip(both, slots, strict=True))
        assert (one == other).all()


@pytest.mark.parametrize("changes", [
    {"grid": 48}, {"form": "0123456789abcdef"}, {"dtype": "float16"},
])  # fmt: skip
def test_a_state_of_another_grid_or_layout_is_not_read(
    pair: Pair,
    both: tuple[Serving, Serving],
    submits: list[Submit],
    alone: Answers,
    changes: dict[str, object],
) -> None:
    source, taker = both
    source.answers(submits)
    ((label, grid, form),) = source.facts(pair[0]).boundaries
    kind = label, changes.get("grid", grid), changes.get("form", form)
    other = identity_of(source.facts(pair[0], boundaries=[kind], dtype=changes.get("dtype", "bfloat16")))
    assert other != source.identity
    taker.mover._fetching.fetcher._identity = other
    assert taker.answers(submits, source.mover.address, source) == alone
    assert taker.counters.fetched_tokens == 0
    assert taker.counters.outcomes.keys() == {"refused"}


@pytest.mark.parametrize("wrong", [None, "state", "block"])
def test_a_source_that_computed_wrongly_is_found_and_costs_no_answer(
    both: tuple[Serving, Serving],
    submits: list[Submit],
    alone: Answers,
    wrong: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(checking, "CHECK_INTERVAL", 1)
    (source, taker), submit = both, submits[3]
    source.answers([submit])
    if wrong is not None:
        names = source.names_of(submit)
        slot = source.pool.slot_of(names[-1] if wrong == "state" else names[-2])
        flipped = source.memory.read([slot])[0] ^ 0x11
        if not flipped.size:
            pytest.skip("without keys and values blocks are empty")
        source.memory.write(slot, flipped.data)
    assert taker.answers([submit], source.mover.address, source) == {submit.request: alone[submit.request]}
    counters = taker.counters
    assert (counters.checked_blocks, counters.wrong_blocks) == (1, int(wrong is not None))
    assert ("is not what was computed here" in caplog.text) == (wrong is not None)
    assert taker.core.reports.report(0, 0).blocks_used == 0
    if wrong is not None:  # what is known by now was computed here
        slot = taker.pool.slot_of(names[-1] if wrong == "state" else names[-2])
        assert slot is not None
        assert not (taker.memory.read([slot])[0] == flipped).all()
    before = counters.outcomes
    assert taker.answers(submits[:3], source.mover.address, source) == {n: alone[n] for n in range(3)}
    assert (taker.counters.outcomes == before) == (wrong is not None), "a wrong source is not asked again"


@pytest.mark.parametrize("wrong", [None, "state", "block"])
def test_spot_checks_find_a_wrong_state_and_a_wrong_block(
    pair: Pair, submits: list[Submit], alone: Answers, wrong: str | None
) -> None:
    serving, submit = Serving(pair[0], check_interval=4), submits[3]
    try:
        assert serving.answers([submit]) == {3: alone[3]}
        names = serving.names_of(submit)
        slot = serving.pool.slot_of(names[-1] if wrong == "state" else names[2])
        flipped = serving.memory.read([slot])[0] ^ 0x11
        if not flipped.size:
            pytest.skip("without keys and values blocks are empty")
        if wrong is not None:
            serving.memory.write(slot, flipped.data)
        for _ in range(20):
            serving.answers([submit])
            if any(serving.counters.spot_wrong.values()):
                break
        assert sum(serving.counters.spot_checked.values()) > 0
        assert +Counter(serving.counters.spot_wrong) == ({"own": 1} if wrong else {})
        assert serving.answers(submits) == alone
        assert serving.core.reports.report(0, 0).blocks_used == 0
        assert serving.pool.num_free_boundaries == len(serving.pool.kinds.slots_of(1))
    finally:
        serving.close()


@pytest.mark.parametrize("begin", [None, "tcp://healthy"])
def test_spot_checks_name_the_source_of_a_state_and_not_of_the_one_before(
    pair: Pair, submits: list[Submit], alone: Answers, begin: str | None
) -> None:
    """``begin``: source of the state before, from which the first check goes on."""
    serving, submit = Serving(pair[0], check_interval=4), submits[3]
    try:
        assert serving.answers([submit]) == {3: alone[3]}
        names, size = serving.names_of(submit)[:-1], serving.core.sharing._block_size
        links = serving.grid // size
        kept = [
            count
            for count in range(links, len(names) + 1, links)
            if serving.pool.find_prefix(names[:count])[count - 1 :]
        ]
        assert len(kept) > 1
        exchange = serving.core.sharing.exchange
        assert exchange is not None
        checks = exchange.spot_checks
        assert checks is not None
        for count in kept[:-1]:
            for name in serving.pool.kinds.boundary_names(names[count - 1]) if begin else ():
                checks._origins.came(name, begin)
        (last,) = serving.pool.kinds.boundary_names(names[kept[-1] - 1])
        checks._origins.came(last, "tcp://wrong")
        slot = serving.pool.slot_of(last)
        assert slot is not None
        serving.memory.write(slot, (serving.memory.read([slot])[0] ^ 0x11).data)
        for _ in range(20):
            serving.answers([submit])
            if any(serving.counters.spot_wrong.values()):
                break
        assert +Counter(serving.counters.spot_wrong) == {"instance": 1}
        assert not exchange.sources.trusts("tcp://wrong")
        assert exchange.sources.trusts("tcp://healthy")
        assert serving.answers(submits) == alone
        assert serving.core.reports.report(0, 0).blocks_used == 0
        assert serving.pool.num_free_boundaries == len(serving.pool.kinds.slots_of(1))
    finally:
        serving.close()


@pytest.mark.parametrize("states", [2, 3, 4])
def test_spot_checks_end_where_slots_of_states_lack(
    pair: Pair, submits: list[Submit], alone: Answers, states: int
) -> None:
    serving = Serving(pair[0], check_interval=1, states=states)
    try:
        for _ in range(3):
            for each in submits:
                assert serving.answers([each]) == {each.request: alone[each.request]}
        assert sum(serving.counters.spot_wrong.values()) == 0
        assert serving.pool.num_free_boundaries == states
    finally:
        serving.close()


def test_a_check_of_a_request_that_is_aborted_leaves_nothing(
    both: tuple[Serving, Serving], submits: list[Submit], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "CHECK_INTERVAL", 1)
    monkeypatch.setattr(checking.BlockChecks, "_own", lambda *_: None)  # as if it had not come so far
    source, taker = both
    source.answers(submits[:1])
    taker.submit(submits[:1], source.mover.address)
    while not taker.found[0].token_ids:
        source.turn()
        taker.turn()
    assert taker.core.sharing.exchange.checks.of_transfers
    taker.core.abort(PEER, [0])
    taker.turn()
    serve(source, taker)
    assert not taker.core.sharing.exchange.checks.of_transfers
    assert taker.core.reports.report(0, 0).blocks_used == 0
    assert taker.pool.num_free_boundaries == len(taker.pool.kinds.slots_of(1))


def test_a_source_that_dies_in_the_middle_costs_its_pieces_only(
    both: tuple[Serving, Serving], submits: list[Submit], alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MOST_SECONDS", 1.0)
    source, taker = both
    source.answers(submits)
    taker.submit(submits, source.mover.address)
    source.mover.close()
    serve(taker)
    assert taker.found == alone
    assert taker.core.reports.report(0, 0).blocks_used == 0


def test_running_requests_are_handed_over_with_their_newest_states(
    pair: Pair, both: tuple[Serving, Serving], submits: list[Submit]
) -> None:
    """Each goes on elsewhere, and computes at most one cell of the grid again."""
    longer = [
        msgspec.structs.replace(each, request=number, params=msgspec.structs.replace(each.params, max_tokens=90))
        for number, each in enumerate(submits[:3], 1)
    ]  # fmt: skip
    alone = pair[0].answers(longer, ALONE)[0]
    source, taker = (Serving(each) for each in pair)  # that run took the cache away
    try:
        hand_over(source, taker, longer)
        for number, answer in alone.items():
            assert taker.found[number].token_ids == answer.token_ids
            assert source.found[number].logprobs + taker.found[number].logprobs == answer.logprobs
        counters = taker.core.scheduler.counters()
        again = counters.scheduled_tokens - counters.generation_tokens
        assert 0 <= again <= len(longer) * (taker.grid - 1)
        assert all(each.core.reports.report(0, 0).blocks_used == 0 for each in (source, taker))
    finally:
        source.close()
        taker.close()


def hand_over(source: Serving, taker: Serving, submits: Sequence[Submit]) -> None:
    """Hand running requests over in the middle, and let them go on to their ends."""
    for side in (source, taker):
        side.core.routers[PEER] = "router-1"
    source.submit(submits)
    while any(len(source.found[each.request].token_ids) < 40 + 9 * each.request for each in submits):
        source.turn()
    waiting = {each.request: each for each in submits}
    for each in submits:
        ids = each.prompt_ids + source.found[each.request].token_ids
        taker.core.prefetch(PEER, Prefetch(each.request, ids, source.mover.address, "", each.request))
    deadline = time.monotonic() + PATIENCE
    while waiting:
        assert time.monotonic() < deadline
        messages, source.fetched = source.fetched, []
        for _, message in messages:
            assert isinstance(message, HandedOver)
            number = message.request
            output = source.found[number].token_ids
            taker.submit([msgspec.structs.replace(waiting.pop(number), output_ids=output, copy=number)])
        source.fetched += source.core.take_fetched()
        taker.turn()
    serve(source, taker)
