"""What tests cost, and so which cases run for each push: ``costs.json``.

``make test`` sets ``LOCKSTEP_EACH_PUSH``. Then a test runs as many of its cases as fit into :data:`BUDGETS`, and
none of which one alone takes more than :data:`LONGEST`, but for one of those marked ``each_push``. Chosen are
cases with values of parameters that no chosen one has. ``make nightly``, and pytest without that variable, run all.

``python -m tests.nightly.costs ARGUMENTS OF PYTEST`` measures the tests that they name, and notes those worth it:
seconds of CPU of a case, of its worker and of children that it waited for; for tests of meshes, on the clock.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import pytest

FILE = Path(__file__).with_name("costs.json")
EACH_PUSH = os.environ.get("LOCKSTEP_EACH_PUSH", "") not in ("", "0")
BUDGETS = {"plain": 1.0, "mesh": 30.0}
"""Seconds of all cases of a test for each push."""
LONGEST = {"plain": 4.0, "mesh": 40.0}
"""Seconds of a case beyond which it runs at night only."""
NOTED = {"plain": 0.5, "mesh": 5.0}
"""Seconds of all cases of a test that make it worth noting.

Others run whole.
"""


def kind_of(item: pytest.Item) -> str:
    return "plain" if item.get_closest_marker("mesh") is None else "mesh"


def name_of(item: pytest.Item) -> str:
    """Name of a test without its case."""
    return item.nodeid.partition("[")[0]


def values_of(item: pytest.Item) -> set[tuple[str, int]]:
    """Parameters of a case with their values; those of one ``parametrize`` stand together."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return set()
    drawn, values = dict(item.callspec.params), set()
    for mark in item.iter_markers("parametrize"):
        given = mark.args[0]
        names = [each.strip() for each in given.split(",")] if isinstance(given, str) else list(given)
        names = [name for name in names if name in drawn]
        values.add((",".join(names), hash(tuple(id(drawn.pop(name)) for name in names))))
    return values | {(name, id(value)) for name, value in drawn.items()}


def most_different(values: Sequence[set[tuple[str, int]]], number: int) -> set[int]:
    """Indices of so many sets, each with most values that none before has."""
    left, chosen, seen = list(range(len(values))), set(), set()
    for _ in range(min(number, len(left))):
        best = max(left, key=lambda index: len(values[index] - seen))
        left.remove(best)
        chosen.add(best)
        seen |= values[best]
    return chosen


def number_for_each_push(cost: float, kind: str, *, is_kept: bool) -> int:
    """How many cases of a test run, one of which costs so many seconds."""
    if cost > LONGEST[kind]:
        return int(is_kept)
    return max(1, int(BUDGETS[kind] / cost))


def chosen(items: Sequence[pytest.Item], costs: Mapping[str, float]) -> list[pytest.Item]:
    """Those of the collected tests that run for each push, in their order."""
    groups: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[name_of(item), kind_of(item)].append(item)
    kept: set[int] = set()
    for (name, kind), cases in groups.items():
        number = len(cases)
        if cost := costs.get(name):
            is_kept = cases[0].get_closest_marker("each_push") is not None
            number = number_for_each_push(cost, kind, is_kept=is_kept)
        kept |= {id(cases[index]) for index in most_different([values_of(each) for each in cases], number)}
    return [item for item in items if id(item) in kept]


def read_costs(file: Path = FILE) -> dict[str, float]:
    """Seconds of a case by the name of its test."""
    found: dict[str, float] = json.loads(file.read_text())
    return found


def seconds() -> float:
    """CPU of this process, and of children that it waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


class Recorder:
    """A plugin that writes what each test took to a file of its worker."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        is_mesh = kind_of(item) == "mesh"
        clock = time.monotonic if is_mesh else seconds
        began = clock()
        try:
            return (yield)
        finally:
            took = [name_of(item), kind_of(item), clock() - began]
            with Path(os.environ["LOCKSTEP_COSTS"], str(os.getpid())).open("a") as lines:
                lines.write(json.dumps(took) + "\n")


def noted(lines: Iterable[str]) -> dict[str, float | None]:
    """Mean cost of a case for tests that are worth noting, None for the others."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in lines:
        name, kind, took = json.loads(line)
        found[name, kind].append(took)
    return {
        name: round(fmean(took), 2) if sum(took) >= NOTED[kind] else None
        for (name, kind), took in found.items()
    }


def write(found: Mapping[str, float | None], file: Path = FILE) -> None:
    """Note costs beside those that the file has of other tests."""
    costs = {name: cost for name, cost in {**read_costs(file), **found}.items() if cost is not None}
    file.write_text(json.dumps(costs, indent=0, sort_keys=True) + "\n")


def main(arguments: list[str]) -> int:
    """Run tests, and note what they cost; the status is pytest's."""
    directory = Path("build", "costs")
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.iterdir():
        old.unlink()
    os.environ["LOCKSTEP_COSTS"] = str(directory.absolute())
    status = int(pytest.main(arguments))
    write(noted(line for each in sorted(directory.iterdir()) for line in each.read_text().splitlines()))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
