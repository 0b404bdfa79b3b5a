"""The ``instructor`` package: its modes for OpenAI's and Anthropic's words, streams, retries, async."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Iterable
from typing import Any, Literal

import checks
import instructor
import openai
from checks import check
from instructor import Mode
from pydantic import BaseModel, Field, field_validator

client = openai.OpenAI(base_url=f"{checks.URL}/v1", api_key=checks.KEY, max_retries=0, timeout=120)
MODEL = checks.model()
USER: list[Any] = [{"role": "user", "content": "Who was at the ball?"}]


class Guest(BaseModel, extra="forbid"):  # else a model may add fields without end
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    rank: Literal["captain", "colonel", "none"]


class Party(BaseModel, extra="forbid"):
    house: Literal["Netherfield", "Longbourn"]
    guests: list[Guest] = Field(min_length=1, max_length=2)


class Anything(BaseModel, extra="allow"):
    """Some JSON object."""


FIXED: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 400, "max_retries": 1}


@check
def modes_with_a_schema() -> None:
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA):
        patched = instructor.from_openai(client, mode=mode)
        for wanted in (Guest, Party):
            found, completion = patched.chat.completions.create_with_completion(
                **FIXED, response_model=wanted
            )
            assert isinstance(found, wanted), mode
            assert completion.usage.completion_tokens > 0


@check
def responses_mode() -> None:
    patched = instructor.from_openai(client, mode=Mode.RESPONSES_TOOLS)
    fixed = {"model": MODEL, "input": "Who was at the ball?", "max_output_tokens": 400, "max_retries": 1}
    assert isinstance(patched.responses.create(**fixed, response_model=Party), Party)


@check
def modes_that_leave_the_schema_to_the_model() -> None:
    """Modes that put the schema into the prompt.

    The shipped model does not understand it there.
    """
    greedy = FIXED | {"temperature": 0, "extra_body": {"repetition_penalty": 1.3}}
    patched = instructor.from_openai(client, mode=Mode.JSON)
    assert isinstance(patched.chat.completions.create(**greedy, response_model=Anything), Anything)
    block = {
        "structured_outputs": {
            "regex": '```json\n\\{"name": "[A-Z][a-z]{1,9}", "age": [1-9], "rank": "none"\\}\n```'
        }
    }
    patched = instructor.from_openai(client, mode=Mode.MD_JSON)
    assert isinstance(patched.chat.completions.create(**FIXED, extra_body=block, response_model=Guest), Guest)


@check
def parallel_tools() -> None:
    checks.needs_tool_parser()
    call = '<tool_call>\n\\{"name": "%s", "arguments": \\{%s\\}\\}\n</tool_call>'
    guest = call % ("Guest", '"name": "[A-Z][a-z]{1,9}", "age": [1-9], "rank": "none"')
    regex = f"{guest}\n{guest}"
    patched = instructor.from_openai(client, mode=Mode.PARALLEL_TOOLS)
    found = patched.chat.completions.create(
        **FIXED, response_model=Iterable[Guest], extra_body={"structured_outputs": {"regex": regex}}
    )
    assert [type(each) for each in found] == [Guest, Guest]


@check
def partial_and_iterable_streams() -> None:
    patched = instructor.from_openai(client)
    *parts, last = patched.chat.completions.create_partial(**FIXED, response_model=Party)
    assert len(parts) > 3
    assert Party.model_validate(last.model_dump())
    guests = list(
        patched.chat.completions.create_iterable(**FIXED | {"max_tokens": 60}, response_model=Guest)
    )
    assert all(isinstance(guest, Guest) for guest in guests)


@check
def a_retry_sends_the_error_back() -> None:
    seen: list[int] = []

    class Picky(BaseModel, extra="forbid"):
        age: int = Field(ge=0, le=120)

        @field_validator("age")
        @classmethod
        def not_the_first(cls, age: int) -> int:
            seen.append(age)
            if len(seen) < 2:
                raise ValueError("another one, please")
            return age

    patched = instructor.from_openai(client)
    found = patched.chat.completions.create(**FIXED | {"max_retries": 3}, response_model=Picky)
    assert len(seen) == 2 and found.age == seen[1]


@check
async def many_at_once() -> None:
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=checks.KEY, max_retries=0) as many:
        patched = instructor.from_openai(many)
        asked = [patched.chat.completions.create(**FIXED, response_model=Guest) for _ in range(8)]
        assert all(isinstance(found, Guest) for found in await asyncio.gather(*asked))


@check
def provider_by_name() -> None:
    patched = instructor.from_provider(
        f"openai/{MODEL}", base_url=f"{checks.URL}/v1", api_key=checks.KEY, mode=Mode.TOOLS
    )
    found = patched.chat.completions.create(messages=USER, response_model=Guest, max_tokens=300)
    assert isinstance(found, Guest)


@check
def errors() -> None:
    from instructor.core import InstructorRetryException

    patched = instructor.from_openai(client)
    try:
        patched.chat.completions.create(**FIXED | {"model": "nobody"}, response_model=Guest)
    except InstructorRetryException as error:
        assert "nobody" in str(error) and "404" in str(error), error
    else:
        raise AssertionError("no error")


if __name__ == "__main__":
    checks.run(f"instructor {importlib.metadata.version('instructor')}")
