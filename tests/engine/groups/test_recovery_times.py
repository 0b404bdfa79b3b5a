from __future__ import annotations

import pytest

from engine.groups.recovery_times import USUAL, StepLengths


def begun(lengths: StepLengths, seconds: list[float]) -> list[tuple[float, float, float] | None]:
    """What is known after each of steps that begin so long after each other."""
    return [lengths.began(sum(seconds[: number + 1])) for number in range(len(seconds))]


def test_steps_around_a_change_are_told_beside_the_usual_ones() -> None:
    lengths = StepLengths()
    assert not any(begun(lengths, [0.01] * (USUAL + 3)))
    lengths.changed()
    now = 0.01 * (USUAL + 3)
    assert lengths.began(now + 0.03) is None
    assert lengths.began(now + 0.05) == pytest.approx((0.01, 0.03, 0.02))
    assert lengths.began(now + 0.06) is None, "once"
    assert (lengths.num_steps, lengths.num_long) == (3, 0)
    begun(lengths, [now + 0.07, *[0.01] * USUAL, 0.03])
    assert (lengths.num_steps, lengths.num_long) == (6, 1)


def test_nothing_is_told_where_there_was_no_work() -> None:
    lengths = StepLengths()
    lengths.changed()
    assert not any(begun(lengths, [0.01] * 4))
    lengths = StepLengths()
    begun(lengths, [0.01] * USUAL + [30.0])
    lengths.changed()
    assert not any(begun(lengths, [60.0, 60.1, 60.2]))
