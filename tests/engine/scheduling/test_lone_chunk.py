"""Length of a prefill chunk while no other request is there."""

from __future__ import annotations

import random

import pytest

from engine.messages import BATCH_PRIORITY
from engine.scheduling.lines_share import LinesShare
from engine.scheduling.lone_chunk import LoneChunk
from engine.step import Step
from tests.engine.scheduling.test_scheduler import PEER, Bench, tokens
from tests.engine.simulated_executor import expected_output


def machine(each: float, more: float) -> tuple[LoneChunk, list[tuple[int, float]]]:
    """Chunks of the second prompt of 16,000 tokens on a machine of this speed."""
    chunk = LoneChunk(512, 2016, 0.5)
    for _ in range(2):
        found, start = [], 0
        while start < 16000:
            count = min(chunk.tokens(start), 16000 - start)
            seconds = count * (each + more * (start + count / 2))
            chunk.took(start, count, seconds)
            found.append((count, seconds))
            start += count
    return chunk, found


@pytest.mark.parametrize(
    ("each", "more"), [(50e-6, 5e-9), (100e-6, 20e-9), (200e-6, 30e-9), (500e-6, 100e-9), (3e-3, 0.0)]
)
def test_a_chunk_beyond_the_budget_takes_no_longer_than_it_may(each: float, more: float) -> None:
    chunk, found = machine(each, more)
    for count, seconds in found:
        assert count == 512 or seconds < 0.6, chunk
    assert sum(count for count, _ in found) == 16000


def test_a_fast_machine_takes_the_largest_and_a_slow_one_the_usual() -> None:
    assert max(count for count, _ in machine(50e-6, 5e-9)[1]) == 2016
    assert {count for count, _ in machine(3e-3, 1e-9)[1]} == {512, 16000 % 512}


def test_chunks_shrink_as_tokens_take_longer_at_later_positions() -> None:
    counts = [count for count, _ in machine(100e-6, 40e-9)[1]]
    assert counts[0] == 2016
    assert counts[:-1] == sorted(counts[:-1], reverse=True)
    assert counts[-2] == 704


def test_an_estimate_is_not_trusted_far_beyond_what_was_measured() -> None:
    chunk = LoneChunk(512, 8000, 100.0)
    assert chunk.tokens(0) == 512
    chunk.took(0, 512, 0.05)
    assert chunk.tokens(512) == 1024
    assert chunk.tokens(1025) == 512, "nobody knows how long tokens take there"
    chunk.took(512, 1024, 0.1)
    assert chunk.tokens(1536) == 2048


def test_what_was_slow_once_is_soon_forgotten() -> None:
    chunk, _ = machine(50e-6, 5e-9)
    chunk.took(4000, 2016, 6.0)
    assert chunk.tokens(4000) == 512
    for _ in range(12):
        chunk.took(4000, 512, 512 * (50e-6 + 5e-9 * 4256))
    assert chunk.tokens(4000) == 2016


def test_short_steps_say_nothing_and_a_clock_may_stand_still() -> None:
    chunk = LoneChunk(512, 2016, 0.5)
    chunk.took(0, 255, 9.0)
    assert chunk.tokens(0) == 512
    chunk.took(0, 512, 0.0)
    assert chunk.tokens(0) == 1024
    off = LoneChunk(512, 0, 0.5)
    off.took(0, 512, 0.001)
    assert off.tokens(0) == 512


def lone_bench() -> Bench:
    """A scheduler that knows how long up to 1024 tokens take."""
    bench = Bench(budget=256, num_blocks=4000, largest_lone_chunk=1024, most_tokens=1024 + 16)
    for count in (256, 512, 1024):
        bench.scheduler.timed(first_chunk(bench, count), count * 1e-4)
    return bench


def first_chunk(bench: Bench, count: int, seed: int = 90) -> Step:
    """A step of a prompt, which is then aborted."""
    number = bench.add(tokens(seed + count, count + 300))
    step = bench.scheduler.schedule()
    assert step is not None
    assert step.num_tokens == count
    bench.executor.begin(step)
    bench.scheduler.update(step, bench.executor.finish())
    bench.scheduler.abort((PEER, number))
    return step


def test_the_next_chunk_is_small_once_anybody_else_is_there() -> None:
    bench = lone_bench()
    bench.add(tokens(2, 3000))
    assert bench.step() == 1024
    waits = bench.add(tokens(3, 10))
    assert bench.step() == 256
    bench.scheduler.abort((PEER, waits))
    assert bench.step() == 1024, "it is gone"
    bench.add(tokens(4, 10), max_tokens=40)
    while bench.scheduler.queues.has_work:
        assert bench.step() <= 256 + 16
    bench.finish()


def test_a_lone_batch_line_has_large_ones_only_where_they_are_fast() -> None:
    bench = lone_bench()
    for _ in range(60):
        bench.scheduler.budget.lines.took(1 << 20, 0.001)
    bench.add(tokens(2, 3000), priority=BATCH_PRIORITY)
    assert bench.step() == 1024
    bench.scheduler.budget.lines.others_run()
    assert bench.step() == LinesShare.FIRST
    bench.finish()


def test_none_is_larger_beside_another_instance_or_in_a_pipeline() -> None:
    bench = lone_bench()
    bench.scheduler.budget.only_instance = False
    bench.add(tokens(2, 1000))
    assert bench.step() == 256
    bench.finish()


def test_a_chunk_behind_a_cached_prefix_is_as_long_as_its_position_allows() -> None:
    bench = lone_bench()
    bench.add(tokens(2, 2000), max_tokens=1)
    bench.finish()
    bench.scheduler.timed(first_chunk(bench, 1024, seed=91), 4.0)  # slow: 2 ms a token
    bench.add([*tokens(2, 2000), *tokens(4, 600)], max_tokens=1)
    assert bench.step() == 256
    bench.finish()


def test_a_chunk_that_waited_for_a_larger_one_of_a_peer_says_nothing() -> None:
    bench = lone_bench()
    bench.scheduler.timed(first_chunk(bench, 1024, seed=91), 4.0, largest=3000)
    bench.add(tokens(2, 2000), max_tokens=1)
    assert bench.step() == 1024
    bench.finish()


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_the_same_whenever_others_come(seed: int) -> None:
    """Requests come and go at random; no step with two requests is beyond the budget."""
    chance = random.Random(seed)
    bench = lone_bench()
    for number in range(8):
        bench.add(tokens(number, chance.choice([5, 300, 700])), max_tokens=chance.randrange(1, 6))
        for _ in range(chance.randrange(6)):
            others = len(bench.scheduler.queues.running) + len(bench.scheduler.queues.waiting)
            count = bench.step()
            assert others == 1 or count <= 256 + 16
    bench.finish()
    for number, request in bench.requests.items():
        if number > 3:
            prompt = request.token_ids[: request.num_prompt]
            assert bench.outputs[number] == expected_output(prompt, request.max_output)
