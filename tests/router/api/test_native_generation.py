"""SGLang's ``/generate``: its fields and shapes, over a real server and a scripted mesh."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from engine.messages import FinishReason
from router.mesh import WeightSpan
from router.text.tokens import Tokenizer
from tests.router.conftest import Server
from tests.router.fake_mesh import saying

IDS = [70, 71, 72]
PROMPT = [65, 66, 67, 68]


def ask(server: Server, **fields: Any) -> httpx2.Response:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}, **fields}
    return server.post("/generate", body)


def test_one_prompt_has_one_object(server: Server, tokenizer: Tokenizer) -> None:
    server.mesh.script = saying(IDS)
    answer = ask(server, rid="mine").json()
    assert answer.keys() == {"text", "output_ids", "meta_info"}
    assert (answer["output_ids"], answer["text"]) == (IDS, tokenizer.decode(IDS))
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") >= 0
    assert meta == {
        "id": "mine", "finish_reason": {"type": "length", "length": 3}, "prompt_tokens": 4,
        "weight_version": "default", "completion_tokens": 3, "cached_tokens": 3,
    }  # fmt: skip
    assert server.mesh.prompts[-1].prompt_ids == PROMPT
    assert server.mesh.prompts[-1].request_id == "mine"


def test_weight_version_is_the_trainers_label(server: Server) -> None:
    server.mesh.script = saying(IDS)
    server.mesh.weight_spans[0] = [WeightSpan(0, 3, "step-3"), WeightSpan(1, 4, "step-4")]
    assert ask(server).json()["meta_info"]["weight_version"] == "step-4"


def test_sampling_parameters_have_sglangs_names(server: Server) -> None:
    server.mesh.script = saying(IDS)
    given = {
        "max_new_tokens": 2, "min_new_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1,
        "sampling_seed": 7, "stop": ["x"], "stop_token_ids": [9], "ignore_eos": True, "no_stop_trim": True,
        "skip_special_tokens": False, "frequency_penalty": 0.5, "json_schema": None,
    }  # fmt: skip
    assert ask(server, sampling_params=given).status_code == 200
    prompt = server.mesh.prompts[-1]
    params = prompt.params
    assert (params.max_tokens, params.min_tokens, params.top_k, prompt.seed) == (2, 1, 0, 7)
    assert (params.temperature, params.top_p, params.min_p, params.frequency_penalty) == (0.5, 0.9, 0.1, 0.5)
    assert params.ignore_eos
    assert params.include_stop_str_in_output
    assert ask(server, sampling_params=None).status_code == 200
    assert server.mesh.prompts[-1].params.max_tokens == 128


def test_log_probabilities_of_prompt_and_output(server: Server, tokenizer: Tokenizer) -> None:
    server.mesh.script = saying(IDS)
    plain = ask(server, return_logprob=True).json()["meta_info"]
    assert plain["input_token_logprobs"] == [], "of a prompt only where logprob_start_len asks for it"
    assert plain["output_token_logprobs"] == [[-1.5, each, None] for each in IDS]
    assert plain["output_token_logprobs_length"] == 3
    assert "output_top_logprobs" not in plain
    wanted = {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2}
    meta = ask(server, **wanted, return_text_in_logprobs=True).json()["meta_info"]
    text = {each: tokenizer.decode([each]) for each in range(60, 80)}
    first, *others = meta["input_token_logprobs"]
    assert first == [None, 66, text[66]], "the first has none, as with SGLang"
    assert others == [[-1.5, 67, text[67]], [-1.5, 68, text[68]]]
    assert meta["input_top_logprobs"][0] is None
    assert meta["input_top_logprobs"][1] == [[-0.5, 68, text[68]], [-1.5, 67, text[67]]]
    assert len(meta["input_top_logprobs"]) == 3
    assert server.mesh.prompts[-1].scored_from == 2, "no others are computed"
    assert meta["output_top_logprobs"][0] == [[-0.5, 71, text[71]], [-1.5, 70, text[70]]]


def test_a_stream_repeats_what_came_before(server: Server, tokenizer: Tokenizer) -> None:
    server.mesh.script = saying(IDS)
    lines = ask(server, stream=True, return_logprob=True).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    found = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert [each["output_ids"] for each in found] == [IDS[:1], IDS[:2], IDS]
    assert [each["text"] for each in found] == [tokenizer.decode(IDS[:count]) for count in (1, 2, 3)]
    assert [each["meta_info"]["completion_tokens"] for each in found] == [1, 2, 3]
    assert [len(each["meta_info"]["output_token_logprobs"]) for each in found] == [1, 2, 3]
    assert [each["meta_info"]["finish_reason"] for each in found] == [
        None,
        None,
        {"type": "length", "length": 3},
    ]


def test_a_batch_and_several_samples_are_lists(server: Server) -> None:
    server.mesh.script = saying(IDS)
    batch = ask(server, input_ids=[PROMPT, [1, 2]]).json()
    assert [each["meta_info"]["prompt_tokens"] for each in batch] == [4, 2]
    assert len({each["meta_info"]["id"] for each in batch}) == 2
    assert len(ask(server, input_ids=[PROMPT]).json()) == 1
    samples = ask(server, sampling_params={"max_new_tokens": 3, "n": 2, "temperature": 1}).json()
    assert len(samples) == 2
    lines = ask(server, input_ids=[PROMPT, [1, 2]], stream=True).text.split("\n\n")[:-2]
    assert {json.loads(line.removeprefix("data: "))["index"] for line in lines} == {0, 1}
    texts = server.post("/generate", {"text": ["Hello", "Hello"], "sampling_params": [{"n": 1}, {"n": 1}]})
    assert len(texts.json()) == 2


def test_why_it_stopped(server: Server, tokenizer: Tokenizer) -> None:
    server.mesh.script = saying(IDS, FinishReason.STOP)
    finish = ask(server, sampling_params={"max_new_tokens": 9}).json()["meta_info"]["finish_reason"]
    assert finish == {"type": "stop", "matched": tokenizer.eos_id}
    server.mesh.script = saying(IDS, FinishReason.ABORT)
    finish = ask(server, sampling_params={"max_new_tokens": 9}).json()["meta_info"]["finish_reason"]
    assert finish["type"] == "abort"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [10**6]}, "input_ids"),
        ({"text": "both"}, "text"),
        ({"input_ids": None}, "text"),
        ({"image_data": "x"}, "image_data"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"logprob_start_len": -2}, "logprob_start_len"),
        ({"sampling_params": {"custom_params": {"a": 1}}}, "sampling_params"),
        ({"sampling_params": {"max_new_tokens": "many"}}, "sampling_params"),
        ({"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"sampling_params": [{"top_k": 1}, {"top_k": 2}]}, "sampling_params"),
        ({"return_logprob": [True, False]}, "return_logprob"),
    ],
)
def test_what_cannot_be_answered_is_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    response = ask(server, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(("name", "instead"), [("max_tokens", "max_new_tokens"), ("seed", "sampling_seed")])
def test_names_of_completions_are_refused_as_they_were_sent(server: Server, name: str, instead: str) -> None:
    error = ask(server, sampling_params={name: 3}).json()["error"]
    expected = f"sampling_params has {name}, which is not supported: use {instead}."
    assert (error["message"], error["param"]) == (expected, "sampling_params")


def test_it_has_no_capsules(server: Server) -> None:
    body = {"text": "Hello"}
    response = server.client.post("/generate", json=body, headers={"x-lockstep-capsule": "1"})
    assert response.status_code == 400
