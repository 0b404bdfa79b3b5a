"""The ``openai`` package: completions, chat, responses; streams, tools, schemas, errors, async."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Literal

import checks
import openai
from checks import OPENING, check
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=f"{checks.URL}/v1", api_key=checks.KEY, max_retries=0, timeout=120)
MODEL = checks.model()
USER: list[Any] = [{"role": "user", "content": "Who was at the ball?"}]
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": checks.WEATHER_SCHEMA, "strict": True},
}


class Guest(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    rank: Literal["captain", "colonel", "none"]


class Guests(BaseModel):
    guests: list[Guest] = Field(min_length=1, max_length=3)


# ---- models and completions


@check
def models() -> None:
    assert MODEL in [each.id for each in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def counts(usage: Any) -> tuple[int, int, int]:
    """Token counts without those from the cache, which vary between calls."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


@check
def completion_with_usage() -> None:
    answer = client.completions.create(model=MODEL, prompt=OPENING, max_tokens=20, seed=1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 20
    assert answer.choices[0].finish_reason == "length"


@check
def completion_streams_say_the_same() -> None:
    fixed: dict[str, Any] = {"model": MODEL, "prompt": OPENING, "max_tokens": 20, "seed": 1}
    whole = client.completions.create(**fixed)
    chunks = list(client.completions.create(**fixed, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert counts(chunks[-1].usage) == counts(whole.usage)


@check
def completions_of_lists_and_token_ids() -> None:
    ids = checks.post("/tokenize", {"prompt": OPENING})["tokens"]
    fixed: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "temperature": 0}
    texts = client.completions.create(prompt=[OPENING, "Elizabeth"], **fixed).choices
    from_ids = client.completions.create(prompt=[ids, ids], **fixed).choices
    assert [choice.index for choice in texts] == [0, 1]
    assert [choice.text for choice in from_ids] == [texts[0].text] * 2


@check
def completion_with_echo_and_logprobs() -> None:
    answer = client.completions.create(model=MODEL, prompt=OPENING, max_tokens=2, echo=True, logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens and found.token_logprobs and found.top_logprobs
    assert "".join(found.tokens) == answer.choices[0].text
    assert found.token_logprobs[0] is None and all(value < 0 for value in found.token_logprobs[1:])


@check
def samples_stops_and_biases() -> None:
    fixed: dict[str, Any] = {"model": MODEL, "prompt": OPENING, "seed": 3, "max_tokens": 60}
    answer = client.completions.create(**fixed, n=3, stop=["."])
    assert len({choice.text for choice in answer.choices}) > 1
    assert not any("." in choice.text for choice in answer.choices)
    biased = client.completions.create(
        **fixed | {"max_tokens": 4}, logit_bias={"300": 100}, extra_body={"return_token_ids": True}
    )
    assert biased.choices[0].token_ids == [300] * 4  # type: ignore[attr-defined]


# ---- chat


@check
def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, max_completion_tokens=12, seed=1)
    assert answer.choices[0].message.content
    assert answer.choices[0].message.role == "assistant"
    parts = [{"role": "user", "content": [{"type": "text", "text": USER[0]["content"]}]}]
    again = client.chat.completions.create(model=MODEL, messages=parts, max_tokens=12, seed=1)  # type: ignore[arg-type]
    assert again.choices[0].message.content == answer.choices[0].message.content


@check
def chat_streams_say_the_same() -> None:
    fixed: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 20, "seed": 1, "n": 2}
    whole = client.chat.completions.create(**fixed)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**fixed, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        usage = chunk.usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert counts(usage) == counts(whole.usage)


@check
def chat_stream_helper() -> None:
    word: Any = {"structured_outputs": {"regex": "[A-Z][a-z]{3,9}"}}  # a short answer that ends by itself
    with client.chat.completions.stream(
        model=MODEL, messages=USER, logprobs=True, max_tokens=40, extra_body=word
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds, kinds
    assert final.choices[0].message.content


@check
def chat_logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=3, logprobs=True, top_logprobs=2
    )
    found = answer.choices[0].logprobs
    assert found is not None and found.content is not None
    assert [len(entry.top_logprobs) for entry in found.content] == [2, 2, 2]
    text = b"".join(bytes(entry.bytes or []) for entry in found.content).decode(errors="replace")
    assert text == answer.choices[0].message.content


@check
def raw_and_streaming_responses() -> None:
    fixed: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 3}
    raw = client.chat.completions.with_raw_response.create(**fixed)
    assert raw.parse().choices[0].message.content is not None
    with client.chat.completions.with_streaming_response.create(**fixed) as response:
        assert json.loads(response.read())["object"] == "chat.completion"


# ---- structured outputs


@check
def chat_parse() -> None:
    fixed: dict[str, Any] = {"model": MODEL, "messages": USER, "response_format": Guests}
    parsed = client.chat.completions.parse(**fixed, max_tokens=400).choices[0].message.parsed
    assert isinstance(parsed, Guests)
    parsed = client.beta.chat.completions.parse(**fixed, max_tokens=400).choices[0].message.parsed
    assert isinstance(parsed, Guests)
    try:
        client.chat.completions.parse(**fixed, max_tokens=4)
    except openai.LengthFinishReasonError:
        return
    raise AssertionError("an answer that was cut is no Guests")


@check
def chat_parse_in_a_stream() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=USER, response_format=Guest, max_tokens=200
    ) as stream:
        for event in stream:
            assert event.type != "error"
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Guest)


@check
def json_mode() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=USER,
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=400,
        extra_body={"repetition_penalty": 1.3},
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


# ---- tools


@check
def tools_required_named_and_none() -> None:
    fixed: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": [WEATHER], "max_tokens": 200}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = client.chat.completions.create(**fixed, tool_choice=choice, parallel_tool_calls=False)
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function" and call.function.name == "weather"
        checks.check_weather(call.function.arguments)
        assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
    answer = client.chat.completions.create(**fixed | {"max_tokens": 5}, tool_choice="none")
    assert not answer.choices[0].message.tool_calls


@check
def tools_auto() -> None:
    checks.needs_tool_parser()
    fixed: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": [WEATHER], "tool_choice": "auto"}
    text = client.chat.completions.create(**fixed, max_tokens=5).choices[0]
    assert text.message.content and not text.message.tool_calls
    fixed["extra_body"] = {"structured_outputs": {"regex": checks.CALL_REGEX}}
    answer = client.chat.completions.create(**fixed, max_tokens=100).choices[0]
    assert answer.finish_reason == "tool_calls" and not answer.message.content
    checks.check_weather(answer.message.tool_calls[0].function.arguments)  # type: ignore[index,union-attr]
    with client.chat.completions.stream(**fixed, max_tokens=100) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    checks.check_weather(done[0].arguments)


@check
def tool_results_go_back() -> None:
    fixed: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "tools": [WEATHER]}
    first = client.chat.completions.create(
        **fixed, messages=USER, tool_choice="required", parallel_tool_calls=False
    )
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}  # type: ignore[index]
    answer = client.chat.completions.create(
        **fixed, messages=[*USER, message, result], tool_choice="none", seed=1
    )
    assert answer.choices[0].message.content


@check
def tools_parsed_into_models() -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=USER,
        max_tokens=300,
        tools=[openai.pydantic_function_tool(Guest)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Guest)


# ---- responses


@check
def responses() -> None:
    fixed: dict[str, Any] = {"model": MODEL, "input": "Who was at the ball?", "temperature": 0}
    answer = client.responses.create(**fixed, max_output_tokens=12, instructions="Be brief.")
    assert answer.output_text and answer.status == "incomplete"
    assert answer.usage is not None and answer.usage.output_tokens == 12
    with client.responses.stream(**fixed, max_output_tokens=12, instructions="Be brief.") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == answer.output_text
    word: Any = {"structured_outputs": {"regex": "[A-Z][a-z]{3,9}"}}  # a short answer that ends by itself
    with client.responses.stream(**fixed, extra_body=word) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == text and final.status == "completed"
    counted = client.responses.input_tokens.count(model=MODEL, input=fixed["input"], instructions="Be brief.")
    assert counted.input_tokens == answer.usage.input_tokens


@check
def responses_parse() -> None:
    answer = client.responses.parse(
        model=MODEL, input="Who was at the ball?", text_format=Guests, max_output_tokens=400
    )
    assert isinstance(answer.output_parsed, Guests)


@check
def responses_call_tools() -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": checks.WEATHER_SCHEMA, "strict": True}
    first = client.responses.create(
        model=MODEL, input=USER, tools=[tool], tool_choice="required", max_output_tokens=200,
        parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = [item for item in first.output if item.type == "function_call"]
    checks.check_weather(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(
        model=MODEL, input=[*USER, *first.output, result], tools=[tool], tool_choice="none",
        max_output_tokens=5,
    )  # type: ignore[list-item,misc]  # fmt: skip
    assert second.output_text


@check
def responses_are_not_kept_unless_asked() -> None:
    answer = client.responses.create(model=MODEL, input="Who?", max_output_tokens=2)
    expect(openai.NotFoundError, lambda: client.responses.retrieve(answer.id), "no answer of this id")


# ---- errors


def expect(kind: type[Exception], call: Any, words: str) -> Any:
    """Check that ``call`` raises exactly ``kind``, with ``words`` in its message."""
    try:
        call()
    except openai.OpenAIError as error:
        assert type(error) is kind, repr(error)
        assert words in str(error), str(error)
        return error
    raise AssertionError(f"no {kind.__name__}")


@check
def bad_requests() -> None:
    def ask(**fields: Any) -> Any:
        return lambda: client.chat.completions.create(**{"model": MODEL, "messages": USER, **fields})

    error = expect(openai.BadRequestError, ask(temperature=-1), "temperature")
    assert error.param == "temperature" and error.code == "400"
    expect(openai.BadRequestError, ask(messages=[]), "messages")
    expect(openai.BadRequestError, ask(max_tokens=10**6), "context")
    expect(openai.BadRequestError, ask(messages=[{"role": "user", "content": "ball " * 9000}]), "context")
    expect(openai.NotFoundError, ask(model="nobody"), "nobody")
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    expect(openai.BadRequestError, ask(messages=[{"role": "user", "content": [image]}]), "image_url")


@check
def batches() -> None:
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": MODEL, "messages": USER, "max_tokens": 8, "seed": number},
        }
        for number in range(3)
    ]
    file = client.files.create(
        file=("requests.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch"
    )
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    end = time.monotonic() + 120
    while batch.status not in ("completed", "failed", "expired", "cancelled") and time.monotonic() < end:
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.output_file_id is not None, batch
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert [each["custom_id"] for each in answers] == ["line-0", "line-1", "line-2"]
    assert all(each["response"]["body"]["usage"]["completion_tokens"] for each in answers)
    client.files.delete(file.id)


@check
def answers_that_are_kept() -> None:
    made = client.responses.create(model=MODEL, input="She", background=True, max_output_tokens=16)
    seen = list(client.responses.retrieve(made.id, stream=True))
    assert seen[-1].type in ("response.completed", "response.incomplete")
    assert list(client.responses.retrieve(made.id, stream=True, starting_after=2)) == seen[3:]
    talk = client.conversations.create()
    client.responses.create(model=MODEL, input="She", conversation=talk.id, max_output_tokens=8)
    assert len(list(client.conversations.items.list(talk.id))) == 2
    client.conversations.delete(talk.id)
    client.responses.delete(made.id)


@check
def what_is_not_served() -> None:
    for call in (
        lambda: client.moderations.create(input="She"),
        lambda: client.images.generate(prompt="a ball"),
        lambda: client.audio.speech.create(model=MODEL, input="She", voice="alloy"),
        lambda: client.fine_tuning.jobs.list(),
    ):
        expect(openai.NotFoundError, call, "This server")


@check
def wrong_key() -> None:
    checks.needs_keys()
    stranger = client.with_options(api_key="wrong")
    expect(openai.AuthenticationError, stranger.models.list, "key")


@check
def used_up_quota() -> None:
    checks.needs_limited_key()
    limited = client.with_options(api_key=checks.LIMITED_KEY)

    def ask() -> Any:
        for _ in range(2):
            limited.completions.create(model=MODEL, prompt="She", max_tokens=1)

    error = expect(openai.RateLimitError, ask, "per minute")
    assert int(error.response.headers["retry-after"]) >= 1


@check
def timeouts() -> None:
    fixed: dict[str, Any] = {"model": MODEL, "prompt": "She", "max_tokens": 1500}
    fixed["extra_body"] = {"ignore_eos": True}
    expect(openai.APITimeoutError, lambda: client.completions.create(**fixed, timeout=0.3), "timed out")
    fixed["extra_body"] = {"ignore_eos": True, "timeout": 0.3}
    expect(openai.InternalServerError, lambda: client.completions.create(**fixed), "0.3 seconds")
    checks.wait_until_idle()


@check
def errors_inside_of_streams() -> None:
    def ask() -> Any:
        return list(
            client.completions.create(
                model=MODEL, prompt="She", max_tokens=1500, stream=True,
                extra_body={"ignore_eos": True, "timeout": 0.5},
            )
        )  # fmt: skip

    expect(openai.APIError, ask, "0.5 seconds")


# ---- async, cancellation


@check
async def many_at_once() -> None:
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=checks.KEY, max_retries=0) as many:

        async def one(index: int) -> str:
            stream = await many.chat.completions.create(
                model=MODEL, messages=USER, max_tokens=10 + index, seed=index, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

        texts = await asyncio.gather(*map(one, range(16)))
        assert all(texts) and len(set(texts)) > 8
        parsed = await many.chat.completions.parse(
            model=MODEL, messages=USER, response_format=Guest, max_tokens=200
        )
        assert isinstance(parsed.choices[0].message.parsed, Guest)
        assert MODEL in [each.id async for each in many.models.list()]


@check
async def cancelled_requests_leave_nothing() -> None:
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=checks.KEY, max_retries=0) as many:
        fixed: dict[str, Any] = {"model": MODEL, "prompt": "She", "max_tokens": 1500}
        fixed["extra_body"] = {"ignore_eos": True}
        task = asyncio.create_task(many.completions.create(**fixed))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        stream = await many.completions.create(**fixed, stream=True)
        async with stream:
            async for _ in stream:
                break
    await asyncio.to_thread(checks.wait_until_idle)


if __name__ == "__main__":
    checks.run(f"openai {openai.__version__}")
