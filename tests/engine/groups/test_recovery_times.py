from __future__ import annotations

from itertools import accumulate

import pytest

from engine.groups.recovery_times import AROUND, BUSY, StepLengths

USUAL = [0.01] * (2 * AROUND + 1)
CHANGE, NEXT = 0.03, 0.02


def begun(
    lengths: StepLengths, seconds: list[float], changes: int = -1, pauses: int = -1
) -> list[tuple[float, float, float]]:
    """What is known of changes while steps of these lengths begin.

    The group changes, and nobody has tokens, before the step of this number ends.
    """
    told = []
    for number, now in enumerate(accumulate(seconds, initial=100.0)):
        if number - 1 == changes:
            lengths.changed()
        if number - 1 == pauses:
            lengths.paused()
        told.append(lengths.began(now))
    return [each for each in told if each is not None]


def test_steps_around_a_change_are_told_beside_their_neighbours() -> None:
    lengths = StepLengths()
    steps = [*USUAL, CHANGE, NEXT, *USUAL]
    (told,) = begun(lengths, steps, changes=len(USUAL))
    assert told == pytest.approx((0.01, CHANGE, NEXT))
    assert (lengths.num_steps, lengths.num_long) == (2 * len(USUAL) - 2 * AROUND, 0)


def test_other_steps_are_counted_and_long_ones_among_them() -> None:
    lengths = StepLengths()
    assert begun(lengths, [*USUAL, 0.021, *USUAL]) == []
    assert (lengths.num_steps, lengths.num_long) == (2 * len(USUAL) + 1 - 2 * AROUND, 1)


def test_a_load_that_grows_with_the_change_makes_no_long_step() -> None:
    lengths = StepLengths()
    (told,) = begun(lengths, [*USUAL, CHANGE, CHANGE, *[0.03] * len(USUAL)], changes=len(USUAL))
    assert told[0] == pytest.approx(0.02), "between the neighbours before and those behind"


@pytest.mark.parametrize("pauses", [len(USUAL) - 1, len(USUAL), len(USUAL) + 1, len(USUAL) + 3])
def test_nothing_is_told_where_there_was_no_work(pauses: int) -> None:
    steps = [*USUAL, CHANGE, NEXT, *USUAL[: AROUND + 1]]
    assert begun(StepLengths(), steps, changes=len(USUAL), pauses=pauses) == []
    assert begun(StepLengths(), [*USUAL[:-1], BUSY, *steps[len(USUAL) :]], changes=len(USUAL)) == []


def test_changes_that_follow_each_other_closely_are_left_out() -> None:
    lengths = StepLengths()
    for number in range(40):
        if number % 2:
            lengths.changed()
        assert lengths.began(0.01 * number) is None
