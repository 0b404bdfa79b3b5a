from __future__ import annotations

import pytest

from tests.nightly import NIGHTLY


@pytest.mark.diagonal("row", "column", columns=3, each=1)
@pytest.mark.parametrize("other", [True, False])
@pytest.mark.parametrize("column", "abc")
@pytest.mark.parametrize("row", range(4))
def test_a_row_of_a_table_runs_in_one_column(row: int, column: str, other: bool) -> None:
    assert NIGHTLY or "abc".index(column) == row % 3


def test_every_row_runs_and_at_night_in_every_column(request: pytest.FixtureRequest) -> None:
    ran = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_a_row_of_a_table_runs_in_one_column
    ]
    assert len(ran) == 4 * 2 * (3 if NIGHTLY else 1)
    assert {each["row"] for each in ran} == set(range(4))
