from __future__ import annotations

import threading

import pytest

from engine.config import DeviceConfig
from engine.lifecycle.step_watch import EARLY_STEPS, StepWatch, place_of

LATER = EARLY_STEPS + 1


def looks(watch: StepWatch, turns: list[tuple[float, int]], num_steps: int = LATER) -> list[float]:
    """Times at which the watch logged a hang, of those at which it looked."""
    return [now for now, turn in turns if watch.look(turn, num_steps, now) is not None]


def test_a_turn_that_does_not_end_hangs() -> None:
    watch = StepWatch(3.0, 3.0)
    assert looks(watch, [(now, 7) for now in range(6)]) == [4, 5]
    assert watch.look(7, LATER, 6.0) == 6.0
    assert watch.look(8, LATER, 7.0) is None, "it has ended after all"
    assert looks(watch, [(7.0 + now, 8) for now in range(1, 5)]) == [11.0]


def test_a_loop_that_turns_does_not_hang_however_often_it_is_looked_at() -> None:
    watch = StepWatch(3.0, 3.0)
    assert looks(watch, [(now / 10, now // 25) for now in range(1000)]) == []


def test_the_first_steps_may_compile() -> None:
    watch = StepWatch(3.0, 6.0)
    assert looks(watch, [(now, 1) for now in range(9)], num_steps=EARLY_STEPS) == [7, 8]
    assert looks(StepWatch(3.0, 1.0), [(now, 1) for now in range(5)], num_steps=1) == [4]


def test_a_process_that_was_stopped_does_not_hang() -> None:
    """It goes on with its step when it is let to."""
    watch = StepWatch(30.0, 30.0)
    assert looks(watch, [(0.0, 1), (1.0, 1), (1000.0, 1), (1001.0, 1)]) == []
    assert looks(watch, [(now, 1) for now in range(1002, 1040)]) == list(range(1028, 1040))


def test_where_it_hangs_is_said() -> None:
    arrived, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        arrived.set()
        go_on.wait()

    thread = threading.Thread(target=hang)
    thread.start()
    assert arrived.wait(20)
    assert thread.ident is not None
    assert "hang (test_step_watch.py:" in place_of(thread.ident)
    go_on.set()
    thread.join()
    assert place_of(thread.ident) == "a thread that has ended"


@pytest.mark.parametrize(
    ("given", "alone", "in_lockstep"),
    [
        ({}, 300.0, 300.0),
        ({"collective_timeout": 200.0}, 400.0, 400.0),
        ({"execute_model_timeout": 7.0}, 7.0, 120.0),
        ({"execute_model_timeout": 7.0, "collective_timeout": 3.0}, 7.0, 7.0),
    ],
)
def test_how_long_a_step_may_take(given: dict[str, float], alone: float, in_lockstep: float) -> None:
    """Who waits for another that hangs does not end with it."""
    device = DeviceConfig(**given)  # type: ignore[arg-type]
    assert (device.step_timeout, device.lockstep_timeout) == (alone, in_lockstep)
