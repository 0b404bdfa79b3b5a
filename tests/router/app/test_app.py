"""The endpoint as clients see it: models, headers, the door, and clients that go away."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import openai
import pytest
import uvloop

from coordinator.messages import Settings
from coordinator.numerics import Numerics
from engine.messages import Delta
from router.app.server_info import server_info
from router.config import HttpConfig
from router.mesh import MeshError, ServedModel
from router.text.tokens import Tokenizer
from tests.router.conftest import MAX_MODEL_LEN, Server, request_head, serving
from tests.router.fake_mesh import FakeMesh, failing, saying
from tests.router.tiny_tokenizer import BOS
from tests.scarce import out_of_files
from tests.waiting import until

USER: list[Any] = [{"role": "user", "content": "Hello"}]


# ---- tokens and models


def test_tokenize_and_detokenize(server: Server, tokenizer: Tokenizer) -> None:
    answer = server.post("/tokenize", {"prompt": "Hello 🙂", "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode("Hello 🙂", add_special_tokens=True)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), MAX_MODEL_LEN)
    assert answer["token_strs"][0] == "<bos>"
    strings = server.post("/tokenize", {"prompt": "a dog 🙂", "return_token_strs": True}).json()["token_strs"]
    assert strings[1:3] == ["a", "Ġdog"], "as the vocabulary spells them"
    assert tokenizer.backend.decoder.decode(strings[1:]) == "a dog 🙂"
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "<bos>Hello 🙂"}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    plain = server.post("/tokenize", {"prompt": "Hello 🙂", "add_special_tokens": False}).json()
    assert (plain["tokens"], plain["token_strs"]) == (answer["tokens"][1:], None)
    chat = server.post("/tokenize", {"messages": USER}).json()["tokens"]
    assert tokenizer.decode(chat).endswith("<|im_start|>assistant\n")
    assert BOS not in chat


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "other/name"]
    model = client.models.retrieve("other/name")
    assert (model.id, model.object, model.owned_by) == ("other/name", "model", "lockstep")
    assert model.model_dump()["max_model_len"] == MAX_MODEL_LEN
    with pytest.raises(openai.NotFoundError, match="The model `x` does not exist"):
        client.models.retrieve("x")


def test_names_of_the_model(server: Server) -> None:
    for given, told in (("other/name", "other/name"), (None, "tiny"), ("", "tiny")):
        body = {"prompt": "a", "model": given}
        assert server.post("/v1/completions", body).json()["model"] == told


# ---- ids, headers, ranks


def test_request_ids(server: Server) -> None:
    def id_of(body: dict[str, Any], headers: dict[str, str]) -> str:
        return str(
            server.client.post("/v1/completions", json={"prompt": "a"} | body, headers=headers).json()["id"]
        )

    assert id_of({}, {"X-Request-Id": "abc"}) == "cmpl-abc"
    assert id_of({"request_id": "def"}, {}) == "cmpl-def"
    assert id_of({"request_id": "def"}, {"X-Request-Id": "abc"}) == "cmpl-abc"
    assert server.mesh.prompts[-1].request_id == "cmpl-abc"
    assert len(id_of({}, {})) == len("cmpl-") + 32


def test_the_rank_is_passed_on(server: Server) -> None:
    headers = {"X-data-parallel-rank": "3"}
    assert server.client.post("/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 200
    assert server.mesh.prompts[-1].rank == 3


@pytest.mark.parametrize(
    ("given", "preferred"), [("3", 3), ("", None), ("-1", None), ("x", None), ("9" * 12, None)]
)
def test_the_preferred_rank_is_a_wish(server: Server, given: str, preferred: int | None) -> None:
    headers = {"X-Lockstep-Preferred-Rank": given}
    assert server.client.post("/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 200
    assert server.mesh.prompts[-1].preferred == preferred
    assert server.mesh.prompts[-1].rank is None
    server.client.post("/v1/completions", json={"prompt": "a", "n": 2}, headers=headers)
    assert [prompt.preferred for prompt in server.mesh.prompts[-2:]] == [None, None], "samples spread"


@pytest.mark.parametrize("name", ["data_parallel_rank", "routed_dp_rank"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
    ],
)
def test_the_rank_in_a_body_is_passed_on(server: Server, path: str, body: dict[str, Any], name: str) -> None:
    assert server.post(path, body | {name: 3}).status_code == 200
    assert server.mesh.prompts[-1].rank == 3
    for rank, status in (("3", 200), ("2", 400)):
        headers = {"X-data-parallel-rank": rank}
        assert server.client.post(path, json=body | {name: 3}, headers=headers).status_code == status


def test_optional_answers(served: ServedModel) -> None:
    config = HttpConfig(enable_request_id_headers=True, enable_prompt_tokens_details=True)
    with serving(FakeMesh(served, saying([70, 71])), config) as server:
        for stream in (False, True):
            body = {"prompt": "a", "stream": stream, "request_id": "abc"}
            assert server.post("/v1/completions", body).headers["x-request-id"] == "abc"
        usage = server.post("/v1/completions", {"prompt": ["a", "b"], "n": 2}).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 6}


# ---- the door


def test_keys(served: ServedModel) -> None:
    with serving(FakeMesh(served, saying([70])), HttpConfig(api_key=("one", "two"))) as server:
        for path in ("/health", "/ping", "/version", "/metrics"):
            assert server.client.get(path).status_code == 200
        for path in ("/v1/models", "/v1/nothing", "/tokenize", "/other"):
            answer = server.client.get(path)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "AuthenticationError")
            assert answer.headers["www-authenticate"] == "Bearer"
        for header in ("Bearer three", "Basic one", "one", "Bearer", "bearer \x80"):
            bad = {"authorization": header.encode("latin-1")}
            assert server.client.get("/v1/models", headers=bad).status_code == 401  # type: ignore[arg-type]
        for header in ("Bearer one", "bearer two"):
            assert server.client.get("/v1/models", headers={"authorization": header}).status_code == 200
        with (
            openai.OpenAI(base_url=server.url + "/v1", api_key="three", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


def test_open_paths(server: Server) -> None:
    get, head = server.client.get, server.client.head
    for path in ("/health", "/ping", "/version", "/metrics", "/v1/models"):
        assert get(path).status_code == 200
        assert (head(path).status_code, head(path).content) == (200, b"")
    assert server.client.post("/ping").status_code == 200
    assert set(get("/version").json()) == {"version"}
    server.mesh.healthy = False
    assert (get("/health").status_code, get("/ping").status_code) == (503, 503)


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/nothing", 404, "NotFoundError"),
        ("POST", "/v1/audio/speech", 404, "NotFoundError"),
        ("GET", "/v1/completions", 405, "MethodNotAllowedError"),
        ("POST", "/v1/models", 405, "MethodNotAllowedError"),
        ("OPTIONS", "/v1/nothing", 404, "NotFoundError"),
        ("GET", "/v1/chat/completions//", 404, "NotFoundError"),
    ],
)
def test_other_paths_and_methods(server: Server, method: str, path: str, status: int, kind: str) -> None:
    answer = server.client.request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == (kind, status)
    assert ("allow" in answer.headers) == (status == 405)
    assert (f"has no {path.removesuffix('/')}" in error["message"]) == (status == 404)


def test_a_slash_at_the_end(server: Server) -> None:
    answer = server.post("/v1/chat/completions/", {"messages": USER})
    assert answer.json()["choices"][0]["message"]["content"] == " Hello world!"
    for path in ("/v1/models", "/v1/models/other/name", "/health"):
        assert server.client.get(path + "/").content == server.client.get(path).content
        assert server.client.get(path + "/").status_code == 200


def test_a_slash_behind_an_open_path(served: ServedModel) -> None:
    with serving(FakeMesh(served, saying([70])), HttpConfig(api_key=("one",))) as server:
        assert server.client.get("/health/").status_code == 200
        assert server.client.get("/v1/models/").status_code == 401


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/Models", "/v1/models"),
        ("/messages", "/v1/messages"),
    ],
)
def test_slips_of_the_path(server: Server, path: str, meant: str) -> None:
    answer = server.post(path, {})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"This server has no {path}: did you mean {meant}?"


@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/moderations", "/v1/audio/speech"])
def test_paths_of_what_is_not_built(server: Server, path: str) -> None:
    message = server.post(path, {}).json()["error"]["message"]
    assert message.startswith(f"This server has no {path}: it serves a model that generates text.")


@pytest.mark.parametrize(
    "path", ["/sleep", "/pause", "/reset_prefix_cache", "/admin/scale", "/scale_elastic_ep"]
)
def test_paths_of_the_admin_api_say_where_it_is(server: Server, path: str) -> None:
    answer = server.post(path, {})
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message.startswith(f"This server has no {path}: it is part of the admin API (serve --admin-port")


@pytest.mark.parametrize("path", ["/favicon.ico", "/foo", "/" + "v1/models" * 5000])
def test_paths_of_nothing(server: Server, path: str) -> None:
    message = server.client.get(path).json()["error"]["message"]
    assert message == f"This server has no {path}. GET /openapi.json lists what it has."


def test_server_info(served: ServedModel) -> None:
    config = HttpConfig(api_key=("secret",), admin_api_key=("secret",), max_logprobs=7)
    with serving(FakeMesh(served, saying([70])), config) as server:
        assert server.client.get("/server_info").status_code == 401
        answer = server.client.get("/server_info", headers={"x-api-key": "secret"})
    info = answer.json()
    assert "secret" not in answer.text
    assert (info["served_model_name"], info["model_path"]) == ("tiny", served.directory)
    assert (info["max_model_len"], info["dp_size"], info["settings"]) == (MAX_MODEL_LEN, 0, None)
    assert info["flags"] == {"max_logprobs": 7}
    assert info["versions"]["msgspec"]


def test_server_info_knows_the_settings_of_the_mesh(served: ServedModel) -> None:
    settings = Settings(
        model="/m", revision=None, served_model_name=("tiny",), fingerprint="", dtype="float32", max_model_len=9,
        block_size=16, vocab_size=9, tensor_parallel_size=2, pipeline_parallel_size=3, enable_expert_parallel=False,
        expert_placement_strategy="linear", all2all_backend="tcp", data_parallel_size=0,
        max_num_batched_tokens=9, max_num_seqs=9,
    )  # fmt: skip
    numerics = {
        Numerics("fp_2", "avx2", "float32", True): [1],
        Numerics("fp_1", "amx", "float32", True): [0, 2],
    }
    info = server_info(served, settings, 4, numerics, HttpConfig())
    assert (info.tp_size, info.pp_size, info.dp_size, info.flags) == (2, 3, 4, {})
    assert [(each.system_fingerprint, each.dp_ranks) for each in info.numerics] == [
        ("fp_1", [0, 2]),
        ("fp_2", [1]),
    ]


def test_server_info_under_vllms_names(server: Server) -> None:
    info = server.client.get("/server_info?config_format=json").json()["vllm_config"]
    assert info["model_config"]["max_model_len"] == MAX_MODEL_LEN
    assert info["parallel_config"]["data_parallel_size"] == 0
    assert info["weight_transfer_config"] == {"backend": "path"}


def test_it_is_awake(server: Server) -> None:
    assert server.client.get("/is_sleeping").json() == {"is_sleeping": False}


def test_no_model_yet() -> None:
    with serving(FakeMesh(None, saying([70])), HttpConfig()) as server:
        for answer in (
            server.post("/v1/completions", {"prompt": "a"}),
            server.post("/v1/chat/completions", {"messages": USER}),
            server.post("/tokenize", {"prompt": "a"}),
            server.client.get("/v1/models"),
            server.client.get("/v1/models/tiny"),
        ):
            assert answer.status_code == 503
            assert answer.json()["error"]["type"] == "ServiceUnavailableError"
            assert answer.headers["retry-after"] == "1"
        assert server.client.get("/metrics").status_code == 200


def test_a_model_without_tokenizer(served: ServedModel, caplog: pytest.LogCaptureFixture) -> None:
    model = msgspec.structs.replace(served, directory="/nowhere")
    with serving(FakeMesh(model, saying([70])), HttpConfig()) as server:
        answer = server.post("/v1/completions", {"prompt": "a"})
        assert answer.status_code == 500
        assert "/nowhere" not in answer.text
        assert "/nowhere has no tokenizer.json" in caplog.text


def test_refusals_of_the_mesh(server: Server) -> None:
    server.mesh.refusal = MeshError(503, "ServiceUnavailableError", "all full", retry_after=2)
    for stream in (False, True):
        answer = server.post("/v1/completions", {"prompt": "a", "stream": stream})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert answer.headers["x-should-retry"] == "true"
        assert answer.json()["error"] == {
            "message": "all full",
            "type": "ServiceUnavailableError",
            "param": None,
            "code": 503,
        }
    server.mesh.refusal = MeshError(400, "BadRequestError", "no rank 9", param="X-data-parallel-rank")
    assert server.post("/v1/completions", {"prompt": "a"}).json()["error"]["param"] == "X-data-parallel-rank"


def test_requests_that_fail_where_they_run(server: Server, client: openai.OpenAI) -> None:
    server.mesh.script = failing("out of luck")
    for stream in (False, True):
        answer = server.post("/v1/completions", {"prompt": "a", "stream": stream})
        assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false")
    server.mesh.script = failing("out of luck", after=[70])
    chunks = client.chat.completions.create(model="tiny", messages=USER, stream=True)
    with pytest.raises(openai.APIError, match="out of luck"):
        list(chunks)


def test_what_the_host_lacks_for_now_is_worth_another_try(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    def script(_: object) -> list[Delta]:
        with out_of_files(), open(os.devnull):
            return []

    server.mesh.script = script
    for stream in (False, True):
        answer = server.post("/v1/completions", {"prompt": "a", "stream": stream})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.headers["x-should-retry"] == "true"
    assert "short of files or memory now: try again in a moment ([Errno 24]" in caplog.text


def test_an_unexpected_error_tells_nothing(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    def script(_: object) -> list[Delta]:
        raise RuntimeError("secret")

    server.mesh.script = script
    answer = server.post("/v1/completions", {"prompt": "a"})
    assert (answer.status_code, "secret" in answer.text) == (500, False)
    assert answer.json()["error"]["type"] == "InternalServerError"
    until(lambda: "secret" in caplog.text)


# ---- clients that go away


def hanging(_: object) -> list[Delta]:
    return [Delta(1, [70])]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up(server: Server, stream: bool) -> None:
    server.mesh.script = hanging
    body = msgspec.json.encode({"prompt": ["a", "b"], "stream": stream})
    with server.connect() as connection:
        connection.sendall(request_head(len(body)) + body)
        until(lambda: len(server.mesh.generations) == 2)
        if stream:
            assert connection.recv(12) == b"HTTP/1.1 200"
    server.wait_until_idle()


def test_a_stream_that_is_closed_early(server: Server, client: openai.OpenAI) -> None:
    server.mesh.script = lambda _: [Delta(1, [70])] * 100
    with client.completions.create(model="tiny", prompt="a", max_tokens=200, stream=True) as stream:
        assert next(iter(stream)).choices[0].text
    server.wait_until_idle()


def test_tokens_are_not_delayed(server: Server, client: openai.OpenAI) -> None:
    """Nagle's algorithm and delayed acknowledgements would add 40 ms to each."""
    server.mesh.delay = 0.005
    server.mesh.script = saying([70] * 20)
    start = time.monotonic()
    times = []
    for _ in client.completions.create(model="tiny", prompt="a", max_tokens=20, stream=True):
        times.append(time.monotonic())
    assert len(times) == 20
    assert times[0] - start < 0.5
    assert sorted(b - a for a, b in pairwise(times))[9] < 0.03


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_tcp_nodelay(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """uvicorn leaves it to the event loop, which sets it."""

    async def run() -> int:
        accepted = asyncio.get_running_loop().create_future()

        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = writer.get_extra_info("socket")
            accepted.set_result(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            with socket.create_connection(server.sockets[0].getsockname()):
                return int(await asyncio.wait_for(accepted, 5))

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(run()) != 0
