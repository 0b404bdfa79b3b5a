"""What stands around the endpoints: keys, browsers, proxies, request ids, TLS, load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.routing import Route

from coordinator.settings.errors import FlagError
from coordinator.settings.flags import from_flat
from engine.messages import Counters, Delta, InstanceReport
from router.app.app import make_app
from router.config import HttpConfig, RouterConfig
from router.http.listen import wait_for_health
from router.mesh import ServedModel
from router.metrics.loads import Loads, loads_of
from router.stored.database import StoreDatabase
from router.stored.store import AnswerStore
from tests.router.conftest import Server, events, serving
from tests.router.fake_mesh import FakeMesh, saying
from tests.waiting import until

PAGE = "https://page.example"


@contextlib.contextmanager
def served_with(served: ServedModel, **config: Any) -> Iterator[Server]:
    with serving(FakeMesh(served, saying([70, 71])), HttpConfig(**config)) as server:
        yield server


# ---- keys


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/invocations"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/responses/input_tokens"),
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/replay"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/tiny"),
        ("GET", "/v1/loads"),
        ("GET", "/get_load"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/tokenizer_info"),
    ],
)
def test_what_needs_a_key(served: ServedModel, method: str, path: str) -> None:
    with served_with(served, api_key=("secret",)) as server:
        assert server.client.request(method, path).status_code == 401
        for headers in ({"authorization": "Bearer secret"}, {"x-api-key": "secret"}):
            assert server.client.request(method, path, headers=headers).status_code != 401
        for headers in (
            {"authorization": "Bearer x"},
            {"x-api-key": "x"},
            {"x-api-key": ""},
            {"api-key": "secret"},
        ):
            assert server.client.request(method, path, headers=headers).status_code == 401


def test_an_empty_token_is_no_key(served: ServedModel) -> None:
    with served_with(served, api_key=("secret",)) as server:
        for headers in ({"authorization": "Basic secret"}, {"authorization": "Bearer"}, {}):
            assert server.client.get("/v1/models", headers=headers).status_code == 401
        assert server.client.get("/load").status_code == 200


# ---- hosts

HERE = [
    "localhost",
    "LOCALHOST:1",
    "mesh.localhost",
    "localhost.:8000",
    "127.0.0.1",
    "127.1.2.3:8000",
    "[::1]:80",
    "0.0.0.0:8000",
    "",
]
ELSEWHERE = [
    "site.example",
    "notlocalhost",
    "site.example:8000",
    "127.site.example",
    "localhost.site.example",
    "[x]",
    "a b",
]


def status_for(server: Server, host: str | None, more: bytes = b"") -> bytes:
    """Status of a request with this Host header; None: without one."""
    line = b"" if host is None else b"Host: %b\r\n" % host.encode()
    version = b"1.0" if host is None else b"1.1"
    with server.connect() as connection:
        connection.sendall(b"GET /v1/models HTTP/%b\r\n%b%b\r\n" % (version, line, more))
        return connection.recv(12)[-3:]


def test_loopback_without_keys_is_for_this_machine(served: ServedModel) -> None:
    """A site may have its own name mean 127.0.0.1."""
    with served_with(served) as server:
        assert [status_for(server, host) for host in (*HERE, None)] == [b"200"] * (len(HERE) + 1)
        assert [status_for(server, host) for host in ELSEWHERE] == [b"421"] * len(ELSEWHERE)
        answer = server.client.get("/v1/models", headers={"host": "site.example:8000"})
        assert "not for 'site.example:8000': give it a key" in answer.json()["error"]["message"]
        assert server.client.get("/metrics", headers={"host": "site.example"}).status_code == 421


def test_names_do_not_matter_with_a_key_or_on_a_network(served: ServedModel) -> None:
    with served_with(served, api_key=("k",)) as server:
        assert status_for(server, "site.example") == b"401"
        assert status_for(server, "site.example", b"X-Api-Key: k\r\n") == b"200"
    with served_with(served, host="0.0.0.0") as server:
        assert status_for(server, "site.example") == b"200"


@pytest.mark.parametrize("path", ["/health", "/ping", "/livez"])
def test_probes_may_use_any_name(served: ServedModel, path: str) -> None:
    """A load balancer asks for the name that it has for the server."""
    with served_with(served) as server:
        assert server.client.get(path, headers={"host": "mesh.internal:8000"}).status_code == 200
    with served_with(served, api_key=("k",)) as server:
        assert server.client.get(path, headers={"host": "mesh.internal:8000"}).status_code == 200


def test_a_router_lives_also_when_nobody_serves(served: ServedModel) -> None:
    with served_with(served) as server:
        server.mesh.healthy = False
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/livez").status_code == 200


# ---- what a path takes


def options(server: Server, path: bytes) -> tuple[int, str | None]:
    """Status and Allow header of an OPTIONS request."""
    with server.connect() as connection:
        connection.sendall(b"OPTIONS %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()
    allow = re.search(r"\r\nallow: ([^\r]*)", answer)
    return int(answer.split()[1]), allow and allow[1]


def test_the_methods_of_a_path_are_told_to_anybody(served: ServedModel) -> None:
    with served_with(served, api_key=("k",)) as server:
        assert options(server, b"/") == options(server, b"*") == (204, "OPTIONS"), "there is no page here"
        assert options(server, b"/v1/completions") == (204, "OPTIONS, POST")
        assert options(server, b"/ping/") == (204, "GET, HEAD, OPTIONS, POST")
        assert options(server, b"/v1/responses/resp_1") == (204, "DELETE, GET, HEAD, OPTIONS")
        assert options(server, b"/nothing") == (401, None)
        with server.connect() as connection:  # as HAProxy asks
            connection.sendall(b"OPTIONS / HTTP/1.0\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 204")
    with served_with(served) as server:
        assert options(server, b"/nothing") == (404, None)


# ---- browsers


def preflight(server: Server, origin: str) -> httpx2.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    return server.client.options("/v1/chat/completions", headers=headers)


def test_no_page_may_ask_unless_allowed(served: ServedModel) -> None:
    with served_with(served) as server:
        assert preflight(server, PAGE).status_code == 405
        answer = server.client.get("/v1/models", headers={"origin": PAGE})
        assert "access-control-allow-origin" not in answer.headers


def test_allowed_pages(served: ServedModel) -> None:
    with served_with(served, allowed_origins=(PAGE,), allow_credentials=True, api_key=("k",)) as server:
        answer = preflight(server, PAGE)
        assert answer.status_code == 200, "a browser asks without a key"
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-allow-credentials"] == "true"
        assert preflight(server, "https://other.example").status_code == 400
        refused = server.client.get("/v1/models", headers={"origin": PAGE})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
        body = {"prompt": "a", "stream": True}
        stream = server.client.post(
            "/v1/completions", json=body, headers={"origin": PAGE, "authorization": "Bearer k"}
        )
        assert stream.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize("value", [["https://a", "https://b"], ['["https://a", "https://b"]']])
def test_origins_as_words_or_as_vllm_writes_them(value: list[str]) -> None:
    config = from_flat(RouterConfig, {"allowed_origins": value})
    assert config.http.allowed_origins == ("https://a", "https://b")
    assert from_flat(RouterConfig, {"api_key": ["[k"]}).http.api_key == ("[k",)
    with pytest.raises(FlagError, match="--allowed-origins must be words or a JSON list"):
        from_flat(RouterConfig, {"allowed_origins": ["[x"]})


# ---- proxies


@pytest.mark.parametrize("prefix", ["/llm", "llm/"])
def test_a_proxy_may_leave_its_prefix_in_or_take_it_off(served: ServedModel, prefix: str) -> None:
    with served_with(served, root_path=prefix, api_key=("k",)) as server:
        for path in ("/health", "/llm/health"):
            assert server.client.get(path).status_code == 200
        for path in ("/v1/models", "/llm/v1/models"):
            assert server.client.get(path).status_code == 401
            assert server.client.get(path, headers={"authorization": "Bearer k"}).status_code == 200
        assert server.client.get("/llmx/health", headers={"authorization": "Bearer k"}).status_code == 404


@pytest.mark.parametrize("prefix", ["/llm", "llm/", "", "/"])
def test_paths_are_given_out_with_the_prefix(served: ServedModel, prefix: str) -> None:
    there = "/llm" if "llm" in prefix else ""
    with served_with(served, root_path=prefix) as server:
        document = server.client.get("/openapi.json").json()
        assert document["servers"] == [{"url": there or "/"}]
        assert "/v1/models" in document["paths"]
        for asked in dict.fromkeys(("/chat/completions", f"{there}/chat/completions")):
            message = server.post(asked, {}).json()["error"]["message"]
            assert message == (
                f"This server has no {there}/chat/completions: did you mean {there}/v1/chat/completions?"
            )
        message = server.client.get("/v1/audio/speech").json()["error"]["message"]
        assert message.endswith(f"GET {there}/openapi.json lists what it has.")
        assert f"GET {there}/v1/completions: Method Not" in server.client.get("/v1/completions").text


def test_a_prefix_is_taken_off_before_all_else(tmp_path: Path) -> None:
    """Before the admin API, and in the log."""
    flags = ["--root-path", "/llm", "--admin-api-key", "root"]
    with router(tmp_path, *flags) as url, httpx2.Client(trust_env=False, base_url=url) as client:
        for path in ("/admin/world", "/llm/admin/world"):
            assert client.get(path).status_code == 401
            answer = client.get(path, headers={"authorization": "Bearer root"})
            assert answer.status_code == 503, "nobody is there to tell"
        for path in ("/llm/health", "/llm/version"):
            client.get(path)
    log = (tmp_path / "log").read_text()
    assert "GET /llm/version" in log
    assert "GET /llm/health" not in log


STREAMS = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
}


@pytest.mark.parametrize("path", STREAMS)
def test_proxies_are_asked_not_to_hold_streams_back(server: Server, path: str) -> None:
    answer = server.post(path, STREAMS[path] | {"stream": True})
    assert answer.status_code == 200
    assert answer.headers["x-accel-buffering"] == "no"
    assert "x-accel-buffering" not in server.post(path, STREAMS[path]).headers


# ---- request ids


def test_every_answer_has_an_id(served: ServedModel) -> None:
    with served_with(served, enable_request_id_headers=True) as server:
        given = {"x-request-id": "abc"}
        for path in ("/v1/models", "/health", "/nothing"):
            assert server.client.get(path, headers=given).headers["x-request-id"] == "abc"
            assert re.fullmatch("[0-9a-f]{32}", server.client.get(path).headers["x-request-id"])
        bad = server.client.get("/health", headers={"x-request-id": "a" * 1000})
        assert len(bad.headers["x-request-id"]) == 32
        for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}, {"messages": 1}):
            path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
            answer = server.client.post(path, json=body, headers=given)
            assert answer.headers.get_list("x-request-id") == ["abc"]
        answer = server.post("/v1/completions", {"prompt": "a"})
        assert answer.json()["id"] == "cmpl-" + answer.headers["x-request-id"]


def test_usage_can_be_forced_into_streams(served: ServedModel) -> None:
    with served_with(served, enable_force_include_usage=True) as server:
        for options in (None, {"include_usage": False}):
            body = {"prompt": "a", "stream": True, "stream_options": options}
            chunks = events(server.post("/v1/completions", body).text)
            assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 2]
            assert chunks[-1]["choices"] == []


def test_one_path_for_chats_and_completions(server: Server) -> None:
    """SageMaker knows no other."""
    chat = server.post("/invocations", {"messages": [{"role": "user", "content": "a"}], "prompt": None})
    completion = server.post("/invocations", {"prompt": "a", "max_tokens": 1})
    found = (chat.json()["object"], completion.json()["object"])
    assert found == ("chat.completion", "text_completion")
    stream = server.post("/invocations", {"prompt": [5, 6], "stream": True}).text
    assert stream.endswith("data: [DONE]\n\n")
    for body in ({}, {"messages": [], "prompt": "a"}, {"input": "a"}, {"messages": None}):
        answer = server.post("/invocations", body)
        assert answer.status_code == 400
        assert "needs messages, for a chat, or prompt" in answer.json()["error"]["message"]


# ---- the model's text side


def test_tokenizer_info(served: ServedModel, server: Server) -> None:
    assert server.client.get("/tokenizer_info").status_code == 404
    with served_with(served, enable_tokenizer_info_endpoint=True) as informed:
        info = informed.client.get("/tokenizer_info").json()
        assert (info["bos_token"], info["eos_token"]) == ("<bos>", "<eos>"), "one is an object in the file"
        assert "im_start" in info["chat_template"]


def test_the_role_of_answers(served: ServedModel) -> None:
    with served_with(served, response_role="model") as server:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
        answer = server.post("/v1/chat/completions", body).json()
        assert answer["choices"][0]["message"]["role"] == "model"
        assert '"role":"model"' in server.post("/v1/chat/completions", body | {"stream": True}).text


def test_the_openapi_document_has_every_route(served: ServedModel, server: Server, tmp_path: Path) -> None:
    document = server.client.get("/openapi.json").json()
    store = AnswerStore(StoreDatabase(tmp_path / "answers", most_bytes=1 << 20, lasts=False))
    app = make_app(FakeMesh(served, saying([])), HttpConfig(), store=store)
    store.database.close()
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert described == routes
    text = server.client.get("/openapi.json").text
    names = set(re.findall(r"#/components/schemas/([^\"]+)", text))
    assert names
    assert names <= document["components"]["schemas"].keys()
    assert "max_completion_tokens" in document["components"]["schemas"]["ChatRequest"]["properties"]
    assert "security" not in text
    with served_with(served, api_key=("k",)) as guarded:
        paths = guarded.client.get("/openapi.json").json()["paths"]
        for path, methods in paths.items():
            for method, operation in methods.items():
                url = path.replace("{id}", "x").replace("{name}", "x")
                needs_key = guarded.client.request(method.upper(), url).status_code == 401
                assert needs_key is ("security" in operation), path


# ---- time


PATHS = {
    "/v1/completions": {"prompt": "a", "max_tokens": 9},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(PATHS))
def test_an_answer_that_comes_too_late(server: Server, path: str, stream: bool) -> None:
    server.mesh.script = lambda _: []  # says nothing, never ends
    answer = server.post(path, PATHS[path] | {"stream": stream, "timeout": 0.05})
    assert answer.status_code == 504
    assert "longer than the 0.05 seconds" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"
    server.wait_until_idle()


@pytest.mark.parametrize("path", list(PATHS))
def test_a_stream_that_is_cut_off(server: Server, path: str) -> None:
    server.mesh.script = lambda _: [Delta(1, [70]), Delta(1, [71])]  # does not end
    text = server.post(path, PATHS[path] | {"stream": True, "timeout": 0.2}).text
    assert "longer than the 0.2 seconds" in text
    assert text.count('"error":{') == 1
    server.wait_until_idle()


def test_an_answer_in_time(server: Server) -> None:
    assert server.post("/v1/completions", {"prompt": "a", "timeout": 5}).status_code == 200
    body = {"prompt": "a", "timeout": 5, "stream": True}
    assert server.post("/v1/completions", body).text.endswith("data: [DONE]\n\n")


# ---- load


def test_server_load(server: Server) -> None:
    assert server.client.get("/load").json() == {"server_load": 0}
    server.mesh.script = lambda _: []  # says nothing, never ends
    with pytest.raises(httpx2.ReadTimeout):
        server.client.post("/v1/completions", json={"prompt": "a"}, timeout=0.2)
    server.wait_until_idle()
    body = b'{"prompt": "a"}'
    with server.connect() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
        )
        until(lambda: server.client.get("/load").json() == {"server_load": 1})


def report(rank: int) -> InstanceReport:
    counters = Counters(prefix_cache_queries=100, prefix_cache_hits=25)
    return InstanceReport(
        5, running=rank, waiting=2, waiting_tokens=300, blocks_used=10, blocks_total=40, counters=counters
    )


def test_loads_of_instances() -> None:
    loads = loads_of({1: report(1), 0: report(0)})
    assert [load.dp_rank for load in loads] == [0, 1]
    second = loads[1]
    assert (second.num_running_reqs, second.num_waiting_reqs, second.num_total_reqs) == (1, 2, 3)
    assert (second.num_waiting_tokens, second.token_usage, second.cache_hit_rate) == (300, 0.25, 0.25)
    whole = Loads.of(loads, 7.0)
    assert (whole.dp_rank_count, whole.aggregate.total_reqs, whole.aggregate.avg_token_usage) == (2, 5, 0.25)
    assert Loads.of([], 7.0).aggregate.avg_token_usage == 0


def test_loads(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.client.get("/v1/loads").json()["loads"] == []
    monkeypatch.setattr(server.metrics, "reports", lambda: {0: report(0), 3: report(3)})
    assert server.client.get("/v1/loads").json()["dp_rank_count"] == 2
    (load,) = server.client.get("/v1/loads?dp_rank=3").json()["loads"]
    assert (load["dp_rank"], load["num_running_reqs"], load["max_total_num_blocks"]) == (3, 3, 40)
    assert server.client.get("/v1/loads?dp_rank=2").status_code == 400


def test_loads_as_older_tools_ask_for_them(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.client.get("/get_load").json() == []
    monkeypatch.setattr(server.metrics, "reports", lambda: {3: report(3), 0: report(0)})
    monkeypatch.setattr(server.metrics, "block_size", lambda: 16)
    assert server.client.get("/get_load").json()[1] == {
        "dp_rank": 3, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 460, "num_pending_tokens": 300,
    }  # fmt: skip


# ---- TLS


@contextlib.contextmanager
def router(directory: Path, *flags: str) -> Iterator[str]:
    """A router process without a mesh; yields its URL."""
    log = directory / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "router", "--port", "0", *flags], stdout=output, stderr=output
        )
    try:

        def url() -> re.Match[str] | None:
            assert process.poll() is None, log.read_text()
            return re.search(r'listening on (https?://[^\s"]+)', log.read_text())

        until(lambda: url() is not None, 30)
        found = url()
        assert found is not None
        yield found[1]
    finally:
        process.terminate()
        assert process.wait(20) == 0


def test_log_lines_about_a_request_have_its_id(tmp_path: Path) -> None:
    """Lines of the access log, and of the reason for a refusal."""
    ids = {"x-request-id": "abc-1"}
    with router(tmp_path) as url, httpx2.Client(trust_env=False, base_url=url) as client:
        for _ in range(2):  # on one connection: not the first one's
            assert client.get("/v1/models", headers=ids).status_code == 503
            body = {"prompt": "a", "request_id": "def-2"}
            assert client.post("/v1/completions", json=body).status_code == 503
    log = (tmp_path / "log").read_text()
    for line in (
        '"GET /v1/models HTTP/1.1" 503',
        "GET /v1/models: 503: No instance has joined the mesh yet.",
    ):
        assert log.count(f"{line} (request abc-1)\n") == 2, log
    made = re.findall(r'"POST /v1/completions HTTP/1.1" 503 \(request ([0-9a-f]{32})\)\n', log)
    assert len(set(made)) == 2, "one of its own, where the body was not read"
    assert all(
        f"POST /v1/completions: 503: No instance has joined the mesh yet. (request {id})" in log
        for id in made
    )


def test_the_id_of_a_request_is_a_field_of_json_lines(tmp_path: Path) -> None:
    with (
        router(tmp_path, "--log-format", "json") as url,
        httpx2.Client(trust_env=False, base_url=url) as client,
    ):
        assert client.get("/v1/models", headers={"x-request-id": "abc"}).status_code == 503
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    about = [line["logger"] for line in lines if line.get("request") == "abc"]
    assert sorted(about) == ["router.app.refusals", "uvicorn.access"]


def test_what_an_open_status_page_asks_for_is_not_in_the_access_log(tmp_path: Path) -> None:
    with router(tmp_path) as url, httpx2.Client(trust_env=False, base_url=url) as client:
        assert client.head("/dashboard/feed").status_code == 200
        assert client.get("/dashboard/style.css").status_code == 200
    log = (tmp_path / "log").read_text()
    assert "GET /dashboard/style.css" in log
    assert "/dashboard/feed" not in log


def test_tls(certificate: tuple[str, str], tmp_path: Path) -> None:
    key, chain = certificate
    flags = [
        "--ssl-keyfile",
        key,
        "--ssl-certfile",
        chain,
        "--disable-access-log-for-endpoints",
        "/health,/ping",
    ]
    with router(tmp_path, *flags) as url:
        assert url.startswith("https://")
        trusting = ssl.create_default_context(cafile=chain)
        with httpx2.Client(verify=trusting, trust_env=False, base_url=url) as client:
            assert client.get("/version").status_code == 200
            assert client.get("/health").status_code == 503, "there is no instance"
        with (
            pytest.raises(httpx2.ConnectError),
            httpx2.Client(trust_env=False, base_url=url) as client,
        ):
            client.get("/version")
    log = (tmp_path / "log").read_text()
    assert "GET /version" in log
    assert "GET /health" not in log


def test_clients_may_have_to_show_a_certificate(certificate: tuple[str, str], tmp_path: Path) -> None:
    key, chain = certificate
    flags = ["--ssl-keyfile", key, "--ssl-certfile", chain, "--ssl-ca-certs", chain, "--ssl-cert-reqs", "2"]
    with router(tmp_path, *flags) as url:
        anonymous = ssl.create_default_context(cafile=chain)
        with (
            pytest.raises(httpx2.TransportError),
            httpx2.Client(verify=anonymous, trust_env=False, base_url=url) as client,
        ):
            client.get("/version")
        known = ssl.create_default_context(cafile=chain)
        known.load_cert_chain(chain, key)
        with httpx2.Client(verify=known, trust_env=False, base_url=url) as client:
            assert client.get("/version").status_code == 200


def test_a_certificate_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("nonsense")
    file = str(tmp_path / "x.pem")
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "router", "--port", "0", "--ssl-keyfile", file, "--ssl-certfile", file],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert f"--ssl-certfile {file} is no certificate in PEM" in done.stderr
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"ssl_keyfile": "k"}, "need each other"),
        ({"ssl_ca_certs": "c"}, "need --ssl-keyfile"),
        ({"ssl_keyfile": "k", "ssl_certfile": "c", "ssl_cert_reqs": 2}, "needs --ssl-ca-certs"),
        ({"default_chat_template_kwargs": "[]"}, "must be a JSON object"),
    ],
)
def test_flags_that_make_no_sense(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HttpConfig(**flags)


# ---- the line that says ready


def test_ready_is_said_when_a_request_would_be_taken(served: ServedModel) -> None:
    def look(seconds: float) -> bool:
        return asyncio.run(wait_for_health("127.0.0.1", server.port, tls=False, timeout=seconds))

    with served_with(served) as server:
        server.mesh.healthy = False
        assert not look(0.3)
        threading.Timer(0.2, setattr, (server.mesh, "healthy", True)).start()
        assert look(20.0)
    assert not look(0.3), "nobody listens"
