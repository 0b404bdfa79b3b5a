"""How docstrings, help texts and log lines are written: short summaries, plain words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOPS = ["parallel", "coordinator", "engine", "router", "examples", "tests"]
FOLDERS = sorted(
    {path.parent.relative_to(ROOT) for top in TOPS for path in (ROOT / top).rglob("*.py")} - {Path("tests")}
)
MOST_WORDS = 15
"""Most words in the first line of a docstring, which stands alone in lists."""
FORBIDDEN = re.compile(
    r"\bwho(m|)ever\b|\b(is|are|was|were|be|been|being) (said|told)\b|\b(told|said) so\b", re.I
)
"""Verbs of persons: what a program does is logged, sent, returned, raised or refused."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those of attributes included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield node.body[0].lineno, text
            for before, after in zip(node.body, node.body[1:], strict=False):
                match before, after:
                    case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str(text))):
                        yield after.lineno, text


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every text in a module, docstrings included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def wrong_in(path: Path) -> Iterator[str]:
    """What is written against the rules in one file, by line."""
    tree = ast.parse(path.read_text())
    for line, text in docstrings(tree):
        first = text.strip().split("\n")[0]
        if len(first.split()) > MOST_WORDS:
            yield f"{path}:{line}: {len(first.split())} words in the first line of a docstring: {first}"
        if first.startswith("Of "):
            yield f"{path}:{line}: a docstring begins with 'Of': {first}"
    for line, text in docstrings(tree) if path.is_relative_to(ROOT / "tests") else strings(tree):
        if found := FORBIDDEN.search(text):
            yield f"{path}:{line}: {found[0]!r}"


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_texts_are_plain(folder: Path) -> None:
    wrong = [each for path in sorted((ROOT / folder).glob("*.py")) for each in wrong_in(path)]
    assert not wrong, "\n" + "\n".join(wrong)
