"""Rules of writing for docstrings, help texts, log lines and pages: short, in plain words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.house.measures import ROOT, Found

TOPS = ["parallel", "coordinator", "engine", "router", "lockstep", "examples", "tests"]
MOST_WORDS = 15
"""Most words in the first line of a docstring, which stands alone in lists."""
FORBIDDEN = re.compile(
    r"\bwho(m|)ever\b|\b(is|are|was|were|be|been|being) (said|told)\b|\b(told|said) so\b", re.I
)
"""Verbs of persons: what a program does is logged, sent, returned, raised or refused."""


PAGES = sorted(
    [
        path
        for room in ("start", "use", "run", "design", "develop")
        for path in (ROOT / "docs" / room).glob("*.md")
    ]
    + [ROOT / "docs" / "index.md", ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
)
"""Pages that are kept up to date; notes stay as they were written."""
MADE = {
    "families.md",
    "families-refused.md",
    "foreign-flags.md",
    "limits.md",
    "limits-router.md",
    "limits-mesh.md",
    "limits-groups.md",
}
"""Pages that are made from the code, mostly: their sentences are not counted."""
OF_PERSONS = re.compile(
    r"\b(process(es)?|routers?|instances?|members?|workers?|coordinators?|clients?),? who\b|\ball who\b|\bthose who\b|\bwhom\b"
    r"|(^|[.;:|] )who (is|was|has|had|does|needs|comes|goes|asks|answers|steps|breaks|waits|cannot|can|may|must)\b"
    r"|\bfront[- ]ends?\b|\btold\b|\bunless said\b",
    re.I,
)
"""More that pages must not have: processes as persons, the router under its old name."""
MOST_WORDS_OF_SENTENCE = 25


def definitions(
    node: ast.AST,
) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """A module and all classes and functions in it.

    Expressions are not walked, which are most of a tree.
    """
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        inside = getattr(node, name, ())
        for each in inside if isinstance(inside, list) else ():
            yield from definitions(each)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those of attributes included."""
    for node in definitions(tree):
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
    documented = list(docstrings(tree))
    for line, text in documented:
        first = text.strip().split("\n")[0]
        if len(first.split()) > MOST_WORDS:
            yield f"{path.relative_to(ROOT)}:{line}: {len(first.split())} words in the first line of a docstring: {first}"
        if first.startswith("Of "):
            yield f"{path.relative_to(ROOT)}:{line}: a docstring begins with 'Of': {first}"
    for line, text in documented if path.is_relative_to(ROOT / "tests") else strings(tree):
        if found := FORBIDDEN.search(text):
            yield f"{path.relative_to(ROOT)}:{line}: {found[0]!r}"


def prose(text: str) -> str:
    """A page without fenced blocks and comments; links and code are one word each."""
    text = re.sub(r"^ *(`{3,})[^\n]*\n.*?^ *\1", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "CODE", text)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> Iterator[str]:
    """Sentences of paragraphs and lists.

    Parts before and after a semicolon or colon count by themselves.
    """
    for part in re.split(r"\n\s*\n|\n *(?=[-*] |\d+\. |#)", text):
        if not part.lstrip().startswith("|"):
            yield from re.split(r"(?<=[.!?])[)*_\"]* +(?=[A-Z(*\"0-9])|[;:] ", " ".join(part.split()))


def wrong_in_page(page: Path) -> Iterator[str]:
    """What is written against the rules in one page."""
    text = prose(page.read_text())
    name = page.relative_to(ROOT)
    for rule in (FORBIDDEN, OF_PERSONS):
        for found in rule.finditer(text):
            yield f"{name}: {found[0]!r}"
    if page.name not in MADE:
        for sentence in sentences(text):
            if len(re.findall(r"\S*\w\S*", sentence)) > MOST_WORDS_OF_SENTENCE:
                yield f"{name}: more than {MOST_WORDS_OF_SENTENCE} words: {sentence}"


def wrong_texts() -> list[Found]:
    """All that is written against the rules, in code, tests, examples and pages."""
    paths = (path for top in TOPS for path in sorted((ROOT / top).rglob("*.py")))
    found = [each for path in paths for each in wrong_in(path)]
    found += [each for page in PAGES for each in wrong_in_page(page)]
    return [Found(each, 1) for each in found]
