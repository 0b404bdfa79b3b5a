"""Number of prompt tokens that run beside decode rows."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import SchedulerConfig
from engine.scheduling.prompt_share import PromptShare
from tests.engine.scheduling.test_scheduler import Bench, tokens


@pytest.mark.parametrize(
    ("milliseconds", "wanted"), [(0.1, 128), (1.1, 128), (1.6, 80), (2.2, 64), (4.0, 32), (50.0, 32)]
)
def test_others_wait_a_seventh_of_a_second_or_for_the_least_that_pays(
    milliseconds: float, wanted: int
) -> None:
    share = PromptShare(128, 0.15)
    assert share.tokens == 128, "until it is known how long they take"
    rng = random.Random(1)
    for _ in range(40):
        count = rng.randrange(32, 200)
        share.took(count, count * milliseconds * 1e-3)
    assert share.tokens == wanted


def test_what_was_slow_once_is_soon_forgotten() -> None:
    share = PromptShare(128, 0.15)
    share.took(128, 6.0)  # memory that nobody had touched
    assert share.tokens == 32
    for _ in range(10):
        share.took(64, 0.064)
    assert share.tokens == 128
    share.took(64, 8.0)  # the machine stood still
    assert share.tokens == 32
    for _ in range(10):
        share.took(64, 0.064)
    assert share.tokens == 128


def test_a_machine_that_stays_slow_is_believed() -> None:
    share = PromptShare(128, 0.15)
    share.took(128, 0.128)
    counts = []
    for _ in range(60):
        share.took(64, 0.15)
        counts.append(share.tokens)
    assert counts[0] == 128
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 64


def test_steps_of_few_tokens_say_nothing() -> None:
    share = PromptShare(128, 0.15)
    share.took(31, 3.0)
    assert share.tokens == 128


def test_own_slow_tokens_stay_slow_beside_a_larger_step_of_a_peer() -> None:
    """Tokens at position 150,000, waited for by a peer with many cheap ones."""
    share = PromptShare(256, 0.15)
    for _ in range(3):
        share.took(32, 0.15)
    assert share.tokens == 32
    for _ in range(100):
        share.took(32, 0.15, largest=1024)
    assert share.tokens == 32
    for _ in range(10):
        share.took(32, 0.03, largest=64)  # a token takes 1 ms at most: the larger step has 64
    assert share.tokens == 144
    for _ in range(100):
        share.took(32, 3.0, largest=1000)  # at least three
    assert share.tokens == 48


@given(st.floats(1e-4, 0.02), st.floats(1e-5, 1e-4), st.integers(256, 4096))
def test_own_tokens_are_learnt_beside_peers_that_are_always_larger(
    own: float, rest: float, peer: int
) -> None:
    """In lockstep no step of this instance may ever be the largest: its attention tells."""
    share = PromptShare(256, 0.15)
    alone = PromptShare(256, 0.15)
    for _ in range(200):
        tokens = share.tokens
        attention = tokens * own
        share.took(tokens, attention + peer * rest, peer, attention)
        alone.took(alone.tokens, alone.tokens * own)
    assert share.tokens <= alone.tokens + PromptShare.MULTIPLE
    assert share.tokens * own <= max(0.15, PromptShare.LEAST * own) + PromptShare.MULTIPLE * own


def test_a_number_that_somebody_chose_is_kept() -> None:
    share = PromptShare(512, None)
    share.took(512, 100.0)
    assert share.tokens == 512
    assert SchedulerConfig().prompt_seconds_beside_decodes() == 0.15
    assert SchedulerConfig(performance_mode="interactivity").prompt_seconds_beside_decodes() == 0.05
    assert SchedulerConfig(max_num_batched_tokens=2048).prompt_seconds_beside_decodes() is None
    assert SchedulerConfig(performance_mode="throughput").prompt_seconds_beside_decodes() is None
    assert SchedulerConfig().prompt_seconds_beside_decodes(has_gpu=True) is None


def test_the_scheduler_cuts_prompts_by_the_time_of_its_steps() -> None:
    bench = Bench(
        budget=256, num_blocks=200, prompt_tokens_beside_decodes=128, prompt_seconds_beside_decodes=0.15
    )
    bench.add(tokens(1, 4), max_tokens=50)
    bench.step()
    bench.add(tokens(2, 400))
    assert bench.step() == 1 + 128
    step = bench.scheduler.schedule()
    assert step is not None
    bench.scheduler.timed(step, 129 * 0.002)
    bench.executor.begin(step)
    bench.scheduler.update(step, bench.executor.finish())
    assert bench.step() == 1 + 64
    step = bench.scheduler.schedule()
    assert step is not None
    bench.scheduler.timed(step, 0.0)  # it cannot be, but a clock may stand still
    bench.executor.begin(step)
    bench.scheduler.update(step, bench.executor.finish())
    bench.finish()


def test_a_step_that_waited_for_a_larger_one_of_a_peer_shortens_no_prompts() -> None:
    bench = Bench(
        budget=256, num_blocks=200, prompt_tokens_beside_decodes=128, prompt_seconds_beside_decodes=0.15
    )
    bench.add(tokens(1, 4), max_tokens=50)
    bench.step()
    bench.add(tokens(2, 100))
    step = bench.scheduler.schedule()
    assert step is not None
    assert step.num_tokens == 101
    bench.scheduler.timed(step, 2000 * 0.001, largest=2000)  # a millisecond a token, of a peer's
    bench.executor.begin(step)
    bench.scheduler.update(step, bench.executor.finish())
    bench.add(tokens(3, 400))
    assert bench.step() == 2 + 128
    step = bench.scheduler.schedule()
    assert step is not None
    for _ in range(20):
        bench.scheduler.timed(step, 130 * 0.003, largest=20)  # its own tokens took that long
    assert bench.scheduler.budget.prompt_share.tokens == 64
    bench.executor.begin(step)
    bench.scheduler.update(step, bench.executor.finish())
    bench.finish()
