"""lm-eval's local tasks with weights and caches of fewer bits: results unchanged, or nearly so."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from examples.clients import run
from tests.mesh.clients import lm_eval_formats
from tests.mesh.clients.lm_eval_formats import ENVIRONMENT, FORMATS, PLAIN

pytestmark = [pytest.mark.mesh, pytest.mark.nightly, pytest.mark.timeout(2400)]

INT4_LIMIT = 0.04
"""Largest change of the perplexity of words with 4 bits.

Rounding itself costs 1 to 3 % of it on these four passages.
"""
LIMIT = 0.015
"""The same with 8 bits."""
CHOICES = 10
"""Documents of the task with choices: of one the answer may turn."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, float]]:
    """What lm-eval finds with a format, each measured once."""
    try:
        run.environment("lm-eval", run.CLIENTS["lm-eval"], ENVIRONMENT.parent, upgrade=False)
    except (RuntimeError, run.Unavailable, OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"lm-eval cannot be installed in {ENVIRONMENT}: {str(error)[-600:]}")
    return cache(lambda name: lm_eval_formats.measure(name, Path(tmp_path_factory.mktemp("lm-eval"))))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != PLAIN])
def test_results_are_those_of_bfloat16(name: str, results: Callable[[str], dict[str, float]]) -> None:
    found, plain = results(name), results(PLAIN)
    limit = INT4_LIMIT if "int4" in name else LIMIT
    assert abs(found["word_perplexity"] / plain["word_perplexity"] - 1) < limit
    for metric in ("acc", "acc_norm"):
        assert abs(found[metric] - plain[metric]) < 1.5 / CHOICES
