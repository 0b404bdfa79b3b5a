"""Marked tests, and cells beside the diagonal of a table, are left to the night."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.nightly import runs_now
def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if runs_now(item)]
"""
TABLE = """
import pytest

@pytest.mark.diagonal("row", "column", columns=3, each=1)
@pytest.mark.parametrize("column", "xyz")
@pytest.mark.parametrize("row", "abcd")
def test_table(row, column): pass

@pytest.fixture(params="ab")
def made(request): return request.param

@pytest.mark.diagonal("made", "column", columns=2, each=1)
@pytest.mark.parametrize("column", ["x", "y"])
def test_rows_of_a_fixture(made, column): pass

@pytest.mark.nightly
def test_long(): pass

@pytest.mark.parametrize("size", [1, pytest.param(9, marks=pytest.mark.nightly)])
def test_sizes(size): pass
"""
EACH_PUSH = {
    *("test_table[a-x]", "test_table[b-y]", "test_table[c-z]", "test_table[d-x]"),
    *("test_rows_of_a_fixture[a-x]", "test_rows_of_a_fixture[b-y]", "test_sizes[1]"),
}


@pytest.mark.parametrize("nightly", ["0", "1"])
def test_each_row_and_each_column_runs_for_each_push_and_all_at_night(tmp_path: Path, nightly: str) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TABLE)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--collect-only",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            tmp_path,
        ],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "LOCKSTEP_NIGHTLY": nightly},
        capture_output=True,
        text=True,
        check=True,
    )
    found = {line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line}
    assert found >= EACH_PUSH
    assert len(found) == (12 + 4 + 1 + 2 if nightly == "1" else len(EACH_PUSH))
