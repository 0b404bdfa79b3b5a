"""Each family that the native kernels compute, at random positions.

``make nightly`` compares more of them.
"""

from __future__ import annotations

import pytest
import torch

from engine.kernels.core import library
from tests.engine.native_families import TRIED
from tests.engine.native_positions import Deviations, check
from tests.nightly import NIGHTLY

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

POSITIONS = 400


@pytest.mark.diagonal("family", "dtype", columns=2, each=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", TRIED if NIGHTLY else TRIED[::2])
def test_results_are_those_of_transformers_at_random_positions(family: str, dtype: torch.dtype) -> None:
    assert check(family, dtype, POSITIONS) is None


def test_deviations_that_begin_late_are_found() -> None:
    positions = torch.arange(1000)
    late = (positions >= 990).float()
    exact = Deviations(positions, late * 0.01, torch.zeros(1000))
    problem = exact.problem(torch.float32, is_mixture=False)
    assert problem == "10 of 1000 positions differ, the first one is 990"
    rounded = Deviations(positions, 0.01 + 0.003 * (positions >= 850), torch.full((1000,), 0.01))
    assert "up to position 999" in str(rounded.problem(torch.bfloat16, is_mixture=False))
