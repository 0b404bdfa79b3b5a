"""Tokens in, tokens out: ``/inference/v1/generate``, with the fields that vLLM 0.32 has.

For routers that tokenize themselves. A request is a completion of token ids, whose answer has token ids.
``/render`` has any chat or completion as a body for it, which gives the tokens that the request itself would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine.messages import TokenLogprobs
from engine.sampling import SamplingParams
from router.api.answers import AnswerFacts, ChunkedAnswer, encode, event, ranges_within, weight_version_of
from router.api.routed_experts import readers_of
from router.api.understanding import Understood
from router.errors import refuse
from router.openai_api import (
    ChatRequest,
    CompletionRequest,
    Int,
    RoutedLists,
    StreamOptions,
    Usage,
    WeightRange,
)
from router.text.output_stream import OutputStream, TextPiece, join

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""
NAMES = {"prompt": "token_ids"}
"""The fields of a completion under the names that they have here."""
PARAMETERS = frozenset(
    {
        "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k",
        "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs",
        "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens",
        "include_stop_str_in_output", "bad_words", "allowed_token_ids", "logit_bias", "structured_outputs",
        "thinking_token_budget",
    }
)  # fmt: skip
"""Fields of ``sampling_params`` that a completion has, too."""
OWN = PARAMETERS - {"max_tokens", "structured_outputs", "logprobs", "thinking_token_budget"}
"""Parameters that go over as they were given."""
WITHOUT = ("features", "content_parts", "kv_transfer_params", "ec_transfer_params", "reasoning_ended",
           "reasoning_parser_kwargs")  # fmt: skip


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Body of a request to ``/inference/v1/generate``."""

    token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
    sampling_params: dict[str, Any]
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    output_mode: str | None = None
    """``tokens``; ``text`` adds the text."""
    return_token_ids: bool | None = None
    """Whether the answer has the prompt's."""
    prompt_logprobs_from: Annotated[int, Meta(ge=0)] | None = None
    """First prompt token whose log-probability is wanted, with ``prompt_logprobs``."""
    return_routed_experts: bool | None = None
    """Whether choices have the experts of each token."""
    cache_salt: str | None = None
    priority: Int | None = None
    token_offsets: Any = None
    """Where tokens begin in a text; nothing depends on it."""
    features: Any = None
    """Refused, like the rest, where they ask for anything."""
    content_parts: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    reasoning_ended: Any = None
    reasoning_parser_kwargs: Any = None


class TokenChance(msgspec.Struct):
    """A token and its log-probability."""

    token_id: int
    logprob: float
    rank: int


class PlaceChances(msgspec.Struct):
    """Log-probabilities at one position: the sampled token's, then the likeliest."""

    token_id: int
    logprob: float
    rank: int
    top_logprobs: list[TokenChance]


class GenerateLogprobs(msgspec.Struct):
    content: list[PlaceChances]


class GenerateChoice(msgspec.Struct):
    index: int
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: GenerateLogprobs | None
    text: str | UnsetType = UNSET
    weight_versions: list[WeightRange] | UnsetType = UNSET
    """Weight versions that made these tokens, where they begin among them."""
    routed_experts: RoutedLists | UnsetType = UNSET
    """By token of prompt and output but the last; in a stream, the new ones."""


class Generated(msgspec.Struct, kw_only=True):
    """Body of an answer, or a chunk of a stream."""

    request_id: str
    output_mode: str
    choices: list[GenerateChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    created: int | UnsetType = UNSET
    prompt_logprobs: list[dict[int, TokenChance] | None] | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    """Newest weight version that made a token."""


def as_completion(asked: GenerateRequest, max_model_len: int) -> CompletionRequest:
    """The request as a completion; the rest of the context if it names no ``max_tokens``.

    Raises:
        ApiError: it asks for what is not supported (400).
    """
    for name in WITHOUT:
        if getattr(asked, name) not in (None, {}, []):
            refuse(f"{name} is not supported: send text as token_ids.", name)
    if asked.output_mode not in (None, "tokens", "text"):
        refuse("output_mode must be tokens or text.", "output_mode")
    given = {name: value for name, value in asked.sampling_params.items() if value is not None}
    detokenize = given.pop("detokenize", True)
    if detokenize is False and (given.get("stop") or asked.output_mode == "text"):
        refuse("stop and output_mode text need sampling_params.detokenize true.", "sampling_params")
    given.pop("output_kind", None)  # how vLLM's engine hands tokens on; an answer has all of them
    unknown = sorted(name for name in given.keys() - PARAMETERS if given[name] not in (False, [], {}))
    if unknown:
        refuse(f"sampling_params has {', '.join(unknown)}, which is not supported.", "sampling_params")
    given = {name: value for name, value in given.items() if name in PARAMETERS}
    given.setdefault("max_tokens", max(1, max_model_len - len(asked.token_ids)))
    common = {
        "model": asked.model,
        "prompt": [asked.token_ids],
        "stream": asked.stream,
        "request_id": asked.request_id,
        "cache_salt": asked.cache_salt,
        "priority": asked.priority,
        "add_special_tokens": False,
        "prompt_logprobs_from": asked.prompt_logprobs_from,
        "return_routed_experts": asked.return_routed_experts,
    }
    try:
        wanted = msgspec.convert({**given, **common}, CompletionRequest)
    except msgspec.ValidationError as error:
        refuse(f"sampling_params: {error}", "sampling_params")
    wanted.stream_options = asked.stream_options
    return wanted


class TokensAnswer(ChunkedAnswer):
    """Answer in token ids; with ``output_mode`` text, also in text."""

    def __init__(self, asked: GenerateRequest, understood: Understood, facts: AnswerFacts) -> None:
        super().__init__(asked.stream_options, facts)
        self._mode = asked.output_mode or "tokens"
        self._returns_prompt = asked.return_token_ids is True
        self._experts = readers_of(self.samples) if asked.return_routed_experts is True else None
        wanted = understood.wanted
        self._num_logprobs, self._num_prompt_logprobs = wanted.logprobs, wanted.prompt_logprobs

    def whole(self, outputs: Sequence[Sequence[TextPiece]]) -> bytes:
        choices = [
            self._choice(sample, join(pieces)) for sample, pieces in zip(self.samples, outputs, strict=True)
        ]
        answer = self._made(choices, with_prompt=self._returns_prompt)
        answer.usage, answer.model, answer.created = self.whole_usage(), self.model, self.created
        answer.system_fingerprint = self.fingerprint or UNSET
        answer.weight_version = self.weight_version
        most = self._num_prompt_logprobs
        if most is not None:
            of_prompt = self.samples[0].prompt_logprobs
            answer.prompt_logprobs = [None if each is None else _by_id(each, most) for each in of_prompt]
        return encode(answer)

    def chunk(self, sample: OutputStream, piece: TextPiece, *, first: bool) -> bytes:
        if not (piece.token_ids or piece.text or piece.finish_reason):
            return b""
        answer = self._made([self._choice(sample, piece)], with_prompt=first and self._returns_prompt)
        answer.usage = self.usage_so_far(sample, sample.num_tokens)
        if piece.finish_reason is not None:
            answer.weight_version = weight_version_of([sample])
        return event(answer)

    def frame(self, sample: OutputStream) -> tuple[bytes, bytes] | None:
        return None

    def text_chunk(self, sample: OutputStream, text: str) -> bytes:
        return event(self._made([self._choice(sample, TextPiece(text))]))

    def last_chunk(self, usage: Usage | UnsetType) -> bytes:
        answer = self._made([])
        answer.usage = usage
        return event(answer)

    def _made(self, choices: list[GenerateChoice], *, with_prompt: bool = False) -> Generated:
        answer = Generated(request_id=self.id, output_mode=self._mode, choices=choices)
        if with_prompt:
            answer.prompt_token_ids = list(self.samples[0].prompt.prompt_ids)
        return answer

    def _choice(self, sample: OutputStream, piece: TextPiece) -> GenerateChoice:
        most, logprobs = self._num_logprobs, None
        if most is not None:
            logprobs = GenerateLogprobs([_place(each, most) for each in piece.logprobs])
        return GenerateChoice(
            index=sample.index,
            token_ids=piece.token_ids,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            logprobs=logprobs,
            text=piece.text if self._mode == "text" else UNSET,
            weight_versions=ranges_within(sample, len(piece.token_ids)),
            routed_experts=UNSET if self._experts is None else self._experts[sample.index].new_lists(),
        )


def _place(entry: TokenLogprobs, most: int) -> PlaceChances:
    own, *others = _chances(entry, most)
    return PlaceChances(own.token_id, own.logprob, own.rank, [own, *others])


def _chances(entry: TokenLogprobs, most: int) -> list[TokenChance]:
    """Log-probabilities at one position: the sampled token first, then others."""
    top = list(zip(entry.top_ids, entry.top_logprobs, strict=False))
    found = [TokenChance(entry.token_id, _finite(entry.logprob), entry.rank)]
    for rank, (token_id, logprob) in enumerate(top if most < 0 else top[:most], start=1):
        if token_id != entry.token_id:
            found.append(TokenChance(token_id, _finite(logprob), rank))
    return found


def _by_id(entry: TokenLogprobs, most: int) -> dict[int, TokenChance]:
    return {each.token_id: each for each in _chances(entry, most)}


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # also for NaN


class RenderedRequest(msgspec.Struct, kw_only=True):
    """A request in token ids."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
    stream: bool = False
    cache_salt: str | None = None
    priority: int = 0
    features: None = None
    """Images are not rendered."""


def rendered(understood: Understood, request_id: str) -> list[RenderedRequest]:
    """The prompts of a request, each with its parameters.

    Raises:
        ApiError: it has a grammar, or a budget of reasoning, which token ids cannot carry (400).
    """
    wanted, params = understood.wanted, understood.params
    if params.grammar is not None or params.thinking is not None:
        refuse(
            "a grammar, tools that are forced and a budget of reasoning are not rendered: send the request "
            "itself.",
            "response_format",
        )
    is_one = len(understood.prompts) == 1
    return [
        RenderedRequest(
            request_id=request_id if is_one else f"{request_id}-{index}",
            token_ids=list(prompt.ids),
            sampling_params=_parameters(understood, params),
            model=wanted.model or understood.model.served.names[0],
            stream=bool(wanted.stream),
            cache_salt=wanted.cache_salt,
            priority=wanted.priority or 0,
        )
        for index, prompt in enumerate(understood.prompts)
    ]


def _parameters(understood: Understood, params: SamplingParams) -> dict[str, Any]:
    wanted = understood.wanted
    given = {name: getattr(wanted, name, None) for name in sorted(OWN)}
    given |= {"max_tokens": params.max_tokens, "logprobs": _num_logprobs(understood)}
    return {name: value for name, value in given.items() if value is not None}


def _num_logprobs(understood: Understood) -> int | None:
    wanted = understood.wanted
    if isinstance(wanted, ChatRequest):
        return (wanted.top_logprobs or 0) if wanted.logprobs else None
    return wanted.logprobs
