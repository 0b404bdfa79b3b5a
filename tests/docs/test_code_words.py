"""Names of the code that the pages quote: files, classes, members and snake_case words exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    path for room in ("design", "develop", "run") for path in sorted((ROOT / "docs" / room).glob("*.md"))
]
SOURCE = re.compile(r"\[(\w+\.py):\d+\] ")
"""Where a line of a log comes from."""
PAGES_WITH_LOGS = [path for path in sorted((ROOT / "docs").glob("*/*.md")) if SOURCE.search(path.read_text())]
PACKAGES = ("coordinator", "engine", "router", "parallel", "tests", "examples")
SOURCES = {".py", ".cpp", ".hpp", ".h", ".c", ".js", ".html", ".sh"}

SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w./-]+\.(?:py|hpp|cpp|h|sh|js)")
CLASS = re.compile(r"([A-Z]\w*[a-z]\w*)(?:\.(\w+))?(?:\(.*\))?")
DOTTED = re.compile(r"(\w+)\.([A-Za-z_]\w*)")
SNAKE = re.compile(r"_?[a-z][a-z0-9]*(?:_[a-z0-9]+)+")

FOREIGN = {
    *("Origin", "Node_1", "Shadow_0"),  # HTTP; processes
    "cache_aware",  # SGLang's policy
}
"""Names of other systems and of processes."""


def without_old_words(page: Path) -> str:
    """The text without fenced blocks, and without the glossary's table of former names."""
    text = page.read_text().partition("## Old words")[0]
    return re.sub(r"^(`{3,})[^\n]*\n.*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def files() -> frozenset[str]:
    found = {path.relative_to(ROOT).as_posix() for top in PACKAGES for path in (ROOT / top).rglob("*")}
    return frozenset(name for name in found if "/build/" not in name)


@cache
def classes() -> dict[str, frozenset[str]]:
    """Each class and union of the packages and tests, with every word of its body."""
    found: dict[str, frozenset[str]] = {}
    for name in sorted(files()):
        if name.endswith(".py"):
            lines = (ROOT / name).read_text().split("\n")
            for node in ast.walk(ast.parse("\n".join(lines))):
                match node:
                    case ast.ClassDef(name=defined):
                        body = re.findall(r"\w+", "\n".join(lines[node.lineno - 1 : node.end_lineno]))
                        found[defined] = found.get(defined, frozenset()) | frozenset(body)
                    case ast.Assign([ast.Name(defined)], ast.BinOp()):
                        found.setdefault(defined, frozenset())
        elif name.endswith((".hpp", ".cpp", ".h")):
            for each in re.findall(r"\b(?:struct|class) (\w+)", (ROOT / name).read_text()):
                found.setdefault(each, frozenset())
    return found


@cache
def words() -> frozenset[str]:
    found = {word for name in files() for word in re.findall(r"\w+", name)}
    for name in files():
        path = ROOT / name
        if path.suffix in SOURCES and path != Path(__file__):
            found |= set(re.findall(r"\w+", path.read_text(errors="ignore")))
    return frozenset(found)


def unknown_in(text: str) -> Iterator[str]:
    """Quoted names that neither the code nor the list of foreign names has."""
    for span in sorted(set(SPAN.findall(text)) - FOREIGN):
        if FILE.fullmatch(span):
            if not any(name == span or name.endswith(f"/{span}") for name in files()):
                yield span
        elif match := CLASS.fullmatch(span):
            known = classes().get(match[1])
            if known is None or (match[2] and known and match[2] not in known):
                yield span
        elif match := DOTTED.fullmatch(span):
            if not {match[1], match[2]} <= words():
                yield span
        elif SNAKE.fullmatch(span) and span not in words():
            yield span


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_that_pages_quote_exist(page: Path) -> None:
    assert not list(unknown_in(without_old_words(page)))


def test_names_that_are_gone_are_found() -> None:
    text = "`engine/core/engine_core.py` `EngineCore.submit` `Lockstep` `pool.py` `process_table`"
    assert list(unknown_in(text)) == []
    gone = ["`EngineCore.no_such`", "`NoSuchClass`", "`engine/no_such.py`", "`no_such.py`", "`no_such_word`"]
    assert list(unknown_in(" ".join(gone))) == sorted(name.strip("`") for name in gone)


@pytest.mark.parametrize("page", PAGES_WITH_LOGS, ids=lambda page: page.name)
def test_sources_of_log_samples_are_files_that_log(page: Path) -> None:
    """Lines move with every change; the samples show those of their day."""
    logging = {name.rpartition("/")[2] for name in files() if _logs(name)}
    assert set(SOURCE.findall(page.read_text())) <= logging | {"httptools_impl.py"}


def _logs(name: str) -> bool:
    return name.endswith(".py") and "logger." in (ROOT / name).read_text()
