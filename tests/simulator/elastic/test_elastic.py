"""A mesh that changes holds its rules. Read a schedule with ``python -m tests.simulator.elastic SEED``."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from coordinator.messages import PlanChange, State, Welcome
from coordinator.numerics import combined
from tests.nightly import NIGHTLY
from tests.simulator.elastic.checker import Checker, Rule
from tests.simulator.elastic.world import World, simulate
from tests.simulator.schedule import Violation

NUM_SCHEDULES = 3000 if NIGHTLY else 500
"""The others, up to 50,000, are run by ``make simulate``."""
CHUNK = 250


@cache
def counts_of(first: int) -> Counter[str]:
    """What happened in a chunk of schedules, none of which broke a rule."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        counts += simulate(seed).checker.counts
    return counts


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, CHUNK))
def test_no_schedule_with_faults_breaks_a_rule(first: int) -> None:
    assert counts_of(first)


@pytest.mark.each_push
def test_the_schedules_reach_what_they_are_for() -> None:
    """A rule that is never put to the test holds too."""
    counts = counts_of(0) + counts_of(CHUNK)
    expected = {
        "kills": 200,
        "stalls": 200,
        "two deaths at once": 20,
        "hangs": 100,
        "cuts": 100,
        "splits": 100,
        "left out": 20,
        "looks at a split that lasts": 5000,
        "restarts": 150,
        "left": 200,
        "Switch": 300,
        "groups after a loss": 200,
        "interrupted": 200,
        "dead taken out": 150,
        "stalled taken out": 25,
        "fenced": 15,
        "forming failed": 40,
        "requests moved": 50,
        "rescues": 50,  # by a supervisor, where the experts did not fit, or nobody was left
        "numbers used again": 1,
        "fault at form": 100,
        "fault at read": 100,
        "fault at prepared": 50,
        "fault at entered": 50,
        "fault at switch": 3,
        "fault at interrupted": 3,
    }
    assert {name: counts[name] for name in expected if counts[name] < expected[name]} == {}


@pytest.mark.parametrize("seed", [10681, 20377, 21200, 30685, 31815, 39012, 304312, 311666])
def test_schedules_that_failed_once(seed: int) -> None:
    """Each found a fault of the protocol; the first and last, of the simulator."""
    simulate(seed)


def test_who_is_in_a_group_again_is_not_taken_to_be_out_of_it() -> None:
    """An instance that was taken out is in a plan: no later welcome fences it."""
    world = simulate(284090)
    instance = world.instances["i0"]
    assert any("taken out" in str(what) for _, who, what in world.trace if who == "coordinator")
    plans = [
        what for _, who, what in world.trace if who == "coordinator to i0" and isinstance(what, PlanChange)
    ]
    assert [plan.epoch for plan in plans] == [2]
    assert instance.alive
    instance.registers_again(world.num_coordinators, highest=3)
    instance.hear(Welcome(rank=0, settings=world.mesh_settings, epoch=2, heartbeat_interval=0.5))
    assert instance.fenced_up_to == 0


def test_a_seed_is_a_schedule() -> None:
    for seed in range(20):
        assert list(map(str, simulate(seed).trace)) == list(map(str, simulate(seed).trace))


def test_at_the_end_everybody_alive_sleeps_in_the_newest_group() -> None:
    for seed in range(30):
        world = simulate(seed)
        assert world.is_steady
        assert world.registry is not None
        assert (
            world.registry.view().waiting_for == ""
            or len(world.registry.view().members) < world.settings.size
        )


def test_at_the_end_the_members_of_a_group_are_shown_one_numerics_class() -> None:
    found = set()
    for seed in range(30):
        world = simulate(seed)
        assert world.registry is not None
        own = {one.member_state.numerics for one in world.instances.values() if one.serves}
        members = world.registry.view().members
        shown = {member.numerics for member in members if member.state is State.READY}
        assert None not in shown
        assert shown == ({combined([each for each in own if each])} if own else set())
        found |= {each.kernels for each in shown if each}
    assert found >= {"avx2", "avx2+avx512"}, "groups of one class and of two"


def test_calm_schedules_are_smooth_because_nothing_fails_in_them() -> None:
    calm = [world for world in map(World, range(100)) if not world.settings.has_faults]
    assert len(calm) > 10
    assert sum(world.settings.joins + world.settings.leaves > 1 for world in calm) > 5


def test_a_violation_tells_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Checker, "formed", lambda checker, form, highest: checker.broken(Rule.RISING, "planted")
    )
    with pytest.raises(Violation) as caught:
        simulate(7)
    assert caught.value.rule is Rule.RISING
    (note,) = caught.value.__notes__
    assert note.startswith(f"seed 7: {World(7).settings}\n")
    assert "coordinator: starts, number 1" in note
    assert "<Instance i0 " in note
