"""``system_fingerprint`` in answers: the numerics class of the instance that gave the first token."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest

from tests.router.conftest import Server, events

FIRST, SECOND = "fp_000000000001", "fp_000000000002"
USER: list[Any] = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "Hello"},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_answer_has_that_of_its_instance(server: Server, path: str) -> None:
    assert server.post(path, BODIES[path]).json()["system_fingerprint"] is None, "none is known"
    server.mesh.fingerprints[0] = FIRST
    assert server.post(path, BODIES[path]).json()["system_fingerprint"] == FIRST


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"return_token_ids": True}])
def test_every_chunk_has_it(server: Server, path: str, more: dict[str, Any]) -> None:
    if "chat" in path and "logprobs" in more:
        more = {"logprobs": True}
    server.mesh.fingerprints[0] = FIRST
    body = BODIES[path] | more | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(server.post(path, body).text)
    assert len(chunks) > 2
    assert {chunk["system_fingerprint"] for chunk in chunks} == {FIRST}
    assert chunks[-1]["choices"] == []
    server.mesh.fingerprints.clear()
    assert not any("system_fingerprint" in chunk for chunk in events(server.post(path, body).text))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_choices_of_several_classes_have_their_own_and_the_answer_none(server: Server, path: str) -> None:
    server.mesh.fingerprints.update({0: FIRST, 1: SECOND})
    body = BODIES[path] | {"n": 2, "temperature": 1}
    assert server.post(path, body).json()["system_fingerprint"] is None
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = events(server.post(path, streamed).text)
    found = {(chunk["choices"][0]["index"], chunk["system_fingerprint"]) for chunk in chunks}
    assert found == {(0, FIRST), (1, SECOND)}
    assert "system_fingerprint" not in usage
    server.mesh.fingerprints[1] = FIRST
    assert server.post(path, body).json()["system_fingerprint"] == FIRST


def test_the_responses_of_a_stream_have_it(server: Server) -> None:
    server.mesh.fingerprints[0] = FIRST
    text = server.post("/v1/responses", BODIES["/v1/responses"] | {"stream": True}).text
    found = [
        event["response"]["system_fingerprint"]
        for line in text.splitlines()
        if line.startswith("data: {") and "response" in (event := msgspec.json.decode(line[6:]))
    ]
    assert found == [FIRST] * 3, "created, in progress, completed"


def test_the_openai_client_reads_it(client: openai.OpenAI, server: Server) -> None:
    server.mesh.fingerprints[0] = FIRST
    answer = client.chat.completions.create(model="tiny", messages=USER)
    assert answer.system_fingerprint == FIRST
    stream = client.chat.completions.create(model="tiny", messages=USER, stream=True)
    assert {chunk.system_fingerprint for chunk in stream} == {FIRST}
