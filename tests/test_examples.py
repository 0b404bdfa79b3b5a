"""What the examples import from here is there: they are not run by the tests, and only some are typed."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"coordinator", "engine", "router", "parallel", "lockstep", "tests", "examples"}
EXAMPLES = sorted(path.relative_to(ROOT) for path in (ROOT / "examples").rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Modules of ours, or beside the file, and the names that are taken from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            beside = path.parent / f"{node.module}.py"
            module = f"examples.{node.module}" if beside.is_file() else node.module
            if module.partition(".")[0] in OURS:
                yield from ((module, name.name) for name in node.names)


def test_they_are_found() -> None:
    assert len(EXAMPLES) > 20
    assert sum(1 for path in EXAMPLES for _ in imports(ROOT / path)) > 60


@pytest.mark.parametrize("path", EXAMPLES, ids=str)
def test_what_an_example_imports_is_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for module, name in imports(ROOT / path):
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.partition(".")[0] not in OURS and error.name != module:
                continue  # a library that only the benchmarks need
            raise
        if not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
