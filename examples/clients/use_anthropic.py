"""The ``anthropic`` package: messages, streams, tools, schemas, token counts, errors, async, cancellation."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import anthropic
import checks
from checks import check
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=checks.URL, api_key=checks.KEY, max_retries=0, timeout=120)
MODEL = checks.model()
USER: list[Any] = [{"role": "user", "content": "Who was at the ball?"}]
WEATHER: Any = {"name": "weather", "description": "Of tomorrow.", "input_schema": checks.WEATHER_SCHEMA}


class Guest(BaseModel):
    """A guest with fields of bounded length.

    The package takes bounds out of schemas, and the shipped model finds no end without bounds.
    """

    name: Literal["Bingley", "Darcy", "Wickham"]
    dances: bool


def prompt_tokens(usage: Any) -> int:
    """All prompt tokens, with those from the cache.

    The mesh reports cached tokens apart with --enable-prompt-tokens-details.
    """
    return int(usage.input_tokens + (usage.cache_read_input_tokens or 0))


@check
def models() -> None:
    assert MODEL in [each.id for each in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@check
def message_with_usage() -> None:
    blocks = [{"role": "user", "content": [{"type": "text", "text": "Who was at the ball?"}]}]
    for messages in (USER, blocks):
        answer = client.messages.create(model=MODEL, messages=messages, max_tokens=12)
        (block,) = answer.content
        assert block.type == "text" and block.text
        assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 12
    counted = client.messages.count_tokens(model=MODEL, messages=USER)
    assert counted.input_tokens == prompt_tokens(answer.usage)


@check
def system_and_stop_sequences() -> None:
    answer = client.messages.create(
        model=MODEL, messages=USER, max_tokens=400, stop_sequences=["."], system="You are Jane Austen."
    )
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == "."


@check
def streams_say_the_same() -> None:
    fixed: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 20}
    fixed["extra_body"] = {"seed": 1}
    whole = client.messages.create(**fixed)
    with client.messages.stream(**fixed) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text  # type: ignore[union-attr]
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert prompt_tokens(final.usage) == prompt_tokens(whole.usage)
    kinds = [event.type for event in client.messages.create(**fixed, stream=True)]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds


@check
def tools_any_and_named() -> None:
    fixed: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": [WEATHER], "max_tokens": 200}
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        choice["disable_parallel_tool_use"] = True  # type: ignore[assignment]
        answer = client.messages.create(**fixed, tool_choice=choice)
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        checks.check_weather(call.input)  # type: ignore[arg-type]
        assert answer.stop_reason == "tool_use"
    with client.messages.stream(**fixed, tool_choice=choice) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        (call,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert json.loads("".join(parts)) == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    messages = [*USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    answer = client.messages.create(
        **fixed | {"messages": messages, "max_tokens": 5}, tool_choice={"type": "none"}
    )
    assert answer.content[0].type == "text"


@check
def tools_auto() -> None:
    checks.needs_tool_parser()
    answer = client.messages.create(
        model=MODEL,
        messages=USER,
        tools=[WEATHER],
        max_tokens=100,
        extra_body={"structured_outputs": {"regex": checks.CALL_REGEX}},
    )
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    checks.check_weather(call.input)  # type: ignore[arg-type]


@check
def tool_runner() -> None:
    """The package's own loop: it calls the function and sends its result back."""
    checks.needs_tool_parser()
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: str, days: int) -> str:
        """The weather of a city.

        Args:
            city: Which one.
            days: For how many days.
        """
        asked.append(city)
        return "rain"

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        messages=USER,
        tools=[weather],
        max_tokens=100,
        max_iterations=2,
        extra_body={"structured_outputs": {"regex": checks.CALL_REGEX}},
    )
    answers = list(runner)
    assert len(answers) == 2 and len(asked) >= 1, (answers, asked)
    first, second = (prompt_tokens(answer.usage) for answer in answers)
    assert second > first, "the call and its result were sent back behind all that was before"


@check
def parsed_into_models() -> None:
    answer = client.messages.parse(model=MODEL, messages=USER, max_tokens=200, output_format=Guest)
    assert isinstance(answer.parsed_output, Guest)
    with client.messages.stream(model=MODEL, messages=USER, max_tokens=200, output_format=Guest) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Guest)


def expect(kind: type[Exception], call: Any, words: str) -> Any:
    """Check that ``call`` raises exactly ``kind``, with ``words`` in its message."""
    try:
        call()
    except anthropic.AnthropicError as error:
        assert type(error) is kind, repr(error)
        assert words in str(error), str(error)
        return error
    raise AssertionError(f"no {kind.__name__}")


@check
def errors() -> None:
    def ask(**fields: Any) -> Any:
        asked = {"model": MODEL, "messages": USER, "max_tokens": 5, **fields}
        return lambda: client.messages.create(**asked)

    expect(anthropic.BadRequestError, ask(extra_body={"temperature": -1}), "temperature")
    expect(anthropic.BadRequestError, ask(messages=[]), "messages")
    expect(anthropic.BadRequestError, ask(max_tokens=10**6), "context")
    error = expect(anthropic.NotFoundError, ask(model="nobody"), "nobody")
    assert error.body["error"]["type"] == "not_found_error"
    expect(anthropic.NotFoundError, lambda: client.messages.batches.list(), "This server")
    expect(anthropic.APITimeoutError, ask(max_tokens=1500, timeout=0.1, extra_body={"ignore_eos": True}), "")


@check
def wrong_key() -> None:
    checks.needs_keys()
    stranger = client.with_options(api_key="wrong")
    expect(anthropic.AuthenticationError, stranger.models.list, "key")
    bearer = anthropic.Anthropic(base_url=checks.URL, auth_token=checks.KEY, max_retries=0)
    assert bearer.messages.count_tokens(model=MODEL, messages=USER).input_tokens > 5


@check
def used_up_quota() -> None:
    checks.needs_limited_key()
    limited = client.with_options(api_key=checks.LIMITED_KEY)

    def ask() -> Any:
        for _ in range(2):
            limited.messages.create(model=MODEL, messages=USER, max_tokens=1)

    expect(anthropic.RateLimitError, ask, "per minute")


@check
async def many_at_once_and_cancelled() -> None:
    async with anthropic.AsyncAnthropic(base_url=checks.URL, api_key=checks.KEY, max_retries=0) as many:

        async def one(index: int) -> str:
            async with many.messages.stream(model=MODEL, messages=USER, max_tokens=5 + index) as stream:
                return "".join([text async for text in stream.text_stream])

        assert all(await asyncio.gather(*map(one, range(16))))
        async with many.messages.stream(model=MODEL, messages=USER, max_tokens=1500) as stream:
            async for _ in stream.text_stream:
                break
        task = asyncio.create_task(many.messages.create(model=MODEL, messages=USER, max_tokens=1500))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(checks.wait_until_idle)


if __name__ == "__main__":
    checks.run(f"anthropic {anthropic.__version__}")
