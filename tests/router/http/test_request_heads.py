"""Heads without an end, too many at once, and offers of other protocols."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import httpx2
import pytest

from router.http.request_heads import MOST_BYTES, MOST_HEADERS
from tests.router.conftest import Server, request_head

PING = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
BEGIN = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n"
)


@contextlib.contextmanager
def ended_by_the_server(server: Server) -> Iterator[socket.socket]:
    """A connection that the server closes while its client sends, or waits for an answer."""
    with server.connect() as connection, contextlib.suppress(ConnectionError):
        yield connection
        while connection.recv(1 << 16):
            pass


def answer_to(server: Server, *sent: bytes) -> bytes:
    """All that comes back on one connection, which the server closes.

    What is sent comes in parts.
    """
    with server.connect() as connection:
        for part in sent:
            connection.sendall(part)
            time.sleep(0.05)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("blanks", [b" ", b"\t", b"  \t "])
def test_blanks_after_a_value_are_no_part_of_it(server: Server, blanks: bytes) -> None:
    head = b"X-Data-Parallel-Rank: 3%b\r\nX-Request-Id:%babc%b\r\nConnection: close\r\n" % ((blanks,) * 3)
    answer = answer_to(server, request_head(15, head) + b'{"prompt": "a"}')
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert (server.mesh.prompts[-1].rank, server.mesh.prompts[-1].request_id) == (3, "cmpl-abc")


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (BEGIN + b"X: ", b"a" * 10_000),
        (BEGIN, b"X: a\r\n" * 1000),
        (BEGIN + b"x", b"a" * 10_000),
        (b"GET /", b"a" * 10_000),
        (b"", b"\r\n" * 5000),
        (CHUNKED + b"\r\n0\r\nX: ", b"a" * 10_000),
        (CHUNKED + b"\r\n0\r\n", b"X: a\r\n" * 1000),
        (CHUNKED + b"\r\n1;x=", b"a" * 10_000),
    ],
    ids=["value", "headers", "name", "url", "blank lines", "trailer", "trailers", "extension"],
)
def test_a_head_that_never_ends(server: Server, begin: bytes, more: bytes) -> None:
    with ended_by_the_server(server) as connection:
        connection.sendall(begin)
        for _ in range(1000):
            connection.sendall(more)


def test_what_is_too_large_is_said(server: Server) -> None:
    many = b"X: a\r\n" * (MOST_HEADERS + 1)
    assert b'"code":431' in answer_to(server, BEGIN + many + b"\r\n")
    assert answer_to(server, PING, BEGIN + many + b"\r\n").count(b"HTTP/1.1") == 2, "the first was answered"
    large = BEGIN + b"X: " + b"a" * (MOST_BYTES - 100) + b"\r\nConnection: close\r\n"
    assert answer_to(server, large + b"\r\n").startswith(b"HTTP/1.1 200")
    assert answer_to(server, large + b"Y: " + b"b" * 100 + b"\r\n\r\n").startswith(b"HTTP/1.1 431")


def test_trailers_are_passed_over(server: Server) -> None:
    body = b'{"prompt": "a"}'
    chunks = b"%x\r\n%b\r\n0\r\nX-Request-Id: late\r\n\r\n" % (len(body), body)
    answer = answer_to(server, CHUNKED + b"Connection: close\r\n\r\n" + chunks)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"late" not in answer


def test_what_is_wrong_with_a_body_is_said(server: Server) -> None:
    assert answer_to(server, CHUNKED + b"\r\nzz\r\n").startswith(b"HTTP/1.1 400")
    assert answer_to(server, CHUNKED + b"\r\n0\r\n" + b"X: a\r\n" * MOST_HEADERS).startswith(b"HTTP/1.1 431")


def test_a_body_may_be_larger_than_a_head(server: Server) -> None:
    body = json.dumps({"prompt": "word " * 50_000, "truncate_prompt_tokens": 10, "max_tokens": 1}).encode()
    parts = [body[place : place + 1000] for place in range(0, len(body), 1000)]
    with server.connect() as connection:
        connection.sendall(request_head(len(body)))
        for part in parts:
            connection.sendall(part)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_thousands_of_requests_at_once_stop_nobody_else(server: Server) -> None:
    with ended_by_the_server(server) as connection:
        connection.sendall(PING * 20_000)
        began = time.monotonic()
        assert server.client.get("/ping").status_code == 200
        assert time.monotonic() - began < 1.0


def test_some_requests_at_once_are_answered_in_order(server: Server) -> None:
    last = PING.replace(b"/ping", b"/nothing").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    answer = answer_to(server, PING * 20 + last)
    assert (answer.count(b"HTTP/1.1 200"), answer.count(b"HTTP/1.1 404")) == (20, 1)
    assert answer.index(b"404") > answer.rindex(b"HTTP/1.1 200")


# ---- upgrades

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
BODY = b'{"prompt": "Hello", "max_tokens": 3}'
CHUNKS = b"5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])
LAST = b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        [request_head(len(BODY), OFFER) + BODY],
        [request_head(len(BODY), OFFER), BODY],
        [request_head(len(BODY), OFFER)[:40], request_head(len(BODY), OFFER)[40:] + BODY[:5], BODY[5:]],
        [CHUNKED + OFFER + b"\r\n" + CHUNKS],
        [CHUNKED + OFFER + b"\r\n", CHUNKS],
        [request_head(len(BODY), OFFER) + BODY + request_head(len(BODY), OFFER) + BODY],
        [request_head(len(BODY), b"Connection: upgrade\r\nUpgrade: websocket\r\n") + BODY],
    ],
    ids=["at once", "body later", "in pieces", "chunked", "chunked later", "two at once", "websocket"],
)
def test_an_offer_of_another_protocol_is_passed_over(server: Server, sent: list[bytes]) -> None:
    """curl --http2 and Java's HttpClient send one with every first request."""
    answer = answer_to(server, *sent, LAST)
    num_posts = sum(part.count(b"POST") for part in sent)
    assert answer.count(b"HTTP/1.1 200") == num_posts + 1, answer
    assert answer.count(b'"choices"') == num_posts


def test_an_offer_with_expect(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(request_head(len(BODY), OFFER + b"Expect: 100-continue\r\n"))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_a_tunnel_is_refused(server: Server) -> None:
    offer = (
        b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
    )
    assert answer_to(server, offer + b"\r\n").startswith(b"HTTP/1.1 400")


def test_a_websocket_is_refused(server: Server) -> None:
    headers = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    assert httpx2.get(f"{server.url}/v1/completions", headers=headers, trust_env=False).status_code == 405
