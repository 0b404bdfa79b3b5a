"""Sampling parameters of a request, with the model's or neutral defaults (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.sampling import (
    ALL_LOGPROBS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    BadParameter,
    SamplingParams,
)
from router.errors import bad_request, in_terms_of, refuse
from router.openai_api import ChatRequest, CompletionRequest, GenerationRequest
from router.text.text_model import TextModel
from router.text.tokens import Tokenizer

MIN_TEMPERATURE = 0.01
"""Lower temperatures, except 0 for greedy, are raised to this, to avoid an overflow.

Logits are divided by the temperature.
"""
RANDOM_SEED = -1
"""The seed that means none, as in vLLM."""
TOKEN_ID = re.compile(r"-?[0-9]{1,18}")
MAX_NAMED = 8
"""Most keys that an error names."""
MAX_STOP_CHARACTERS = 8000
"""Most characters of all stop strings together, and of all bad words."""


def sampling_params(request: GenerationRequest, model: TextModel, max_logprobs: int) -> SamplingParams:
    """Checked sampling parameters of a request, with defaults where it sets none.

    :mod:`router.api.request_samples` settles ``max_tokens`` for each prompt.
    """
    given = model.defaults
    is_chat = isinstance(request, ChatRequest)
    temperature = float(_first(request.temperature, given.get("temperature"), 1.0))
    vocab_size = model.served.vocab_size
    max_logprobs = vocab_size if max_logprobs == ALL_LOGPROBS else max_logprobs
    if len(request.allowed_token_ids or ()) > vocab_size:
        refuse(
            f"allowed_token_ids names more than the {vocab_size} tokens that there are.", "allowed_token_ids"
        )
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    params = SamplingParams(
        n=_first(request.n, 1),
        presence_penalty=_first(request.presence_penalty, 0.0),
        frequency_penalty=_first(request.frequency_penalty, 0.0),
        repetition_penalty=_first(request.repetition_penalty, given.get("repetition_penalty"), 1.0),
        temperature=max(temperature, MIN_TEMPERATURE) if temperature > 0 else temperature,
        top_p=_first(request.top_p, given.get("top_p"), 1.0),
        top_k=min(int(_first(request.top_k, given.get("top_k"), 0)), vocab_size),
        min_p=_first(request.min_p, given.get("min_p"), 0.0),
        seed=None if request.seed == RANDOM_SEED else request.seed,
        stop=tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=request.ignore_eos is True,
        max_tokens=request.max_tokens,
        min_tokens=_first(request.min_tokens, 0),
        logprobs=_number(_logprobs(request), vocab_size, max_logprobs, _name_of_logprobs(request)),
        prompt_logprobs=_number(request.prompt_logprobs, vocab_size, max_logprobs, "prompt_logprobs"),
        logit_bias=_biases(request.logit_bias or {}),
        bad_words=_bad_words(request.bad_words or (), model.tokenizer),
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        include_stop_str_in_output=request.include_stop_str_in_output is True,
        skip_special_tokens=request.skip_special_tokens is not False,
        spaces_between_special_tokens=request.spaces_between_special_tokens is not False,
    )
    try:
        params.check(vocab_size=vocab_size, max_logprobs=max_logprobs)
    except BadParameter as error:
        names = {"max_tokens": request.max_tokens_field} | ({"logprobs": "top_logprobs"} if is_chat else {})
        with in_terms_of(names):
            raise bad_request(str(error), error.param) from error
    if sum(map(len, stop)) > MAX_STOP_CHARACTERS:
        refuse(f"stop strings may have at most {MAX_STOP_CHARACTERS} characters together.", "stop")
    if params.max_tokens == 0 and params.min_tokens:
        refuse("min_tokens must not exceed max_tokens (0).", "min_tokens")
    return params


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token ids of each bad word, at the start of a text and inside one.

    Inside a text it may begin with another token. Source: vLLM's ``SamplingParams.update_from_tokenizer``.
    """
    if not words:
        return ()
    if len(words) > MAX_BAD_WORDS // 2 or sum(map(len, words)) > MAX_STOP_CHARACTERS:
        refuse(
            f"bad_words may be {MAX_BAD_WORDS // 2} words of {MAX_STOP_CHARACTERS} characters together.",
            "bad_words",
        )
    bare = [word.lstrip() for word in words]
    if not all(bare):
        refuse("bad_words must not be empty.", "bad_words")
    texts = [*bare, *(f" {word}" for word in bare)]
    ids = list(map(tuple, tokenizer.encode_all(texts, add_special_tokens=False)))
    pairs = zip(ids[: len(bare)], ids[len(bare) :], strict=True)
    inside = [second for first, second in pairs if len(first) == len(second) and first[:1] != second[:1]]
    return (*ids[: len(bare)], *inside)


def _biases(given: Mapping[int | str, float]) -> dict[int, float]:
    """Biases by token id; those out of bounds are refused later, as with OpenAI."""
    if len(given) > MAX_LOGIT_BIAS:
        refuse(f"logit_bias may name at most {MAX_LOGIT_BIAS} tokens.", "logit_bias")
    if wrong := [str(key) for key in given if not TOKEN_ID.fullmatch(str(key))]:
        named = ", ".join(repr(key[:40]) for key in wrong[:MAX_NAMED])
        more = f" and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        refuse(f"logit_bias must have token ids as its keys, got {named}{more}.", "logit_bias")
    return {int(key): bias for key, bias in given.items()}


def _logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    assert isinstance(request, CompletionRequest)
    return request.logprobs


def _name_of_logprobs(request: GenerationRequest) -> str:
    return "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"


def _number(wanted: int | None, vocab_size: int, max_logprobs: int, name: str) -> int | None:
    """Number of log-probabilities requested per token, where -1 means the whole vocabulary."""
    if wanted != ALL_LOGPROBS:
        return wanted
    if max_logprobs < vocab_size:
        refuse(
            f"{name} -1 asks for all {vocab_size} tokens, --max-logprobs allows {max_logprobs} (-1: all).",
            name,
        )
    return vocab_size


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next(value for value in values if value is not None)
