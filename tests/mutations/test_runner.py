"""What the runner of planted bugs calls killed, survived, not applicable and crude."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutations.__main__ import Run, Verdict, plant, table_of, verdict_on
from tests.mutations.planted import PlantedBug

TEST = "test_sums.py::test_three"


@pytest.mark.parametrize(
    ("status", "output", "verdict"),
    [
        (0, "1 passed", Verdict.SURVIVED),
        (1, f"FAILED {TEST} - assert 4 == 3", Verdict.KILLED),
        (1, f"FAILED {TEST}[a] - assert 4 == 3\n1 passed", Verdict.KILLED),
        (1, f"ERROR {TEST} - NameError", Verdict.KILLED),
        (1, f"FAILED {TEST}_and_more - assert 4 == 3", Verdict.SURVIVED),
        (2, f"ERROR {TEST} - SyntaxError", Verdict.CRUDE),
        (5, "no tests ran", Verdict.CRUDE),
        (0, "7 skipped, 5 deselected in 2.1s", Verdict.CRUDE),
        (0, "1 passed, 7 skipped in 2.1s", Verdict.SURVIVED),
        (None, "", Verdict.CRUDE),
    ],
)
def test_a_bug_is_killed_by_the_tests_that_were_named(
    status: int | None, output: str, verdict: Verdict
) -> None:
    assert verdict_on(Run(status, output), [TEST]) is verdict


def test_one_test_that_passes_is_a_survivor() -> None:
    run = Run(1, f"FAILED {TEST} - assert 4 == 3")
    assert verdict_on(run, [TEST, "test_sums.py::test_four"]) is Verdict.SURVIVED


def test_a_planted_bug_is_found_and_taken_out_again(tmp_path: Path) -> None:
    source = "def total(numbers):\n    return sum(numbers[:])\n\n\ndef unused():\n    return 1\n"
    (tmp_path / "sums.py").write_text(source)
    check = "from sums import total\n\ndef test_three():\n    assert total([1, 2]) == 3\n"
    (tmp_path / "test_sums.py").write_text(check)
    bugs = {
        Verdict.KILLED: ("numbers[:]", "numbers[1:]"),
        Verdict.SURVIVED: ("return 1", "return 2"),
        Verdict.STALE: ("numbers[0]", "numbers[1]"),
    }
    for expected, (old, new) in bugs.items():
        verdict, _ = plant(tmp_path, PlantedBug("It counts wrong.", "sums.py", old, new, [TEST]))
        assert verdict is expected
        assert (tmp_path / "sums.py").read_text() == source


def test_scores_are_a_table() -> None:
    scores = {
        "caches": Counter({Verdict.KILLED: 3, Verdict.SURVIVED: 1}),
        "ledger": Counter([Verdict.KILLED]),
    }
    assert table_of(scores).split("\n")[2:] == [
        "| caches | 3 | 4 |",
        "| ledger | 1 | 1 |",
        "| all | 4 | 5 |",
        "",
    ]
