"""The ``langchain-openai`` package with images: its own blocks and OpenAI's, streams, the responses API."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import checks
import pictures
from checks import check
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pictures import NUM_TOKENS, QUESTION, RAMP, STRIPES

PLACE: dict[str, Any] = {
    "model": checks.model(),
    "base_url": f"{checks.URL}/v1",
    "api_key": checks.KEY,
    "max_retries": 0,
    "temperature": 0,
    "max_completion_tokens": NUM_TOKENS,
}


def turns(picture: str) -> list[HumanMessage]:
    """The same turn with OpenAI's part, and with the package's own block."""
    text = {"type": "text", "text": QUESTION}
    block = {"type": "image", "base64": picture, "mime_type": "image/png"}
    return [HumanMessage(content=[text, each]) for each in (pictures.part(picture), block)]


@check
def chats_and_their_streams() -> None:
    chat = ChatOpenAI(**PLACE)
    for picture, expected in zip((STRIPES, RAMP), pictures.needs_sight(), strict=True):
        for turn in turns(picture):
            assert chat.invoke([turn]).text == expected
            assert "".join(chunk.text for chunk in chat.stream([turn])) == expected


@check
def responses_api() -> None:
    chat = ChatOpenAI(**PLACE, use_responses_api=True)
    for picture, expected in zip((STRIPES, RAMP), pictures.needs_sight(), strict=True):
        for turn in turns(picture):
            assert chat.invoke([turn]).text == expected


checks.run(f"langchain-openai {importlib.metadata.version('langchain-openai')}")
