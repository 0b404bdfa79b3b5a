"""Sentences about answers that may differ: they name where, since invariant classes promise equal bits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.writing import PAGES, prose

ROOT = Path(__file__).parents[2]
SIXTEEN_BITS = re.compile(r"\bbfloat16\b|\b16 bits\b")
MAY_DIFFER = re.compile(
    r"\bmay (?:\w+ ){0,2}(?:differ|tip|fall|round)|\b(?:rounds?|fall) (?:differently|otherwise)"
)
WHERE = re.compile(r"torch|variant|GPU")


def unqualified(text: str) -> list[str]:
    """Sentences that say of 16 bits, without where, that answers may differ."""
    parts = [" ".join(each.split()) for each in re.split(r"(?<=[.;])\s|\n\s*\n|\n *[-*|] ", text)]
    return [
        part
        for part in parts
        if SIXTEEN_BITS.search(part) and MAY_DIFFER.search(part) and not WHERE.search(part)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_answers_in_16_bits_may_differ_where_torch_computes_alone(page: Path) -> None:
    assert not unqualified(prose(page.read_text()))


def test_such_sentences_are_found() -> None:
    wrong = "All is well. In float32 they are equal; in bfloat16 a batch of another shape rounds\ndifferently. So."
    assert unqualified(wrong)
    assert not unqualified(wrong.replace("in bfloat16", "on torch's operators in bfloat16"))
