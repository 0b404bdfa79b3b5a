"""Each planted bug of the page can be planted, and its tests are there."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.mutations.planted import ROOT, areas

BUGS = areas()
AREAS = {
    "admission",
    "agreement",
    "balance",
    "caches",
    "epochs",
    "kernels",
    "ledger",
    "order",
    "sampler",
    "scheduling",
    "transfers",
    "verify",
}
FEWEST = 60
"""Least planted bugs over all areas."""


@cache
def text_of(file: str) -> str:
    path = ROOT / file
    return path.read_text() if path.exists() else ""


@cache
def plain_tests(file: str) -> set[str]:
    """Names of a file's tests that are not marked ``mesh``."""
    module = ast.parse(text_of(file))
    marks = [ast.unparse(each) for each in module.body if isinstance(each, ast.Assign)]
    if any("pytestmark" in mark and "mesh" in mark for mark in marks):
        return set()
    functions = [each for each in module.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        each.name
        for each in functions
        if not any("mark.mesh" in ast.unparse(decorator) for decorator in each.decorator_list)
    }


def test_there_are_bugs_of_every_area() -> None:
    assert BUGS.keys() >= AREAS
    assert sum(map(len, BUGS.values())) >= FEWEST
    sentences = [bug.breaks for bugs in BUGS.values() for bug in bugs]
    assert len(set(sentences)) == len(sentences)


@pytest.mark.parametrize("area", sorted(BUGS))
def test_each_bug_can_be_planted(area: str) -> None:
    problems = [problem for bug in BUGS[area] if (problem := bug.problem_in(text_of(bug.file)))]
    assert not problems
    for bug in BUGS[area]:
        if bug.file.endswith(".py"):
            ast.parse(bug.planted_in(text_of(bug.file)))


@pytest.mark.parametrize("area", sorted(BUGS))
def test_each_bug_names_plain_tests(area: str) -> None:
    named = [test.partition("[")[0].partition("::") for bug in BUGS[area] for test in bug.tests]
    assert all(bug.tests for bug in BUGS[area])
    assert [f"{file}::{name}" for file, _, name in named if name not in plain_tests(file)] == []
