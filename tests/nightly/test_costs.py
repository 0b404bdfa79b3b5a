from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.nightly.costs import (
    EACH_PUSH,
    LONGEST,
    chosen,
    most_different,
    name_of,
    noted,
    number_for_each_push,
    read_costs,
    write,
)
from tests.nightly.parts import ROOT


@pytest.mark.parametrize("size", range(3))
@pytest.mark.parametrize(("kind", "number"), [("a", 1), ("b", 2), ("c", 1)])
def test_a_table(kind: str, number: int, size: int) -> None:
    assert kind + str(number) in ("a1", "b2", "c1")
    assert 0 <= size < 3


def table(request: pytest.FixtureRequest) -> list[pytest.Item]:
    return [item for item in request.session.items if name_of(item).endswith("::test_a_table")]


def pairs(items: Sequence[pytest.Item]) -> list[tuple[str, int]]:
    return [
        (item.callspec.params["kind"], item.callspec.params["size"])
        for item in items
        if isinstance(item, pytest.Function)
    ]


@pytest.mark.skipif("config.getoption('numprocesses', None)", reason="workers have tests of their own")
@pytest.mark.parametrize(("cost", "number"), [(0.3, 3), (0.2, 5), (2.0, 1), (4.5, 0)])
def test_cases_with_other_values_run_while_they_fit(
    request: pytest.FixtureRequest, cost: float, number: int
) -> None:
    items = table(request)
    found = pairs(chosen(items, {name_of(items[0]): cost}))
    assert len(found) == number
    assert len({kind for kind, _ in found}) == len({size for _, size in found}) == min(number, 3)


def test_what_is_not_noted_runs_whole(request: pytest.FixtureRequest) -> None:
    items = request.session.items
    assert chosen(items, {}) == items


def test_a_long_one_runs_where_it_is_asked_for() -> None:
    assert number_for_each_push(50.0, "plain", is_kept=False) == 0
    assert number_for_each_push(50.0, "plain", is_kept=True) == 1
    assert number_for_each_push(30.1, "mesh", is_kept=False) == 1
    assert number_for_each_push(0.01, "plain", is_kept=False) == 100


def test_each_value_comes_before_one_comes_twice() -> None:
    values = [{("a", row), ("b", column)} for row in range(4) for column in range(4)]
    assert most_different(values, 4) == {0, 5, 10, 15}
    assert len(most_different(values, 100)) == 16


def test_costs_are_means_and_cheap_tests_leave_the_file(tmp_path: Path) -> None:
    lines = [
        ("a", "plain", 0.4),
        ("a", "plain", 0.6),
        ("b", "plain", 0.1),
        ("c", "mesh", 4.0),
        ("d", "mesh", 6),
    ]
    found = noted(map(json.dumps, lines))
    assert found == {"a": 0.5, "b": None, "c": None, "d": 6.0}
    file = tmp_path / "costs.json"
    file.write_text('{"b": 2.0, "e": 3.0}')
    write(found, file)
    assert read_costs(file) == {"a": 0.5, "d": 6.0, "e": 3.0}


def test_noted_tests_exist() -> None:
    texts: dict[str, str] = {}
    missing = []
    for name in read_costs():
        path, _, function = name.partition("::")
        if path not in texts:
            texts[path] = (ROOT / path).read_text() if (ROOT / path).exists() else ""
        if f"def {function.rpartition('::')[2]}(" not in texts[path]:
            missing.append(name)
    assert missing == []


def test_no_file_is_left_to_the_night() -> None:
    costs, left = read_costs(), []
    for path in sorted({name.partition("::")[0] for name in costs}):
        text = (ROOT / path).read_text()
        longest = LONGEST["mesh" if "mark.mesh" in text else "plain"]
        tests = {
            each.name: {ast.unparse(mark) for mark in each.decorator_list}
            for each in ast.walk(ast.parse(text))
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) and each.name.startswith("test_")
        }
        by_day = {name: marks for name, marks in tests.items() if "pytest.mark.nightly" not in marks}
        if by_day and not any(
            costs.get(f"{path}::{name}", 0.0) <= longest or "pytest.mark.each_push" in marks
            for name, marks in by_day.items()
        ):
            left.append(path)
    assert left == []


def test_no_plain_test_is_in_a_file_that_the_plain_part_does_not_load() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("ARGS", "MAKEFLAGS")}
    printed = subprocess.run(
        ["make", "-n", "test"], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout
    ignored = re.findall(r"--ignore=(\S+)", printed)
    assert len(ignored) > 50
    for path in ignored:
        body = ast.parse((ROOT / path).read_text()).body
        marks = [ast.unparse(each) for each in body if isinstance(each, ast.Assign)]
        assert any(each.startswith("pytestmark = ") and "pytest.mark.mesh" in each for each in marks), path


def test_only_make_test_leaves_cases_out() -> None:
    assert "LOCKSTEP_EACH_PUSH=1" in (ROOT / "Makefile").read_text()
    assert EACH_PUSH or len(read_costs()) > 0
