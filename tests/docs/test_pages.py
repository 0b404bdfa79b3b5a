"""Pages of the documentation: links and anchors exist, every page is reachable, sizes are bounded."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.docs.flags import tables, written
from tests.docs.site_links import without_outside_links

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INDEX = DOCS / "index.md"
PAGES = sorted(DOCS.rglob("*.md"))
AT_ROOT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]

README_BYTES = 9_000
PAGE_BYTES = 12 * 1024
"""Largest size of a page that is neither a result nor a note."""

LINK = re.compile(r"\]\(<?([^)\s>]+)>?\)")
FENCE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.*?)\s*#*$", re.MULTILINE)


def prose(page: Path) -> str:
    """The text of a page without fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that code hosts and the site give to the headings of a page."""
    found: dict[str, int] = {}
    result = set()
    for heading in HEADING.findall(prose(page)):
        words = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower().strip()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        seen = found[slug] = found.get(slug, -1) + 1
        result.add(f"{slug}-{seen}" if seen else slug)
    return result


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    return [link for link in LINK.findall(text) if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("page", [*PAGES, *AT_ROOT], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_exist(page: Path) -> None:
    wrong = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong


def test_every_page_is_reachable_from_the_index() -> None:
    reached, ahead = {INDEX}, [INDEX]
    while ahead:
        page = ahead.pop()
        for link in links(page):
            target = (page.parent / link.partition("#")[0]).resolve()
            if (
                target.suffix == ".md"
                and DOCS in target.parents
                and target.exists()
                and target not in reached
            ):
                reached.add(target)
                ahead.append(target)
    assert {page.relative_to(DOCS) for page in PAGES} == {page.relative_to(DOCS) for page in reached}


def test_pages_are_of_a_readable_size() -> None:
    sizes = {
        str(page.relative_to(DOCS)): page.stat().st_size
        for page in PAGES
        if page.relative_to(DOCS).parts[0] != "results"
    }
    assert {name: size for name, size in sizes.items() if size > PAGE_BYTES} == {}
    assert (ROOT / "README.md").stat().st_size < README_BYTES


def test_the_site_shows_the_pages_of_the_index() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    nav = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    shown = [path for room in nav[1:] for pages in room.values() for page in pages for path in page.values()]
    assert shown == [link for link in links(INDEX) if link.endswith(".md")]


@pytest.mark.parametrize("page", tables(), ids=lambda page: page.name)
def test_tables_of_flags_are_as_the_code_has_them(page: Path) -> None:
    assert page.read_text() == written(page, tables()[page]), "python -m tests.docs.flags writes them"


def test_links_out_of_the_docs_become_names_on_the_site() -> None:
    inside = "[x](../run/y.md#z) and ![p](../images/p.svg)"
    assert without_outside_links(inside, 1) == inside
    assert without_outside_links("[`a.py`](../../examples/a.py)", 1) == "`a.py`"
    assert without_outside_links("[its\ncard](../../engine/README.md#x).", 1) == (
        "its\ncard (`engine/README.md`)."
    )
    assert without_outside_links("[changes](../CHANGELOG.md)", 0) == "changes (`CHANGELOG.md`)"
