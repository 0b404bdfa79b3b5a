"""Whether tests run at their full size, as ``make nightly`` asks for with ``LOCKSTEP_NIGHTLY=1``."""

from __future__ import annotations

import os

import pytest

NIGHTLY = os.environ.get("LOCKSTEP_NIGHTLY", "") not in ("", "0")
"""All seeds of the simulators, and ten minutes of chaos.

Otherwise what fits into a run for each push.
"""


def examples(number: int) -> int:
    """How many examples a property test draws: an eighth of them for each push."""
    return number if NIGHTLY else max(number // 8, 15)


def is_on_diagonal(item: pytest.Item) -> bool:
    """Whether a test of a table runs for each push: ``@pytest.mark.diagonal("rows", "columns", each=2)``.

    The table is that of two parameters. Each row runs in ``each`` columns, neighbouring rows in other ones, so
    that every row and every column is tried. At night the table is whole.
    """
    mark = item.get_closest_marker("diagonal")
    if NIGHTLY or mark is None or not isinstance(item, pytest.Function):
        return True
    row, column = (_index(item, name) for name in mark.args)
    each = mark.kwargs.get("each", 2)
    return (column - each * row) % mark.kwargs["columns"] < each


def _index(item: pytest.Function, name: str) -> int:
    """Index of a test's value among all of that parameter."""
    for mark in item.iter_markers("parametrize"):
        if mark.args[0] == name:
            return list(mark.args[1]).index(item.callspec.params[name])
    return item.callspec.indices[name]  # of a fixture; for others, pytest counts tests there, not values


def runs_now(item: pytest.Item) -> bool:
    """Whether a test runs: at night each does.

    For each push those do that have no mark ``nightly``, and of a table the diagonal.
    """
    return (NIGHTLY or item.get_closest_marker("nightly") is None) and is_on_diagonal(item)
