"""The ``openai-agents`` package over responses and chat: runs, streams, tools, handoffs, types, sessions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import checks
import openai
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from checks import check
from pydantic import BaseModel, Field

set_tracing_disabled(True)
NAME = checks.model()
QUESTION = "Who was at the ball?"
FORM = {"structured_outputs": {"regex": "[A-Z][a-z]{2,8}( [a-z]{2,8}){2,5}\\."}, "seed": 1}
SHORT = ModelSettings(max_tokens=60, extra_body=FORM)
"""Answers that end by themselves: this package takes one that ``max_tokens`` cut as a failure."""
FREE = ModelSettings(max_tokens=200, extra_body={"seed": 2}, parallel_tool_calls=False)
asked_of: list[tuple[str, int]] = []


class Guest(BaseModel, extra="forbid"):
    name: Literal["Bingley", "Darcy", "Collins"]
    age: int = Field(ge=0, le=120)


@function_tool
def weather(city: Literal["London", "Bath", "Meryton"], days: Literal[1, 2, 3]) -> str:
    """Tell the weather."""
    asked_of.append((city, days))
    return "rain"


@contextlib.asynccontextmanager
async def models() -> AsyncIterator[list[Model]]:
    """Models of both kinds, with a client that is closed in its own event loop."""
    async with openai.AsyncOpenAI(base_url=f"{checks.URL}/v1", api_key=checks.KEY, max_retries=0) as client:
        yield [OpenAIResponsesModel(NAME, client), OpenAIChatCompletionsModel(NAME, client)]


@check
async def runs_and_streams() -> None:
    async with models() as both:
        for model in both:
            agent = Agent(name="writer", instructions="Be brief.", model=model, model_settings=SHORT)
            whole = await Runner.run(agent, QUESTION)
            assert whole.final_output, whole
            assert whole.context_wrapper.usage.output_tokens > 3
            stream = Runner.run_streamed(agent, QUESTION)
            deltas = [
                event.data.delta
                async for event in stream.stream_events()
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
            ]
            assert "".join(deltas) == stream.final_output == whole.final_output


@check
async def a_tool_is_called_and_its_result_answered() -> None:
    checks.needs_tool_parser()
    async with models() as both:
        for model in both:
            asked_of.clear()
            settings = FREE.resolve(ModelSettings(tool_choice="required"))
            agent = Agent(
                name="forecaster", model=model, tools=[weather], model_settings=settings,
                tool_use_behavior="stop_on_first_tool",
            )  # fmt: skip
            done = await Runner.run(agent, QUESTION)
            assert len(asked_of) == 1 and asked_of[0][0] in ("London", "Bath", "Meryton"), asked_of
            assert done.final_output == "rain"
            history: Any = [*done.to_input_list(), {"role": "user", "content": "And tomorrow?"}]
            told = await Runner.run(Agent(name="writer", model=model, model_settings=SHORT), history)
            assert told.final_output


@check
async def a_handoff_names_another_agent() -> None:
    checks.needs_tool_parser()
    async with models() as both:
        for model in both:
            second = Agent(name="second", model=model, model_settings=SHORT)
            settings = FREE.resolve(ModelSettings(tool_choice="required"))
            first = Agent(name="first", model=model, handoffs=[handoff(second)], model_settings=settings)
            done = await Runner.run(first, QUESTION)
            assert done.last_agent is second and done.final_output


@check
async def outputs_have_a_type() -> None:
    async with models() as both:
        for model in both:
            agent = Agent(name="host", model=model, output_type=Guest, model_settings=FREE)
            found = (await Runner.run(agent, QUESTION)).final_output
            assert isinstance(found, Guest) and 0 <= found.age <= 120, found


@check
async def sessions_send_the_whole_conversation() -> None:
    async with models() as both:
        for model in both:
            session = SQLiteSession("ball")
            agent = Agent(name="writer", model=model, model_settings=SHORT)
            await Runner.run(agent, QUESTION, session=session)
            second = await Runner.run(agent, "And who was not?", session=session)
            items = await session.get_items()
            assert [item.get("role") for item in items] == ["user", "assistant"] * 2, items
            assert second.final_output and len(items) == 4


@check
async def log_probabilities_of_responses() -> None:
    settings = SHORT.resolve(ModelSettings(top_logprobs=2))
    async with models() as (model, _):
        done = await Runner.run(Agent(name="writer", model=model, model_settings=settings), QUESTION)
    message: Any = done.raw_responses[0].output[0]
    told = message.content[0].logprobs
    assert {len(entry.top_logprobs) for entry in told} == {2}
    text = bytes(byte for entry in told for byte in entry.bytes).decode()
    assert text.removesuffix("<|endoftext|>").removesuffix("<|im_end|>") == done.final_output, text


@check
async def errors_are_those_of_the_openai_package() -> None:
    async with models() as both:
        for model in both:
            agent = Agent(name="writer", model=model, model_settings=SHORT)
            try:
                await Runner.run(agent, "word " * 100_000)
            except openai.BadRequestError as error:
                assert "maximum context length" in json.dumps(error.body)
            else:
                raise AssertionError("no BadRequestError")


@check
def nothing_is_left_behind() -> None:
    checks.wait_until_idle()


checks.run(f"openai-agents {importlib.metadata.version('openai-agents')}")
