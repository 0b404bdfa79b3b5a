"""Steps scheduled ahead: answers are those of steps scheduled one after the other."""

from __future__ import annotations

from collections import Counter, deque
from functools import cache

import pytest

from engine.messages import FinishReason, Submit
from engine.pieces.kinds import BoundaryKind, BoundarySlots
from engine.pieces.pool import PiecePool
from engine.sampling import SamplingParams, ThinkingBudget
from engine.scheduling.ahead import needs_tokens
from engine.scheduling.request import Request, from_submit
from engine.scheduling.rules import SchedulerRules
from engine.scheduling.scheduler import Scheduler
from engine.step import Step, StepResult
from engine.transfers.handing_over import HandOvers
from engine.transfers.lending import Lookup
from engine.transfers.messages import NO_BLOCK
from tests.engine.scheduling.ahead_schedules import PEER, SIZE, compare
from tests.nightly import NIGHTLY

NUM_SCHEDULES = 10_000 if NIGHTLY else 250
CHUNK = 125


@cache
def counts_of(first: int) -> Counter[str]:
    """What happened in a chunk of schedules, whose answers were all right."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        counts += compare(seed)
    return counts


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, CHUNK))
def test_answers_are_those_without_steps_ahead(first: int) -> None:
    assert counts_of(first)


def test_the_schedules_reach_what_they_are_for() -> None:
    counts = counts_of(0) + counts_of(CHUNK)
    expected = {
        "rows ahead": 1500,
        "surplus rows": 75,
        "preemptions": 25,
        "requests that wait": 250,
        "deaths": 50,
        "deaths in the group": 50,
        "with a step behind": 10,
        "moves": 50,
        "blocks of steps under way": 5,
    }
    assert {name: counts[name] for name in expected if counts[name] < expected[name]} == {}


class Ahead:
    """A scheduler with a step under way behind another, answered by hand."""

    def __init__(self, *, num_blocks: int = 32, is_on: bool = True, boundaries: bool = False) -> None:
        rules = SchedulerRules(max_num_seqs=4, max_num_batched_tokens=32, block_size=SIZE, runs_ahead=is_on)
        kind = BoundaryKind(label="state", grid=SIZE, num_bytes=8)
        slots = [BoundarySlots(kind, 8)] if boundaries else []
        self.pool = PiecePool(num_blocks, boundaries=slots, block_size=SIZE)
        self.scheduler = Scheduler(rules, self.pool)
        self.under_way: deque[Step] = deque()
        self._arrivals = 0

    def add(self, length: int, params: SamplingParams | None = None, **fields: int) -> Request:
        self._arrivals += 1
        submit = Submit(
            self._arrivals,
            "r",
            [self._arrivals] * length,
            params or SamplingParams(max_tokens=9),
            0,
            **fields,  # type: ignore[arg-type]
        )
        request = from_submit(submit, PEER, arrival=self._arrivals, eos_ids=(0,), max_model_len=64)
        self.scheduler.add(request)
        return request

    def begin(self) -> Step | None:
        step = self.scheduler.schedule()
        if step is not None:
            self.under_way.append(step)
        return step

    def finish(self, *tokens: int | None) -> list[Request]:
        step = self.under_way.popleft()
        found = self.scheduler.update(step, StepResult([*tokens]))
        return [outcome.request for outcome in found]


def test_a_row_follows_a_token_that_is_not_known() -> None:
    bench = Ahead()
    request = bench.add(3)
    first, second = bench.begin(), bench.begin()
    assert first is not None
    assert second is not None
    assert (first.starts, first.counts, first.ahead) == ([0], [3], [])
    assert (second.starts, second.counts, second.ahead, second.partial) == ([3], [1], [0], [])
    assert bench.begin() is None, "the token behind it is not even being chosen"
    assert bench.finish(5) == [request]
    assert request.token_ids == [1, 1, 1, 5]


def test_nothing_goes_ahead_where_it_is_off() -> None:
    bench = Ahead(is_on=False)
    bench.add(3)
    assert bench.begin() is not None
    assert bench.begin() is None


def test_what_is_behind_the_last_token_is_dropped() -> None:
    bench = Ahead()
    request = bench.add(3)
    bench.begin()
    bench.begin()
    blocks = bench.scheduler.blocks_in_flight()
    assert bench.finish(0) == [request]
    assert request.finish_reason is FinishReason.STOP
    assert bench.pool.num_used == 0
    assert bench.scheduler.blocks_in_flight() == blocks, "its row still writes to them"
    assert bench.finish(7) == []
    assert request.token_ids == [1, 1, 1, 0]
    assert bench.scheduler.blocks_in_flight() == set()


def test_with_pieces_beside_blocks_steps_wait_for_each_other() -> None:
    """Else requests that came meanwhile would run in steps of their own for good."""
    bench = Ahead(boundaries=True)
    bench.add(3)
    assert bench.begin() is not None
    bench.add(3)
    assert bench.begin() is None
    bench.finish(5)
    step = bench.begin()
    assert step is not None
    assert len(step.slots) == 2


def test_no_row_follows_a_token_that_is_certainly_the_last() -> None:
    bench = Ahead()
    bench.add(3, SamplingParams(max_tokens=1))
    bench.begin()
    assert bench.begin() is None


def test_a_block_has_a_name_once_its_tokens_are_known() -> None:
    bench = Ahead()
    request = bench.add(3)
    bench.begin()
    bench.begin()
    assert request.num_computed == 4
    assert request.num_named == 0, "its last token is unknown"
    bench.finish(5)
    assert request.num_named == 1
    assert bench.scheduler.blocks_being_filled() == {request.blocks[0]}
    assert list(bench.pool.known) == request.hashes_up_to(1, SIZE)


@pytest.mark.parametrize(
    ("params", "needs"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=0.0, logprobs=2, min_tokens=3, logit_bias={3: 1.0}), False),
        (SamplingParams(top_k=3, top_p=0.5, min_p=0.1, allowed_token_ids=(3, 4), bad_words=((5,),)), False),
        (SamplingParams(presence_penalty=0.1), True),
        (SamplingParams(frequency_penalty=0.1), True),
        (SamplingParams(repetition_penalty=1.1), True),
        (SamplingParams(bad_words=((5,), (5, 6))), True),
        (SamplingParams(thinking=ThinkingBudget(3, (), (5,))), True),
    ],
)
def test_who_needs_tokens_on_the_host(params: SamplingParams, needs: bool) -> None:
    bench = Ahead()
    request = bench.add(3, params)
    assert needs_tokens(request) == request.needs_tokens == needs
    bench.begin()
    assert (bench.begin() is None) == needs


def test_one_that_needs_its_token_is_in_each_step_all_the_same() -> None:
    """If only its own row waited, it would get half of the tokens."""
    bench = Ahead()
    waits, goes = bench.add(3, SamplingParams(presence_penalty=1.0, max_tokens=9)), bench.add(3)
    for turn in range(4):
        step = bench.begin()
        assert step is not None
        assert len(step.slots) == 2
        assert bench.begin() is None
        bench.finish(5, 6)
        assert (waits.num_output, goes.num_output) == (turn + 1, turn + 1)


def test_where_blocks_lack_steps_wait_so_that_one_can_give_way() -> None:
    bench = Ahead(num_blocks=3)
    first, second = bench.add(7), bench.add(1)
    bench.begin()
    assert bench.begin() is not None, "the eighth token has room"
    bench.finish(5, 6)
    step = bench.begin()
    assert step is not None
    assert step.slots == [second.slot], "no block for the ninth"
    bench.finish(5, 6)
    assert bench.begin() is None, "the second one would be in each step"
    bench.finish(6)
    step = bench.begin()
    assert step is not None
    assert (step.slots, second.slot) == ([first.slot], None)
    assert bench.scheduler.counters().preemptions == 1


def test_steps_wait_where_one_of_higher_priority_needs_room() -> None:
    bench = Ahead()
    for _ in range(4):
        bench.add(3, priority=1)
    bench.begin()
    assert bench.begin() is not None
    before = bench.add(3)
    bench.finish(5, 5, 5, 5)
    assert bench.begin() is None
    bench.finish(5, 5, 5, 5)
    assert bench.begin() is not None
    assert before.slot is not None


def test_one_that_is_handed_over_goes_no_further_ahead() -> None:
    bench = Ahead()
    request = bench.add(3)
    bench.begin()
    bench.begin()
    handing = HandOvers(bench.pool, SIZE)
    handing.add(Lookup((b"taker", 1), [NO_BLOCK], ("router", 1), room=9))
    assert handing.due(lambda _: request) == []
    bench.finish(5)
    assert bench.begin() is None
    assert handing.due(lambda _: request) == []
    bench.finish(6)
    ((_, found, tail),) = handing.due(lambda _: request)
    assert found is request
    assert not isinstance(tail, str)
    assert not request.is_asked_for


def test_a_step_that_runs_again_has_no_rows_of_unknown_tokens() -> None:
    bench = Ahead()
    going, prompt = bench.add(4), bench.add(40)
    bench.begin()
    second = bench.begin()
    assert second is not None
    assert second.ahead == [0]
    assert second.counts == [1, 12]
    again, rest = bench.scheduler.restart()
    assert (again.slots, again.counts, again.ahead) == ([0, 1], [4, 28], [])
    assert (rest.slots, rest.counts, rest.ahead, rest.partial) == ([1], [12], [], [])
    assert (going.num_computed, going.num_in_flight, len(going.blocks)) == (4, 1, 1)
    assert (prompt.num_computed, prompt.num_in_flight) == (40, 2)
    bench.under_way = deque((again, rest))
    bench.finish(5, None)
    third = bench.begin()
    assert third is not None
    assert (third.slots, third.starts, third.ahead) == ([0, 1], [4, 40], [1])
