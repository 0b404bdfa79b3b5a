from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from engine.host import background
from engine.host.background import NICENESS, Chores, beside_steps, let_go


def test_work_beside_steps_yields_to_them_and_its_errors_come_back() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    assert beside_steps(niceness) == min(before + NICENESS, 19)
    assert niceness() == before, "only that thread"

    def fails() -> None:
        raise ValueError("not readable")

    with pytest.raises(ValueError, match="not readable"):
        beside_steps(fails)


def test_memory_goes_when_the_first_steps_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "RELEASE_DELAY", 0.01)
    tensor = torch.ones(1000)
    kept = tensor[:10]
    let_go([tensor])
    until = time.monotonic() + 10
    while tensor.numel() and time.monotonic() < until:
        time.sleep(0.005)
    assert tensor.numel() == 0
    assert kept.sum() == 10, "who shares the memory keeps it"


def test_chores_are_done_in_order_whatever_fails(caplog: pytest.LogCaptureFixture) -> None:
    done, chores = list[int](), Chores("chores")

    def fail() -> None:
        raise RuntimeError("no")

    chores.put(lambda: done.append(1))
    chores.put(fail)
    chores.put(lambda: done.append(2))
    chores.close()
    assert done == [1, 2]
    assert "something was not done" in caplog.text
