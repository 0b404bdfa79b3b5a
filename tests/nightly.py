"""Whether tests run at their full size, as ``make nightly`` asks for with ``LOCKSTEP_NIGHTLY=1``."""

from __future__ import annotations

import os

import pytest

NIGHTLY = os.environ.get("LOCKSTEP_NIGHTLY", "") not in ("", "0")
"""All seeds of the simulators, and ten minutes of chaos.

Otherwise what fits into a run for each push.
"""


def is_on_diagonal(item: pytest.Item) -> bool:
    """Whether a test of a table runs for each push: ``@pytest.mark.diagonal("rows", "columns", each=2)``.

    The table is that of two parameters. Each row runs in ``each`` columns, neighbouring rows in other ones, so
    that every row and every column is tried.
    """
    mark = item.get_closest_marker("diagonal")
    if mark is None or not isinstance(item, pytest.Function):
        return True
    row, column = (_place(item, name) for name in mark.args)
    each = mark.kwargs.get("each", 2)
    return (column - each * row) % mark.kwargs["columns"] < each


def _place(item: pytest.Function, name: str) -> int:
    """Which of its values a parameter has. pytest numbers products of parameters that are no fixtures."""
    for mark in item.iter_markers("parametrize"):
        if mark.args[0] == name:
            return list(mark.args[1]).index(item.callspec.params[name])
    return item.callspec.indices[name]


def runs_now(item: pytest.Item) -> bool:
    """Whether a test runs: at night all, for each push those that are on a diagonal and not marked ``nightly``."""
    return NIGHTLY or (item.get_closest_marker("nightly") is None and is_on_diagonal(item))
