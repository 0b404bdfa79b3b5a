"""The ``openai`` package with images: chats, streams, responses, results of tools, errors."""

from __future__ import annotations

from typing import Any

import checks
import openai
import pictures
from checks import check
from pictures import NUM_TOKENS, QUESTION, RAMP, STRIPES

client = openai.OpenAI(base_url=f"{checks.URL}/v1", api_key=checks.KEY, max_retries=0, timeout=120)
MODEL = checks.model()
FIXED: dict[str, Any] = {"model": MODEL, "temperature": 0}
LOOKED: list[Any] = [{"role": "user", "content": "Look."}]


def seen(picture: str) -> dict[str, Any]:
    """A picture as responses have it."""
    return {"type": "input_image", "image_url": pictures.url(picture), "detail": "auto"}


@check
def chats_and_their_streams() -> None:
    for picture, expected in zip((STRIPES, RAMP), pictures.needs_sight(), strict=True):
        asked: Any = {**FIXED, "messages": [pictures.turn(picture)], "max_tokens": NUM_TOKENS}
        assert client.chat.completions.create(**asked).choices[0].message.content == expected
        chunks = client.chat.completions.create(**asked, stream=True)
        assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == expected


@check
def responses() -> None:
    for picture, expected in zip((STRIPES, RAMP), pictures.needs_sight(), strict=True):
        content = [{"type": "input_text", "text": QUESTION}, seen(picture)]
        asked: Any = {**FIXED, "input": [{"role": "user", "content": content}]}
        assert client.responses.create(**asked, max_output_tokens=NUM_TOKENS).output_text == expected


@check
def results_of_tools() -> None:
    pictures.needs_sight()
    asked: Any = [*LOOKED, {"role": "tool", "tool_call_id": "1", "content": [pictures.part(RAMP)]}]
    expected = pictures.answer(*asked)
    answer = client.chat.completions.create(**FIXED, messages=asked, max_tokens=NUM_TOKENS)
    assert answer.choices[0].message.content == expected
    outputs: Any = [*LOOKED, {"type": "function_call_output", "call_id": "1", "output": [seen(RAMP)]}]
    response = client.responses.create(**FIXED, input=outputs, max_output_tokens=NUM_TOKENS)
    assert response.output_text == expected


@check
def errors() -> None:
    pictures.needs_sight()
    for wrong in ("data:image/png;base64,aGVsbG8=", "https://example.com/a.png"):
        asked: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": wrong}}]}]
        try:
            client.chat.completions.create(**FIXED, messages=asked)
        except openai.BadRequestError as error:
            assert error.param == "messages[0].content[0]", error
            continue
        raise AssertionError(wrong)


checks.run(f"openai {openai.__version__}")
