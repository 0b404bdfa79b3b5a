"""``--structured-outputs-config``: how structured outputs are made (pure)."""

from __future__ import annotations

import functools
from typing import Literal

import msgspec


class StructuredOutputsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's settings, as far as they mean something here."""

    backend: Literal["auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"] = "auto"
    """Always llguidance, whichever is asked for: what a grammar allows does not depend on it."""
    disable_any_whitespace: bool = False
    """Compact JSON: no blanks between its tokens."""
    disable_additional_properties: bool = False
    """Objects have no other properties, unless their schema allows them."""
    enable_in_reasoning: bool = False
    """Reasoning follows the grammar, too, which leaves no room for any."""
    reasoning_parser: str = ""
    reasoning_parser_plugin: str = ""

    def __post_init__(self) -> None:
        if self.reasoning_parser:
            raise ValueError(f"reasoning_parser: give --reasoning-parser {self.reasoning_parser} instead")
        if self.reasoning_parser_plugin:
            raise ValueError("reasoning_parser_plugin: no code of others runs in the server: leave it out")

    @property
    def ignored(self) -> str:
        """The warning about a backend that is not there; empty if none is needed."""
        if self.backend in ("auto", "guidance"):
            return ""
        return f"--structured-outputs-config.backend {self.backend} ignored: llguidance is the one there is"


@functools.lru_cache(maxsize=8)
def read_config(text: str) -> StructuredOutputsConfig:
    """
    Raises:
        ValueError: it is no JSON object with these settings.
    """
    try:
        return msgspec.json.decode(text, type=StructuredOutputsConfig)
    except msgspec.DecodeError as error:
        raise ValueError(f"--structured-outputs-config: {error}") from error
