from __future__ import annotations

import pytest

from engine.lifecycle.scheduling_ahead import log_scheduling_ahead


@pytest.mark.parametrize(
    ("wanted", "device", "runs_ahead", "level", "line"),
    [
        (None, "cuda", True, "INFO", "scheduling ahead: on"),
        (True, "cpu", False, "WARNING", "--async-scheduling has no effect here: a CPU computes"),
        (True, "cuda", False, "WARNING", "--async-scheduling has no effect here: it takes decode steps"),
        (False, "cuda", False, "INFO", "scheduling ahead: off, by the flag"),
        (None, "cuda", False, "INFO", "scheduling ahead: off, it takes decode steps as CUDA graphs"),
    ],
)
def test_the_log_shows_whether_steps_are_scheduled_ahead(
    wanted, device, runs_ahead, level, line, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        log_scheduling_ahead(wanted, device, runs_ahead=runs_ahead)
    (record,) = caplog.records
    assert record.levelname == level
    assert record.getMessage().startswith(line)


@pytest.mark.parametrize("wanted", [None, False])
def test_nothing_is_logged_on_a_cpu_where_nobody_asked(wanted, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        log_scheduling_ahead(wanted, "cpu", runs_ahead=False)
    assert not caplog.records
