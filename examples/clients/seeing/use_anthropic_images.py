"""The ``anthropic`` package with images: messages, streams, token counts, results of tools, errors."""

from __future__ import annotations

from typing import Any

import anthropic
import checks
import pictures
from checks import check
from pictures import NUM_TOKENS, QUESTION, RAMP, STRIPES

client = anthropic.Anthropic(base_url=checks.URL, api_key=checks.KEY, max_retries=0, timeout=120)
MODEL = checks.model()
FIXED: dict[str, Any] = {"model": MODEL, "max_tokens": NUM_TOKENS, "extra_body": {"temperature": 0}}


def block(picture: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture}}


def turn(picture: str) -> Any:
    return {"role": "user", "content": [{"type": "text", "text": QUESTION}, block(picture)]}


@check
def messages_and_their_streams() -> None:
    for picture, expected in zip((STRIPES, RAMP), pictures.needs_sight(), strict=True):
        assert client.messages.create(**FIXED, messages=[turn(picture)]).content[0].text == expected
        with client.messages.stream(**FIXED, messages=[turn(picture)]) as stream:
            assert "".join(stream.text_stream) == expected


@check
def tokens_are_counted() -> None:
    pictures.needs_sight()
    counted = client.messages.count_tokens(model=MODEL, messages=[turn(RAMP)]).input_tokens
    usage = client.messages.create(**FIXED, messages=[turn(RAMP)]).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    bare: Any = [{"role": "user", "content": QUESTION}]
    assert counted > client.messages.count_tokens(model=MODEL, messages=bare).input_tokens


@check
def results_of_tools() -> None:
    pictures.needs_sight()
    said = {"role": "assistant", "content": "I look."}
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [block(STRIPES)]}
    asked: Any = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "text", "text": said["content"]}, call]},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(**FIXED, messages=asked)
    shown = {"role": "tool", "tool_call_id": "toolu_1", "content": [pictures.part(STRIPES)]}
    expected = pictures.answer({"role": "user", "content": "Look."}, said, shown)
    assert answer.content[0].text == expected


@check
def errors() -> None:
    pictures.needs_sight()
    try:
        client.messages.create(**FIXED, messages=[turn("aGVsbG8=")])
    except anthropic.BadRequestError as error:
        assert "messages[0].content[1]" in str(error), error
    else:
        raise AssertionError("a text is no picture")


checks.run(f"anthropic {anthropic.__version__}")
