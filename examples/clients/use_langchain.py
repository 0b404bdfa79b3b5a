"""The ``langchain-openai`` package: chat, completions, responses; streams, tools, schemas, errors, async."""

from __future__ import annotations

import asyncio
import importlib.metadata
from typing import Any, Literal

import checks
import openai
from checks import check
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

MODEL = checks.model()
PLACE: dict[str, Any] = {
    "model": MODEL,
    "base_url": f"{checks.URL}/v1",
    "api_key": checks.KEY,
    "max_retries": 0,
}
chat = ChatOpenAI(**PLACE, max_completion_tokens=12, seed=1)
QUESTION = "Who was at the ball?"


class Guest(BaseModel, extra="forbid"):
    """A guest."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    rank: Literal["captain", "colonel", "none"]


@tool
def weather(city: Literal["London", "Bath", "Meryton"], days: int) -> str:
    """The weather of a city."""
    return f"rain in {city} for {days} days"


@check
def invoke_with_usage() -> None:
    answer = chat.invoke([SystemMessage("You are Jane Austen."), HumanMessage(QUESTION)])
    assert answer.content
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] == 12
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == MODEL


@check
def streams_say_the_same() -> None:
    whole = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION, stream_usage=True))  # not by itself where base_url is not OpenAI's
    total = AIMessageChunk("")
    for chunk in chunks:
        total += chunk
    assert len(chunks) > 3 and total.content == whole.content
    assert total.usage_metadata is not None
    assert total.usage_metadata["output_tokens"] == 12


@check
def chains_and_batches() -> None:
    chain = ChatPromptTemplate.from_messages([("user", "Tell me about {whom}.")]) | chat
    answers = chain.batch([{"whom": name} for name in ("Darcy", "Bingley", "Wickham", "Elizabeth")])
    assert len({answer.content for answer in answers}) > 1


@check
def logprobs() -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    found = answer.response_metadata["logprobs"]["content"]
    assert len(found) == 12 and len(found[0]["top_logprobs"]) == 2


@check
def structured_outputs() -> None:
    long = ChatOpenAI(**PLACE, max_completion_tokens=300)
    for method in ("json_schema", "function_calling"):
        assert isinstance(long.with_structured_output(Guest, method=method).invoke(QUESTION), Guest), method
    *_, last = long.with_structured_output(Guest).stream(QUESTION)
    assert isinstance(last, Guest)
    schema = {"title": "weather", "description": "Of a city.", **checks.WEATHER_SCHEMA}
    checks.check_weather(long.with_structured_output(schema, strict=True).invoke(QUESTION))
    raw = long.with_structured_output(Guest, include_raw=True).invoke(QUESTION)
    assert isinstance(raw["parsed"], Guest) and raw["parsing_error"] is None


@check
def json_mode() -> None:
    greedy = ChatOpenAI(
        **PLACE, temperature=0, max_completion_tokens=300, extra_body={"repetition_penalty": 1.3}
    )
    assert isinstance(greedy.with_structured_output(None, method="json_mode").invoke(QUESTION), dict)


@check
def tools_required_and_named() -> None:
    long = ChatOpenAI(**PLACE, max_completion_tokens=300)
    schema = {"name": "weather", "description": "Of a city.", "parameters": checks.WEATHER_SCHEMA}
    for choice in ("any", "required", "weather"):
        bound = long.bind_tools([schema], tool_choice=choice, parallel_tool_calls=False)
        answer = bound.invoke(QUESTION)
        (call,) = answer.tool_calls
        checks.check_weather(call["args"])
        total = AIMessageChunk("")
        for chunk in bound.stream(QUESTION):
            total += chunk
        checks.check_weather(total.tool_calls[0]["args"])


@check
def tools_auto_and_back() -> None:
    checks.needs_tool_parser()
    long = ChatOpenAI(**PLACE, max_completion_tokens=100)
    calling = long.bind_tools([weather]).bind(extra_body={"structured_outputs": {"regex": checks.CALL_REGEX}})
    answer = calling.invoke(QUESTION)
    (call,) = answer.tool_calls
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage) and "rain" in str(result.content)
    final = long.bind_tools([weather], tool_choice="none").invoke([HumanMessage(QUESTION), answer, result])
    assert final.content and not final.tool_calls


@check
def responses_api() -> None:
    new = ChatOpenAI(**PLACE, use_responses_api=True, temperature=0, max_completion_tokens=12)
    answer = new.invoke([SystemMessage("You are Jane Austen."), HumanMessage(QUESTION)])
    assert answer.text
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] == 12
    assert (
        "".join(
            chunk.text
            for chunk in new.stream([SystemMessage("You are Jane Austen."), HumanMessage(QUESTION)])
        )
        == answer.text
    )
    long = ChatOpenAI(**PLACE, use_responses_api=True, max_completion_tokens=300)
    assert isinstance(long.with_structured_output(Guest).invoke(QUESTION), Guest)
    schema = {"name": "weather", "description": "Of a city.", "parameters": checks.WEATHER_SCHEMA}
    (call,) = (
        long.bind_tools([schema], tool_choice="any", parallel_tool_calls=False).invoke(QUESTION).tool_calls
    )
    checks.check_weather(call["args"])


@check
def completions() -> None:
    old = OpenAI(**PLACE, max_tokens=20, temperature=0)
    text = old.invoke(checks.OPENING)
    assert text and "".join(old.stream(checks.OPENING)) == text
    answers = old.generate([checks.OPENING, "Elizabeth"])
    assert answers.generations[0][0].text == text and len(answers.generations) == 2


@check
def errors() -> None:
    for fields, kind, words in (
        ({"model": "nobody"}, openai.NotFoundError, "nobody"),
        ({"temperature": -1.0}, openai.BadRequestError, "temperature"),
        ({"api_key": "wrong"}, openai.AuthenticationError, "key"),
    ):
        if "api_key" in fields and checks.KEY == "none":
            continue
        try:
            ChatOpenAI(**PLACE | fields).invoke(QUESTION)
        except kind as error:
            assert words in str(error)
        else:
            raise AssertionError(f"no {kind}")
    try:
        OpenAIEmbeddings(**PLACE, check_embedding_ctx_length=False).embed_query("She")
    except openai.BadRequestError as error:
        assert "--runner pooling" in str(error)
    else:
        raise AssertionError("no BadRequestError")


@check
async def many_at_once_and_cancelled() -> None:
    answers = await chat.abatch([QUESTION] * 8)
    assert all(answer.content for answer in answers)
    long = ChatOpenAI(**PLACE, max_completion_tokens=1500, extra_body={"ignore_eos": True})
    async for _ in long.astream(QUESTION):
        break
    task = asyncio.create_task(long.ainvoke(QUESTION))
    await asyncio.sleep(0.3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(checks.wait_until_idle)


if __name__ == "__main__":
    checks.run(f"langchain-openai {importlib.metadata.version('langchain-openai')}")
