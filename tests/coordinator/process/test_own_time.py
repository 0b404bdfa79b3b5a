"""Time in which the coordinator itself stood still does not count against instances."""

from __future__ import annotations

import pytest

from coordinator.membership.records import Note, Rules
from coordinator.membership.registry import Registry
from coordinator.process.own_time import LONGEST_GAP, OwnTime
from tests.coordinator.membership.test_registry import heartbeat, joined


def test_gaps_count_little() -> None:
    time = OwnTime()
    assert [time.at(now) for now in (100.0, 100.05, 100.1)] == pytest.approx([0.0, 0.05, 0.1])
    assert time.at(200.0) == pytest.approx(0.1 + LONGEST_GAP)
    assert time.at(200.1) == pytest.approx(0.2 + LONGEST_GAP)


@pytest.mark.parametrize(("pause", "gone"), [(60.0, []), (0.0, [0, 1])], ids=["paused", "awake"])
def test_a_paused_coordinator_takes_nobody_out(pause: float, gone: list[int]) -> None:
    time, registry = OwnTime(), Registry(Rules(size=2, member_timeout=5.0))
    for rank, name in enumerate("ab"):
        joined(registry, name, rank, now=time.at(10.0))
        registry.handle(name.encode(), heartbeat(name), time.at(10.0))
    notes = registry.tick(time.at(10.0 + pause))
    for tick in range(1, 10 if pause else 110):
        notes += registry.tick(time.at(10.0 + pause + 0.05 * tick))
    taken_out = [note.text for note in notes if isinstance(note, Note) and "taken out" in note.text]
    assert [int(text.split()[1]) for text in taken_out] == gone
