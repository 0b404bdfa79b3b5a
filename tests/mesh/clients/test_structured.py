"""Structured outputs of a real mesh: many schemas, over a kill, by the openai client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from engine.config import SHIPPED_MODEL
from tests.mesh.clients.schemas import WRITTEN
from tests.mesh.clients.structured import FLAGS, ask_all
from tests.mesh.conftest import Mesh
from tests.mesh.harness import Ports, serve

pytestmark = pytest.mark.mesh

SOME = range(len(WRITTEN), len(WRITTEN) + 16)
"""A share of what ``python -m tests.mesh.clients.structured --schemas 200 --kill`` asks for."""
USER: list[Any] = [{"role": "user", "content": "Who was at the ball?"}]


def test_answers_follow_their_schemas_over_a_kill(tmp_path: Path) -> None:
    ports = Ports()
    with serve(tmp_path / "log", "-dp", "2", "--no-enable-expert-parallel", *ports.head(), *FLAGS) as command:
        command.wait_for("2 instances ready")
        undisturbed = asyncio.run(ask_all(ports, SOME))
        assert [answer.problem for answer in undisturbed] == [""] * len(SOME)
        finished = [answer for answer in undisturbed if answer.finish_reason == "stop"]
        assert len(finished) >= 0.9 * len(SOME)
        disturbed = asyncio.run(ask_all(ports, SOME, command.child("Engine_1").kill))
        assert disturbed == undisturbed
        assert "requests of instance 1 go on elsewhere" in command.log
        assert command.stop() == 0


class Guest(BaseModel):
    """With bounds, as a small model at temperature 1 seldom ends by itself."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)
    mood: Literal["glad", "sad"] | None


class Ball(BaseModel):
    model_config = ConfigDict(extra="forbid")
    guests: list[Guest] = Field(max_length=3)
    town: str = Field(max_length=20)


@pytest.fixture
def client(mesh: Mesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_openai_client_parses(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=SHIPPED_MODEL, messages=USER, response_format=Ball, seed=1, max_tokens=600
    )
    assert isinstance(parsed.choices[0].message.parsed, Ball)
    response = client.responses.parse(
        model=SHIPPED_MODEL, input="Who was there?", text_format=Ball, max_output_tokens=600
    )
    assert isinstance(response.output_parsed, Ball)
    with client.chat.completions.stream(
        model=SHIPPED_MODEL, messages=USER, response_format=Ball, seed=1, max_tokens=600
    ) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.parsed == parsed.choices[0].message.parsed


def test_tools_that_must_be_called(client: openai.OpenAI) -> None:
    tools: list[Any] = [openai.pydantic_function_tool(Guest), openai.pydantic_function_tool(Ball)]
    for choice in ("required", {"type": "function", "function": {"name": "Ball"}}):
        answer = client.chat.completions.parse(
            model=SHIPPED_MODEL, messages=USER, tools=tools, tool_choice=choice, parallel_tool_calls=False,
            seed=3, max_tokens=600,
        )  # type: ignore[call-overload]  # fmt: skip
        (call,) = answer.choices[0].message.tool_calls
        kind = {"Guest": Guest, "Ball": Ball}[call.function.name]
        assert isinstance(call.function.parsed_arguments, kind)
        assert choice == "required" or kind is Ball


def test_samples_and_log_probabilities(client: openai.OpenAI) -> None:
    """Log-probabilities are those of the model, not of what the grammar left of it."""
    answer = client.chat.completions.create(
        model=SHIPPED_MODEL, messages=USER, n=4, seed=1, logprobs=True, top_logprobs=3,
        extra_body={"structured_outputs": {"regex": "[0-9]{3}-[A-Z]{2}"}, "min_tokens": 50},
    )  # type: ignore[call-overload]  # fmt: skip
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) > 1
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        head, tail = choice.message.content.split("-")
        assert head.isdecimal()
        assert tail.isupper()
        best = choice.logprobs.content[0].top_logprobs
        assert not any(token.token.isdecimal() for token in best), (
            "a model of novels would not begin with digits"
        )
        assert choice.logprobs.content[0].logprob < best[-1].logprob


def test_what_only_the_instance_can_refuse(mesh: Mesh, client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="unknown special token"):
            client.completions.create(
                model=SHIPPED_MODEL,
                prompt="x",
                stream=stream,
                extra_body={"structured_outputs": {"grammar": 'start: <nothing> "x"'}},
            )
    answer = client.completions.create(
        model=SHIPPED_MODEL,
        prompt="x",
        max_tokens=40,
        extra_body={"structured_outputs": {"json": {"type": "null"}}},
    )
    assert json.loads(answer.choices[0].text) is None
