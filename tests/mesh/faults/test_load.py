"""Verdicts and times of answers in the tools that disturb a mesh."""

from __future__ import annotations

import pytest

from tests.mesh.faults.kills import merged, percentile, table
from tests.mesh.faults.load import LONGEST, SHORTEST, Answer, Load, Verdict, body_of


def answer(
    ids: list[int],
    text: str = "ab",
    reason: str | None = "length",
    error: str | None = None,
    logprobs: tuple[float, ...] = (-0.25, -1.5, -0.125),
) -> Answer:
    return Answer(0, 0.0, ids=ids, logprobs=[*logprobs], text=text, finish_reason=reason, error=error)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (answer([1, 2, 3]), Verdict.RIGHT),
        (answer([1, 2, 3], text="abb"), Verdict.DIFFERENT),
        (answer([1, 2, 3], reason="stop"), Verdict.DIFFERENT),
        (answer([1, 2, 3], logprobs=(-0.25, -1.5000000000000002, -0.125)), Verdict.DIFFERENT),
        (answer([1, 2, 3], logprobs=(-0.25, -1.5)), Verdict.DIFFERENT),
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


def test_runs_of_a_case_that_took_turns_have_one_table() -> None:
    def page(case: str, noticed: float) -> dict[str, object]:
        counts = {"kills": 1, "right": 10}
        kills = [{"noticed": noticed}]
        return {"case": case, "seconds": 2.0, "tokens_per_second": noticed, "counts": counts, "kills": kills}

    once, twice = merged([[page("moe", 1.0)], [page("moe-twice", 5.0)], [page("moe", 3.0)]])
    assert (once["case"], twice["case"]) == ("moe", "moe-twice")
    assert once["counts"] == {"kills": 2, "right": 20}
    assert [kill["noticed"] for kill in once["kills"]] == [1.0, 3.0]
    assert (once["seconds"], once["tokens_per_second"]) == (4.0, 2.0)
    assert len(twice["kills"]) == 1
