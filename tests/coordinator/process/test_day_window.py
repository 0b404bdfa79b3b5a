"""Counts of the last 24 hours."""

from __future__ import annotations

from coordinator.process.day_window import DAY, GRAIN, DayWindow


def test_what_was_counted_a_day_ago_counts_no_more() -> None:
    window = DayWindow()
    assert window.count(0, 100.0) == 0
    assert window.count(7, 101.0) == 7, "all of it, while the process is younger than a day"
    assert window.count(9, 100.0 + DAY / 2) == 9
    assert window.count(9, 100.0 + DAY + GRAIN) == 9, "to a quarter of an hour, never less than a day"
    assert window.count(12, 100.0 + DAY + DAY / 2) == 3
    assert window.count(12, 100.0 + 3 * DAY) == 0


def test_it_remembers_a_day_only() -> None:
    window = DayWindow()
    for second in range(0, int(10 * DAY), 60):
        assert window.count(second, float(second)) <= DAY + GRAIN + 60
    assert len(window._totals) <= DAY / GRAIN + 2
