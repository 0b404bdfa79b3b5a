"""What the packages tell their users also holds where they are installed from a wheel."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("coordinator", "engine", "lockstep", "parallel", "router")
OF_A_CLONE = re.compile(r"'\.\[|[Ll]ockstep's clone|\bexamples/|\bdocs/\S+\.md|\bdeploy/|`make |\.ci/")
"""Names of what a wheel does not have."""


def texts_of(tree: ast.AST) -> Iterator[ast.Constant]:
    """Constant texts that are no docstrings."""
    for node in ast.walk(tree):
        children = list(ast.iter_child_nodes(node))
        for child in children:
            if (
                isinstance(child, ast.Constant)
                and isinstance(child.value, str)
                and not isinstance(node, ast.Expr)
            ):
                yield child


def hints_of_a_clone(source: str) -> list[str]:
    return [str(text.value) for text in texts_of(ast.parse(source)) if OF_A_CLONE.search(str(text.value))]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_text_names_a_file_of_the_clone(package: str) -> None:
    found = {
        str(path.relative_to(ROOT)): hints
        for path in sorted((ROOT / package).rglob("*.py"))
        if (hints := hints_of_a_clone(path.read_text()))
    }
    assert found == {}


def test_hints_of_a_clone_are_found() -> None:
    source = '"""See docs/a.md."""\nx = "run `make docs`"\ny = f"in examples/a.py: {x}"\nz = "make one"'
    assert hints_of_a_clone(source) == ["run `make docs`", "in examples/a.py: "]
