"""Steps of batch lines alone: short while other requests come, whole when none do."""

from __future__ import annotations

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
    assert timed_step(bench) == 64, "nobody else has come yet"
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


def test_they_are_whole_again_once_nobody_comes() -> None:
    share = LinesShare(2048)
    assert share.tokens == 2048
    share.others_run()
    steps = 0
    while share.tokens < 2048:
        share.took(share.tokens, 0.0001 * share.tokens)
        steps += 1
    assert 0.9 * LinesShare.LASTS / LinesShare.SECONDS < steps < 1.6 * LinesShare.LASTS / LinesShare.SECONDS
    share.others_run()
    assert 30 < share.tokens < 70, "what was learned stays"


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
