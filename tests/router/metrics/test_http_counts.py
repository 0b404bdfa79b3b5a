"""Answers to HTTP requests, counted."""

from __future__ import annotations

import msgspec
import pytest

from engine.messages import Delta
from router.config import HttpConfig
from router.mesh import ServedModel
from tests.router.conftest import Server, request_head, serving
from tests.router.fake_mesh import FakeMesh, saying
from tests.waiting import until


def told(server: Server, name: str = "http_requests_total") -> dict[str, float]:
    lines = server.client.get("/metrics").text.splitlines()
    found = (line.removeprefix(name).rpartition(" ") for line in lines if line.startswith(name))
    return {labels: float(value) for labels, _, value in found}


def labels(handler: str, method: str, status: str) -> str:
    return f'{{handler="{handler}",method="{method}",status="{status}"}}'


def test_answers_by_handler_method_and_status(served: ServedModel) -> None:
    with serving(FakeMesh(served, saying([70, 71])), HttpConfig()) as server:
        for stream in (False, True):
            server.post("/v1/completions", {"prompt": "a", "stream": stream})
        server.post("/v1/completions/", {"prompt": "a", "temperature": -1})
        server.client.get("/v1/completions")
        server.client.get("/v1/models")
        server.client.get("/v1/models/other/name")
        server.client.get("/v1/responses/a/input_items")
        for path in ("/a", "/b", "/v1/audio/speech", "/health", "/ping"):
            server.client.get(path)
        server.client.request("PROPFIND", "/a")
        expected = {
            labels("/v1/completions", "GET", "4xx"): 1,
            labels("/v1/completions", "POST", "2xx"): 2,
            labels("/v1/completions", "POST", "4xx"): 1,
            labels("/v1/models", "GET", "2xx"): 1,
            labels("/v1/models/{name}", "GET", "2xx"): 1,
            labels("/v1/responses/{id}/input_items", "GET", "4xx"): 1,
            labels("none", "GET", "4xx"): 3,
            labels("none", "OTHER", "4xx"): 1,
        }
        until(lambda: told(server) == expected)
        seconds = told(server, "http_request_duration_seconds_count")
        assert seconds['{handler="/v1/completions",method="POST"}'] == 3


def test_what_is_refused_at_the_door(served: ServedModel) -> None:
    with serving(FakeMesh(served, saying([70])), HttpConfig(api_key=("one",))) as server:
        server.client.get("/v1/models")
        until(lambda: told(server) == {labels("/v1/models", "GET", "4xx"): 1})


def test_errors_of_ours(served: ServedModel) -> None:
    def script(_: object) -> list[Delta]:
        raise RuntimeError

    with serving(FakeMesh(served, script), HttpConfig()) as server:
        close = {"connection": "close"}  # as the server will
        server.client.post("/v1/completions", json={"prompt": "a"}, headers=close)
        until(lambda: told(server) == {labels("/v1/completions", "POST", "5xx"): 1})


def test_the_time_is_that_of_the_whole_answer(served: ServedModel) -> None:
    mesh = FakeMesh(served, saying([70] * 4))
    mesh.delay = 0.05
    with serving(mesh, HttpConfig()) as server:
        server.post("/v1/completions", {"prompt": "a", "stream": True})
        name = "http_request_duration_seconds_sum"
        until(lambda: told(server, name) != {})
        assert told(server, name)['{handler="/v1/completions",method="POST"}'] > 0.1


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up(served: ServedModel, stream: bool) -> None:
    """Counted if an answer has begun."""
    with serving(FakeMesh(served, lambda _: [Delta(1, [70])]), HttpConfig()) as server:
        body = msgspec.json.encode({"prompt": "a", "stream": stream})
        with server.connect() as connection:
            connection.sendall(request_head(len(body)) + body)
            until(lambda: len(server.mesh.generations) == 1)
            if stream:
                assert connection.recv(12) == b"HTTP/1.1 200"
        server.wait_until_idle()
        expected = {labels("/v1/completions", "POST", "2xx"): 1.0} if stream else {}
        until(lambda: told(server) == expected)
