"""Log-probabilities of /v1/responses: of the texts, whatever parsers hold back or take away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from router.mesh import ServedModel
from tests.router.conftest import Server
from tests.router.talking import CALLS, THOUGHT, TOOL_FLAGS, Speaker, openai_client, speaker, talking

INCLUDE: list[Any] = ["message.output_text.logprobs"]
TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]


@pytest.fixture(scope="module")
def talking_server(served: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = TOOL_FLAGS | {"reasoning_parser": "qwen3"}
    with talking(served, tmp_path_factory.mktemp("responses_logprobs"), **flags) as server:
        yield server


client = openai_client
say = speaker


def spelt(entries: Any) -> str:
    """The text of the tokens, without the end of the sequence."""
    text = bytes(byte for entry in entries for byte in entry.bytes or [] if entry.token != "<eos>")
    return text.decode()


def test_of_an_answer(client: openai.OpenAI, say: Speaker) -> None:
    ids = say("Hello 🙂 world!")
    answer = client.responses.create(model="tiny", input="x", include=INCLUDE, top_logprobs=2)
    (message,) = answer.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert spelt(part.logprobs) == part.text == "Hello 🙂 world!"
    assert len(part.logprobs) == len(ids), "the end of the sequence has one, too, as in chat"
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2] * len(ids)
    assert part.logprobs[0].logprob == -1.5
    assert answer.top_logprobs == 2


def test_of_a_stream(client: openai.OpenAI, say: Speaker) -> None:
    say("Hello 🙂 world!")
    events = list(
        client.responses.create(model="tiny", input="x", include=INCLUDE, top_logprobs=1, stream=True)
    )
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3
    for delta in deltas:
        assert delta.delta.startswith(delta.logprobs[0].token.strip("\ufffd"))
    texts = [event for event in events if event.type == "response.output_text.done"]
    streamed = [entry.token for delta in deltas for entry in delta.logprobs]
    assert [entry.token for entry in texts[0].logprobs][: len(streamed)] == streamed
    final = events[-1]
    assert final.type == "response.completed"
    message: Any = final.response.output[0]
    assert spelt(message.content[0].logprobs) == "Hello 🙂 world!"


@pytest.mark.parametrize("stream", [False, True])
def test_of_the_text_alone(client: openai.OpenAI, say: Speaker, stream: bool) -> None:
    """Not of reasoning, nor of calls; of what looked like a call and was none."""
    say(THOUGHT + "Wait <tool" + "x. " + CALLS)
    answer: Any = client.responses.create(
        model="tiny", input="x", tools=TOOLS, include=INCLUDE, stream=stream
    )
    if stream:
        answer = list(answer)[-1].response
    reasoning, message, *calls = answer.output
    assert (reasoning.type, [call.type for call in calls]) == ("reasoning", ["function_call"] * 2)
    part = message.content[0]
    assert part.text == "Wait <toolx."
    assert spelt(part.logprobs).strip() == part.text
    assert all(entry.top_logprobs == [] for entry in part.logprobs)


def test_none_unless_asked_for(client: openai.OpenAI, say: Speaker) -> None:
    say("Hello")
    answer: Any = client.responses.create(model="tiny", input="x", top_logprobs=0)
    assert answer.output[0].content[0].logprobs == []
    assert say.server.mesh.prompts[-1].params.logprobs is None
