"""Prompt of a request: token ids, and the text that an answer may repeat."""

from __future__ import annotations

import msgspec

from engine.prompt_images import PromptImage


class PromptText(msgspec.Struct, frozen=True):
    """One prompt as token ids, with its text if the client gave or wants it."""

    ids: list[int]
    text: str = ""
    offsets: list[int] | None = None
    """Where in the text each token begins, if requested and the client gave the text."""
    images: tuple[PromptImage, ...] = ()


NO_TEXT = PromptText([])
"""Stands for a prompt that no answer repeats."""
