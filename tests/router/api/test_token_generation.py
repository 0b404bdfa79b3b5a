"""``/inference/v1/generate``: token ids in and out, over a real server and a scripted mesh."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from engine.messages import FinishReason
from router.app.server_info import IsScaling, is_scaling
from tests.router.conftest import Server, events
from tests.router.fake_mesh import saying

IDS = [70, 71, 72]


def ask(server: Server, **fields: Any) -> httpx2.Response:
    body = {"token_ids": [65, 66, 67], "sampling_params": {"max_tokens": 3}, **fields}
    return server.post("/inference/v1/generate", body)


def test_token_ids_go_in_and_come_out(server: Server) -> None:
    server.mesh.script = saying(IDS)
    answer = ask(server, request_id="mine").json()
    assert answer["request_id"] == "generate-tokens-mine"
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0, "token_ids": IDS, "finish_reason": "length", "stop_reason": None, "logprobs": None,
    }  # fmt: skip
    assert answer["usage"]["total_tokens"] == 6
    assert server.mesh.prompts[-1].prompt_ids == [65, 66, 67]


def test_without_max_tokens_the_context_is_the_bound(server: Server) -> None:
    server.mesh.script = saying(IDS, FinishReason.STOP)
    assert ask(server, sampling_params={}).json()["choices"][0]["finish_reason"] == "stop"
    model = server.mesh.model
    assert model is not None
    assert server.mesh.prompts[-1].params.max_tokens == model.max_model_len - 3


def test_a_stream_has_each_token_once(server: Server) -> None:
    server.mesh.script = saying(IDS)
    response = ask(server, stream=True, stream_options={"include_usage": True}, return_token_ids=True)
    chunks = events(response.text)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks if chunk["choices"]] == [[70], [71], [72]]
    assert chunks[0]["prompt_token_ids"] == [65, 66, 67]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_logprobs_begin_with_the_sampled_token(server: Server) -> None:
    server.mesh.script = saying(IDS)
    answer = ask(server, sampling_params={"max_tokens": 1, "logprobs": 2, "prompt_logprobs": 1}).json()
    (place,) = answer["choices"][0]["logprobs"]["content"]
    assert (place["token_id"], place["logprob"], place["rank"]) == (70, -1.5, 2)
    assert [each["token_id"] for each in place["top_logprobs"]] == [70, 71]
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1]["66"]["logprob"] == -1.5


def test_log_probabilities_of_the_end_of_a_prompt(server: Server) -> None:
    server.mesh.script = saying(IDS)
    sampling = {"max_tokens": 1, "prompt_logprobs": 1}
    assert ask(server, sampling_params=sampling, prompt_logprobs_from=2).status_code == 200
    assert server.mesh.prompts[-1].scored_from == 2
    assert ask(server, sampling_params=sampling, prompt_logprobs_from=99).status_code == 200
    assert server.mesh.prompts[-1].scored_from == 3, "the prompt has no more"
    body = {"prompt": [65, 66, 67], "max_tokens": 0, "prompt_logprobs": 0, "prompt_logprobs_from": 1}
    assert server.post("/v1/completions", body).status_code == 200
    assert server.mesh.prompts[-1].scored_from == 1
    echoed = body | {"echo": True, "logprobs": 1}
    assert server.post("/v1/completions", echoed).status_code == 200
    assert server.mesh.prompts[-1].scored_from == 0, "an echoed prompt has all"
    assert server.post("/v1/completions", body | {"prompt_logprobs_from": -1}).status_code == 400


def test_text_comes_where_it_is_asked_for(server: Server) -> None:
    server.mesh.script = saying(IDS)
    answer = ask(server, output_mode="text").json()
    assert answer["output_mode"] == "text"
    assert isinstance(answer["choices"][0]["text"], str)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"output_mode": "sound"}, "output_mode"),
        ({"sampling_params": {"max_tokens": "many"}}, "sampling_params"),
        ({"sampling_params": {"logprob_token_ids": [1]}}, "sampling_params"),
        ({"sampling_params": {"detokenize": False, "stop": ["a"]}}, "sampling_params"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_done_is_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    response = ask(server, **fields)
    assert response.status_code == 400
    assert param in response.text


def test_a_mesh_scales_while_instances_start_or_leave(server: Server) -> None:
    expected = is_scaling(server.mesh.instances_by_state()).is_scaling_elastic_ep
    assert server.post("/is_scaling_elastic_ep", {}).json() == {"is_scaling_elastic_ep": expected}
    assert is_scaling({"ready": 3, "loading": 0}) == IsScaling(False)
    assert is_scaling({"ready": 3, "draining": 1}) == IsScaling(True)
