"""The ``litellm`` package through four of its providers: streams, tools, schemas, logprobs, errors, async."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else importing it asks the network for prices

import asyncio
import copy
import importlib.metadata
from typing import Any, Literal

import checks
import litellm
from checks import check
from pydantic import BaseModel, Field

litellm.suppress_debug_info = True
MODEL = checks.model()
USER: list[Any] = [{"role": "user", "content": "Who was at the ball?"}]
PLACE: dict[str, Any] = {"api_base": f"{checks.URL}/v1", "api_key": checks.KEY, "num_retries": 0}
PROVIDERS = ("hosted_vllm", "openai")


def weather() -> Any:
    """A tool, made anew each time: litellm changes what it is given."""
    function = {"name": "weather", "parameters": copy.deepcopy(checks.WEATHER_SCHEMA)}
    return {"type": "function", "function": function}


class Guest(BaseModel, extra="forbid"):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    rank: Literal["captain", "colonel", "none"]


@check
def chat_with_usage_and_its_streams() -> None:
    for provider in PROVIDERS:
        fixed: dict[str, Any] = {
            "model": f"{provider}/{MODEL}",
            "messages": USER,
            "max_tokens": 12,
            "seed": 1,
        }
        whole = litellm.completion(**PLACE, **fixed)
        assert whole.choices[0].message.content and whole.usage.completion_tokens == 12, provider
        chunks = list(
            litellm.completion(**PLACE, **fixed, stream=True, stream_options={"include_usage": True})
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content, provider
        rebuilt = litellm.stream_chunk_builder(chunks, messages=USER)
        assert rebuilt.usage.completion_tokens == 12


@check
def text_completions() -> None:
    fixed: dict[str, Any] = {"prompt": checks.OPENING, "max_tokens": 12, "temperature": 0, "logprobs": 2}
    answer = litellm.text_completion(model=f"text-completion-openai/{MODEL}", **PLACE, **fixed)
    assert answer.choices[0].text
    assert len(answer.choices[0].logprobs.token_logprobs) == 12


@check
def through_anthropics_words() -> None:
    place = {"api_base": checks.URL, "api_key": checks.KEY, "num_retries": 0}
    fixed: dict[str, Any] = {"model": f"anthropic/{MODEL}", "messages": USER, "max_tokens": 12}
    answer = litellm.completion(**place, **fixed)
    assert answer.choices[0].message.content and answer.usage.completion_tokens == 12
    chunks = list(litellm.completion(**place, **fixed, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    called = litellm.completion(
        **place,
        **fixed | {"max_tokens": 200},
        tools=[weather()],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    checks.check_weather(called.choices[0].message.tool_calls[0].function.arguments)


@check
def responses() -> None:
    fixed: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "input": "Who was at the ball?",
        "max_output_tokens": 12,
    }
    answer = litellm.responses(**PLACE, **fixed)
    assert answer.output[0].content[0].text
    events = [event.type for event in litellm.responses(**PLACE, **fixed, stream=True)]
    assert "response.output_text.delta" in events


@check
def logprobs() -> None:
    answer = litellm.completion(
        f"openai/{MODEL}", **PLACE, messages=USER, max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert [len(entry.top_logprobs) for entry in answer.choices[0].logprobs.content] == [2, 2, 2]


@check
def schemas() -> None:
    for provider in PROVIDERS:
        fixed: dict[str, Any] = {"model": f"{provider}/{MODEL}", "messages": USER, "max_tokens": 300}
        answer = litellm.completion(**PLACE, **fixed, response_format=Guest)
        assert Guest.model_validate_json(answer.choices[0].message.content), provider
    answer = litellm.completion(**PLACE, **fixed, guided_json=checks.WEATHER_SCHEMA)
    checks.check_weather(answer.choices[0].message.content)


@check
def tools() -> None:
    for provider in PROVIDERS:
        fixed: dict[str, Any] = {"model": f"{provider}/{MODEL}", "messages": USER, "max_tokens": 300}
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            answer = litellm.completion(
                **PLACE, **fixed, tools=[weather()], tool_choice=choice, parallel_tool_calls=False
            )
            (call,) = answer.choices[0].message.tool_calls
            if provider == "openai":
                checks.check_weather(call.function.arguments)
            else:  # there litellm takes additionalProperties out, so a model may add some without end
                assert call.function.name == "weather"
                assert call.function.arguments.startswith("{")
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    fixed["max_tokens"] = 5
    answer = litellm.completion(
        **PLACE, **fixed | {"messages": [*USER, message, result]}, tools=[weather()], tool_choice="none"
    )
    assert answer.choices[0].message.content


@check
def tools_auto_in_a_stream() -> None:
    checks.needs_tool_parser()
    chunks = list(
        litellm.completion(
            f"hosted_vllm/{MODEL}", **PLACE, messages=USER, tools=[weather()], max_tokens=100, stream=True,
            extra_body={"structured_outputs": {"regex": checks.CALL_REGEX}},
        )
    )  # fmt: skip
    rebuilt = litellm.stream_chunk_builder(chunks, messages=USER)
    checks.check_weather(rebuilt.choices[0].message.tool_calls[0].function.arguments)


def expect(kind: type[Exception], call: Any, words: str) -> None:
    """Check that ``call`` raises exactly ``kind``, with ``words`` in its message."""
    try:
        call()
    except Exception as error:
        assert type(error) is kind, repr(error)
        assert words in str(error), str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")


@check
def errors() -> None:
    def ask(**fields: Any) -> Any:
        asked = {"model": f"openai/{MODEL}", "messages": USER, "max_tokens": 5, **PLACE, **fields}
        return lambda: litellm.completion(**asked)

    expect(litellm.BadRequestError, ask(temperature=-1), "temperature")
    expect(litellm.NotFoundError, ask(model="openai/nobody"), "nobody")
    long = [{"role": "user", "content": "ball " * 9000}]
    expect(litellm.ContextWindowExceededError, ask(messages=long), "context")
    expect(litellm.Timeout, ask(max_tokens=1500, timeout=0.2, extra_body={"ignore_eos": True}), "")
    expect(
        litellm.BadRequestError,
        lambda: litellm.embedding(f"openai/{MODEL}", **PLACE, input=["She"]),
        "--runner pooling",
    )
    if checks.KEY != "none":
        expect(litellm.AuthenticationError, ask(api_key="wrong"), "key")
    if checks.LIMITED_KEY:
        limited = ask(api_key=checks.LIMITED_KEY)
        expect(litellm.RateLimitError, lambda: [limited() for _ in range(2)], "per minute")


@check
async def many_at_once_and_cancelled() -> None:
    fixed: dict[str, Any] = {"model": f"hosted_vllm/{MODEL}", "messages": USER, **PLACE}
    answers = await asyncio.gather(*(litellm.acompletion(**fixed, max_tokens=8) for _ in range(8)))
    assert all(answer.choices[0].message.content for answer in answers)
    stream = await litellm.acompletion(**fixed, max_tokens=1500, stream=True)
    async for _ in stream:
        break
    await stream.aclose()
    task = asyncio.create_task(litellm.acompletion(**fixed, max_tokens=1500))
    await asyncio.sleep(0.3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(checks.wait_until_idle)


@check
def its_router() -> None:
    """litellm goes on with a model that exists where the first does not."""
    wrong = {"model": "openai/nobody", **PLACE}
    right = {"model": f"openai/{MODEL}", **PLACE}
    router = litellm.Router(
        model_list=[
            {"model_name": "first", "litellm_params": wrong},
            {"model_name": "second", "litellm_params": right},
        ],
        fallbacks=[{"first": ["second"]}],
    )
    assert router.completion("first", messages=USER, max_tokens=5).choices[0].message.content


if __name__ == "__main__":
    checks.run(f"litellm {importlib.metadata.version('litellm')}")
