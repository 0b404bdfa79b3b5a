"""Sampling parameters of one request: how its next tokens are chosen (no torch).

Names, ranges and defaults are those of vLLM's ``SamplingParams``, so that clients and scripts written
for it mean the same thing here.
"""

from __future__ import annotations

import itertools
import math

import msgspec

MAX_STOP_STRINGS = 64
"""Stop strings of one request, and its stop tokens."""
MAX_LOGIT_BIAS = 1024
"""Tokens that one request may bias."""
MOST_BIAS = 100.0
"""Largest bias of a token; its negative is the smallest."""
ALL_LOGPROBS = -1
"""Clients write it for log-probabilities of all tokens; instances get a number of them."""
UNBOUNDED = 2**62
"""Stands for a limit that only the model knows, until it is asked."""
MAX_BAD_WORDS = 1024
"""Sequences of tokens; most words are two."""
MAX_GRAMMAR_BYTES = 512 * 1024
"""Characters of the grammar of one request."""
LEAST_REPETITION = 1e-6
"""Smallest repetition penalty; its inverse is the largest.

Beyond these, logits of float32 would not be finite.
"""


class BadParameter(ValueError):
    """A sampling parameter that cannot be honoured. ``param`` names it as the client spells it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class ThinkingBudget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limit of the reasoning tokens that an output begins with."""

    tokens: int
    begin: tuple[tuple[int, ...], ...]
    """What the output begins with if it has any, one of these.

    None: it begins inside.
    """
    end: tuple[int, ...]
    """Token ids that end the reasoning."""


class SamplingFields(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling parameters that programs and instances give in the same form, with one default.

    :class:`SamplingParams` has what instances get beyond them, :class:`router.offline.params.SamplingParams`
    what users of the class ``LLM`` may give.
    """

    n: int = 1
    """Samples per prompt."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 keeps all tokens."""
    min_p: float = 0.0
    seed: int | None = None
    """None (offline also -1): the router or the ``LLM`` draws one.

    The stream must not change when another instance continues it.
    """
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None means up to the model's context."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Alternatives per sampled token, 0 for the sampled one alone, None for no log-probabilities."""
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


class SamplingParams(  # type: ignore[misc]  # frozen, unlike what programs may change
    SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Parameters of one request, as instances get them.

    Stop strings, ``n`` and everything about text (``skip_special_tokens`` ...) are honoured by the router,
    which turns ids into text; an instance works on token ids only and sees one sample at a time.
    """

    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output must not have, made from words by the router."""
    thinking: ThinkingBudget | None = None
    grammar: str | None = None
    """What the output must look like: a grammar of the llguidance library, as JSON."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def shapes_logits_by_history(self) -> bool:
        """Whether one of the three penalties makes the tokens so far change the distribution."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def is_plain(self) -> bool:
        """Whether the token is chosen from the unchanged logits, without log-probabilities.

        (A grammar comes with a mask in the step.)
        """
        told = self.logprobs is not None or self.prompt_logprobs is not None
        restricted = self.allowed_token_ids is not None or bool(self.logit_bias) or self.min_tokens > 0
        restricted = restricted or bool(self.bad_words) or self.thinking is not None
        return not (told or restricted or self.shapes_logits_by_history)

    def check(self, *, vocab_size: int, max_logprobs: int = 20, max_n: int = 128) -> None:
        """Raise :class:`BadParameter` for the first value out of its range."""
        self._check_distribution()
        self._check_lengths(max_n)
        self._check_stops(vocab_size)
        self._check_logprobs(max_logprobs)
        self._check_tokens(vocab_size)
        if self.grammar is not None and len(self.grammar) > MAX_GRAMMAR_BYTES:
            raise BadParameter("structured_outputs", f"a grammar may have {MAX_GRAMMAR_BYTES} characters.")

    def _check_distribution(self) -> None:
        in_range = [
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            ("temperature", self.temperature, 0.0, math.inf),
            ("min_p", self.min_p, 0.0, 1.0),
        ]
        for name, value, low, high in in_range:
            if not (math.isfinite(value) and low <= value <= high):
                bound = f"between {low:g} and {high:g}" if math.isfinite(high) else f"at least {low:g}"
                raise BadParameter(name, f"{name} must be a finite number {bound}, got {value}.")
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise BadParameter("top_p", f"top_p must be in (0, 1], got {self.top_p}.")
        if not LEAST_REPETITION <= self.repetition_penalty <= 1 / LEAST_REPETITION:
            raise BadParameter(
                "repetition_penalty",
                f"repetition_penalty must be above 0 and finite ({LEAST_REPETITION:g} to "
                f"{1 / LEAST_REPETITION:g}), got {self.repetition_penalty}.",
            )
        if self.top_k < -1:
            raise BadParameter("top_k", f"top_k must be 0 or -1 (off) or at least 1, got {self.top_k}.")

    def _check_lengths(self, max_n: int) -> None:
        if not 1 <= self.n <= max_n:
            raise BadParameter("n", f"n must be between 1 and {max_n}, got {self.n}.")
        if self.n > 1 and self.greedy:
            raise BadParameter("n", "n must be 1 with temperature 0: greedy samples would all be the same.")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise BadParameter("max_tokens", f"max_tokens must be at least 0, got {self.max_tokens}.")
        if self.min_tokens < 0:
            raise BadParameter("min_tokens", f"min_tokens must be at least 0, got {self.min_tokens}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadParameter(
                "min_tokens",
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).",
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise BadParameter("seed", "seed must fit in 64 bits.")

    def _check_logprobs(self, max_logprobs: int) -> None:
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and not 0 <= count <= max_logprobs:
                bound = "at least 0" if max_logprobs >= UNBOUNDED else f"between 0 and {max_logprobs}"
                raise BadParameter(name, f"{name} must be {bound}, got {count}.")

    def _check_tokens(self, vocab_size: int) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise BadParameter("logit_bias", f"logit_bias may name at most {MAX_LOGIT_BIAS} tokens.")
        for token, bias in self.logit_bias.items():
            _check_token("logit_bias", token, vocab_size)
            if not -MOST_BIAS <= bias <= MOST_BIAS:
                raise BadParameter(
                    "logit_bias",
                    f"logit_bias values must be between {-MOST_BIAS:g} and {MOST_BIAS:g}, got {bias}.",
                )
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise BadParameter("allowed_token_ids", "allowed_token_ids must not be empty.")
            for token in self.allowed_token_ids:
                _check_token("allowed_token_ids", token, vocab_size)
        if self.thinking is not None:
            if self.thinking.tokens < 0 or not self.thinking.end:
                raise BadParameter(
                    "thinking_token_budget", "thinking_token_budget must be at least 0, or -1."
                )
            for token in itertools.chain(self.thinking.end, *self.thinking.begin):
                _check_token("thinking_token_budget", token, vocab_size)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise BadParameter("bad_words", f"at most {MAX_BAD_WORDS // 2} bad words are accepted.")
        for word in self.bad_words:
            if not word:
                raise BadParameter("bad_words", "bad_words must not be empty.")
            for token in word:
                _check_token("bad_words", token, vocab_size)

    def _check_stops(self, vocab_size: int) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise BadParameter("stop", f"at most {MAX_STOP_STRINGS} stop strings are accepted.")
        if any(not text for text in self.stop):
            raise BadParameter("stop", "stop strings must not be empty.")
        if len(self.stop_token_ids) > MAX_STOP_STRINGS:
            raise BadParameter("stop_token_ids", f"at most {MAX_STOP_STRINGS} stop tokens are accepted.")
        for token in self.stop_token_ids:
            _check_token("stop_token_ids", token, vocab_size)


def _check_token(param: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        bounded = vocab_size < UNBOUNDED
        has = f"{vocab_size} tokens, with ids 0 to {vocab_size - 1}" if bounded else "ids from 0 on"
        raise BadParameter(param, f"{param} names token {token}, but the vocabulary has {has}.")
