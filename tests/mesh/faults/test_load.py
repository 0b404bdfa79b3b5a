"""Verdicts and times of answers in the tools that disturb a mesh."""

from __future__ import annotations

import pytest

from tests.mesh.faults.kills import percentile, table
from tests.mesh.faults.load import LONGEST, SHORTEST, Answer, Load, Verdict, body_of


def answer(
    ids: list[int], text: str = "ab", reason: str | None = "length", error: str | None = None
) -> Answer:
    return Answer(0, 0.0, ids=ids, text=text, finish_reason=reason, error=error)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (answer([1, 2, 3]), Verdict.RIGHT),
        (answer([1, 2, 3], text="abb"), Verdict.DIFFERENT),
        (answer([1, 2, 3], reason="stop"), Verdict.DIFFERENT),
        (answer([1, 2]), Verdict.LOST),
        (answer([1, 3]), Verdict.LOST),
        (answer([]), Verdict.LOST),
        (answer([1, 2, 2, 3]), Verdict.DOUBLED),
        (answer([1, 2, 1, 2, 3]), Verdict.DOUBLED),
        (answer([1, 2, 4]), Verdict.DIFFERENT),
        (answer([1, 4]), Verdict.DIFFERENT),
        (answer([1, 2, 3], error="the stream ended before its last token"), Verdict.ERROR),
    ],
)
def test_every_way_to_be_wrong_has_its_name(found: Answer, verdict: Verdict) -> None:
    assert found.verdict(answer([1, 2, 3])) is verdict


def test_waits_and_tokens_are_those_of_the_asked_time() -> None:
    load = Load("", [], [], streams=0)
    one, whole = Answer(0, 0.0, times=[1.0, 2.0, 5.0], counts=[1, 3, 4]), Answer(1, 0.0, streams=False)
    load.answers = [one, whole]
    assert load.longest_wait(4.0, 9.0) == 3.0, "it began before, and lasts into it"
    assert load.longest_wait(4.0, 9.0, begun=4.0) == 0.0
    assert load.longest_wait(0.0, 1.5) == 1.0
    assert load.tokens_between(1.5, 5.0) == 2
    assert load.tokens_between(0.0, 9.0) == 4


def test_the_load_is_mixed_and_always_the_same() -> None:
    bodies = [body_of(number) for number in range(200)]
    assert bodies == [body_of(number) for number in range(200)]
    lengths = sorted(len(body["prompt"]) for body in bodies)
    assert SHORTEST <= lengths[0] < 20
    assert LONGEST - 300 < lengths[-1] <= LONGEST
    assert sum(body["temperature"] == 0 for body in bodies) == 100
    assert {body["seed"] for body in bodies} == set(range(200))


def test_the_table_has_median_ninetieth_and_most() -> None:
    values = [float(value) for value in range(1, 12)]
    assert percentile(values, 0.9) == 10.0
    assert table([{"noticed": value} for value in values]).endswith("| noticed | 6 | 10 | 11 |")
