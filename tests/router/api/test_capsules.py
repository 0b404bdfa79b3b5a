"""Capsules in answers, and the endpoint that computes a sample again."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import openai
import pytest

from coordinator.numerics import Numerics
from engine.messages import Counters, Delta, InstanceReport
from engine.prompt_images import PromptImage
from engine.sampling import SamplingParams
from router.api import replaying
from router.api.replaying import OTHER_TEMPLATE
from router.capsule import FIELD, Capsule, CapsuleModel, ReplayRequest, found_in, read
from router.config import HttpConfig
from router.http.large_bodies import LARGE_BODY
from router.images.replayed import taken_from
from router.mesh import NumericsSwitch, ServedModel
from router.recorded import RecordedSample
from router.text.text_model import TextModel
from router.text.tokens import Tokenizer
from tests.router.conftest import Server, events, ids_of, serving
from tests.router.fake_mesh import Facts, FakeMesh, failing, saying
from tests.waiting import until

CLASS = Numerics("fp_000000000001", "avx2", "bfloat16", invariant=True)
OTHER = Numerics("fp_000000000002", "amx", "bfloat16", invariant=True)
USER: list[Any] = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 8},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 8},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 8},
    "/v1/messages": {"model": "tiny", "messages": USER, "max_tokens": 8},
    "/invocations": {"prompt": "Hello", "max_tokens": 8},
}
ASKS = {"x-lockstep-capsule": "1"}


@pytest.fixture(scope="module")
def shared(served: ServedModel) -> Iterator[Server]:
    facts = Facts(numerics={OTHER: [0], CLASS: [1, 2]})
    model = msgspec.structs.replace(served, fingerprint="abc")
    with serving(FakeMesh(model, saying([]), facts), HttpConfig()) as server:
        yield server


@pytest.fixture
def server(shared: Server, tokenizer: Tokenizer) -> Iterator[Server]:
    shared.mesh.reset(saying(ids_of(tokenizer, " Hello world!")))
    shared.mesh.fingerprints.update(dict.fromkeys(range(8), CLASS.fingerprint))
    yield shared
    shared.wait_until_idle()


def ask(server: Server, path: str, body: dict[str, Any]) -> str:
    answer = server.client.post(path, json=body, headers=ASKS)
    assert answer.status_code == 200, answer.text
    return answer.text


def capsule_in(text: str) -> Capsule:
    ((_, found),) = found_in(text.encode())
    return read(found)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_has_its_capsule(
    server: Server, text_model: TextModel, tokenizer: Tokenizer, path: str, *, streams: bool
) -> None:
    capsule = capsule_in(ask(server, path, BODIES[path] | {"stream": streams}))
    asked = server.mesh.prompts[0]
    assert asked.params.logprobs == 0, "instances send log-probabilities that the client did not ask for"
    assert capsule.format == 3
    assert capsule.model == CapsuleModel("tiny", "abc", tokenizer.digest, text_model.chat_template_digest)
    assert len(capsule.model.tokenizer) == len(capsule.model.chat_template) == 16
    assert capsule.numerics == (CLASS,)
    (prompt,) = capsule.prompts
    assert list(prompt.prompt_ids) == asked.prompt_ids
    assert prompt.seed == str(asked.seed), "the seed that was drawn"
    assert prompt.params == msgspec.structs.replace(asked.params, logprobs=None)
    (sample,) = prompt.samples
    ids = ids_of(tokenizer, " Hello world!")[: asked.params.max_tokens]
    assert sample.result == RecordedSample(tuple(ids), (-1.5,) * len(ids), "length")
    assert sample.system_fingerprint == CLASS.fingerprint


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("streams", [False, True])
def test_the_rest_of_the_answer_is_as_without_one(server: Server, path: str, *, streams: bool) -> None:
    def shown(headers: dict[str, str]) -> Any:
        body = BODIES[path] | {"seed": 1, "stream": streams}
        text = server.client.post(path, json=body, headers=headers).text
        found = [line.removeprefix("data: ") for line in text.splitlines() if line[:1] in ("d", "{")]
        values = [json.loads(each) for each in found if each != "[DONE]"]
        kept = [{key: value for key, value in each.items() if key != FIELD} for each in values]
        return [without_ids(each) for each in kept if each.get("choices") != []]

    assert shown(ASKS) == shown({}) == shown({"x-lockstep-capsule": "0"})


def without_ids(value: Any) -> Any:
    """A body without what differs from answer to answer."""
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: without_ids(each) for key, each in value.items() if not key.endswith(("id", "created_at"))
    } | {"created": None}


@pytest.mark.parametrize("includes_usage", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_in_chunks_it_is_in_the_last_one(server: Server, path: str, *, includes_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if includes_usage else {}
    *chunks, last = events(ask(server, path, BODIES[path] | {"stream": True} | options))
    assert not any(FIELD in chunk for chunk in chunks)
    assert last["choices"] == []
    assert FIELD in last
    assert ("usage" in last) == includes_usage
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_each_prompt_and_sample_has_its_result(server: Server) -> None:
    body = {"prompt": ["Hello", "Hello world"], "n": 3, "temperature": 1, "max_tokens": 2}
    first, second = capsule_in(ask(server, "/v1/completions", body)).prompts
    assert [sample.index for sample in (*first.samples, *second.samples)] == list(range(6))
    assert [sample.sample_index for sample in second.samples] == [0, 1, 2]
    assert first.seed != second.seed


def test_tokens_behind_a_stop_string_are_left_out(server: Server, tokenizer: Tokenizer) -> None:
    body = BODIES["/v1/completions"] | {"stop": [" world"], "max_tokens": 30}
    (prompt,) = capsule_in(ask(server, "/v1/completions", body)).prompts
    assert prompt.params.stop == (" world",)
    result = prompt.samples[0].result
    assert (result.finish_reason, result.stop_reason) == ("stop", " world")
    assert tokenizer.decode(list(result.token_ids)).endswith(" world")


def test_an_echoed_prompt_has_a_result_without_tokens(server: Server) -> None:
    body = {"prompt": "Hello", "max_tokens": 0, "echo": True}
    (prompt,) = capsule_in(ask(server, "/v1/completions", body)).prompts
    assert (prompt.params.max_tokens, prompt.samples[0].result) == (0, RecordedSample((), (), "length"))


@pytest.mark.parametrize("value", ["yes", "2", "true", "1, 1"])
def test_another_value_of_the_header_is_refused(server: Server, value: str) -> None:
    headers = {"x-lockstep-capsule": value}
    answer = server.client.post("/v1/completions", json=BODIES["/v1/completions"], headers=headers)
    assert answer.status_code == 400
    assert "must be 1 for a capsule in the answer, tokens for one" in answer.json()["error"]["message"]


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_fails_has_none(server: Server, *, streams: bool) -> None:
    server.mesh.script = failing("it broke", after=[70])
    body = BODIES["/v1/completions"] | {"stream": streams}
    assert FIELD not in server.client.post("/v1/completions", json=body, headers=ASKS).text


def test_the_openai_client_passes_it_on(server: Server) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="tiny", messages=USER, extra_headers={"X-Lockstep-Capsule": "1"}
        )
        stream = client.completions.create(model="tiny", prompt="Hi", stream=True, extra_headers=ASKS)
        last = list(stream)[-1]
    for found in (answer, last):
        assert read(json.dumps((found.model_extra or {})[FIELD]).encode()).model.name == "tiny"


# ---- computed again


def replay_of(capsule: Capsule, **changes: Any) -> dict[str, Any]:
    (prompt,) = capsule.prompts
    wanted = ReplayRequest(
        model=capsule.model,
        numerics=capsule.numerics[0],
        prompt_ids=list(prompt.prompt_ids),
        params=prompt.params,
        seed=prompt.seed,
        sample_index=prompt.samples[0].sample_index,
    )
    fields: dict[str, Any] = msgspec.to_builtins(wanted, str_keys=True)
    return fields | changes


def test_a_sample_is_computed_again_as_it_was(server: Server) -> None:
    body = BODIES["/v1/chat/completions"] | {"stop": ["!"], "top_k": 5, "logit_bias": {"7": 2}}
    capsule = capsule_in(ask(server, "/v1/chat/completions", body))
    answers = [server.post("/v1/replay", replay_of(capsule)).json() for _ in range(4)]
    sample = capsule.prompts[0].samples[0]
    for answer in answers:
        assert msgspec.convert(answer["result"], RecordedSample) == sample.result
        assert answer["system_fingerprint"] == CLASS.fingerprint
    assert {answer["dp_rank"] for answer in answers} == {1, 2}, "instances of its class take turns"
    first, *again = server.mesh.prompts
    for prompt in again:
        assert (prompt.prompt_ids, prompt.params, prompt.seed, prompt.sample_index, prompt.asked) == (
            first.prompt_ids, first.params, first.seed, first.sample_index, first.asked,
        )  # fmt: skip
    assert len({prompt.cache_salt for prompt in again}) == 4, "nothing is taken from the prefix cache"


def test_instances_that_still_load_are_not_chosen(served: ServedModel, tokenizer: Tokenizer) -> None:
    report = InstanceReport(0, 0, 0, 0, 0, 0, Counters())
    mesh = FakeMesh(served, saying([70]), Facts(reports={2: report}, numerics={CLASS: [1, 2]}))
    with serving(mesh, HttpConfig()) as server:
        body = body_of(served.fingerprint, tokenizer)
        assert [server.post("/v1/replay", body).json()["dp_rank"] for _ in range(3)] == [2, 2, 2]


def body_of(fingerprint: str, tokenizer: Tokenizer, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": {
            "name": "tiny",
            "fingerprint": fingerprint,
            "tokenizer": tokenizer.digest,
            "chat_template": "",
        },
        "numerics": msgspec.to_builtins(CLASS),
        "prompt_ids": [70, 71],
        "params": {"max_tokens": 3},
        "seed": "1",
    }
    return fields | changes


def image(first: int = 0, end: int = 1, shape: Sequence[int] = (1, 0), data: bytes = b"") -> dict[str, Any]:
    text = base64.b64encode(data).decode()
    pixels = {"name": "pixel_values", "dtype": "float32", "shape": shape, "data": text}
    return {"images": [{"first": first, "end": end, "tensors": [pixels]}]}


def params(**values: Any) -> dict[str, Any]:
    return {"params": {"max_tokens": 3} | values}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt_ids": []}, "prompt_ids must not be empty"),
        ({"prompt_ids": [512]}, "Token id 512 is out of vocabulary"),
        ({"prompt_ids": [-1]}, "Token id -1 is out of vocabulary"),
        ({"prompt_ids": [70] * 300}, "the prompt of 300 tokens and max_tokens of 3 exceed the context length"),
        ({"seed": "1e3"}, "matching regex"),
        ({"seed": str(2**63)}, "seed must fit in 64 bits"),
        ({"sample_index": -1}, "sample_index"),
        ({"more": 1}, "unknown field `more`"),
        (image(first=10**30), "images[0].first"),
        (image(end=10**30), "images[0].end"),
        (image(shape=[0, 10**30]), "images[0].tensors[0].shape"),
        ({"params": {"max_tokens": None}}, "params.max_tokens must be set"),
        (params(more=1), "unknown field `more`"),
        (params(n=2), "params.n must be 1"),
        (params(seed=1), "params.seed unset"),
        (params(logprobs=2), "params.logprobs and params.prompt_logprobs must be unset"),
        (params(prompt_logprobs=2), "params.logprobs and params.prompt_logprobs must be unset"),
        (params(max_tokens=-1), "max_tokens must be at least 0"),
        (params(min_tokens=4), "min_tokens (4) must not exceed max_tokens (3)"),
        (params(temperature=1e-5), "params.temperature must be 0 or at least 0.01"),
        (params(temperature=-1), "temperature must be a finite number"),
        (params(top_k=10**30), "params.top_k and params.allowed_token_ids exceed 512 tokens"),
        (params(allowed_token_ids=[1] * 600), "params.top_k and params.allowed_token_ids exceed 512 tokens"),
        (params(logit_bias={"600": 1}), "logit_bias names token 600"),
        (params(stop=["x" * 8001]), "params.stop or params.bad_words are too long"),
        (params(bad_words=[[1] * 8001]), "params.stop or params.bad_words are too long"),
        (params(thinking={"tokens": 2**70, "begin": [], "end": [1]}), "params.thinking has too many tokens"),
        (params(thinking={"tokens": 1, "begin": [[1]] * 5000, "end": [1]}), "too many tokens"),
        (params(grammar="{"), "params.grammar:"),
        (params(grammar='{"grammars":[{"json_schema":{"type":"nothing"}}]}'), "params.grammar:"),
        (params(grammar="x" * 600_000), "a grammar may have 524288 characters"),
    ],
)  # fmt: skip
def test_what_no_capsule_holds_is_refused(
    server: Server, tokenizer: Tokenizer, changes: dict[str, Any], problem: str
) -> None:
    answer = server.post("/v1/replay", body_of("abc", tokenizer, **changes))
    assert answer.status_code == 400, answer.text
    assert problem in answer.json()["error"]["message"]
    assert not server.mesh.prompts


def test_images_of_large_bodies_are_checked_beside_the_event_loop(
    server: Server, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def watched(*given: Any) -> tuple[PromptImage, ...]:
        threads.append(threading.current_thread().name)
        return taken_from(*given)

    monkeypatch.setattr(replaying, "taken_from", watched)
    body = body_of("abc", tokenizer, **image(shape=(1, LARGE_BODY // 4), data=bytes(LARGE_BODY // 4 * 4)))
    assert server.post("/v1/replay", body).status_code == 200
    assert threads[0].startswith("large_")
    assert len(server.mesh.prompts[0].images[0].tensors[0].data) == LARGE_BODY


def test_a_capsule_of_another_model_is_refused(server: Server) -> None:
    capsule = capsule_in(ask(server, "/v1/completions", BODIES["/v1/completions"]))
    other = msgspec.to_builtins(capsule.model) | {"name": "huge", "fingerprint": "def"}
    answer = server.post("/v1/replay", replay_of(capsule, model=other))
    assert answer.status_code == 409
    message = answer.json()["error"]["message"]
    assert (
        "the capsule is of model huge (checkpoint def), and this mesh serves tiny (checkpoint abc)" in message
    )


def test_a_capsule_of_another_tokenizer_is_refused(server: Server, tokenizer: Tokenizer) -> None:
    """Where a stop string ends depends on it, and the text of each token."""
    capsule = capsule_in(ask(server, "/v1/completions", BODIES["/v1/completions"]))
    other = msgspec.to_builtins(capsule.model) | {"tokenizer": "0" * 16}
    answer = server.post("/v1/replay", replay_of(capsule, model=other))
    assert answer.status_code == 409
    message = answer.json()["error"]["message"]
    assert (
        f"another tokenizer (digest {'0' * 16}) than this router has (digest {tokenizer.digest})" in message
    )
    assert len(server.mesh.prompts) == 1


def test_a_capsule_of_another_chat_template_is_computed_again_with_a_remark(server: Server) -> None:
    """Its prompt is in the capsule as token ids."""
    capsule = capsule_in(ask(server, "/v1/chat/completions", BODIES["/v1/chat/completions"]))
    assert "remarks" in server.post("/v1/replay", replay_of(capsule)).json()
    assert server.post("/v1/replay", replay_of(capsule)).json()["remarks"] == []
    other = msgspec.to_builtins(capsule.model) | {"chat_template": "0" * 16}
    answer = server.post("/v1/replay", replay_of(capsule, model=other))
    assert answer.status_code == 200
    assert answer.json()["remarks"] == [OTHER_TEMPLATE]


def test_a_capsule_of_other_weights_is_refused(served: ServedModel, tokenizer: Tokenizer) -> None:
    here = msgspec.structs.replace(CLASS, weights="0a")
    with serving(FakeMesh(served, saying([70]), Facts(numerics={here: [0]})), HttpConfig()) as server:
        wanted = msgspec.structs.replace(here, fingerprint="fp_9", weights="0b")
        body = body_of(served.fingerprint, tokenizer, numerics=msgspec.to_builtins(wanted))
        answer = server.post("/v1/replay", body)
    assert answer.status_code == 409
    message = answer.json()["error"]["message"]
    assert "the capsule is of other weights (digest 0b) than this mesh serves (digest 0a)" in message


def test_a_capsule_of_another_class_is_refused(server: Server) -> None:
    capsule = capsule_in(ask(server, "/v1/completions", BODIES["/v1/completions"]))
    numerics = {"fingerprint": "fp_3", "kernels": "avx512", "dtype": "float32", "invariant": True}
    answer = server.post("/v1/replay", replay_of(capsule, numerics=numerics))
    assert answer.status_code == 409
    message = answer.json()["error"]["message"]
    assert (
        "of numerics class fp_3 (avx512 kernels, float32), and this mesh has fp_000000000002 (amx" in message
    )
    assert "--dtype float32 --numerics avx512" in message


def test_a_sample_that_nobody_reads_is_ended(server: Server, tokenizer: Tokenizer) -> None:
    server.mesh.script = lambda _: [Delta(1, [70])]
    with server.connect() as client:
        body = json.dumps(body_of("abc", tokenizer)).encode()
        head = f"POST /v1/replay HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        until(lambda: server.mesh.num_open == 1)


def test_parameters_are_those_of_instances(server: Server) -> None:
    """Each sampling parameter of a request is in the capsule, as instances got it."""
    asked = {
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1, "temperature": 0.7,
        "top_p": 0.9, "top_k": 11, "min_p": 0.05, "stop": ["zzz"], "stop_token_ids": [9], "ignore_eos": True,
        "max_tokens": 4, "min_tokens": 2, "logit_bias": {"7": -3.5}, "allowed_token_ids": [70, 71, 72],
        "bad_words": ["world"], "include_stop_str_in_output": True, "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "structured_outputs": {"regex": "[a-z]+"},
    }  # fmt: skip
    (prompt,) = capsule_in(ask(server, "/v1/completions", {"prompt": "Hello", "seed": -5} | asked)).prompts
    assert prompt.seed == "-5"
    left_out = {"n", "seed", "logprobs", "prompt_logprobs", "thinking"}
    for field in msgspec.structs.fields(SamplingParams):
        if field.name not in left_out:
            assert getattr(prompt.params, field.name) != field.default, field.name


def test_a_change_of_class_stands_in_the_capsule_and_in_a_replay(server: Server) -> None:
    change = NumericsSwitch(2, CLASS.fingerprint, OTHER.fingerprint)
    server.mesh.changes[0] = [change]
    capsule = capsule_in(ask(server, "/v1/completions", BODIES["/v1/completions"]))
    assert capsule.prompts[0].samples[0].numerics_changes == (change,)
    again = server.post("/v1/replay", replay_of(capsule)).json()
    assert again["numerics_changes"] == [msgspec.to_builtins(change)]


def test_requests_with_a_capsule_prefer_their_class(server: Server) -> None:
    """Also without a seed of their own: the drawn one is recorded."""
    capsule = capsule_in(ask(server, "/v1/completions", BODIES["/v1/completions"]))
    server.post("/v1/replay", replay_of(capsule))
    assert [prompt.repeatable for prompt in server.mesh.prompts] == [True, True]
