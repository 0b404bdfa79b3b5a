"""The page about invariance names tests that exist, and all tests of the table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design" / "invariance.md"
TABLE = "tests/engine/invariance/test_table.py"
"""File of the tests that are named without one."""
NAMED = re.compile(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`")


def lines_of(title: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Lines of a section's table: their first cell, and file and name of their tests."""
    section = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    text = next(each for each in section if each.startswith(title))
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")][2:]
    return [
        (row[0].strip(), [(file or TABLE, name) for file, name in NAMED.findall(row[-1])]) for row in rows
    ]


LINES = [*lines_of("What changes no bit"), *lines_of("What changes bits")]


def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {
        each.name for each in tree.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test")
    }


@pytest.mark.parametrize(("line", "tests"), LINES, ids=[line for line, _ in LINES])
def test_each_line_names_tests_that_exist(line: str, tests: list[tuple[str, str]]) -> None:
    assert tests, "a line without a test promises nothing"
    for file, name in tests:
        assert name in names_in(file), f"there is no {name} in {file}"


def test_each_test_of_the_table_has_a_line() -> None:
    named = {name for _, tests in LINES for file, name in tests if file == TABLE}
    assert named == names_in(TABLE)
