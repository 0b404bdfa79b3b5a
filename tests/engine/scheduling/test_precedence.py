from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import SamplingParams
from engine.scheduling.request import Status
from tests.engine.scheduling.test_scheduler import Bench, guesses, tokens
from tests.engine.simulated_executor import expected_output
from tests.nightly import examples


def preemptions(bench: Bench) -> int:
    return bench.scheduler.counters().preemptions


def running(bench: Bench) -> list[int]:
    return [n for n, request in bench.requests.items() if request.status is Status.RUNNING]


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_a_slot_is_taken_from_the_lowest_latest_and_nothing_is_lost(micro_batches: int) -> None:
    bench = Bench(max_seqs=3, micro_batches=micro_batches)
    lows = [bench.add(tokens(seed, 9), max_tokens=40, priority=5 + (seed > 1)) for seed in (1, 2, 3)]
    for _ in range(6):
        bench.step()
    urgent = bench.add(tokens(4, 9), max_tokens=5)
    for _ in range(2 * micro_batches):
        bench.step()
    assert bench.outputs[urgent], "it waits for no end of those below it"
    if micro_batches == 1:
        assert running(bench) == [*lows[:2], urgent]
    bench.finish()
    assert preemptions(bench) == 1
    for seed, number, count in [*((seed, n, 40) for seed, n in enumerate(lows, 1)), (4, urgent, 5)]:
        assert bench.outputs[number] == expected_output(tokens(seed, 9), count)


def test_the_next_step_has_all_that_take_slots() -> None:
    bench = Bench(max_seqs=3)
    for seed in range(3):
        bench.add(tokens(seed, 4), max_tokens=30, priority=1)
    bench.step()
    urgent = [bench.add(tokens(seed, 4), max_tokens=2) for seed in range(10, 14)]
    bench.step()
    assert running(bench) == urgent[:3]
    bench.finish()
    assert preemptions(bench) == 3


def test_no_more_give_way_than_the_next_step_has_tokens_for() -> None:
    bench = Bench(max_seqs=4, budget=32, prompt_tokens_beside_decodes=10)
    for seed in range(4):
        bench.add(tokens(seed, 4), max_tokens=30, priority=1)
    bench.step()
    for seed in range(10, 14):
        bench.add(tokens(seed, 8), max_tokens=2)
    bench.step()
    assert preemptions(bench) == 2, "8 tokens of the first, and the beginning of the second"
    bench.finish()


def test_equal_and_resumed_requests_take_no_slot() -> None:
    bench = Bench(max_seqs=1)
    first = bench.add(tokens(1, 4), max_tokens=9, priority=3)
    bench.step()
    bench.add(tokens(2, 4), output_ids=expected_output(tokens(2, 4), 2), priority=3)
    bench.add(tokens(3, 4), priority=4)
    while bench.requests[first].status is not Status.FINISHED:
        assert running(bench) == [first]
        bench.step()
    bench.finish()
    assert preemptions(bench) == 0


def test_blocks_are_taken_as_slots_are() -> None:
    """Those that are needed, and no more."""
    bench = Bench(num_blocks=12, budget=64)
    lows = [bench.add(tokens(seed, 9), max_tokens=7, priority=1) for seed in range(4)]
    bench.step()
    urgent = bench.add(tokens(9, 14), max_tokens=2)
    bench.step()
    assert running(bench) == [*lows[:2], urgent]
    bench.finish()
    for seed, number in enumerate(lows):
        assert bench.outputs[number] == expected_output(tokens(seed, 9), 7)


def test_nobody_gives_way_in_vain() -> None:
    """What equals hold is lacking, whatever lower ones give."""
    bench = Bench(num_blocks=12, budget=64)
    equal = bench.add(tokens(1, 30), max_tokens=2)
    low = bench.add(tokens(2, 6), max_tokens=9, priority=1)
    bench.step()
    big = bench.add(tokens(3, 26), max_tokens=2)
    while bench.requests[equal].status is not Status.FINISHED:
        assert running(bench) == [equal, low]
        bench.step()
    bench.step()
    assert low in running(bench)
    assert big in running(bench)
    bench.finish()
    assert preemptions(bench) == 0


def test_blocks_that_are_shared_do_not_come_free() -> None:
    """Four of the six blocks of a prompt are of another request as well."""
    for length, gives_way in ((11, True), (15, False)):
        bench = Bench(num_blocks=8, budget=64)
        first = bench.add(tokens(1, 17), max_tokens=3)
        low = bench.add(tokens(1, 17), max_tokens=3, priority=1)
        bench.step()
        assert bench.pool.num_free == 2
        urgent = bench.add(tokens(2, length), max_tokens=2)
        bench.step()
        assert running(bench) == [first, urgent if gives_way else low]
        bench.finish()
        assert preemptions(bench) == gives_way


def test_a_known_prefix_is_room_already() -> None:
    bench = Bench(num_blocks=8, budget=64)
    first = bench.add(tokens(1, 17), max_tokens=3)
    low = bench.add(tokens(2, 4), max_tokens=3, priority=1)
    bench.step()
    assert bench.pool.num_free == 2
    urgent = bench.add([*tokens(1, 16), *tokens(3, 3)], max_tokens=2)
    bench.step()
    assert running(bench) == [first, low, urgent]
    bench.finish()


@pytest.mark.parametrize("beside", [None, 6])
def test_a_long_prompt_of_lower_priority_holds_up_no_other(beside: int | None) -> None:
    """The tokens of a step are taken, too; the long prompt keeps its place."""
    bench = Bench(budget=16, prompt_tokens_beside_decodes=beside)
    long = bench.add(tokens(1, 100), max_tokens=3, priority=1)
    bench.step()
    urgent = bench.add(tokens(2, 5), max_tokens=3)
    equal = bench.add(tokens(3, 5), max_tokens=3, priority=1)
    bench.step()
    assert len(bench.outputs[urgent]) == 1
    while not bench.outputs[long]:
        assert not bench.outputs[equal]
        bench.step()
    bench.finish()
    assert preemptions(bench) == 0
    assert bench.outputs[long] == expected_output(tokens(1, 100), 3)


def test_whole_prompts_get_the_tokens_of_those_below_them() -> None:
    bench = Bench(budget=20, max_seqs=8, enable_chunked_prefill=False)
    for seed in range(4):
        bench.add(tokens(seed, 4), max_tokens=9, priority=1)
    bench.step()
    urgent = bench.add(tokens(9, 18), max_tokens=2)
    bench.step()
    assert len(bench.outputs[urgent]) == 1
    assert preemptions(bench) == 2
    bench.finish()


def test_who_lacks_blocks_keeps_back_no_higher_one() -> None:
    """Free blocks kept for a long prompt go to a request of higher priority."""
    bench = Bench(num_blocks=16, budget=16)
    bench.add(tokens(1, 31), max_tokens=9, priority=1)
    bench.step()
    bench.step()
    long = bench.add(tokens(2, 32), max_tokens=3, priority=1)
    assert [bench.step() for _ in range(3)] == [1 + 15, 1, 1], "it lacks one block of four"
    equal = bench.add(tokens(3, 3), max_tokens=2, priority=1)
    urgent = bench.add(tokens(4, 3), max_tokens=2)
    bench.step()
    assert [len(bench.outputs[number]) for number in (long, equal, urgent)] == [0, 0, 1]
    bench.finish()
    assert bench.outputs[long] == expected_output(tokens(2, 32), 3)
    assert preemptions(bench) == 0


def test_log_probabilities_of_prompts_are_whole_after_giving_way() -> None:
    wanted = SamplingParams(max_tokens=4, prompt_logprobs=2)
    bench = Bench(max_seqs=1, budget=8)
    low = bench.add(tokens(1, 20), params=wanted, priority=1)
    bench.step()
    urgent = bench.add(tokens(2, 10), params=wanted)
    for _ in range(2):
        bench.step()
    assert len(bench.outputs[urgent]) == 1
    bench.finish()
    for number, count in ((low, 20), (urgent, 10)):
        assert len(bench.requests[number].prompt_logprobs or ()) == count
    assert preemptions(bench) == 1


@settings(max_examples=examples(150), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.integers(10, 30),
    block_size=st.sampled_from([1, 2, 4]),
    budget=st.integers(6, 40),
    max_seqs=st.integers(1, 5),
    micro_batches=st.sampled_from([1, 1, 2, 3]),
    right=st.sampled_from([None, 0.8]),
    beside=st.sampled_from([None, 5]),
    chunked=st.booleans(),
)
def test_any_priorities_give_what_each_request_gives_alone(
    seed: int,
    num_blocks: int,
    block_size: int,
    budget: int,
    max_seqs: int,
    micro_batches: int,
    right: float | None,
    beside: int | None,
    chunked: bool,
) -> None:
    """Few priorities, so that there are equals."""
    rng = random.Random(seed)
    capacity = num_blocks * block_size
    bench = Bench(
        speculation=None if right is None else guesses(right, seed=seed),
        num_blocks=num_blocks,
        block_size=block_size,
        budget=max(budget, max_seqs) if chunked else max(capacity, max_seqs),
        max_seqs=max_seqs,
        prompt_tokens_beside_decodes=beside,
        micro_batches=micro_batches,
        enable_chunked_prefill=chunked,
    )
    wanted: dict[int, tuple[list[int], int]] = {}
    for _ in range(rng.randrange(1, 60)):
        if rng.random() < 0.3:
            length = rng.randrange(1, max(2, capacity // rng.choice([1, 4]) - 2))
            prompt = tokens(rng.randrange(3), length)
            most = rng.randrange(1, max(2, min(12, capacity - length + 1)))
            wanted[bench.add(prompt, max_tokens=most, priority=rng.randrange(3))] = (prompt, most)
        else:
            bench.step()
    bench.finish()
    for number, (prompt, most) in wanted.items():
        assert bench.outputs[number] == expected_output(prompt, most)
