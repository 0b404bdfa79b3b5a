"""Files and functions that the documentation of the code names exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
WALKS = ROOT / "docs" / "develop" / "reading-order.md"
PAGES = [*sorted((ROOT / "docs" / "design").glob("*.md")), *sorted((ROOT / "docs" / "develop").glob("*.md"))]

FILE = re.compile(r"`((?:coordinator|engine|router|parallel|tests|examples)/[\w./-]+\.\w+)`")
NAME = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)?)`")


def names_of(path: Path) -> set[str]:
    """Functions, classes and methods of a module, as ``function``, ``Class`` and ``Class.method``."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name, body=body):
                found.add(name)
                methods = [each for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
                found |= {f"{name}.{each.name}" for each in methods}
    return found


def hops(text: str) -> Iterator[tuple[str, str]]:
    """File and function of each hop: tables have a column of each."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and (file := FILE.fullmatch(cells[1])):
            for name in NAME.findall(cells[2]):
                yield file[1], name


HOPS = list(hops(WALKS.read_text()))


def test_there_are_five_walks() -> None:
    titles = re.findall(r"^## (Where .*)$", WALKS.read_text(), re.M)
    assert len(titles) == 5
    assert len(HOPS) > 40


@pytest.mark.parametrize(("file", "name"), HOPS, ids=str)
def test_each_hop_of_the_walks_exists(file: str, name: str) -> None:
    assert name in names_of(ROOT / file), f"{WALKS.name}: there is no {name} in {file}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_about_the_code_name_exist(page: Path) -> None:
    text = page.read_text().partition("## Old words")[0]  # of the glossary
    missing = {file for file in FILE.findall(text) if not (ROOT / file).exists()}
    assert not missing, f"{page.name} names files that are not there: {sorted(missing)}"


def test_functions_of_the_architecture_page_exist() -> None:
    page = ROOT / "docs" / "design" / "architecture.md"
    for line in page.read_text().splitlines():
        if file := re.search(r"`([\w.]+)`(?: or `([\w.]+)`)? \(`([\w/]+\.py)`\)", line):
            known = names_of(ROOT / file[3])
            assert {name for name in file.groups()[:2] if name} <= known, line


def test_new_names_of_the_glossary_exist() -> None:
    page = (ROOT / "docs" / "design" / "glossary.md").read_text()
    rows = [
        line.split("|")[2]
        for line in page[page.index("## Old words") :].splitlines()
        if line.startswith("| ")
    ]
    classes = {
        name
        for package in ("coordinator", "engine", "router", "parallel")
        for path in (ROOT / package).rglob("*.py")
        for name in names_of(path)
    }
    new = {name for row in rows for name in re.findall(r"`([A-Z]\w+)`", row)}
    assert len(new) > 15
    assert not new - classes


EXTENDING = ROOT / "docs" / "develop" / "extending.md"


@pytest.mark.parametrize(("file", "name"), list(hops(EXTENDING.read_text())), ids=str)
def test_what_extensions_touch_exists(file: str, name: str) -> None:
    source = (ROOT / file).read_text()
    missing = [part for part in name.split(".") if not re.search(rf"\b{part}\b", source)]
    assert not missing, f"{EXTENDING.name}: there is no {name} in {file}"
