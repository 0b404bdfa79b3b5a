"""Readers of request bodies."""

from __future__ import annotations

import json

import pytest

from router.api.bodies import READERS
from router.app.openapi import OPERATIONS
from router.mesh import ServedModel
from router.openai_api import ChatRequest, CompletionRequest

SERVED = ServedModel(("tiny",), "", 512, 256)
USER = [{"role": "user", "content": "Hello"}]


def test_each_endpoint_that_generates_has_a_reader() -> None:
    """Else an endpoint picker would choose blindly for it."""
    assert READERS.keys() == {each.path for each in OPERATIONS if each.streams}


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 9}, CompletionRequest),
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 9}, ChatRequest),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 9}, ChatRequest),
        ("/v1/messages", {"messages": USER, "max_tokens": 9}, ChatRequest),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"max_tokens": 9}},
            CompletionRequest,
        ),
        ("/generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 9}}, CompletionRequest),
        ("/invocations", {"messages": USER, "max_tokens": 9}, ChatRequest),
        ("/invocations", {"prompt": "Hello", "max_tokens": 9}, CompletionRequest),
    ],
)
def test_a_body_becomes_a_chat_or_a_completion(
    path: str, body: object, kind: type[ChatRequest] | type[CompletionRequest]
) -> None:
    wanted = READERS[path](json.dumps(body).encode(), SERVED)
    assert type(wanted) is kind
    newer = wanted.max_completion_tokens if isinstance(wanted, ChatRequest) else None
    assert 9 in (wanted.max_tokens, newer)
