"""Paths that pages call not served answer 404; endpoints of the table are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.launcher.foreign_flags import FOREIGN
from tests.router.conftest import Server

DOCS = Path(__file__).parents[3] / "docs"
ROOMS = ("start", "use", "run", "design", "develop")
NOT_SERVED = re.compile(r"([^.;:|]*) (?:is|are) not served\b")
PATH = re.compile(r"(?<![\w.])/[a-z][\w/.{}-]*")
NAMED = re.compile(r"`(/[^`?]+)")
ENDPOINT = re.compile(r"^\| ((?:GET|POST|DELETE)\b[^|]*)\|([^|]*)\|", re.MULTILINE)


def asked(path: str) -> str:
    """A path that a client may ask for, of one with a part left open."""
    return path.replace("...", "any").replace("{id}", "any")


def denied() -> Iterator[tuple[str, str]]:
    """Each path that is called not served, and the sentence or row."""
    texts = [text for flag in FOREIGN for text in (flag.instead, flag.why)]
    texts += [page.read_text() for room in ROOMS for page in sorted((DOCS / room).glob("*.md"))]
    for text in texts:
        for sentence in NOT_SERVED.findall(text):
            yield from ((asked(path), sentence) for path in PATH.findall(sentence))
    for row in (DOCS / "use" / "differences.md").read_text().split("\n"):
        _, theirs, here, *_ = (*row.split("|"), "", "", "")
        if "404" in here:
            yield from ((asked(path), row) for path in NAMED.findall(theirs))


DENIED = dict(denied())


@pytest.mark.parametrize("path", sorted(DENIED))
def test_what_is_called_not_served_is_not_there(server: Server, path: str) -> None:
    statuses = {server.client.request(method, path, json={}).status_code for method in ("GET", "POST")}
    assert 404 in statuses <= {404, 405}, DENIED[path]
    known = server.client.get("/openapi.json").json()["paths"]
    assert not [each for each in known if each.startswith(f"{path}/")], DENIED[path]


def test_denials_are_found() -> None:
    assert {"/render", "/cohere/v2/chat", "/v1/realtime", "/v1/chat/completions/batch"} <= DENIED.keys()


def served() -> Iterator[tuple[str, str]]:
    """Method and path of each endpoint of the table in ``api.md`` that keeps an answer."""
    for left, right in ENDPOINT.findall((DOCS / "use" / "api.md").read_text()):
        if "404" not in right and "behind" not in right and "/dashboard" not in left:
            yield from (
                (left.split(",")[0].split()[0], path) for path in NAMED.findall(left) if "{" not in path
            )


@pytest.mark.parametrize(("method", "path"), sorted(set(served())))
def test_what_is_called_an_endpoint_is_there(server: Server, method: str, path: str) -> None:
    assert server.client.request(method, path, content=b"{").status_code not in (404, 405)
