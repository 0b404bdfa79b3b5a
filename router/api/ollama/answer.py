"""Answers of Ollama's ``/api/chat`` and ``/api/generate``: lines of JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from router.api.answers import MARK, Answer, AnswerFacts, encode
from router.api.capsules import with_capsule
from router.api.items import Closed, ItemEvent, ItemKind, ItemSequence, TextAdded, arguments_object
from router.api.logprobs import LogprobShapes
from router.api.ollama.errors import error_body
from router.api.ollama.wire import (
    CalledFunction,
    OllamaCall,
    OllamaChatLine,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaLine,
    OllamaMessage,
    OllamaTextLine,
)
from router.api.understanding import Understood
from router.errors import ApiError
from router.openai_api import ChatRequest, TokenLogprob
from router.text.output_stream import OutputStream, TextPiece

OllamaAsked = OllamaChatRequest | OllamaGenerateRequest


class OllamaAnswer(Answer):
    """One message or text, whole or in lines; the last line has counts and durations."""

    content_type: ClassVar[str] = "application/x-ndjson"
    comment: ClassVar[bytes] = b""

    def __init__(
        self, asked: OllamaAsked, understood: Understood, arrival: float, facts: AnswerFacts
    ) -> None:
        """``arrival``: when the request came, on the clock of ``time.perf_counter``."""
        super().__init__(facts)
        self.model = asked.model or facts.model
        wanted = understood.wanted
        (self._sample,) = self.samples
        self._is_chat = isinstance(asked, OllamaChatRequest)
        self._arrival = arrival
        self._created_at = timestamp(self.created)
        self._wants_logprobs = asked.logprobs is True
        self._shapes = LogprobShapes(understood.model.tokenizer, asked.top_logprobs or 0)
        turn_format = understood.turn_format
        is_plain = turn_format.is_plain or not isinstance(wanted, ChatRequest)
        self._sequence = None if is_plain else ItemSequence(turn_format.reader(self._sample.prompt_text))
        self._num_calls = 0
        self._finish_reason: str | None = None
        self._frame: tuple[bytes, bytes] | None = None

    def whole(self, outputs: Sequence[Sequence[TextPiece]]) -> bytes:
        parts = [self._parts(piece) for piece in outputs[0]]
        line = self._line(
            "".join(content for content, _, _ in parts),
            "".join(thinking for _, thinking, _ in parts),
            [call for _, _, calls in parts for call in calls],
        )
        if self._wants_logprobs:
            line.logprobs = [each for piece in outputs[0] for each in self._logprobs(piece)]
        return encode(self._ended(line))

    def chunk(self, sample: OutputStream, piece: TextPiece, *, first: bool) -> bytes:
        content, thinking, calls = self._parts(piece)
        if self._wants_logprobs:
            line = self._line(content, thinking, calls)
            line.logprobs = self._logprobs(piece)
            return encode(line) + b"\n"
        if thinking or calls:
            return encode(self._line(content, thinking, calls)) + b"\n"
        before, after = self._framing()
        return before + encode(content) + after if content else b""

    def frame(self, sample: OutputStream) -> tuple[bytes, bytes] | None:
        return None if self._wants_logprobs or self._sequence is not None else self._framing()

    def closing(self) -> bytes:
        return encode(self._ended(self._line("", "", []))) + b"\n"

    def closing_with(self, capsule: bytes) -> bytes:
        return with_capsule(self.closing().removesuffix(b"\n"), capsule) + b"\n"

    def failure(self, error: ApiError) -> bytes:
        return error_body(error) + b"\n"

    def _framing(self) -> tuple[bytes, bytes]:
        """Bytes around the text of a line that has nothing else."""
        if self._frame is None:
            before, _, after = (encode(self._line(MARK, "", [])) + b"\n").partition(encode(MARK))
            self._frame = before, after
        return self._frame

    def _parts(self, piece: TextPiece) -> tuple[str, str, list[OllamaCall]]:
        """Content, reasoning and whole tool calls that a piece adds."""
        ended = piece.finish_reason is not None
        if ended:
            self._finish_reason = piece.finish_reason
        if self._sequence is None:
            return piece.text, "", []
        content, thinking = "", ""
        calls: list[OllamaCall] = []
        for event in self._sequence.read(piece.parts, ended=ended):
            match event:
                case TextAdded(item, text) if item.kind is ItemKind.TEXT:
                    content += text
                case TextAdded(item, text) if item.kind is ItemKind.REASONING:
                    thinking += text
                case Closed(item) if item.kind is ItemKind.CALL:
                    calls.append(self._call(event))
        return content, thinking, calls

    def _call(self, event: ItemEvent) -> OllamaCall:
        item = event.item
        arguments = arguments_object(item.text)
        if isinstance(arguments, msgspec.Raw):  # as the model wrote it, perhaps in several lines
            arguments = msgspec.Raw(msgspec.json.format(bytes(arguments), indent=-1))
        function = CalledFunction(self._num_calls, item.name, arguments)
        self._num_calls += 1
        return OllamaCall(item.call_id, function)

    def _logprobs(self, piece: TextPiece) -> list[TokenLogprob]:
        return self._shapes.chat(piece.logprobs).content

    def _line(self, content: str, thinking: str, calls: list[OllamaCall]) -> OllamaChatLine | OllamaTextLine:
        thought: str | UnsetType = thinking or UNSET
        if not self._is_chat:
            return OllamaTextLine(
                model=self.model, created_at=self._created_at, response=content, thinking=thought
            )
        message = OllamaMessage(content, thinking=thought, tool_calls=calls or UNSET)
        return OllamaChatLine(model=self.model, created_at=self._created_at, message=message)

    def _ended(self, line: OllamaLine) -> OllamaLine:
        """The line as the last one, with reason, counts and durations."""
        ended, first = time.perf_counter(), self._sample.first_token_at
        line.done, line.done_reason = True, self._finish_reason or "stop"
        line.total_duration, line.load_duration = _nanoseconds(ended - self._arrival), 0
        line.prompt_eval_count = len(self._sample.prompt.prompt_ids)
        line.prompt_eval_duration = _nanoseconds(first - self._arrival)
        line.eval_count, line.eval_duration = self._sample.num_tokens, _nanoseconds(ended - first)
        line.system_fingerprint = self.fingerprint or UNSET
        line.weight_version, line.weight_versions = self.weight_version, self.weight_versions
        return line


def loaded_line(asked: OllamaAsked, model: str) -> bytes:
    """Answer to a request that only loads or unloads the model."""
    reason = "unload" if asked.keep_alive in (0, "0", "0s") else "load"
    line: OllamaLine
    if isinstance(asked, OllamaChatRequest):
        line = OllamaChatLine(model=model, created_at=timestamp(time.time()), message=OllamaMessage(""))
    else:
        line = OllamaTextLine(model=model, created_at=timestamp(time.time()), response="")
    line.done, line.done_reason = True, reason
    return encode(line)


def timestamp(seconds: float) -> str:
    """Seconds since 1970 as RFC 3339 has them."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
