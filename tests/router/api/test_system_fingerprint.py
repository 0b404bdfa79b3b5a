"""``system_fingerprint`` in answers: the numerics class of the instance that gave the first token."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest

from router.mesh import NumericsSwitch
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


# ---- a choice that went on in another class

MOVED = NumericsSwitch(2, FIRST, SECOND)
TOLD = {"choice": 0, "after_tokens": 2, "from": FIRST, "to": SECOND}
HEADER = "x-lockstep-numerics-changed"
ALL = BODIES | {"/v1/messages": {"messages": USER, "max_tokens": 50}}


def moved(server: Server, change: NumericsSwitch = MOVED) -> None:
    """The mesh gives tokens of two classes from now on."""
    server.mesh.fingerprints[0] = FIRST
    server.mesh.changes[0] = [change]


@pytest.mark.parametrize("path", ALL)
def test_a_whole_answer_says_so_in_its_usage_and_in_a_header(server: Server, path: str) -> None:
    server.mesh.fingerprints[0] = FIRST
    before = server.post(path, ALL[path])
    assert HEADER not in before.headers
    assert "numerics_changes" not in before.text
    moved(server)
    answer = server.post(path, ALL[path])
    assert answer.json()["usage"].pop("numerics_changes") == [TOLD]
    assert answer.headers[HEADER] == f"{FIRST} -> {SECOND}"
    assert answer.json().get("system_fingerprint", FIRST) == FIRST


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"return_token_ids": True}])
@pytest.mark.parametrize("usage", [True, False])
def test_the_last_chunk_of_a_choice_says_so(
    server: Server, path: str, more: dict[str, Any], usage: bool
) -> None:
    if "chat" in path and "logprobs" in more:
        more = {"logprobs": True}
    moved(server)
    body = BODIES[path] | more | {"stream": True, "stream_options": {"include_usage": usage}}
    chunks = events(server.post(path, body).text)
    if usage:
        assert chunks.pop()["usage"]["numerics_changes"] == [TOLD]
    assert chunks.pop()["numerics_changes"] == [TOLD]
    assert not any("numerics_changes" in chunk for chunk in chunks)
    assert {chunk["system_fingerprint"] for chunk in chunks} == {FIRST}


def test_each_choice_says_its_own(server: Server) -> None:
    server.mesh.fingerprints.update({0: FIRST, 1: SECOND, 2: FIRST})
    server.mesh.changes.update(
        {0: [MOVED], 1: [NumericsSwitch(1, SECOND, None), NumericsSwitch(3, None, FIRST)]}
    )
    body = {"prompt": "Hello", "n": 3, "temperature": 1}
    told = [
        TOLD,
        {"choice": 1, "after_tokens": 1, "from": SECOND, "to": None},
        {"choice": 1, "after_tokens": 3, "from": None, "to": FIRST},
    ]
    answer = server.post("/v1/completions", body)
    assert answer.json()["usage"]["numerics_changes"] == told
    assert answer.headers[HEADER] == f"{FIRST} -> {SECOND}, {SECOND} -> unknown, unknown -> {FIRST}"
    chunks = events(server.post("/v1/completions", body | {"stream": True}).text)
    found = {
        chunk["choices"][0]["index"]: chunk["numerics_changes"]
        for chunk in chunks
        if "numerics_changes" in chunk
    }
    assert found == {0: told[:1], 1: told[1:]}


def test_events_of_other_dialects_say_so_in_their_last_usage(server: Server) -> None:
    moved(server)
    for path, kind in (("/v1/responses", "response.incomplete"), ("/v1/messages", "message_delta")):
        text = server.post(path, ALL[path] | {"stream": True}).text
        (found,) = (
            event
            for line in text.splitlines()
            if line.startswith("data: {") and "numerics_changes" in line
            for event in [msgspec.json.decode(line[6:])]
        )
        assert found["type"] == kind
        assert found.get("response", found)["usage"]["numerics_changes"] == [TOLD]


def test_a_stream_that_has_not_begun_says_so_in_its_header(server: Server) -> None:
    """Its first tokens wait to be written when the instance dies."""
    moved(server)
    for path in ALL:
        assert server.post(path, ALL[path] | {"stream": True}).headers[HEADER] == f"{FIRST} -> {SECOND}"


def test_a_change_behind_the_last_token_is_none_of_the_answer(server: Server) -> None:
    """A stop string was found while the next tokens were on their way."""
    whole = server.post("/v1/completions", {"prompt": "Hello", "logprobs": 0}).json()["choices"][0]
    tokens = whole["logprobs"]["tokens"]
    for after, is_told in ((2, False), (1, True)):
        moved(server, NumericsSwitch(after, FIRST, SECOND))
        answer = server.post("/v1/completions", {"prompt": "Hello", "stop": tokens[1]})
        assert answer.json()["usage"]["completion_tokens"] == 2
        assert ("numerics_changes" in answer.json()["usage"]) is is_told
        assert (HEADER in answer.headers) is is_told


def test_the_openai_client_reads_the_changes(client: openai.OpenAI, server: Server) -> None:
    moved(server)
    answer = client.chat.completions.create(model="tiny", messages=USER)
    assert answer.usage is not None
    assert answer.usage.model_dump()["numerics_changes"] == [TOLD]
    *_, last = client.chat.completions.create(model="tiny", messages=USER, stream=True)
    assert last.model_dump()["numerics_changes"] == [TOLD]


@pytest.mark.parametrize(
    ("fields", "is_repeatable"), [({"temperature": 0}, True), ({"seed": 0}, True), ({}, False)]
)
def test_greedy_and_seeded_requests_are_to_be_repeatable(
    server: Server, fields: dict[str, Any], is_repeatable: bool
) -> None:
    server.post("/v1/completions", {"prompt": "Hello", "temperature": 1} | fields)
    assert [prompt.repeatable for prompt in server.mesh.prompts] == [is_repeatable]
