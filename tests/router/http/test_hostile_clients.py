"""Large, slow and missing bodies, and clients that leave: bounded, with nothing left behind."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engine.messages import Delta, FinishReason
from router.api.streaming import EventStream
from router.config import HttpConfig
from router.http.connection import PatientProtocol
from router.mesh import ServedModel
from router.text.tokens import load_tokenizer
from tests.router.conftest import JSON, Server, request_head, serving
from tests.router.fake_mesh import FakeMesh, saying
from tests.router.talking import talking
from tests.scarce import out_of_files
from tests.waiting import until


def test_large_bodies(server: Server) -> None:
    """The limit here is 1 MiB."""
    for size in (1_100_000, 7_000_000, 10_000_000):
        with httpx2.Client(base_url=server.url, trust_env=False) as client:
            body = b'{"prompt": "' + b"a" * size + b'"}'
            try:
                answer = client.post("/v1/completions", content=body, headers=JSON)
            except httpx2.NetworkError:
                assert size > 8 * 1024**2, "only those far beyond the limit are not read to their end"
                continue
            assert answer.status_code == 413
            assert answer.json()["error"]["type"] == "RequestTooLargeError"
            assert answer.headers["connection"] == "close"


def test_large_bodies_without_a_length(server: Server) -> None:
    def chunks() -> Any:
        for _ in range(30):
            yield b"a" * 100_000

    with httpx2.Client(base_url=server.url, trust_env=False) as client:
        answer = client.post("/v1/completions", content=chunks(), headers=JSON)
        assert answer.status_code == 413


def test_nobody_is_asked_to_send_too_much(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(request_head(2_000_000, b"Expect: 100-continue\r\n"))
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_large_but_allowed(server: Server) -> None:
    text = "word " * 50_000
    answer = server.post("/tokenize", {"prompt": text[:2000]})
    assert answer.json()["count"] > 256, "more than the context holds can be counted"
    body = {"prompt": text, "truncate_prompt_tokens": 10, "max_tokens": 1}
    assert server.post("/v1/completions", body).json()["usage"]["prompt_tokens"] == 10


def test_a_body_that_does_not_come(served: ServedModel) -> None:
    with serving(FakeMesh(served, saying([70])), HttpConfig(request_timeout=0.1)) as server:
        for sent in (b"", b'{"prompt": '):
            with server.connect() as connection:
                connection.sendall(request_head(100) + sent)
                answer = b"".join(iter(lambda: connection.recv(4096), b""))
                assert answer.startswith(b"HTTP/1.1 408")
                assert b"RequestTimeoutError" in answer


def test_a_head_that_does_not_come(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PatientProtocol, "head_timeout", 0.2)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(FakeMesh(served, saying([70])), HttpConfig()) as server:
        for begin in (b"", whole[:9], whole + whole[:9]):
            with server.connect() as connection:
                connection.sendall(begin)
                answer = b"".join(iter(lambda: connection.recv(4096), b""))
                assert answer.count(b"HTTP/1.1 200") == begin.count(whole)
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200


@contextlib.contextmanager
def long_answers(served: ServedModel, directory: Path) -> Iterator[Server]:
    """A server whose answers are longer than what systems hold of a connection (8 MB)."""
    long = "x" * 10_000
    with talking(served, directory, [long]) as server:
        token = load_tokenizer(directory).special_id(long)
        assert token is not None
        server.mesh.script = lambda _: [
            *[Delta(1, [token] * 50)] * 16,
            Delta(1, [token], FinishReason.LENGTH),
        ]
        yield server


def ask(connection: socket.socket, *, stream: bool, more: bytes = b"") -> None:
    body = json.dumps({"prompt": "a", "stream": stream, "skip_special_tokens": False}).encode()
    connection.sendall(request_head(len(body), more) + body)


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_takes_nothing_of_its_answer(
    served: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, more: bytes
) -> None:
    monkeypatch.setattr(PatientProtocol, "take_timeout", 0.3)
    with long_answers(served, tmp_path) as server, server.connect() as connection:
        ask(connection, stream=stream, more=more)
        until(lambda: server.mesh.generations)
        until(lambda: not server.connections)
        server.wait_until_idle()


def test_a_client_that_takes_its_answer_slowly_gets_all_of_it(
    served: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PatientProtocol, "take_timeout", 0.3)
    with long_answers(served, tmp_path) as server, server.connect() as connection:
        ask(connection, stream=False, more=b"Connection: close\r\n")
        size = 0
        while part := connection.recv(1_000_000):
            size += len(part)
            time.sleep(0.05)
        assert size > 8_000_000


def test_a_client_that_does_not_read_its_stream_is_cut_off(
    served: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(EventStream.__init__.__kwdefaults__, "send_timeout", 0.3)
    with long_answers(served, tmp_path) as server, server.connect() as connection:
        ask(connection, stream=True)
        until(lambda: server.mesh.generations)
        until(lambda: not server.connections)
        server.wait_until_idle()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_body_that_drips_after_its_answer(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PatientProtocol, "head_timeout", 0.2)
    config = HttpConfig(api_key=("k",))
    with serving(FakeMesh(served, saying([70])), config) as server, server.connect() as connection:
        connection.sendall(request_head(1000))
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")
        connection.sendall(b"a")
        assert b"".join(iter(lambda: connection.recv(4096), b"")) == b""


def test_a_connection_without_requests_stays_longer_than_in_pools(served: ServedModel) -> None:
    """Go's pool keeps an idle connection for 90 s, others keep it for less."""
    assert HttpConfig().timeout_keep_alive > 90
    config = HttpConfig(timeout_keep_alive=1)
    with serving(FakeMesh(served, saying([70])), config) as server, server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        began = time.monotonic()
        assert b"".join(iter(lambda: connection.recv(4096), b"")).startswith(b"HTTP/1.1 200")
        assert 0.5 < time.monotonic() - began < 4.0


def test_a_client_that_leaves_in_the_middle_of_its_body(server: Server) -> None:
    for sent in (b"", b'{"prompt": '):
        with server.connect() as connection:
            connection.sendall(request_head(100) + sent)
    assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200
    assert len(server.mesh.generations) == 1


def test_a_client_that_leaves_with_more_requests_behind_the_one_that_runs(server: Server) -> None:
    server.mesh.script = lambda _: []
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    with server.connect() as connection:
        connection.sendall((request_head(len(body)) + body) * 3)
        until(lambda: len(server.mesh.generations) == 1)
    server.wait_until_idle()
    assert len(server.mesh.generations) == 1, "the others were not begun"


def test_garbage_instead_of_http(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_many_who_leave(server: Server) -> None:
    """All at once, in the middle of their streams."""
    server.mesh.script = lambda _: []
    body = json.dumps({"prompt": "a", "stream": True, "n": 3}).encode()
    connections = [server.connect() for _ in range(20)]
    for connection in connections:
        connection.sendall(request_head(len(body)) + body)
    until(lambda: len(server.mesh.generations) == 60)
    assert server.metrics.in_flight == 20
    for connection in connections:
        connection.close()
    server.wait_until_idle()


# ---- no files left


def test_a_first_request_without_files_is_told_to_come_again(
    served: ServedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is wrong with tokenizer.json, and nothing that was not read is taken for missing."""
    with talking(served, tmp_path) as server:
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        assert server.client.get("/version").status_code == 200  # it has its connection
        with out_of_files():
            answer = server.post("/v1/chat/completions", chat)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), answer.text
        assert "short of files or memory now: try again" in answer.json()["error"]["message"]
        assert "cannot be read now: too many files are open: raise the limit with ulimit -n" in caplog.text
        assert "tokenizer.json" not in answer.text
        server.mesh.reset(saying([70]))
        assert server.post("/v1/chat/completions", chat).status_code == 200
        server.wait_until_idle()
