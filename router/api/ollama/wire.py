"""Bodies of Ollama's ``/api/chat`` and ``/api/generate``, and the lines of their answers.

Durations are whole nanoseconds. Options that only set up a local run (``num_thread``, ``use_mmap`` ...) are
unknown fields here, and have no effect.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from router.openai_api import MOST, Int, TokenLogprob, WeightRange

REFUSED_CHANGES = {
    "/api/pull": ("POST", "download models"),
    "/api/push": ("POST", "upload models"),
    "/api/create": ("POST", "create models"),
    "/api/copy": ("POST", "copy models"),
    "/api/delete": ("DELETE", "delete models"),
    "/api/blobs/{digest}": ("POST", "store files"),
}
"""Refused paths of changes to models: the method, and what it would do."""

# ---- requests


class OllamaOptions(msgspec.Struct, kw_only=True):
    """``options``: sampling parameters."""

    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Int | None = None
    num_predict: Int | None = None
    """Most tokens of the answer; -1 and -2: up to the context length."""
    num_ctx: Annotated[int, Meta(ge=1, le=MOST)] | None = None
    """Context length that the client counts on."""
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Int | None = None
    """Tokens that the repeat penalty looks back on; -1: all."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: Int | None = None
    """Not supported, as the next two."""
    typical_p: float | None = None
    tfs_z: float | None = None


class OllamaRequest(msgspec.Struct, kw_only=True):
    """What both endpoints take."""

    model: str | None = None
    stream: bool | None = None
    """Streamed unless false."""
    format: Any = None
    """``json``, or a JSON schema."""
    options: OllamaOptions | None = None
    think: bool | str | None = None
    """Whether the model reasons; or how much: low, medium, high."""
    keep_alive: Any = None
    """No effect: the model stays loaded, and nothing is cut to fit."""
    truncate: Any = None
    shift: Any = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """Body of ``/api/chat``."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it only asks for the model to be loaded."""
        return not self.messages


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """Body of ``/api/generate``."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    """Whether the prompt goes to the model without a chat template."""
    suffix: Any = None
    """Not supported, as the next two."""
    template: Any = None
    context: Any = None
    images: Any = None
    """In base64."""

    @property
    def is_empty(self) -> bool:
        """Whether it only asks for the model to be loaded."""
        return not (self.prompt or self.images or self.suffix)


# ---- answers


class CalledFunction(msgspec.Struct):
    """Function of a tool call, with its position in the turn."""

    index: int
    name: str
    arguments: msgspec.Raw | dict[str, Any]


class OllamaCall(msgspec.Struct):
    """A tool call, always whole."""

    id: str
    function: CalledFunction


class OllamaMessage(msgspec.Struct):
    """Message of the assistant, whole or a part of it."""

    content: str
    role: str = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaLine(msgspec.Struct, kw_only=True):
    """What the lines of both endpoints have; counts and durations stand in the last one."""

    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    """From the request to its first token."""
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    """From the first token to the last."""
    system_fingerprint: str | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    weight_versions: list[WeightRange] | UnsetType = UNSET


class OllamaChatLine(OllamaLine, kw_only=True):
    """A line of an answer of ``/api/chat``."""

    message: OllamaMessage


class OllamaTextLine(OllamaLine, kw_only=True):
    """A line of an answer of ``/api/generate``."""

    response: str
    thinking: str | UnsetType = UNSET
