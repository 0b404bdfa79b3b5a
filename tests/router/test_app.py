"""The endpoint as clients see it: a real server, the real OpenAI client, a scripted mesh."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import msgspec
import openai
import pytest
import uvloop

from engine.messages import Counters, Delta, FinishReason, Report
from router.config import HttpConfig
from router.mesh import MeshError, ServedModel
from router.metrics import Metrics
from router.tokens import Tokenizer
from tests.router.conftest import MAX_MODEL_LEN, Server, serving
from tests.router.fake_mesh import FakeMesh, failing, saying
from tests.router.tiny_tokenizer import BOS, EOS
from tests.waiting import until

USER: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


# ---- completions


def test_completion(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=50)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    assert abs(answer.created - time.time()) < 60
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, " Hello world!", "length")
    assert answer.usage is not None
    prompt, output = (
        len(tokenizer.encode("Hello", add_special_tokens=True)),
        len(ids_of(tokenizer, " Hello world!")),
    )
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }


def test_streamed_completion_says_the_same(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="tiny", prompt="Hello", max_tokens=50, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " Hello world!"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_several_prompts_and_samples(client: openai.OpenAI, server: Server) -> None:
    server.mesh.script = lambda prompt: [
        Delta(1, [70 + len(prompt.prompt_ids), 90 + prompt.sample_index], FinishReason.LENGTH)
    ]
    prompts = [[5], [5, 6]]
    answer = client.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) == 4
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)
    texts = [""] * 4
    for chunk in client.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


def test_logprobs_with_echo(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """What lm-eval builds on."""
    prompt = ids_of(tokenizer, "one two")
    answer = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=1, logprobs=1, echo=True, temperature=0
    )
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert logprobs is not None
    first = ids_of(tokenizer, " Hello world!")[0]
    assert choice.text == "one two" + tokenizer.token_text(first)
    assert logprobs.tokens == [tokenizer.token_text(id) for id in [*prompt, first]]
    assert logprobs.token_logprobs == [None, *[-1.5] * len(prompt)]
    assert logprobs.top_logprobs is not None
    assert [top and list(top.values()) for top in logprobs.top_logprobs[:2]] == [None, [-0.5, -1.5]]
    assert logprobs.text_offset is not None
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)


@pytest.mark.parametrize("echo", [True, False])
def test_streamed_logprobs_are_the_same(server: Server, echo: bool) -> None:
    body = {"prompt": "one two", "max_tokens": 50, "logprobs": 2, "echo": echo}
    whole = server.post("/v1/completions", body).json()["choices"][0]
    text, joined = "", {name: [] for name in whole["logprobs"]}  # type: ignore[var-annotated]
    for chunk in events(server.post("/v1/completions", body | {"stream": True}).text):
        text += chunk["choices"][0]["text"]
        for name, values in chunk["choices"][0]["logprobs"].items():
            joined[name] += values
    assert (text, joined) == (whole["text"], whole["logprobs"])


def test_logprobs_by_token_id(server: Server, tokenizer: Tokenizer) -> None:
    body = {"prompt": "a", "logprobs": 1, "return_tokens_as_token_ids": True}
    logprobs = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    ids = ids_of(tokenizer, " Hello world!")
    assert logprobs["tokens"] == [f"token_id:{id}" for id in ids]
    assert logprobs["top_logprobs"][0] == {f"token_id:{ids[0] + 1}": -0.5, f"token_id:{ids[0]}": -1.5}


def test_logprobs_0_tells_of_the_sampled_token_alone(server: Server) -> None:
    logprobs = server.post("/v1/completions", {"prompt": "a", "logprobs": 0}).json()["choices"][0]["logprobs"]
    assert [list(top.values()) for top in logprobs["top_logprobs"]] == [[-1.5]] * len(logprobs["tokens"])


def test_prompt_logprobs(server: Server, tokenizer: Tokenizer) -> None:
    prompt = ids_of(tokenizer, "one two")
    body = {"prompt": prompt, "max_tokens": 0, "prompt_logprobs": 1}
    answer = server.post("/v1/completions", body).json()
    (choice,) = answer["choices"]
    first, second, *_ = choice["prompt_logprobs"]
    assert first is None
    assert second == {
        str(prompt[1]): {"logprob": -1.5, "rank": 2, "decoded_token": tokenizer.token_text(prompt[1])},
        str(prompt[1] + 1): {
            "logprob": -0.5,
            "rank": 1,
            "decoded_token": tokenizer.token_text(prompt[1] + 1),
        },
    }
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert answer["usage"]["completion_tokens"] == 0


def test_minus_infinity_is_valid_json(server: Server) -> None:
    entry = [70, float("-inf"), 1, [70, 71], [float("-inf"), float("nan")]]
    delta = msgspec.convert([1, [70], "length", None, [entry]], Delta)
    server.mesh.script = lambda _: [delta]
    answer = server.post("/v1/completions", {"prompt": "a", "logprobs": 2}).json()
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


def test_token_ids_are_returned(server: Server, tokenizer: Tokenizer) -> None:
    ids, prompt = ids_of(tokenizer, " Hello world!"), tokenizer.encode("Hello", add_special_tokens=True)
    body = {"prompt": "Hello", "return_token_ids": True, "max_tokens": 50}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, ids)
    chunks = events(server.post("/v1/completions", body | {"stream": True}).text)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == prompt
    assert all("prompt_token_ids" not in chunk["choices"][0] for chunk in chunks[1:])
    assert [id for chunk in chunks for id in chunk["choices"][0]["token_ids"]] == ids


def test_usage_in_streams(server: Server) -> None:
    def usages(**options: bool) -> list[Any]:
        body = {"prompt": "Hello", "max_tokens": 50, "stream": True, "stream_options": options}
        return [chunk.get("usage", "absent") for chunk in events(server.post("/v1/completions", body).text)]

    assert set(map(str, usages())) == {"absent"}
    *rest, last = usages(include_usage=True)
    assert set(rest) == {None}
    total = last["completion_tokens"]
    *rest, last = usages(include_usage=True, continuous_usage_stats=True)
    assert [usage["completion_tokens"] for usage in rest] == list(range(1, total + 1))
    assert last["completion_tokens"] == total


# ---- chat


def test_chat(client: openai.OpenAI, server: Server, tokenizer: Tokenizer) -> None:
    ids = [*ids_of(tokenizer, "Fine, thanks"), EOS]
    server.mesh.script = saying(ids, FinishReason.STOP)
    answer = client.chat.completions.create(model="tiny", messages=USER)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Fine, thanks")
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ids)


def test_streamed_chat(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(model="tiny", messages=USER, stream=True, n=2, temperature=1)
    )
    for index in range(2):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert (own[0].delta.role, own[0].delta.content) == ("assistant", "")
        assert all(choice.delta.role is None for choice in own[1:])
        assert "".join(choice.delta.content or "" for choice in own) == " Hello world!"
        assert [choice.finish_reason for choice in own] == [*[None] * (len(own) - 1), "length"]


def test_chat_logprobs(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = client.chat.completions.create(model="tiny", messages=USER, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert bytes(byte for entry in logprobs.content for byte in entry.bytes or []) == b" Hello world!"
    entry = logprobs.content[0]
    first = ids_of(tokenizer, " Hello world!")[0]
    assert (entry.token, entry.logprob) == (tokenizer.token_text(first), -1.5)
    assert [top.logprob for top in entry.top_logprobs] == [-0.5, -1.5]
    assert entry.top_logprobs[0].token == tokenizer.token_text(first + 1)


def test_chat_token_ids(server: Server, tokenizer: Tokenizer) -> None:
    """vLLM has the prompt's beside the choices here, not in them."""
    body = {"messages": USER, "return_token_ids": True}
    whole = server.post("/v1/chat/completions", body).json()
    assert tokenizer.decode(whole["prompt_token_ids"]).startswith("<|im_start|>user")
    chunks = events(server.post("/v1/chat/completions", body | {"stream": True}).text)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    ids = [id for chunk in chunks for id in chunk["choices"][0].get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]


def test_chat_prompt_logprobs(server: Server) -> None:
    answer = server.post("/v1/chat/completions", {"messages": USER, "prompt_logprobs": 0}).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_chat_echo_prepends_the_last_message_of_the_same_role(server: Server) -> None:
    begun = [*USER, {"role": "assistant", "content": "Well,"}]
    body = {"messages": begun, "echo": True, "continue_final_message": True}
    whole = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert whole["content"] == "Well, Hello world!"
    chunks = events(server.post("/v1/chat/completions", body | {"stream": True}).text)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "Well, Hello world!"
    answer = server.post("/v1/chat/completions", {"messages": USER, "echo": True}).json()
    assert answer["choices"][0]["message"]["content"] == " Hello world!"


def test_stop_reasons(server: Server, tokenizer: Tokenizer) -> None:
    def ends(**fields: Any) -> tuple[Any, ...]:
        body = {"messages": USER, "max_tokens": 50} | fields
        (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
        last = events(server.post("/v1/chat/completions", body | {"stream": True}).text)[-1]["choices"][0]
        found = (choice["finish_reason"], choice["stop_reason"])
        assert (last["finish_reason"], last["stop_reason"]) == found
        return (choice["message"]["content"], *found)

    assert ends(stop=" wor") == (" Hello", "stop", " wor")
    assert ends(stop=["x", "!"]) == (" Hello world", "stop", "!")
    ids = ids_of(tokenizer, "Hello!")
    server.mesh.script = lambda _: [Delta(1, ids, FinishReason.STOP, stop_reason=ids[-1])]
    assert ends(stop_token_ids=[ids[-1]]) == ("Hello", "stop", ids[-1])
    server.mesh.script = saying([*ids, EOS], FinishReason.STOP)
    assert ends() == ("Hello!", "stop", None)


# ---- tokens and models


def test_tokenize_and_detokenize(server: Server, tokenizer: Tokenizer) -> None:
    answer = server.post("/tokenize", {"prompt": "Hello 🙂", "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode("Hello 🙂", add_special_tokens=True)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), MAX_MODEL_LEN)
    assert answer["token_strs"][0] == "<bos>"
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


def test_models_without_a_name(server: Server) -> None:
    assert server.client.get("/v1/models/").status_code == 404


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
        ("POST", "/v1/embeddings", 404, "NotFoundError"),
        ("GET", "/v1/completions", 405, "MethodNotAllowedError"),
        ("POST", "/v1/models", 405, "MethodNotAllowedError"),
        ("OPTIONS", "/v1/chat/completions", 405, "MethodNotAllowedError"),
    ],
)
def test_other_paths_and_methods(server: Server, method: str, path: str, status: int, kind: str) -> None:
    answer = server.client.request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == (kind, status)
    assert ("allow" in answer.headers) == (status == 405)
    assert (f"has no {path}" in error["message"]) == (status == 404)


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


def test_failures_of_the_mesh(server: Server, client: openai.OpenAI) -> None:
    server.mesh.script = failing("out of luck")
    for stream in (False, True):
        answer = server.post("/v1/completions", {"prompt": "a", "stream": stream})
        assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    server.mesh.script = failing("out of luck", after=[70])
    chunks = client.chat.completions.create(model="tiny", messages=USER, stream=True)
    with pytest.raises(openai.APIError, match="out of luck"):
        list(chunks)


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


# ---- metrics


def test_metrics(served: ServedModel) -> None:
    mesh = FakeMesh(served, saying([70, 71, 72]))
    sizes = [0, 4, 3] + [0] * 11
    report = Report(
        9, 2, 3, 40, 25, 100, Counters(11, 12, 1, 50, 7, 7, 0, scheduled_tokens=60, step_sizes=sizes)
    )
    metrics = Metrics(
        mesh,
        reports=lambda: {1: report},
        epoch=lambda: 4,
        instances=lambda: {"ready": 2},
        refused_peers=lambda: {"coordinator": 5, "0": 1},
        choices=lambda: {"affinity_hits": 3, "moves": 2},
    )
    with serving(mesh, HttpConfig()) as server:
        server.post("/v1/completions", {"prompt": "a", "n": 2})
        server.client.post("/v1/completions", json={"prompt": "a"}, headers={"X-data-parallel-rank": "1"})
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        page = server.client.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain; version=")
        values = parsed(page.text)
        zero, one = '{engine="0",model_name="tiny"}', '{engine="1",model_name="tiny"}'
        assert values[f"vllm:time_to_first_token_seconds_count{zero}"] == 3
        assert values[f"vllm:inter_token_latency_seconds_count{zero}"] == 4
        assert values[f"vllm:inter_token_latency_seconds_count{one}"] == 2
        assert values[f"vllm:e2e_request_latency_seconds_count{one}"] == 1
        assert values[f"vllm:request_generation_tokens_sum{zero}"] == 7
        assert values[f"vllm:request_params_n_sum{zero}"] == 3
        assert values[f"vllm:request_params_max_tokens_sum{one}"] == 16
        assert values['vllm:request_prompt_tokens_bucket{engine="1",le="2.0",model_name="tiny"}'] == 1
        assert values['vllm:request_prompt_tokens_bucket{engine="1",le="+Inf",model_name="tiny"}'] == 1
        assert (
            values['vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}'] == 3
        )
        assert values["lockstep:requests_in_flight"] == 0
        openmetrics = server.client.get("/metrics", headers={"accept": "application/openmetrics-text"})
        assert openmetrics.text.endswith("# EOF\n")
        assert "\nvllm:request_success_total{" in openmetrics.text  # not vllm_request_success_total
    values = parsed(metrics.exposition("")[0].decode())
    told = {name: value for name, value in values.items() if one in name and not name.endswith(f"_sum{one}")}
    assert {name: value for name, value in told.items() if value} == {
        f"vllm:num_requests_running{one}": 2,
        f"vllm:num_requests_waiting{one}": 3,
        f"vllm:kv_cache_usage_perc{one}": 0.25,
        f"vllm:prompt_tokens_total{one}": 11,
        f"vllm:generation_tokens_total{one}": 12,
        f"vllm:num_preemptions_total{one}": 1,
        f"vllm:prefix_cache_queries_total{one}": 50,
        f"vllm:prefix_cache_hits_total{one}": 7,
        f"vllm:prompt_tokens_cached_total{one}": 7,
        f"vllm:iteration_tokens_total_count{one}": 7,
    }
    assert told[f"vllm:request_queue_time_seconds_count{one}"] == 0  # there before anything happened
    kinds = {
        name.partition("{")[0] + of.group(0): value
        for name, value in values.items()
        if 'engine="1"' in name and (of := re.search(r'(reason|source|sleep_state)="\w+"', name))
    }
    assert kinds == {
        **{
            f'vllm:request_success_totalreason="{reason}"': 0
            for reason in ("abort", "error", "length", "stop")
        },
        'vllm:num_requests_waiting_by_reasonreason="capacity"': 3,
        'vllm:num_requests_waiting_by_reasonreason="deferred"': 0,
        'vllm:engine_sleep_statesleep_state="awake"': 1,
        'vllm:engine_sleep_statesleep_state="weights_offloaded"': 0,
        'vllm:engine_sleep_statesleep_state="discard_all"': 0,
        'vllm:prompt_tokens_by_source_totalsource="local_compute"': 4,
        'vllm:prompt_tokens_by_source_totalsource="local_cache_hit"': 7,
    }
    assert values['vllm:iteration_tokens_total_bucket{engine="1",le="8.0",model_name="tiny"}'] == 4
    assert (values["lockstep:epoch"], values['lockstep:instances{state="ready"}']) == (4, 2)
    assert values['lockstep:refused_peers_total{by="coordinator"}'] == 5
    assert values['lockstep:refused_peers_total{by="0"}'] == 1
    outcomes = ("affinity_hits", "affinity_misses", "moves", "queue_full")
    choices = [values[f'lockstep:choices_total{{outcome="{outcome}"}}'] for outcome in outcomes]
    assert choices == [3, 0, 2, 0]


# ---- helpers


def events(text: str) -> list[Any]:
    """The chunks of a stream that ended well."""
    *chunks, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [msgspec.json.decode(chunk.removeprefix("data: ")) for chunk in chunks]


def parsed(page: str) -> dict[str, float]:
    """Samples by name and labels, these sorted."""
    values = {}
    for line in page.splitlines():
        if line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        metric, _, labels = name.partition("{")
        ordered = ",".join(sorted(labels.removesuffix("}").split(","))) if labels else ""
        values[f"{metric}{{{ordered}}}" if ordered else metric] = float(value)
    return values


def request_head(length: int) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % length
    )
