"""``--structured-outputs-config``: how structured outputs are made (pure)."""

from __future__ import annotations

from typing import Literal

import msgspec


class StructuredOutputsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's settings, as far as they mean something here."""

    backend: Literal["auto", "guidance"] = "auto"
    """Always llguidance."""
    disable_any_whitespace: bool = False
    """Compact JSON: no blanks between its tokens."""
    disable_additional_properties: bool = False
    """Objects of a schema that does not say have no other properties."""
    enable_in_reasoning: bool = False
    """Reasoning follows the grammar, too, which leaves no room for any."""


def read_config(text: str) -> StructuredOutputsConfig:
    """
    Raises:
        ValueError: it is no JSON object with these settings.
    """
    try:
        return msgspec.json.decode(text, type=StructuredOutputsConfig)
    except msgspec.DecodeError as error:
        raise ValueError(f"--structured-outputs-config: {error}") from error
