"""The texts that the page of symptoms quotes are texts of the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "run" / "troubleshooting.md"


def quoted() -> list[str]:
    """What the first column of each table quotes: texts with a blank in them."""
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return [text for cell in rows for text in re.findall(r"`([^`]+)`", cell) if " " in text]


@cache
def texts() -> str:
    """All texts of the packages, with a mark between two."""
    parts = []
    for package in ("coordinator", "engine", "router", "parallel"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    parts.append(node.value)
    return "\0".join(parts)


def test_page_quotes_texts() -> None:
    assert len(quoted()) > 25


@pytest.mark.parametrize("text", quoted())
def test_each_quoted_text_is_in_the_code(text: str) -> None:
    parts = [part for part in re.split(r"\s*\(?\.\.\.\)?\s*", text) if part]
    missing = [part for part in parts if part not in texts()]
    assert not missing, f"{PAGE.name}: no message has {missing}"
