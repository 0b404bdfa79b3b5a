"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from router.api.answers import (
    AnswerFacts,
    ChunkedAnswer,
    changes_of,
    encode,
    event,
    ranges_within,
    weight_version_of,
    weight_versions_of,
)
from router.api.chat_deltas import DeltaWriter, finish_reason, message_of
from router.api.logprobs import LogprobShapes
from router.api.understanding import Understood
from router.openai_api import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    CompletionTokensDetails,
    Usage,
)
from router.text.output_stream import OutputStream, TextPiece, join
from router.turns.assistant_turns import TurnReader, turn_of


class ChatAnswer(ChunkedAnswer):
    """Answer of /v1/chat/completions: one message of the assistant per choice."""

    def __init__(self, understood: Understood, response_role: str, facts: AnswerFacts) -> None:
        request, turn_format = understood.wanted, understood.turn_format
        assert isinstance(request, ChatRequest)
        self._role = _role_of_answer(request, response_role)
        self._echoed = _echoed(request, self._role)
        super().__init__(request.stream_options, facts)
        self._wants_logprobs = request.logprobs is True
        self._num_prompt_logprobs = request.prompt_logprobs
        self._returns_ids = request.return_token_ids is True
        self._shapes = LogprobShapes(
            understood.model.tokenizer,
            request.top_logprobs or 0,
            as_token_ids=request.return_tokens_as_token_ids is True,
        )
        self._readers: list[TurnReader] = []
        """One per sample, unless all text is content."""
        if not turn_format.is_plain:
            self._readers = [turn_format.reader(sample.prompt_text) for sample in self.samples]
        self._writers = [DeltaWriter(reader) for reader in self._readers]

    def whole(self, outputs: Sequence[Sequence[TextPiece]]) -> bytes:
        choices = []
        for sample, pieces in zip(self.samples, outputs, strict=True):
            piece = join(pieces)
            choice = ChatChoice(
                index=sample.index,
                message=self._message(sample, pieces, piece),
                logprobs=self._logprobs(piece),
                finish_reason=self._finish_reason(sample, piece),
                stop_reason=piece.stop_reason,
                token_ids=piece.token_ids if self._returns_ids else None,
            )
            if self._returns_ids:
                choice.weight_versions = ranges_within(sample, sample.num_tokens)
            choices.append(choice)
        first = self.samples[0]
        answer = ChatCompletion(
            self.id, self.created, self.model, choices, self.whole_usage(), self.fingerprint
        )
        if self._num_prompt_logprobs is not None:
            most = self._num_prompt_logprobs
            answer.prompt_logprobs = self._shapes.prompt_encoded(first.prompt_logprobs, most)
        if self._returns_ids:
            answer.prompt_token_ids = first.prompt.prompt_ids
        answer.weight_version, answer.weight_versions = self.weight_version, self.weight_versions
        return encode(answer)

    def chunk(self, sample: OutputStream, piece: TextPiece, *, first: bool) -> bytes:
        is_plain = piece.finish_reason is None and not (self._returns_ids or piece.logprobs)
        if is_plain and not (first or self._writers):
            return self.framed(sample, piece.text) if piece.text else b""
        opening = self._opening(sample) if first else b""
        delta = self._delta(sample, piece, echoed=self._echoed if first else "")
        if is_plain:
            return opening + self._delta_chunk(sample, delta)
        choice = ChatChunkChoice(
            index=sample.index,
            delta=delta,
            logprobs=self._logprobs(piece),
            finish_reason=self._finish_reason(sample, piece),
            stop_reason=piece.stop_reason if piece.finish_reason is not None else UNSET,
            token_ids=piece.token_ids if self._returns_ids else None,
        )
        if self._returns_ids:
            choice.weight_versions = ranges_within(sample, len(piece.token_ids))
        chunk = self._chunk([choice], sample)
        if piece.finish_reason is not None:
            chunk.system_fingerprint = sample.system_fingerprint or UNSET
            chunk.numerics_changes = changes_of([sample])
            chunk.weight_version = weight_version_of([sample])
            chunk.weight_versions = weight_versions_of([sample])
        return opening + event(chunk)

    def frame(self, sample: OutputStream) -> tuple[bytes, bytes] | None:
        return None if self._returns_ids or self._wants_logprobs or self._writers else super().frame(sample)

    def text_chunk(self, sample: OutputStream, text: str) -> bytes:
        choice = ChatChunkChoice(sample.index, ChatDelta(text), token_ids=None)
        return event(self._chunk([choice], sample))

    def last_chunk(self, usage: Usage | UnsetType) -> bytes:
        chunk = ChatChunk(self.id, self.created, self.model, [], usage, self.fingerprint or UNSET)
        chunk.weight_version, chunk.weight_versions = self.weight_version, self.weight_versions
        return event(chunk)

    def usage(self) -> Usage:
        usage = super().usage()
        if count := sum(reader.num_reasoning_tokens for reader in self._readers):
            usage.completion_tokens_details = CompletionTokensDetails(count)
        return usage

    def _opening(self, sample: OutputStream) -> bytes:
        """First chunk of a choice, with the role; it stands before the first token."""
        chunk = self._chunk([ChatChunkChoice(sample.index, ChatDelta("", role=self._role))], sample)
        chunk.usage = self.usage_so_far(sample, 0)
        chunk.prompt_token_ids = sample.prompt.prompt_ids if self._returns_ids else None
        return event(chunk)

    def _message(
        self, sample: OutputStream, pieces: Sequence[TextPiece], piece: TextPiece
    ) -> AssistantMessage:
        if not self._readers:
            return AssistantMessage(self._role, self._echoed + piece.text)
        parts = [part for each in pieces for part in each.parts]
        turn = turn_of(parts, self._readers[sample.index])
        turn.content = self._echoed + turn.content
        return message_of(turn, self._role)

    def _delta(self, sample: OutputStream, piece: TextPiece, *, echoed: str) -> ChatDelta:
        if not self._writers:
            return ChatDelta(echoed + piece.text)
        ended = piece.finish_reason is not None
        return self._writers[sample.index].delta(piece.parts, echoed, ended=ended)

    def _delta_chunk(self, sample: OutputStream, delta: ChatDelta) -> bytes:
        """A chunk with nothing but a delta; empty bytes for an empty delta."""
        if delta.reasoning is UNSET and delta.tool_calls is UNSET:
            return self.framed(sample, delta.content) if delta.content else b""
        return event(self._chunk([ChatChunkChoice(sample.index, delta, token_ids=None)], sample))

    def _chunk(self, choices: list[ChatChunkChoice], sample: OutputStream) -> ChatChunk:
        usage = self.usage_so_far(sample, sample.num_tokens)
        fingerprint = sample.fingerprint or UNSET
        return ChatChunk(self.id, self.created, self.model, choices, usage, fingerprint)

    def _finish_reason(self, sample: OutputStream, piece: TextPiece) -> str | None:
        return finish_reason(piece, self._readers[sample.index]) if self._readers else piece.finish_reason

    def _logprobs(self, piece: TextPiece) -> ChatLogprobs | None:
        return self._shapes.chat(piece.logprobs) if self._wants_logprobs else None


def _role_of_answer(request: ChatRequest, response_role: str) -> str:
    """Role of the answer: the assistant's, or that of a last message which is continued."""
    continues = request.continue_final_message or request.add_generation_prompt is False
    return str(request.messages[-1]["role"]) if continues else response_role


def _echoed(request: ChatRequest, role: str) -> str:
    """Text before the answer for ``echo``: the last message, if it has the same role."""
    last = request.messages[-1]
    content = last.get("content")
    return content if request.echo and last["role"] == role and isinstance(content, str) else ""
