"""Steps of batch lines alone: short while other requests come, longer when none do."""

from __future__ import annotations

import pytest

from engine.messages import BATCH_PRIORITY
from engine.scheduling.lines_share import LinesShare
from engine.scheduling.request import Status
from tests.engine.scheduling.test_scheduler import Bench, tokens
from tests.engine.scheduling.test_scheduler import expected_output as expected

EACH = 0.001
"""Seconds of a token."""


def timed_step(bench: Bench) -> int:
    """Tokens of one step, which takes as long as they do."""
    step = bench.scheduler.schedule()
    assert step is not None
    bench.executor.begin(step)
    bench.scheduler.timed(step, EACH * step.num_tokens)
    for outcome in bench.scheduler.update(step, bench.executor.finish()):
        bench.outputs[outcome.request.key[1]] += outcome.token_ids
    return step.num_tokens


def test_steps_of_lines_are_short_while_other_requests_come() -> None:
    bench = Bench(budget=64, max_seqs=16, num_blocks=400)
    lines = [bench.add(tokens(seed, 20), max_tokens=60, priority=BATCH_PRIORITY) for seed in range(12)]
    alone = [timed_step(bench) for _ in range(20)]
    assert max(alone[10:]) <= 1.3 * LinesShare.SECONDS_ALONE / EACH, "others may come"
    assert alone[0] == LinesShare.FIRST
    assert max(alone) >= 0.7 * LinesShare.SECONDS_ALONE / EACH, "nobody else has come yet"
    other = bench.add(tokens(50, 6), max_tokens=2)
    while bench.requests[other].status is not Status.FINISHED:
        timed_step(bench)
    sizes = [timed_step(bench) for _ in range(40)]
    assert max(sizes[10:]) <= 1.3 * LinesShare.SECONDS / EACH
    assert min(sizes[10:]) >= LinesShare.LEAST, "they go on"
    bench.finish()
    for seed, number in enumerate(lines):
        assert bench.outputs[number] == expected(tokens(seed, 20), 60)


def test_a_prompt_goes_before_later_ones_beside_a_line_that_decodes() -> None:
    bench = Bench(budget=16)
    bench.add(tokens(1, 4), max_tokens=9, priority=BATCH_PRIORITY)
    bench.step()
    first = bench.add(tokens(2, 64), max_tokens=1)
    for seed in range(3, 6):
        bench.step()
        bench.add(tokens(seed, 16), max_tokens=1)
    bench.step()
    assert bench.outputs[first], "those that came later went before its next chunk"
    bench.finish()


def settled(share: LinesShare, fixed: float, each: float, steps: int = 200) -> float:
    """Seconds of the longest of the last steps, all of them full."""
    longest = 0.0
    for number in range(steps):
        seconds = fixed + each * share.tokens
        share.took(share.tokens, seconds)
        if number >= steps // 2:
            longest = max(longest, seconds)
    return longest


def test_they_are_longer_again_once_nobody_comes() -> None:
    share = LinesShare(2048)
    settled(share, 0.0, 0.0001)
    alone = share.tokens
    assert 0.7 * LinesShare.SECONDS_ALONE < 0.0001 * alone < 1.3 * LinesShare.SECONDS_ALONE
    share.others_run()
    steps = 0
    while share.are_short:
        share.took(share.tokens, 0.0001 * share.tokens)
        steps += 1
    assert 0.9 * LinesShare.LASTS / LinesShare.SECONDS < steps < 1.6 * LinesShare.LASTS / LinesShare.SECONDS
    assert share.tokens == alone, "what was learned stays"
    share.others_run()
    assert 30 < share.tokens < 70, "so it does for short ones"


@pytest.mark.parametrize("fixed", [0.0005, 0.004, 0.02])
def test_steps_alone_are_as_long_as_their_fixed_part_asks(fixed: float) -> None:
    share = LinesShare(1 << 16)
    longest = settled(share, fixed, 0.0001)
    bound = max(LinesShare.SECONDS_ALONE, LinesShare.PARTS * fixed)
    assert 0.7 * bound < longest < 1.3 * bound


def test_a_cold_first_step_is_soon_forgotten() -> None:
    share = LinesShare(1 << 16)
    share.took(share.tokens, 0.1)
    assert settled(share, 0.0005, 0.0001) < 1.3 * LinesShare.SECONDS_ALONE


def test_a_host_that_becomes_slower_gets_longer_steps() -> None:
    share = LinesShare(1 << 16)
    settled(share, 0.004, 0.0001)
    share.took(1, 0.0041)  # the last line of a batch: the smallest step, and the fastest
    for _ in range(100 * LinesShare.AGAIN):
        share.took(share.tokens, 0.012 + 0.0003 * share.tokens)
    assert settled(share, 0.012, 0.0003) > 0.8 * LinesShare.PARTS * 0.012


def test_steps_alone_are_bounded_where_no_small_one_was_measured() -> None:
    share = LinesShare(1 << 16)
    for _ in range(40):  # beside larger ones, which are fast
        share.took(share.tokens, 0.001, largest=1 << 16)
    assert share.tokens > 256
    assert settled(share, 0.0005, 0.001) < 1.3 * LinesShare.SECONDS_ALONE + 0.01


def test_steps_alone_are_whole_where_tokens_cost_next_to_nothing() -> None:
    share = LinesShare(2048)
    assert settled(share, 0.04, 0.00005) > LinesShare.SECONDS_ALONE
    assert share.tokens == 2048


def test_a_model_whose_steps_are_all_long_gets_a_few_tokens_a_step() -> None:
    share = LinesShare(2048)
    share.others_run()
    for _ in range(20):
        share.took(share.tokens, 0.1)
    assert share.tokens == LinesShare.LEAST
    assert LinesShare(2).tokens == 2


def test_a_longer_step_of_another_instance_shortens_no_lines() -> None:
    share = LinesShare(2048)
    share.others_run()
    for _ in range(10):
        share.took(share.tokens, 0.1, largest=512)
    assert share.tokens == LinesShare.FIRST
    share.took(share.tokens, 0.001, largest=512)
    assert share.tokens > LinesShare.FIRST, "even so there was time left"
    share.took(share.tokens, 0.1, largest=share.tokens)
    assert share.tokens < LinesShare.FIRST, "nobody had more"


def test_models_whose_images_are_whole_and_prompts_without_chunks_are_not_cut() -> None:
    for rules in ({"enable_chunked_prefill": False}, {"images_are_whole": True}):
        bench = Bench(budget=64, num_blocks=400, **rules)
        other = bench.add(tokens(50, 6), max_tokens=2)
        while bench.requests[other].status is not Status.FINISHED:
            timed_step(bench)
        bench.add(tokens(1, 40), priority=BATCH_PRIORITY)
        assert timed_step(bench) == 40
        bench.finish()
