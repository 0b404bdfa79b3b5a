"""Completions as clients see them: a real server, the real OpenAI client, a scripted mesh."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import openai
import pytest

from engine.messages import Delta, FinishReason
from router.config import HttpConfig
from router.mesh import ServedModel
from router.text.tokens import Tokenizer
from tests.router.conftest import VOCAB_SIZE, Server, events, ids_of, serving
from tests.router.fake_mesh import FakeMesh, saying
from tests.router.tiny_tokenizer import BOS, IM_START


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


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("truncate_prompt_tokens", [None, 4])
def test_offsets_point_into_an_echoed_text(
    server: Server, tokenizer: Tokenizer, skip_special_tokens: bool, truncate_prompt_tokens: int | None
) -> None:
    """Special tokens in the text count; the one put before it does not."""
    body = {"prompt": "<|im_start|>one two<|im_end|>\nthree", "max_tokens": 50, "logprobs": 0, "echo": True,
            "skip_special_tokens": skip_special_tokens, "truncate_prompt_tokens": truncate_prompt_tokens}  # fmt: skip
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert choice["text"].endswith("\nthree Hello world!")
    ends = [*offsets[1:], len(choice["text"])]
    for token, offset, end in zip(tokens, offsets, ends, strict=True):
        hidden = token == "<bos>"  # which is put before it
        assert choice["text"][offset:end] == ("" if hidden else token)
    if truncate_prompt_tokens is None:
        assert choice["text"].startswith("<|im_start|>one two<|im_end|>")
        assert (tokens[:2], offsets[:2]) == (["<bos>", "<|im_start|>"], [0, 0])


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
    assert all(chunk["choices"][0]["prompt_token_ids"] is None for chunk in chunks[1:])
    assert [id for chunk in chunks for id in chunk["choices"][0]["token_ids"]] == ids


def test_what_is_not_told_is_null(server: Server) -> None:
    """As vLLM sends it: clients look fields up without asking whether they are there."""
    answer = server.post("/v1/completions", {"prompt": "Hello"}).json()
    told = ("service_tier", "system_fingerprint", "kv_transfer_params")
    assert [answer[name] for name in told] == [None] * 3
    assert answer["usage"]["prompt_tokens_details"] is None
    told = ("logprobs", "stop_reason", "prompt_logprobs", "prompt_token_ids", "token_ids")
    assert [answer["choices"][0][name] for name in told] == [None] * 5
    for chunk in events(server.post("/v1/completions", {"prompt": "Hello", "stream": True}).text):
        assert set(chunk) == {"object", "id", "created", "model", "choices"}
        choice = chunk["choices"][0]
        assert {choice[name] for name in ("prompt_token_ids", "token_ids", "stop_reason")} == {None}
        assert "prompt_logprobs" not in choice


def test_all_log_probabilities(served: ServedModel, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, " Hello")
    with serving(FakeMesh(served, saying(ids)), HttpConfig(max_logprobs=-1)) as server:
        body = {"prompt": "one two", "prompt_logprobs": -1, "logprobs": -1}
        (choice,) = server.post("/v1/completions", body).json()["choices"]
        assert server.mesh.prompts[-1].params.prompt_logprobs == VOCAB_SIZE
        assert {len(each) for each in choice["prompt_logprobs"][1:]} == {3}, "as many as the mesh tells"
        assert len(choice["logprobs"]["top_logprobs"][0]) == 3


def test_chats_name_of_max_tokens_goes_over_it(server: Server) -> None:
    for fields in ({"max_completion_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 9}):
        assert server.post("/v1/completions", {"prompt": "Hello"} | fields).status_code == 200
        assert server.mesh.prompts[-1].params.max_tokens == 3


@pytest.mark.parametrize("max_tokens", [0, 50])
def test_an_echo_of_token_ids_has_its_special_tokens(server: Server, max_tokens: int) -> None:
    body = {"prompt": [BOS, IM_START, 100], "echo": True, "logprobs": 0, "max_tokens": max_tokens}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert choice["text"].startswith("<bos><|im_start|>")
    assert choice["logprobs"]["tokens"][:2] == ["<bos>", "<|im_start|>"]
    assert choice["logprobs"]["text_offset"][:3] == [0, 5, 17]


def test_usage_in_streams(server: Server) -> None:
    def usages(**options: bool) -> list[Any]:
        body = {"prompt": "Hello", "max_tokens": 50, "stream": True, "stream_options": options}
        return [chunk.get("usage", "absent") for chunk in events(server.post("/v1/completions", body).text)]

    assert set(map(str, usages())) == {"absent"}
    *rest, last = usages(include_usage=True)
    assert set(rest) == {None}
    total = last["completion_tokens"]
    assert set(map(str, usages(continuous_usage_stats=True))) == {"absent"}, "as vLLM has it"
    *rest, last = usages(include_usage=True, continuous_usage_stats=True)
    assert [usage["completion_tokens"] for usage in rest] == list(range(1, total + 1))
    assert last["completion_tokens"] == total


def test_whole_numbers_with_a_point(server: Server) -> None:
    body = {
        "prompt": [5.0, 6],
        "max_tokens": 2.0,
        "seed": 3.0,
        "top_k": 4.0,
        "n": 1.0,
        "logit_bias": {"7": 1.0},
    }
    answer = server.post("/v1/completions", body | {"stop_token_ids": [9.0], "temperature": 1.0})
    assert answer.json()["usage"]["completion_tokens"] == 2
    prompt = server.mesh.prompts[-1]
    assert (prompt.prompt_ids, prompt.seed, prompt.params.max_tokens, prompt.params.top_k) == (
        [5, 6],
        3,
        2,
        4,
    )
    assert (prompt.params.stop_token_ids, prompt.params.logit_bias) == ((9,), {7: 1.0})
    assert type(prompt.params.max_tokens) is int


def test_other_numbers_with_a_point(server: Server) -> None:
    for body, param in (
        ({"max_tokens": 5.0, "top_k": 1.5}, "top_k"),
        ({"max_tokens": 1e19}, "max_tokens"),
        ({"stop_token_ids": [1.0, 2.5]}, "stop_token_ids"),
        ({"user": 5.0}, "user"),
    ):
        answer = server.post("/v1/completions", {"prompt": "a"} | body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert server.client.post("/v1/completions", content=b"5.0").status_code == 400
    assert server.client.post("/v1/completions", content=b"[5.0]").status_code == 400
