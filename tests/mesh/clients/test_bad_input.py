"""Bad requests and garbage on every port: clear answers, and no harm to other requests."""

from __future__ import annotations

import json
import random
import socket
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
import zmq

from coordinator.rpc.codec import PROTOCOL
from engine.config import SHIPPED_MODEL
from tests.mesh.clients.test_clients import assert_idle
from tests.mesh.conftest import Mesh

pytestmark = pytest.mark.mesh


def post(mesh: Mesh, body: object, path: str = "/v1/completions", **headers: str) -> tuple[int, Any]:
    """Status and decoded body."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        mesh.url + path, payload, {"Content-Type": "application/json", **headers}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def good(**fields: object) -> dict[str, object]:
    return {"model": SHIPPED_MODEL, "prompt": "She", "max_tokens": 2, **fields}


CASES: dict[str, tuple[object, int, str]] = {
    "too long": (good(prompt=[5] * 3000), 400, "maximum context length is 2048 tokens"),
    "invalid JSON": (b"{", 400, "JSON"),
    "wrong type": (good(max_tokens="many"), 400, "max_tokens"),
    "unknown model": (good(model="gpt-9"), 404, "The model `gpt-9` does not exist."),
    "negative max_tokens": (good(max_tokens=-1), 400, "max_tokens must be at least"),
    "temperature NaN": (b'{"model": "lockstep-moe", "prompt": "x", "temperature": NaN}', 400, "JSON"),
    "temperature huge": (
        b'{"model": "lockstep-moe", "prompt": "x", "temperature": 1e999}',
        400,
        "temperature",
    ),
    "invalid regex": (good(structured_outputs={"regex": "("}), 400, "structured_outputs"),
    "empty prompt": (good(prompt=""), 400, "empty"),
    "no prompt": ({"model": SHIPPED_MODEL}, 400, "prompt"),
    "ids outside": (good(prompt=[1, 10**6]), 400, "vocabulary"),
    "10 MB": (good(prompt="x" * 10_000_000), 413, "8388608"),
    "no such rank": (good(), 400, "there is no instance with data-parallel rank 7"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_requests_get_their_status_and_say_why(mesh: Mesh, name: str) -> None:
    body, status, message = CASES[name]
    headers = {"X-data-parallel-rank": "7"} if name == "no such rank" else {}
    found, answer = post(mesh, body, **headers)
    assert (found, set(answer)) == (status, {"error"}), answer
    assert message in answer["error"]["message"]
    assert answer["error"]["code"] == status


def test_habits_of_clients_are_accepted(mesh: Mesh) -> None:
    nulls = dict.fromkeys(("logprobs", "stop", "seed", "n", "stream", "suffix", "user", "temperature"))
    assert post(mesh, good(**nulls, unknown_field={"a": [1]}))[0] == 200
    chat = {
        "model": SHIPPED_MODEL,
        "messages": [{"role": "user", "content": "Hi", "name": None}],
        "max_tokens": 2,
        "max_completion_tokens": 3,
        "tools": None,
    }
    status, answer = post(mesh, chat, "/v1/chat/completions")
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)


def test_half_sent_requests_end_and_harm_nobody(mesh: Mesh) -> None:
    halves = [
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 500\r\n\r\n{",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
    ]
    open_ends = []
    for half in halves:
        connection = socket.create_connection(("127.0.0.1", mesh.http))
        connection.sendall(half)
        connection.settimeout(20)
        open_ends.append(connection)
    assert post(mesh, good())[0] == 200
    began = time.monotonic()
    for connection in open_ends:
        while connection.recv(4096):
            pass
        connection.close()
    assert time.monotonic() - began < 15, "--request-timeout 5 ends them"


def test_garbage_on_every_socket_of_the_mesh(mesh: Mesh) -> None:
    """Garbage from a process with the key, and from one that speaks no ZeroMQ."""
    rng = random.Random(0)
    endpoints = [f"tcp://127.0.0.1:{mesh.rpc}", *(member.address for member in mesh.view().members)]
    assert len(endpoints) == 3
    context: zmq.Context[Any] = zmq.Context()
    for endpoint in endpoints:
        raw = context.socket(zmq.DEALER)
        raw.setsockopt(zmq.LINGER, 1000)
        found = mesh.keys()
        assert found is not None
        raw.curve_serverkey = found.server_public
        raw.curve_publickey, raw.curve_secretkey = found.client_public, found.client_secret
        raw.connect(endpoint)
        for _ in range(200):
            body = rng.randbytes(rng.randrange(100))
            raw.send_multipart(
                rng.choice([[body], [body, body], [b""], [bytes([PROTOCOL]) + body], [b"\x07" + body]])
            )
        raw.send(b"\x01" + bytes(70 * 1024**2))  # above every limit: ZeroMQ drops the connection
        raw.close()
        host, port = endpoint.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(rng.randbytes(10_000))
    context.term()
    for rank in ("0", "1"):
        assert post(mesh, good(), **{"X-data-parallel-rank": rank})[0] == 200
    assert mesh.command.process.poll() is None
    assert "dropped a bad message" in mesh.command.log
    assert len(mesh.view().members) == 2
    assert_idle(mesh)


def test_random_bodies_never_break_the_server(mesh: Mesh) -> None:
    rng = random.Random(1)
    values: list[object] = [
        None, True, -1, 0, 1, 2, 3.5, 10**30, "", "x", "\ud7ff", [], [1], ["a", "b"], [[1, 2], [3]], {}, {"a": 1},
        [None], [[]], {"type": "text"}, 1e308, -0.0,
    ]  # fmt: skip
    fields = (
        "prompt", "messages", "temperature", "top_p", "top_k", "n", "stop", "logprobs", "stream", "seed", "echo",
        "max_tokens", "min_tokens", "logit_bias", "stop_token_ids", "stream_options", "prompt_logprobs", "tools",
        "response_format", "allowed_token_ids", "priority", "cache_salt", "request_id", "return_token_ids",
    )  # fmt: skip
    statuses = set()
    for _ in range(300):
        body = good(**{rng.choice(fields): rng.choice(values) for _ in range(rng.randrange(1, 4))})
        if rng.random() < 0.5:
            body["messages"] = rng.choice(
                [[{"role": "user", "content": "x"}], [{"role": rng.choice(values)}]]
            )
        if rng.random() < 0.2:
            body["model"] = rng.choice(values)
        body["stream"] = False if rng.random() < 0.9 else rng.choice(values[:3])
        statuses.add(
            _status(mesh, body, rng.choice(("/v1/completions", "/v1/chat/completions", "/tokenize")))
        )
    assert 200 in statuses
    assert not [status for status in statuses if status >= 500]
    assert_idle(mesh)


def _status(mesh: Mesh, body: object, path: str) -> int:
    request = urllib.request.Request(
        mesh.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
