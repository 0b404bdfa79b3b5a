"""Background work that pauses while steps run, and computes on one core."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from engine.host import background
from engine.host.background import Pace, beside_steps
from engine.host.openmp import compute_with
from engine.weight_versions.resting import Resting


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that were asked for, without waiting."""
    found: list[float] = []
    moments = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: 0.4 * next(moments))
    clock = iter(range(1000))
    monkeypatch.setattr(time, "sleep", found.append)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock) / 100)
    return found


def test_pauses_are_as_long_as_the_share_asks_for_while_steps_run(rests: list[float]) -> None:
    steps = iter([0, 0, 1, 1, 1, 1, 1, 2])
    pace = Pace(lambda: next(steps), share=0.2)
    for _ in range(7):
        pace.rest()
    assert rests == pytest.approx([0.04] * 4), "none while no step runs, but all through a long one"


def test_a_long_slice_is_paid_for_by_several_pauses(rests: list[float]) -> None:
    steps = iter(range(100))
    pace = Pace(lambda: next(steps), share=0.01)
    for _ in range(3):
        pace.rest()
    assert rests == [background.LONGEST_REST] * 3
    assert pace._owed == pytest.approx(3 * 0.99 - 1.5)


def test_small_slices_add_up(rests: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "SLICE", 0.025)
    steps = iter(range(100))
    pace = Pace(lambda: next(steps), share=0.5)
    for _ in range(6):
        pace.rest()
    assert rests == pytest.approx([0.03, 0.03])


def test_torchs_functions_are_followed_by_pauses_in_their_own_thread() -> None:
    calls: list[int] = []
    with Resting(lambda: calls.append(threading.get_ident())):
        torch.zeros(3) + 1
        other = threading.Thread(target=lambda: torch.ones(2).sum())
        other.start()
        other.join()
    assert calls == [threading.get_ident()] * len(calls)
    assert len(calls) >= 2
    torch.zeros(1)
    assert len(calls) < 10


def test_the_threads_of_others_stay() -> None:
    before = torch.get_num_threads()

    def alone() -> int:
        compute_with(1)
        return torch.get_num_threads()

    assert beside_steps(alone) == 1
    assert torch.get_num_threads() == before
