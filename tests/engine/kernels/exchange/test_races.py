"""Sums over ranks in a step: the threads of all ranks have no data race."""

from __future__ import annotations

from pathlib import Path

from engine.kernels.core import library
from parallel.compiler import INCLUDE
from tests.parallel.rounds import races


def test_sums_over_ranks_have_no_data_race(tmp_path: Path) -> None:
    printed = races.run(Path(__file__).with_name("races.cpp"), tmp_path, library.KERNELS, INCLUDE)
    assert printed == "120 sums\n"
