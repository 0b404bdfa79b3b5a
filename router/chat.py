"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from router.answers import Answer, encode, event
from router.logprobs import LogprobShapes
from router.openai_api import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
)
from router.sample import Piece, Sample
from router.tokens import Tokenizer


class ChatAnswer(Answer):
    """Messages of the assistant."""

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer, **common: Any) -> None:
        super().__init__(stream_options=request.stream_options, **common)
        self._role = _role_of_answer(request)
        self._echoed = _echoed(request, self._role)
        self._wants_logprobs = request.logprobs is True
        self._num_prompt_logprobs = request.prompt_logprobs
        self._returns_ids = request.return_token_ids is True
        self._shapes = LogprobShapes(
            tokenizer, request.top_logprobs or 0, as_token_ids=request.return_tokens_as_token_ids is True
        )

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        choices = [
            ChatChoice(
                index=sample.index,
                message=AssistantMessage(self._role, self._echoed + piece.text),
                logprobs=self._logprobs(piece),
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
                token_ids=piece.token_ids if self._returns_ids else UNSET,
            )
            for sample, piece in zip(self.samples, pieces, strict=True)
        ]
        first = self.samples[0]
        answer = ChatCompletion(self.id, self.created, self.model, choices, self.usage())
        if self._num_prompt_logprobs is not None:
            answer.prompt_logprobs = self._shapes.prompt(first.prompt_logprobs, self._num_prompt_logprobs)
        if self._returns_ids:
            answer.prompt_token_ids = first.prompt.prompt_ids
        return encode(answer)

    def chunk(self, sample: Sample, piece: Piece, *, first: bool) -> bytes:
        opening = self._opening(sample) if first else b""
        text = self._echoed + piece.text if first else piece.text
        if piece.finish_reason is None and not (self._returns_ids or piece.logprobs):
            return opening + self.framed(sample, text) if text else opening
        choice = ChatChunkChoice(
            index=sample.index,
            delta=ChatDelta(text),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason if piece.finish_reason is not None else UNSET,
            token_ids=piece.token_ids if self._returns_ids else UNSET,
        )
        return opening + event(self._chunk([choice], sample))

    def text_chunk(self, sample: Sample, text: str) -> bytes:
        return event(self._chunk([ChatChunkChoice(sample.index, ChatDelta(text))], sample))

    def usage_chunk(self) -> bytes:
        return event(ChatChunk(self.id, self.created, self.model, [], self.usage()))

    def _opening(self, sample: Sample) -> bytes:
        """The first chunk of a choice: whose message it is."""
        chunk = self._chunk([ChatChunkChoice(sample.index, ChatDelta("", role=self._role))], sample)
        if self._returns_ids:
            chunk.prompt_token_ids = sample.prompt.prompt_ids
        return event(chunk)

    def _chunk(self, choices: list[ChatChunkChoice], sample: Sample) -> ChatChunk:
        return ChatChunk(self.id, self.created, self.model, choices, self.usage_so_far(sample))

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return self._shapes.chat(piece.logprobs) if self._wants_logprobs else None


def _role_of_answer(request: ChatRequest) -> str:
    """The assistant's turn, unless the client has the last message continued, whoever wrote it."""
    continues = request.continue_final_message or request.add_generation_prompt is False
    return str(request.messages[-1]["role"]) if continues else "assistant"


def _echoed(request: ChatRequest, role: str) -> str:
    """``echo`` in chat: the last message goes before the answer, if it is of the same role."""
    last = request.messages[-1]
    content = last.get("content")
    return content if request.echo and last["role"] == role and isinstance(content, str) else ""
