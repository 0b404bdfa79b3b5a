"""A toy state through the real scheduler: hits, preemption, aborts, drafts, restarts."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.speculation import SpeculativeConfig
from engine.speculation.speculation import Speculation
from tests.engine.oracle import Oracle
from tests.engine.pieces.toy import PEER, ToyBench
from tests.engine.scheduling.test_scheduler import tokens
from tests.engine.simulated_executor import expected_output
from tests.nightly import examples


def test_a_request_fills_a_state_at_each_position_of_the_grid_that_it_passes() -> None:
    bench = ToyBench(grid=8, block_size=4, budget=5)
    number = bench.add(tokens(1, 30), max_tokens=12)
    bench.finish()
    assert bench.outputs[number] == expected_output(tokens(1, 30), 12)
    kinds, request = bench.pool.kinds, bench.requests[number]
    named = [
        (index + 1) * 4
        for index, link in enumerate(request.hashes)
        if all(map(bench.pool.slot_of, kinds.boundary_names(link)))
    ]
    assert named == [8, 16, 24, 40], "of the prompt its end and distances that double; and the last one"


def test_the_same_prompt_goes_on_from_the_last_state_before_its_end() -> None:
    bench = ToyBench(grid=8, block_size=4, budget=64)
    first = bench.add(tokens(1, 24))
    bench.finish()
    before = bench.executor.computed_tokens
    second = bench.add(tokens(1, 24))
    bench.finish()
    assert bench.requests[second].num_cached == 16, "one token at least is computed"
    assert bench.executor.computed_tokens - before == 8 + 4
    assert bench.outputs[first] == bench.outputs[second] == expected_output(tokens(1, 24), 5)


def test_a_history_that_grows_computes_at_most_two_grids_more() -> None:
    """Ten turns of an agent, and a second branch of the fifth one."""
    grid, block = 16, 4
    bench = ToyBench(grid=grid, block_size=block, budget=64, num_blocks=1_000, num_states=200)
    history, kept = tokens(1, 600), []
    for turn in range(10):
        if turn:
            number = bench.add(history, max_tokens=20)
            bench.finish()
            assert bench.requests[number].num_cached >= len(kept[-1]) - 2 * grid
            assert bench.outputs[number] == expected_output(history, 20)
            history = history + bench.outputs[number] + tokens(turn, 30)
            kept.append(history[: -30 - 1])
        else:
            bench.add(history, max_tokens=1)
            bench.finish()
            kept.append(history)
    branch = kept[4] + tokens(77, 50)
    for _ in range(2):
        number = bench.add(branch, max_tokens=1)
        bench.finish()
    assert bench.requests[number].num_cached >= len(branch) - 2 * grid


def test_where_two_prompts_part_the_second_leaves_a_state_for_the_third() -> None:
    bench = ToyBench(grid=8, block_size=4, budget=64, num_blocks=200)
    shared = tokens(1, 101)
    cached = []
    for seed in (2, 3, 4):
        number = bench.add(shared + tokens(seed, 45), max_tokens=1)
        bench.finish()
        cached.append(bench.requests[number].num_cached)
    assert cached[1:] == [80, 96], "nobody knew that they part there, until two had"


def test_a_preempted_request_goes_on_from_its_state() -> None:
    bench = ToyBench(grid=8, block_size=4, budget=64, max_seqs=1)
    first = bench.add(tokens(1, 17), max_tokens=20, priority=1)
    for _ in range(13):
        bench.step()
    second = bench.add(tokens(2, 17), max_tokens=20)
    bench.finish()
    assert bench.scheduler.counters().preemptions == 1
    assert bench.outputs[first] == expected_output(tokens(1, 17), 20)
    assert bench.outputs[second] == expected_output(tokens(2, 17), 20)
    assert bench.executor.computed_tokens == 2 * (17 + 19) + 5, "the rows behind position 24 were dropped"


def test_requests_wait_or_give_way_where_states_lack() -> None:
    bench = ToyBench(grid=4, block_size=4, budget=64, num_states=2)
    numbers = [bench.add(tokens(seed, 9), max_tokens=20) for seed in range(4)]
    bench.finish()
    for seed, number in enumerate(numbers):
        assert bench.outputs[number] == expected_output(tokens(seed, 9), 20)


def test_the_state_of_an_aborted_request_is_kept_while_its_step_may_run_again() -> None:
    """Blocks that the step fills have names, and must be right after its second run."""
    bench = ToyBench(grid=8, block_size=1, num_states=2, micro_batches=2, checks_reads=False)
    prompt = tokens(1, 8)
    first = bench.add(prompt, max_tokens=5)
    bench.step()
    bench.begin()
    bench.scheduler.abort((PEER, first))
    bench.add(tokens(2, 20))
    bench.begin()
    assert len(bench.under_way) == 2
    bench.restart()
    bench.finish()
    longer = prompt + expected_output(prompt, 1) + tokens(3, 8)
    for _ in range(2):
        number = bench.add(longer)
        bench.finish()
    assert bench.requests[number].num_cached == 16
    assert bench.outputs[number] == expected_output(longer, 5)


def test_what_was_computed_from_wrong_content_is_not_found() -> None:
    bench = ToyBench(grid=8, block_size=4, budget=64)
    number = bench.add(tokens(1, 21), max_tokens=20)
    for _ in range(6):
        bench.step()
    bench.pool.unname(list(bench.pool.known))
    bench.scheduler.set_back(bench.requests[number])
    assert not list(bench.pool.known)
    bench.finish()
    assert bench.outputs[number] == expected_output(tokens(1, 21), 20)


def test_what_a_step_fills_from_wrong_content_is_not_found() -> None:
    """A step's content is found wrong before its states have names."""
    bench = ToyBench(grid=8, block_size=4, budget=64)
    number = bench.add(tokens(1, 45), max_tokens=4)
    bench.begin()
    bench.pool.unname(list(bench.pool.known))
    bench.scheduler.set_back(bench.requests[number])
    bench.scheduler.update(bench.under_way.popleft(), bench.executor.finish())
    assert not list(bench.pool.known)
    bench.finish()
    assert bench.outputs[number] == expected_output(tokens(1, 45), 4)


@settings(max_examples=examples(200), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.integers(10, 30),
    num_states=st.sampled_from([2, 3, 5, 12, 40]),
    num_kinds=st.sampled_from([1, 1, 2]),
    shape=st.sampled_from([(1, 1), (1, 4), (2, 2), (2, 6), (4, 4), (4, 8)]),
    budget=st.integers(6, 40),
    max_seqs=st.integers(1, 6),
    micro_batches=st.sampled_from([1, 1, 2, 3]),
    right=st.sampled_from([None, "looked up", 0.0, 0.8, 1.0]),
    restarts=st.booleans(),
)
def test_no_state_is_read_before_it_is_written_whatever_happens(
    seed: int,
    num_blocks: int,
    num_states: int,
    num_kinds: int,
    shape: tuple[int, int],
    budget: int,
    max_seqs: int,
    micro_batches: int,
    right: float | str | None,
    restarts: bool,
) -> None:
    """Free slots hold NaN, and each request gives what it gives alone."""
    rng = random.Random(seed)
    block_size, grid = shape
    speculation: Speculation | None = None
    if right == "looked up":
        speculation = Speculation(SpeculativeConfig(prompt_lookup_min=1))
    elif isinstance(right, float):
        speculation = Oracle(expected_output, right, seed=seed)
    bench = ToyBench(
        num_blocks=num_blocks, num_states=num_states, num_kinds=num_kinds, grid=grid, block_size=block_size,
        budget=max(budget, max_seqs), max_seqs=max_seqs, micro_batches=micro_batches, speculation=speculation,
        checks_reads=not restarts,
    )  # fmt: skip
    capacity = num_blocks * block_size
    wanted: dict[int, tuple[list[int], int]] = {}
    aborted = set()
    for _ in range(rng.randrange(1, 30)):
        if rng.random() < 0.4:
            length = rng.randrange(1, max(2, capacity - 2))
            prompt = tokens(rng.randrange(3), length)  # few seeds, so that prefixes repeat
            if rng.random() < 0.3:
                prompt = prompt[: length // 2] + tokens(7, length - length // 2)
            most = rng.randrange(1, max(2, min(24, capacity - length + 1)))
            wanted[bench.add(prompt, most, priority=rng.randrange(2))] = (prompt, most)
        elif wanted and rng.random() < 0.2:
            victim = rng.choice(list(wanted))
            if bench.scheduler.abort((PEER, victim)):
                aborted.add(victim)
                bench.spoil_free()
        elif restarts and rng.random() < 0.3:
            bench.begin()
            bench.restart()
        elif rng.random() < 0.1:
            bench.pool.unname(list(bench.pool.known))
            bench.spoil_free()
        else:
            bench.step()
    bench.finish()
    for number, (prompt, most) in wanted.items():
        expected = expected_output(prompt, most)
        if number in aborted:
            assert bench.outputs[number] == expected[: len(bench.outputs[number])]
        else:
            assert bench.outputs[number] == expected
