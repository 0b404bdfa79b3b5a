"""What is measured of the house: classes, functions, names, repeated lines, folders and pages.

Product code is what the packages hold. Tests and examples are measured by folder sizes alone.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("parallel", "coordinator", "engine", "router", "lockstep")
WINDOW = 6
"""Lines that two places must share to be a pair."""
VLLM_CONSTRUCTORS = frozenset({"LLM"})
"""Classes whose constructors keep the parameters of vLLM's, as users' programs and editors expect."""
SHORT = 4
"""Characters below which a line says nothing: brackets and the like."""


class Found(NamedTuple):
    """One thing that was measured."""

    where: str
    """Path and line, or a name."""
    size: int


@cache
def sources() -> dict[Path, str]:
    """Text of each Python file of the packages."""
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return {path: path.read_text() for path in paths}


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(text) for path, text in sources().items()}


@cache
def _nodes() -> list[tuple[Path, ast.AST]]:
    """All classes, functions, imports and expressions."""
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Import | ast.ImportFrom | ast.Expr
    return [
        (path, node) for path, tree in trees().items() for node in ast.walk(tree) if isinstance(node, kinds)
    ]


def _where(path: Path, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def _largest_first(found: list[Found]) -> list[Found]:
    return sorted(found, key=lambda each: (-each.size, each.where))


def large_classes(most: int) -> list[Found]:
    """Classes with more methods than this, properties among them."""
    found = []
    for path, node in _nodes():
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
            found += [Found(_where(path, node), methods)] if methods > most else []
    return _largest_first(found)


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is compiled by Triton."""
    return any("jit" in ast.unparse(each) for each in node.decorator_list)


def long_functions(most: int) -> list[Found]:
    """Functions with more lines than this, Triton's kernels left out."""
    found = []
    for path, node in _nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel(node):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            found += [Found(_where(path, node), lines)] if lines > most else []
    return _largest_first(found)


def wide_constructors(most: int) -> list[Found]:
    """Classes whose ``__init__`` takes more parameters than this; those that copy vLLM's left out."""
    found = []
    for path, node in _nodes():
        if isinstance(node, ast.ClassDef) and node.name not in VLLM_CONSTRUCTORS:
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    taken = len([*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs]) - 1
                    found += [Found(_where(path, node), taken)] if taken > most else []
    return _largest_first(found)


def repeated_names() -> list[Found]:
    """Names that several classes of the packages have, private ones left out."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, node in _nodes():
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            places[node.name].append(str(path.relative_to(ROOT)))
    return _largest_first(
        [Found(f"{name}: {', '.join(at)}", len(at)) for name, at in places.items() if len(at) > 1]
    )


def repeated_lines() -> list[Found]:
    """Pairs of places that share at least six lines, without imports and docstrings."""
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    lines_of = {str(path.relative_to(ROOT)): _told_lines(path) for path in sources()}
    for name, lines in lines_of.items():
        for first in range(len(lines) - WINDOW + 1):
            places[tuple(text for _, text in lines[first : first + WINDOW])].append((name, first))
    pairs: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for at in places.values():
        for index, (name, first) in enumerate(at):
            for other, second in at[index + 1 :]:
                pairs[name, other, second - first].append(first)
    found = []
    for (name, other, apart), firsts in pairs.items():
        for run in _runs(sorted(firsts)):
            begin, beside = lines_of[name][run[0]][0], lines_of[other][run[0] + apart][0]
            found.append(Found(f"{name}:{begin} and {other}:{beside}", len(run) + WINDOW - 1))
    return _largest_first(found)


@cache
def _skipped() -> dict[Path, set[int]]:
    """Numbers of lines of each file that are imports or docstrings."""
    skipped: dict[Path, set[int]] = defaultdict(set)
    for path, node in _nodes():
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or (is_text and isinstance(node, ast.Expr)):
            skipped[path].update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return skipped


def _told_lines(path: Path) -> list[tuple[int, str]]:
    """Number and text of each line that says something."""
    skipped = _skipped()[path]
    lines = enumerate(sources()[path].splitlines(), start=1)
    told = ((number, text.strip()) for number, text in lines if number not in skipped)
    return [(number, text) for number, text in told if len(text) > SHORT and not text.startswith("#")]


def _runs(firsts: list[int]) -> list[list[int]]:
    """Runs of consecutive numbers."""
    runs: list[list[int]] = []
    for first in firsts:
        if runs and first == runs[-1][-1] + 1:
            runs[-1].append(first)
        else:
            runs.append([first])
    return runs


def crowded_folders(most: int) -> list[Found]:
    """Folders with more modules than this, those of tests and examples among them."""
    found = []
    for top in (*PACKAGES, "tests", "examples"):
        for folder in (ROOT / top, *(path for path in sorted((ROOT / top).rglob("*")) if path.is_dir())):
            modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
            found += [Found(str(folder.relative_to(ROOT)), len(modules))] if len(modules) > most else []
    return _largest_first(found)


def large_rooms(most: int) -> list[Found]:
    """Rooms with more lines than this, without the rooms inside of them."""
    sizes: dict[str, int] = defaultdict(int)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.suffix in (".py", ".cpp", ".hpp"):
                sizes[str(path.parent.relative_to(ROOT))] += len(path.read_text().splitlines())
    return _largest_first([Found(room, lines) for room, lines in sizes.items() if lines > most])


def pages() -> list[Found]:
    """Pages of the documentation and their bytes, the notebook left out."""
    found = (path for path in sorted((ROOT / "docs").rglob("*.md")) if "notes" not in path.parts)
    return _largest_first([Found(str(path.relative_to(ROOT)), path.stat().st_size) for path in found])
