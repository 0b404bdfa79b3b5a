"""Answers of /v1/completions."""

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
from router.api.logprobs import LogprobShapes, offsets_of
from router.api.routed_experts import readers_of
from router.api.understanding import Understood
from router.openai_api import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, Usage
from router.text.output_stream import OutputStream, TextPiece, join


class CompletionAnswer(ChunkedAnswer):
    """Answer of /v1/completions: one text per choice, with ``echo`` behind its prompt."""

    def __init__(self, understood: Understood, facts: AnswerFacts) -> None:
        request = understood.wanted
        assert isinstance(request, CompletionRequest)
        super().__init__(request.stream_options, facts)
        self._tokenizer = understood.model.tokenizer
        self._echo = request.echo is True
        self._num_logprobs = request.logprobs
        self._num_prompt_logprobs = request.prompt_logprobs
        self._returns_ids = request.return_token_ids is True
        self._experts = readers_of(self.samples) if request.return_routed_experts is True else None
        self._shapes = LogprobShapes(
            self._tokenizer, request.logprobs or 0, as_token_ids=request.return_tokens_as_token_ids is True
        )

    def whole(self, outputs: Sequence[Sequence[TextPiece]]) -> bytes:
        choices = []
        for sample, pieces in zip(self.samples, outputs, strict=True):
            choice = self._choice(sample, join(pieces), first=True)
            most = self._num_prompt_logprobs
            if most is None:
                choice.prompt_logprobs = None
            else:
                choice.prompt_logprobs = self._shapes.prompt_encoded(sample.prompt_logprobs, most)
            choices.append(choice)
        answer = Completion(self.id, self.created, self.model, choices, self.whole_usage())
        answer.system_fingerprint = self.fingerprint
        answer.weight_version, answer.weight_versions = self.weight_version, self.weight_versions
        answer.service_tier = answer.kv_transfer_params = None
        return encode(answer)

    def chunk(self, sample: OutputStream, piece: TextPiece, *, first: bool) -> bytes:
        is_plain = piece.finish_reason is None and not (self._returns_ids or piece.logprobs or self._experts)
        if is_plain and not (first and self._echo):
            return self.framed(sample, piece.text) if piece.text else b""
        return self._chunk(sample, self._choice(sample, piece, first=first))

    def frame(self, sample: OutputStream) -> tuple[bytes, bytes] | None:
        is_more = self._returns_ids or self._num_logprobs is not None or self._experts is not None
        return None if is_more else super().frame(sample)

    def text_chunk(self, sample: OutputStream, text: str) -> bytes:
        return self._chunk(sample, self._choice(sample, TextPiece(text), first=False))

    def last_chunk(self, usage: Usage | UnsetType) -> bytes:
        chunk = Completion(self.id, self.created, self.model, [], usage, self.fingerprint or UNSET)
        chunk.weight_version, chunk.weight_versions = self.weight_version, self.weight_versions
        return event(chunk)

    def _chunk(self, sample: OutputStream, choice: CompletionChoice) -> bytes:
        usage = self.usage_so_far(sample, sample.num_tokens)
        chunk = Completion(self.id, self.created, self.model, [choice], usage, sample.fingerprint or UNSET)
        if choice.finish_reason is not None:
            chunk.system_fingerprint = sample.system_fingerprint or UNSET
            chunk.numerics_changes = changes_of([sample])
            chunk.weight_version = weight_version_of([sample])
            chunk.weight_versions = weight_versions_of([sample])
        return event(chunk)

    def _choice(self, sample: OutputStream, piece: TextPiece, *, first: bool) -> CompletionChoice:
        echoes = first and self._echo
        return CompletionChoice(
            index=sample.index,
            text=sample.prompt_text + piece.text if echoes else piece.text,
            logprobs=self._logprobs(sample, piece, echoes=echoes) if self._num_logprobs is not None else None,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            prompt_token_ids=sample.prompt.prompt_ids if first and self._returns_ids else None,
            token_ids=piece.token_ids if self._returns_ids else None,
            weight_versions=ranges_within(sample, len(piece.token_ids)) if self._returns_ids else UNSET,
            routed_experts=UNSET if self._experts is None else self._experts[sample.index].new_lists(),
        )

    def _logprobs(self, sample: OutputStream, piece: TextPiece, *, echoes: bool) -> CompletionLogprobs:
        start = len(sample.prompt_text) if self._echo else 0
        token_ids = piece.token_ids
        offsets = [start + offset for offset in piece.offsets]
        if not echoes:
            return self._shapes.completion(token_ids, piece.logprobs, offsets)
        prompt_ids = sample.prompt.prompt_ids
        of_prompt = sample.prompt_offsets
        if of_prompt is None:
            of_prompt = offsets_of(self._tokenizer, prompt_ids)
        known = [*sample.prompt_logprobs, *[None] * (len(prompt_ids) - len(sample.prompt_logprobs))]
        return self._shapes.completion(
            [*prompt_ids, *token_ids], [*known, *piece.logprobs], [*of_prompt, *offsets]
        )
