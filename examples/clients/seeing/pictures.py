"""Two pictures, and the answers of the mesh itself about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checks

FOUND: dict[str, str] = json.loads((Path(__file__).parent / "pictures.json").read_text())
STRIPES, RAMP = FOUND["stripes"], FOUND["ramp"]
"""PNG files of 32 x 32 pixels in base64."""
QUESTION = "What is this?"
NUM_TOKENS = 24


def url(picture: str) -> str:
    return f"data:image/png;base64,{picture}"


def part(picture: str) -> dict[str, Any]:
    """A picture as chats have it."""
    return {"type": "image_url", "image_url": {"url": url(picture)}}


def turn(*pictures: str) -> dict[str, Any]:
    """The question, and pictures behind it."""
    return {"role": "user", "content": [{"type": "text", "text": QUESTION}, *map(part, pictures)]}


def answer(*messages: dict[str, Any]) -> str:
    """What the mesh answers to a chat that no client had its hands on; greedy."""
    asked = {
        "model": checks.model(),
        "messages": messages,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
    }
    return str(checks.post("/v1/chat/completions", asked)["choices"][0]["message"]["content"])


def needs_sight() -> tuple[str, str]:
    """Answers about both pictures.

    Skips the check where the model takes text only.
    """
    card = next(each for each in checks.get("/v1/models")["data"] if each["id"] == checks.model())
    if "image" not in card.get("input_modalities", ()):
        raise checks.Skipped("the mesh has no model that takes images")
    both = answer(turn(STRIPES)), answer(turn(RAMP))
    assert both[0] != both[1], "the pictures make no difference"
    return both
