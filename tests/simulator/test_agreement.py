"""The agreement holds in all schedules. Read one with ``python -m tests.simulator.world SEED``."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.nightly import NIGHTLY
from tests.simulator.checker import Checker, Rule
from tests.simulator.schedule import Violation
from tests.simulator.settings import Settings
from tests.simulator.world import World, simulate

NUM_SCHEDULES = 10_000 if NIGHTLY else 1_000
CHUNK = 200


@cache
def counts_of(first: int) -> Counter[str]:
    """What happened in a chunk of schedules, none of which broke a rule."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        counts += simulate(seed).checker.counts
    return counts


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, CHUNK))
def test_no_schedule_breaks_a_rule(first: int) -> None:
    assert counts_of(first)


def test_the_schedules_reach_what_they_are_for() -> None:
    """A rule that is never put to the test holds too."""
    counts = counts_of(0)
    assert set(counts) >= {"RunStep", "Sleep", "Switch"}
    expected = {
        "wakes": 1000,
        "early wakes": 500,
        "stale wakes": 1000,
        "stale wakes in sleep": 300,
        "impossible wakes": 100,
        "losses": 1000,
        "repeats": 1000,
        "wakes repeated in vain": 1000,
        "steps with two wakers": 100,
        "sleeps asked for": 30,  # the wakers' work was gone or held back when its step came
        "steps without tokens": 100,  # some are ready for an epoch, others not yet
        "sleeps as long as they may be": 30,  # the bound is exact
    }
    assert {name: counts[name] for name in expected if counts[name] < expected[name]} == {}


def test_a_seed_is_a_schedule() -> None:
    for seed in range(50):
        assert simulate(seed).trace == simulate(seed).trace
    assert simulate(0).trace != simulate(1).trace


def test_at_the_end_all_sleep_and_nothing_is_outstanding() -> None:
    for seed in range(50):
        for instance in simulate(seed).instances.values():
            assert not instance.lockstep.awake
            assert not instance.has_work
            assert instance.lockstep.outstanding_wake is None


def test_settings_cover_what_they_say() -> None:
    drawn = [World(seed).settings for seed in range(300)]
    assert {settings.size for settings in drawn} == {2, 3, 4, 5}
    assert {settings.repeat is None for settings in drawn} == {True, False}
    assert all(settings.losses == 0 for settings in drawn if settings.repeat is None)


def test_a_violation_tells_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checker, "end", lambda checker: checker.endless(0))
    with pytest.raises(Violation) as caught:
        simulate(7)
    assert caught.value.rule is Rule.REST
    (note,) = caught.value.__notes__
    assert note.startswith(f"seed 7: {World(7).settings}\n")
    assert "Sleep()" in note
    assert "<Instance 0 ASLEEP 0 tokens <Lockstep rank 0/" in note


def test_bounds_follow_from_the_settings() -> None:
    settings = Settings(
        size=2, budget=1, compute=5, gather=3, delay=4, repeat=10, losses=2, loss=0.5, duplication=0.0,
        hold_back=1, gap=1, arrivals=1, arrivals_at_sleep=0, pauses=0, pause=1, epochs=0, cancellations=0,
        impossible=0,
    )  # fmt: skip
    wake = 4 + 2 * 10
    assert settings.bounds.asleep == 3 + wake
    assert settings.bounds.progress == 4 * (3 + wake)
    assert settings.bounds.switch == 3 * (3 + wake)
