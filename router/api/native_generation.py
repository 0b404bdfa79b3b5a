"""SGLang's own endpoint ``/generate``, with the fields of SGLang 0.5.

Text or token ids go in, both come out. Training loops call it for rollouts. A request is a completion; its
answer has no choices, but one object for each sample. A stream repeats all of its sample in each event, as
SGLang does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from engine.messages import FinishReason, TokenLogprobs
from router.api.answers import DONE, Answer, AnswerFacts, encode, event, weight_version_of
from router.api.routed_experts import readers_of
from router.api.token_generation import LEAST_LOGPROB
from router.api.understanding import Understood
from router.errors import ApiError, AsSent, error_body, refuse
from router.mesh import STARTING_WEIGHTS
from router.openai_api import CompletionRequest, Int
from router.text.output_stream import OutputStream, TextPiece, join
from router.text.tokens import Tokenizer

NAMES = {
    "prompt": "input_ids", "max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens",
    "seed": "sampling_seed", "request_id": "rid", "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num", "include_stop_str_in_output": "no_stop_trim",
}  # fmt: skip
"""The fields of a completion under the names that they have here."""
SAME = frozenset(
    {
        "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens",
        "spaces_between_special_tokens", "logit_bias",
    }
)  # fmt: skip
"""Fields of ``sampling_params`` that a completion has under the same names."""
RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed",
           "no_stop_trim": "include_stop_str_in_output"}  # fmt: skip
GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
"""Fields that hold a grammar, and their names in ``structured_outputs``."""
IGNORED = frozenset({"stream_interval"})
WITHOUT = ("input_embeds", "image_data", "audio_data", "video_data", "token_ids_logprob", "session_params",
           "custom_logit_processor", "return_hidden_states", "bootstrap_room", "lora_path")  # fmt: skip
"""Fields of the body that are refused where they ask for anything."""
DEFAULT_MAX_TOKENS = 128


class NativeRequest(msgspec.Struct, kw_only=True):
    """Body of a request to ``/generate``; a list of prompts is a batch."""

    text: str | list[str] | None = None
    input_ids: list[Int | list[Int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Int | list[Int] | None = None
    """First prompt token whose log-probability is wanted; -1 for none."""
    top_logprobs_num: Int | list[Int] | None = None
    return_text_in_logprobs: bool | None = None
    return_routed_experts: bool | None = None
    stream: bool | None = None
    extra_key: str | None = None
    """Salt of the prefix cache."""
    priority: Int | None = None
    model: str | None = None
    input_embeds: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    token_ids_logprob: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: Any = None
    bootstrap_room: Any = None
    lora_path: Any = None

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list, whatever ``n`` is."""
        return isinstance(self.text, list) or any(isinstance(each, list) for each in self.input_ids or ())


Chance = tuple[float | None, int, str | None]
"""Log-probability, token, and its text where that is wanted."""


class MetaInfo(msgspec.Struct, kw_only=True):
    """Facts of one sample, so far or at its end."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    weight_version: str
    """Newest weight version that made one of its tokens."""
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    """Seconds since the request was understood."""
    input_token_logprobs: list[Chance] | UnsetType = UNSET
    output_token_logprobs: list[Chance] | UnsetType = UNSET
    output_token_logprobs_length: int | UnsetType = UNSET
    input_top_logprobs: list[list[Chance] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[Chance]] | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET
    """At the end only, in the form of :meth:`.RoutedReader.encoded`."""


class NativeOutput(msgspec.Struct, kw_only=True):
    """One sample: a whole answer, or what an event of a stream repeats and extends."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
    """In streams of several samples."""


def as_completion(asked: NativeRequest, max_model_len: int) -> CompletionRequest:
    """The request as a completion.

    Raises:
        ApiError: it asks for what is not supported (400).
    """
    for name in WITHOUT:
        if getattr(asked, name) not in (None, False, {}, []):
            refuse(f"{name} is not supported.", name)
    if (asked.text is None) == (asked.input_ids is None):
        refuse("give either text or input_ids.", "text")
    prompt: Any = asked.input_ids if asked.text is None else asked.text
    fields = _sampling(_one(asked.sampling_params, "sampling_params") or {})
    if fields.get("max_tokens") is None:
        length = len(prompt) if asked.input_ids is not None and not asked.is_batch else 0
        fields["max_tokens"] = max(1, min(DEFAULT_MAX_TOKENS, max_model_len - length))
    if _one(asked.return_logprob, "return_logprob"):
        fields["logprobs"] = _one(asked.top_logprobs_num, "top_logprobs_num") or 0
        if (start := first_scored(asked)) is not None:
            fields |= {"prompt_logprobs": fields["logprobs"], "prompt_logprobs_from": start + 1}
    common = {
        "model": asked.model,
        "prompt": prompt,
        "stream": asked.stream,
        "request_id": asked.rid,
        "cache_salt": asked.extra_key,
        "priority": asked.priority,
        "return_routed_experts": asked.return_routed_experts,
    }
    try:
        return msgspec.convert({**fields, **common}, CompletionRequest)
    except msgspec.ValidationError as error:
        refuse(f"sampling_params: {error}", "sampling_params")


def first_scored(asked: NativeRequest) -> int | None:
    """First prompt token that is to have a log-probability; None for none."""
    start = _one(asked.logprob_start_len, "logprob_start_len")
    if start is not None and start < -1:
        refuse("logprob_start_len must be -1 or more.", "logprob_start_len")
    return start if _one(asked.return_logprob, "return_logprob") and start not in (None, -1) else None


def _sampling(given: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters under the names of a completion."""
    set_ones = {name: value for name, value in given.items() if value is not None}
    known = SAME | RENAMED.keys() | GRAMMARS.keys() | IGNORED
    unknown = sorted(name for name in set_ones.keys() - known if set_ones[name] not in (False, [], {}))
    if unknown:
        instead = [f"use {NAMES[name]}" for name in unknown if NAMES.get(name) in RENAMED]
        remark = ": ".join(["which is not supported", *instead[:1]])
        raise AsSent(400, f"sampling_params has {', '.join(unknown)}, {remark}.", param="sampling_params")
    found = {name: set_ones[name] for name in SAME & set_ones.keys()}
    found |= {other: set_ones[name] for name, other in RENAMED.items() if name in set_ones}
    if found.get("top_k") == -1:
        found["top_k"] = 0
    if grammars := {other: set_ones[name] for name, other in GRAMMARS.items() if name in set_ones}:
        found["structured_outputs"] = grammars
    return found


def _one(value: Any, name: str) -> Any:
    """A field that is the same for all prompts, which a batch may repeat."""
    if not isinstance(value, list):
        return value
    if any(each != value[0] for each in value):
        refuse(f"{name} must be the same for all prompts of a batch: send a request for each.", name)
    return value[0] if value else None


class NativeAnswer(Answer):
    """Answer of ``/generate``: an object for each sample."""

    def __init__(self, asked: NativeRequest, understood: Understood, facts: AnswerFacts) -> None:
        if facts.capsule is not None:
            refuse("answers of /generate have no capsules: use /v1/completions.", "X-Lockstep-Capsule")
        super().__init__(facts)
        wanted = understood.wanted
        self._began = time.perf_counter()
        self._tokenizer: Tokenizer = understood.model.tokenizer
        self._most = wanted.logprobs if isinstance(wanted, CompletionRequest) else None
        self._first_scored = first_scored(asked)
        self._with_text = asked.return_text_in_logprobs is True
        self._experts = readers_of(self.samples) if asked.return_routed_experts is True else None
        self._is_list = asked.is_batch or len(self.samples) > 1
        self._so_far = [TextPiece() for _ in self.samples]

    def whole(self, outputs: Sequence[Sequence[TextPiece]]) -> bytes:
        pairs = zip(self.samples, outputs, strict=True)
        found = [self._output(sample, join(pieces)) for sample, pieces in pairs]
        return encode(found if self._is_list else found[0])

    def chunk(self, sample: OutputStream, piece: TextPiece, *, first: bool) -> bytes:
        if not (piece.token_ids or piece.text or piece.finish_reason):
            return b""
        whole = self._so_far[sample.index] = join([self._so_far[sample.index], piece])
        output = self._output(sample, whole)
        if self._is_list:
            output.index = sample.index
        return event(output)

    def closing(self) -> bytes:
        return DONE

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n" + DONE

    def _output(self, sample: OutputStream, piece: TextPiece) -> NativeOutput:
        prompt_ids = sample.prompt.prompt_ids
        version = weight_version_of([sample])
        meta = MetaInfo(
            id=sample.prompt.request_id,
            finish_reason=self._finish_reason(piece),
            prompt_tokens=len(prompt_ids),
            weight_version=STARTING_WEIGHTS if version is UNSET else version,
            completion_tokens=len(piece.token_ids),
            cached_tokens=sample.num_cached_tokens,
            e2e_latency=time.perf_counter() - self._began,
        )
        if self._most is not None:
            begin = len(prompt_ids) if self._first_scored is None else self._first_scored
            ids, entries = prompt_ids[begin:], [None, *sample.prompt_logprobs[begin + 1 :]]
            pairs = zip(ids, entries, strict=False)
            meta.input_token_logprobs = [self._own(token_id, entry) for token_id, entry in pairs]
            meta.output_token_logprobs = [self._own(each.token_id, each) for each in piece.logprobs]
            meta.output_token_logprobs_length = len(piece.logprobs)
            if self._most:
                meta.input_top_logprobs = [self._top(each) for each in entries[: len(ids)]]
                meta.output_top_logprobs = [self._top(each) or [] for each in piece.logprobs]
        if self._experts is not None and piece.finish_reason is not None:
            meta.routed_experts = self._experts[sample.index].encoded()
        return NativeOutput(text=piece.text, output_ids=piece.token_ids, meta_info=meta)

    def _finish_reason(self, piece: TextPiece) -> dict[str, Any] | None:
        match piece.finish_reason:
            case None:
                return None
            case FinishReason.LENGTH:
                return {"type": "length", "length": len(piece.token_ids)}
            case FinishReason.STOP:
                matched = self._tokenizer.eos_id if piece.stop_reason is None else piece.stop_reason
                return {"type": "stop", "matched": matched}
            case reason:
                return {"type": "abort", "message": f"the request ended: {reason}"}

    def _own(self, token_id: int, entry: TokenLogprobs | None) -> Chance:
        """A token with its log-probability; the first of a prompt has none."""
        return (None if entry is None else max(entry.logprob, LEAST_LOGPROB), token_id, self._text(token_id))

    def _top(self, entry: TokenLogprobs | None) -> list[Chance] | None:
        if entry is None:
            return None
        pairs = zip(entry.top_ids[: self._most], entry.top_logprobs, strict=False)
        return [(max(logprob, LEAST_LOGPROB), id, self._text(id)) for id, logprob in pairs]

    def _text(self, token_id: int) -> str | None:
        return self._tokenizer.decode([token_id]) if self._with_text else None
