"""The ``ollama`` package: chats, texts, streams, schemas, tools, models, errors, async, cancellation."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import checks
import ollama
from checks import check

MODEL = checks.model()
USER: list[Any] = [{"role": "user", "content": "Who was at the ball?"}]
PLACE: dict[str, Any] = {"host": checks.URL, "headers": {"Authorization": f"Bearer {checks.KEY}"}}
FEW: dict[str, Any] = {"num_predict": 12, "temperature": 0}
client = ollama.Client(**PLACE)


@check
def chat_and_its_stream() -> None:
    whole = client.chat(MODEL, USER, options=FEW)
    assert whole.message.content and (whole.eval_count, whole.done_reason) == (12, "length")
    assert whole.total_duration >= whole.eval_duration > 0 and whole.prompt_eval_count > 0
    parts = list(client.chat(MODEL, USER, stream=True, options=FEW))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert parts[-1].done and parts[-1].eval_count == 12 and len(parts) > 2


@check
def generation_and_its_stream() -> None:
    whole = client.generate(MODEL, checks.OPENING, raw=True, options=FEW)
    parts = list(client.generate(MODEL, checks.OPENING, raw=True, stream=True, options=FEW))
    assert "".join(part.response for part in parts) == whole.response != ""
    assert client.generate(MODEL, "Hello", system="Be brief.", options=FEW).response
    assert client.generate(MODEL).done_reason == "load"


@check
def equal_seeds_give_equal_texts() -> None:
    drawn = {
        client.chat(MODEL, USER, options={"seed": 7, "num_predict": 12}).message.content for _ in range(2)
    }
    assert len(drawn) == 1


@check
def formats() -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}},
        "required": ["age"],
        "additionalProperties": False,
    }
    found = json.loads(client.chat(MODEL, USER, format=schema, options={"num_predict": 60}).message.content)
    assert 0 <= found["age"] <= 120


@check
def tools() -> None:
    checks.needs_tool_parser()

    def weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: Its name.
        """
        return "rain in " + city

    whole = client.chat(MODEL, USER, tools=[weather], options=FEW)
    assert whole.message.content
    called = {"function": {"name": "weather", "arguments": {"city": "Bath"}}}
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_name": "weather", "content": weather("Bath")},
    ]
    assert client.chat(MODEL, messages, options=FEW).message.content


@check
def models() -> None:
    assert MODEL in [each.model for each in client.list().models]
    assert MODEL in [each.model for each in client.ps().models]
    assert "completion" in client.show(MODEL).capabilities


def expect(status: int, call: Any, words: str) -> None:
    """Check that ``call`` raises the client's error of this status, with ``words`` in it."""
    try:
        call()
    except ollama.ResponseError as error:
        assert error.status_code == status and words in error.error, repr(error)
    else:
        raise AssertionError("no error")


@check
def errors() -> None:
    expect(404, lambda: client.chat("nobody", USER), "nobody")
    expect(400, lambda: client.chat(MODEL, USER, options={"temperature": -1}), "temperature")
    expect(400, lambda: client.chat(MODEL, USER, options={"num_ctx": 10**6}), "num_ctx")
    expect(400, lambda: client.pull(MODEL), "download")
    expect(400, lambda: client.delete(MODEL), "delete")
    if checks.KEY != "none":
        expect(401, lambda: ollama.Client(host=checks.URL).chat(MODEL, USER), "key")


@check
async def async_and_cancelled() -> None:
    asynchronous = ollama.AsyncClient(**PLACE)
    assert (await asynchronous.chat(MODEL, USER, options=FEW)).message.content
    async for _ in await asynchronous.generate(MODEL, "Hello", stream=True, options={"num_predict": 1000}):
        break
    await asynchronous._client.aclose()
    checks.wait_until_idle()


if __name__ == "__main__":
    checks.run(f"ollama {importlib.metadata.version('ollama')}")
