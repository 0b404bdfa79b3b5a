"""What was sampled for one request, and where a second computation of it differs (pure).

Within an invariant numerics class (:mod:`coordinator.numerics`) the prompt's ids, the parameters and the seed
decide every token and log-probability. So a request can be computed again elsewhere and compared to the bit.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

import msgspec

from engine.messages import TokenLogprobs
from router.mesh import Prompt

Logprob = float | None
"""Log-probability of a sampled token. None stands for infinity and NaN, which JSON lacks.

Minus zero is recorded as zero: programs that pass JSON on lose its sign.
"""


class RecordedSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens of one sample, with their log-probabilities, and its end."""

    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] | None
    """One per token; None where the client wanted tokens only."""
    finish_reason: str
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} tokens have {len(self.logprobs)} log-probabilities")


class Recorder:
    """Collects what is sampled for one request."""

    def __init__(self, *, logprobs: bool = True) -> None:
        """``logprobs``: whether log-probabilities are recorded as well."""
        self._has_logprobs = logprobs
        self._token_ids: list[int] = []
        self._logprobs: list[Logprob] = []

    def __repr__(self) -> str:
        return f"<Recorder of {len(self._token_ids)} tokens>"

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def at(self, index: int) -> tuple[int, Logprob]:
        """A token and its log-probability."""
        return self._token_ids[index], self._logprobs[index]

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Record the next tokens; ``logprobs`` has one entry for each of them, or more."""
        self._token_ids += token_ids
        found = (each.logprob for each in logprobs[: len(token_ids)])
        self._logprobs += [value + 0.0 if math.isfinite(value) else None for value in found]

    def sample(self, finish_reason: str, stop_reason: int | str | None) -> RecordedSample:
        """Recorded sample, once it has ended."""
        logprobs = tuple(self._logprobs) if self._has_logprobs else None
        return RecordedSample(tuple(self._token_ids), logprobs, finish_reason, stop_reason)


def with_logprobs(prompt: Prompt) -> Prompt:
    """The same request, with the log-probability of each sampled token; no token changes by it."""
    if prompt.params.logprobs is not None:
        return prompt
    return msgspec.structs.replace(prompt, params=msgspec.structs.replace(prompt.params, logprobs=0))


class Difference(msgspec.Struct, frozen=True):
    """First difference of two samples: a token, a log-probability, or the end."""

    index: int
    """Position of the token; the number of tokens where only the end differs."""
    expected: tuple[int, Logprob] | None
    """Token and log-probability there; None where the sample has ended before."""
    found: tuple[int, Logprob] | None
    expected_end: str = ""
    """Finish reason, where the token is missing on a side or only the ends differ."""
    found_end: str = ""


def first_difference(
    expected: RecordedSample, found: RecordedSample, up_to: int | None = None
) -> Difference | None:
    """Where ``found`` differs from ``expected`` in any bit; None if it does not.

    Only tokens are compared where one has no log-probabilities.

    ``up_to``: number of tokens that count, for a sample whose further ones another class computed.
    """
    alone = expected.logprobs is None or found.logprobs is None
    ours, theirs = _tokens(expected, up_to, alone=alone), _tokens(found, up_to, alone=alone)
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return Difference(index, one, other)
    shorter = min(len(ours), len(theirs))
    ends = end_of(expected), end_of(found)
    if len(ours) == len(theirs) and (ends[0] == ends[1] or len(ours) == up_to):
        return None
    return Difference(
        shorter,
        ours[shorter] if len(ours) > shorter else None,
        theirs[shorter] if len(theirs) > shorter else None,
        *ends,
    )


def shown_token(token: tuple[int, Logprob] | None, end: str, text_of: Callable[[int], str]) -> str:
    """A token with its text and log-probability, or the end that stands there instead."""
    if token is None:
        return f"end by {end}"
    token_id, logprob = token
    return f"{token_id} {text_of(token_id)} with log-probability {logprob} (bits {bits_of(logprob)})"


def bits_of(logprob: Logprob) -> str:
    """The bits of a log-probability as hexadecimal digits: eight where float32 holds it, else sixteen."""
    if logprob is None:
        return "not finite"
    try:
        short = struct.pack(">f", logprob)
    except OverflowError:
        short = b""
    whole = struct.pack(">d", logprob)
    is_float32 = short and struct.pack(">d", struct.unpack(">f", short)[0]) == whole
    return (short if is_float32 else whole).hex()


def _tokens(sample: RecordedSample, up_to: int | None, *, alone: bool) -> list[tuple[int, Logprob]]:
    ids = sample.token_ids[:up_to]
    if alone or sample.logprobs is None:
        return [(each, None) for each in ids]
    return list(zip(ids, sample.logprobs[:up_to], strict=True))


def end_of(sample: RecordedSample) -> str:
    """Reason for which a sample ended, with what stopped it."""
    reason = sample.finish_reason
    return reason if sample.stop_reason is None else f"{reason} ({sample.stop_reason!r})"
