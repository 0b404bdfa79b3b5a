"""The autoscaler on traces, with a simulated mesh whose instances start slowly."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path

import pytest

from coordinator.messages import Load, Member, OperatorAnswer, Scale, State, View
from router.tools.autoscale.command import (
    AutoscaleConfig,
    PendingScale,
    TtftMeter,
    seen_in,
    signal_text,
    write_signal,
)
from router.tools.autoscale.policy import Autoscaler, Goals, MeshSnapshot, SizeDecision

GOALS = Goals(max_instances=8, target_running=10, cool_down_up=10, cool_down_down=20, stabilization_window=60)


class Mesh:
    """Serves so many requests at once per instance; the others wait."""

    STARTS = 15
    """Seconds until a new instance is ready."""

    def __init__(self, goals: Goals, size: int = 1) -> None:
        self._scaler = Autoscaler(goals)
        self._ready_at = [0.0] * size
        self.sizes = [size]
        self.changes: list[tuple[float, int]] = []

    def run(self, loads: list[float], step: float = 5.0) -> None:
        """One look per load, which is the number of requests in the mesh."""
        for number, load in enumerate(loads):
            now = step * number
            ready = sum(at <= now for at in self._ready_at)
            running = min(int(load), 10 * ready)
            seen = MeshSnapshot(
                staying=len(self._ready_at), ready=ready, running=running, waiting=int(load) - running
            )
            verdict = self._scaler.look(seen, now)
            if verdict.size != len(self._ready_at):
                self.changes.append((now, verdict.size))
            while len(self._ready_at) < verdict.size:
                self._ready_at.append(now + self.STARTS)
            del self._ready_at[verdict.size :]
            self.sizes.append(verdict.size)


def test_a_wave_is_followed_up_soon_and_down_late() -> None:
    mesh = Mesh(GOALS)
    mesh.run([5] * 10 + [70] * 40 + [5] * 40)
    peak = max(mesh.sizes)
    assert peak == 7
    up = next(at for at, size in mesh.changes if size == peak)
    assert up <= 50 + 3 * (Mesh.STARTS + 10), "it doubles, each time when those before are ready"
    down = next(at for at, size in mesh.changes if at > up and size < peak)
    assert 250 + 60 <= down <= 250 + 60 + 10, "the window has passed"
    assert mesh.sizes[-1] == 1


def test_a_load_that_swings_within_the_window_changes_nothing() -> None:
    mesh = Mesh(GOALS, size=4)
    mesh.run([40, 40, 40, 5, 5, 5] * 30)
    assert mesh.changes == []


def test_a_spike_of_one_look_does_not_start_more_than_double() -> None:
    mesh = Mesh(Goals(max_instances=8, target_running=1000.0, target_queue=2.0))
    mesh.run([5, 5, 5, 500])
    assert mesh.sizes[-1] == 2, "a queue says that there are too few, not how many are missing"


def test_random_traces_keep_the_bounds_and_the_pauses() -> None:
    rng = random.Random(5)
    for _ in range(200):
        low, high = sorted(rng.sample(range(1, 9), 2))
        goals = Goals(
            min_instances=low, max_instances=high, target_running=10, cool_down_up=rng.choice((0, 10, 30)),
            cool_down_down=rng.choice((0, 20, 90)), stabilization_window=rng.choice((5, 60)),
        )  # fmt: skip
        mesh = Mesh(goals, size=rng.randrange(low, high + 1))
        level, loads = 10.0, []
        for _ in range(100):
            level = max(0.0, min(120.0, level + rng.gauss(0, 15)))
            loads.append(level)
        mesh.run(loads + [0.0] * 80)
        assert all(low <= size <= high for size in mesh.sizes)
        assert mesh.sizes[-1] == low
        for (before, old), (at, new) in zip(mesh.changes, mesh.changes[1:], strict=False):
            assert at - before >= (goals.cool_down_up if new > old else goals.cool_down_down)


def test_a_slow_first_token_asks_for_more_and_a_middling_one_for_no_less() -> None:
    goals = Goals(max_instances=8, target_ttft=1.0, stabilization_window=0.0, cool_down_down=0.0)
    for ttft, size in ((1.5, 6), (5.0, 8), (0.8, 4), (0.1, 1), (None, 1)):
        assert Autoscaler(goals).look(MeshSnapshot(staying=4, ready=4, ttft=ttft), 0.0).size == size


@pytest.mark.parametrize(
    "seen", [MeshSnapshot(staying=3, ready=2, waiting=90), MeshSnapshot(staying=3, ready=3, leaving=1)]
)
def test_nothing_changes_while_instances_start_or_leave(seen: MeshSnapshot) -> None:
    scaler = Autoscaler(GOALS)
    assert scaler.look(seen, 1000.0) == SizeDecision(3, "instances start or leave")


def test_too_few_and_too_many_are_put_right_at_once() -> None:
    goals = Goals(min_instances=2, max_instances=4)
    assert Autoscaler(goals).look(MeshSnapshot(staying=1, ready=0), 0.0).size == 2
    assert Autoscaler(goals).look(MeshSnapshot(staying=6, ready=6), 0.0).size == 4


def test_the_mean_time_to_the_first_token_is_that_since_the_last_look() -> None:
    def text(total: float, count: int) -> str:
        name = "vllm:time_to_first_token_seconds"
        return (
            f"# TYPE {name} histogram\n"
            f'{name}_bucket{{engine="0",le="+Inf"}} {count}\n{name}_sum{{engine="0"}} {total}\n'
            f'{name}_count{{engine="0"}} {count}\n'
        )

    meter = TtftMeter()
    assert meter.read(text(10.0, 5)) is None
    assert meter.read(text(16.0, 7)) == 3.0
    assert meter.read(text(16.0, 7)) is None
    assert meter.read(text(1.0, 1)) is None, "the router was started again"
    assert meter.read("") is None


def test_a_view_is_counted() -> None:
    members = [
        Member(
            instance=str(rank), rank=rank, state=state, phase="", address="a", host="h", pid=1,
            load=Load(running=3, waiting=rank),
        )
        for rank, state in enumerate((State.READY, State.LOADING, State.DRAINING))
    ]  # fmt: skip
    view = View(epoch=1, size=1, settings=None, members=members, waiting_for="")
    assert seen_in(view, 0.5) == MeshSnapshot(staying=2, ready=1, leaving=1, running=9, waiting=3, ttft=0.5)


def test_the_signal_is_json_or_a_metric(tmp_path: Path) -> None:
    seen, verdict = MeshSnapshot(staying=2, ready=2), SizeDecision(3, "5 requests wait")
    path = tmp_path / "wanted.json"
    write_signal(verdict, seen, str(path))
    assert path.read_text() == '{"wanted":3,"instances":2,"ready":2,"why":"5 requests wait"}\n'
    assert list(tmp_path.iterdir()) == [path]
    assert signal_text(verdict, seen, "a.prom").endswith("\nlockstep_autoscale_wanted_instances 3\n")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "--max-instances"),
        ({"max_instances": 1, "min_instances": 2}, "less than"),
        ({"max_instances": 2, "target_ttft": 1.0}, "need each other"),
        ({"max_instances": 2, "target_ttft": 1.0, "metrics_url": "localhost"}, "no URL"),
    ],
)
def test_wrong_flags_are_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        AutoscaleConfig(**fields)  # type: ignore[arg-type]


def test_no_number_is_wanted_beyond_what_is_finite() -> None:
    assert math.isfinite(Autoscaler(GOALS).look(MeshSnapshot(staying=0, ready=0, waiting=10**9), 0.0).size)


def world(size: int) -> View:
    members = [
        Member(
            instance=str(rank), rank=rank, state=State.READY, phase="", address="a", host="h", pid=1, load=Load()
        )
        for rank in range(size)
    ]  # fmt: skip
    return View(epoch=1, size=size, settings=None, members=members, waiting_for="")


def test_a_change_that_cannot_succeed_is_printed_once_with_its_reason() -> None:
    statuses = iter([202, 202, 500])
    asked: list[str] = []

    async def command(wish: Scale) -> OperatorAnswer:
        asked.append(wish.command)
        status = next(statuses)
        text = "Engine_2 ended with status 3: it differs" if status == 500 else "starting instance 2"
        return OperatorAnswer(command=wish.command, status=status, text=text)

    async def looks() -> list[str]:
        change = PendingScale(command)
        return [await change.begin(3), *[await change.look(world(2)) for _ in range(3)]]

    failed = "there are not 3 instances: Engine_2 ended with status 3: it differs"
    assert asyncio.run(looks()) == ["starting instance 2", "", failed, ""]
    assert len(asked) == 3
    assert len(set(asked)) == 1


def test_a_change_that_is_done_or_refused_is_asked_for_no_more() -> None:
    asked: list[str] = []

    async def looks(status: int, size: int) -> str:
        async def command(wish: Scale) -> OperatorAnswer:
            asked.append(wish.command)
            return OperatorAnswer(command=wish.command, status=status, text="so")

        change = PendingScale(command)
        begun = await change.begin(3)
        assert await change.look(world(size)) == ""
        return begun

    assert asyncio.run(looks(202, 3)) == "so"
    assert asyncio.run(looks(409, 2)) == "refused: so"
    assert len(asked) == 2
