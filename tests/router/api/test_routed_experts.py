"""``return_routed_experts``: experts by token and layer, in answers, chunks and SGLang's form."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from engine.messages import NO_EXPERT, Delta, FinishReason, RoutedExperts
from router.mesh import Prompt
from tests.router.conftest import Server, events

IDS = [70, 71, 72]
PROMPT = [65, 66, 67, 68]
LAYERS, TOP_K = 3, 2


def layers_of(position: int) -> list[list[int] | None]:
    """Made-up experts of a token; the middle layer is no mixture."""
    return [[position, position + 1], None, [300 + position, 2]]


def experts(first: int, end: int) -> RoutedExperts:
    numbers = array("H")
    for position in range(first, end):
        for layer in layers_of(position):
            numbers.extend([NO_EXPERT] * TOP_K if layer is None else layer)
    return RoutedExperts(first, LAYERS, TOP_K, numbers.tobytes())


def script(prompt: Prompt) -> Sequence[Delta]:
    """Three tokens, each with the experts of what was computed for it."""
    assert prompt.routed_experts
    ends = [len(prompt.prompt_ids) + count for count in range(len(IDS))]
    parts = zip([0, *ends], ends, strict=False)
    last = len(IDS) - 1
    return [
        Delta(
            1,
            [IDS[index]],
            FinishReason.LENGTH if index == last else None,
            routed_experts=experts(*part),
        )
        for index, part in enumerate(parts)
    ]


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 3, "return_routed_experts": True},
    "/inference/v1/generate": {
        "token_ids": PROMPT, "sampling_params": {"max_tokens": 3}, "return_routed_experts": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_answer_has_all_but_those_of_the_last_token(server: Server, path: str) -> None:
    server.mesh.script = script
    (choice,) = server.post(path, BODIES[path]).json()["choices"]
    assert choice["routed_experts"] == [layers_of(position) for position in range(len(PROMPT) + 2)]


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_has_each_once(server: Server, path: str) -> None:
    server.mesh.script = script
    chunks = events(server.post(path, BODIES[path] | {"stream": True}).text)
    parts = [choice["routed_experts"] for chunk in chunks for choice in chunk["choices"]]
    assert [len(part) for part in parts] == [4, 1, 1]
    assert [each for part in parts for each in part] == [layers_of(position) for position in range(6)]


def test_those_behind_a_stop_string_are_left_out(server: Server, tokenizer: Any) -> None:
    server.mesh.script = script
    body = BODIES["/v1/completions"] | {"stop": tokenizer.decode(IDS[1:2])}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert len(choice["routed_experts"]) == len(PROMPT) + 1


def test_a_prompt_alone(server: Server) -> None:
    server.mesh.script = script
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "return_routed_experts": True}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert choice["routed_experts"] == [layers_of(position) for position in range(len(PROMPT))]


@pytest.mark.parametrize("stream", [False, True])
def test_sglangs_form(server: Server, stream: bool) -> None:
    server.mesh.script = script
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}, "return_routed_experts": True}
    answer = server.post("/generate", body | {"stream": stream})
    found = events(answer.text)[-1] if stream else answer.json()
    numbers = array("i", base64.b64decode(found["meta_info"]["routed_experts"]))
    expected = [
        each
        for position in range(len(PROMPT) + 2)
        for layer in layers_of(position)
        for each in (layer or [-1] * TOP_K)
    ]
    assert numbers.tolist() == expected


def test_others_do_not_have_them(server: Server) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3}}
    (choice,) = server.post("/inference/v1/generate", body).json()["choices"]
    assert "routed_experts" not in choice
