"""What explains that an answer differs from its second computation (pure).

Two things are known of each answer. It was drawn again, and its recorded tokens were scored: each got the
log-probability that the model gives it behind the recorded ones before it. Tokens that are drawn depend on
model, parameters and seed; scores on the model alone.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

import msgspec

from engine.sampling import SamplingParams
from router.recorded import Difference, Logprob, RecordedSample, Recorder, end_of

ENOUGH = 2
"""Differing positions after which the rest of an answer is not drawn again."""


class VerifyStatus(enum.IntEnum):
    """Exit status of ``lockstep verify``."""

    EQUAL = 0
    DIFFERENT = 1
    USAGE = 2
    UNREADABLE = 10
    """Cut off, or no capsule."""
    EDITED = 11
    """Its digest is not that of its content."""
    SIGNATURE = 12
    """Not signed, or not by one of the given keys."""
    VERSION = 13
    VARIANT = 14
    """Its class promises no equal bits, and it differs."""
    NO_MODEL = 15
    """The checkpoint is not there, or cannot be computed here."""
    TOO_LONG = 16
    """Prompt and answer exceed the context or the memory here."""
    ONLY_CLOSE = 17
    """Its class cannot be computed here, and it differs."""
    OTHER_MODEL = 18
    """It names another checkpoint than the given one, and differs."""
    UNUSABLE = 19
    """Its parameters are none that a request can have."""
    REQUEST = 20
    """It answers another request than was sent: another prompt, other parameters."""
    QUANTIZED = 21
    """Equal, but with weights or a cache quantised, where none may be."""


class Cause(enum.Enum):
    """What a difference comes from, as far as drawing and scoring show."""

    CHANGED = enum.auto()
    """One position only: it was changed after the answer was computed."""
    END = enum.auto()
    """All tokens are equal, but not the end."""
    SAMPLER = enum.auto()
    """The model gives all recorded tokens their log-probabilities, but others are drawn."""
    MODEL = enum.auto()
    """The model gives other log-probabilities."""
    TOKENS = enum.auto()
    """Tokens differ, and there are no log-probabilities to compare."""


class Redraw:
    """Compares an answer with what is drawn again, token by token."""

    def __init__(self, expected: RecordedSample, up_to: int | None, recorder: Recorder) -> None:
        """``up_to``: tokens that count, None for all; ``recorder`` gets what is drawn."""
        self._expected = expected
        self._drawn = recorder
        self._count = len(expected.token_ids[:up_to])
        self._counts_end = up_to is None
        self._compared = 0
        self.differing: list[int] = []
        """Positions at which token or log-probability differ, :data:`ENOUGH` at most."""
        self._end: str | None = None

    def __repr__(self) -> str:
        return f"<Redraw of {self._count} tokens, {len(self.differing)} differ>"

    def look(self, end: str | None) -> bool:
        """Compare newly drawn tokens; ``end`` once there are no more. Returns whether that is enough."""
        self._end = end
        known = min(self._drawn.num_tokens, self._count)
        for index in range(self._compared, known):
            if self._recorded(index) != self._found(index):
                self.differing.append(index)
        self._compared = max(known, self._compared)
        del self.differing[ENOUGH:]
        is_whole = self._drawn.num_tokens > self._count or (not self._counts_end and known == self._count)
        return len(self.differing) == ENOUGH or is_whole

    @property
    def difference(self) -> Difference | None:
        """The first difference; None if all is equal."""
        ends = end_of(self._expected), self._end or "nothing yet"
        index = self.differing[0] if self.differing else self._compared
        if self.differing:
            return Difference(index, self._recorded(index), self._found(index), *ends)
        has_more = self._drawn.num_tokens > self._count
        if not self._counts_end and self._compared == self._count:
            return None
        if self._compared == self._count and not has_more and ends[0] == ends[1]:
            return None
        return Difference(
            index,
            self._recorded(index) if index < self._count else None,
            self._found(index) if has_more else None,
            *ends,
        )

    def cause(self, scores: Sequence[Logprob]) -> Cause:
        """What the difference comes from.

        ``scores``: of the recorded tokens, as far as they are known.
        """
        recorded = self._expected.logprobs
        if not self.differing:
            return Cause.END
        index = self.differing[0]
        if len(self.differing) == 1 and self._compared == self._count:
            is_last = index + 1 == self._count
            if not is_last or self._recorded(index)[0] == self._found(index)[0]:
                return Cause.CHANGED
        if recorded is None:
            return Cause.TOKENS
        return Cause.SAMPLER if tuple(scores) == recorded[: len(scores)] else Cause.MODEL

    def _recorded(self, index: int) -> tuple[int, Logprob]:
        logprobs = self._expected.logprobs
        return self._expected.token_ids[index], None if logprobs is None else logprobs[index]

    def _found(self, index: int) -> tuple[int, Logprob]:
        token_id, logprob = self._drawn.at(index)
        return token_id, None if self._expected.logprobs is None else logprob


class Closeness(msgspec.Struct, frozen=True):
    """How near recorded log-probabilities are to scores."""

    num_tokens: int
    num_equal: int
    largest: float
    mean: float

    def __str__(self) -> str:
        if self.num_equal == self.num_tokens:
            return f"the log-probabilities of its {self.num_tokens} tokens are equal"
        return (
            f"the log-probabilities of its {self.num_tokens} tokens differ by {self.largest:.2g} at most and "
            f"{self.mean:.2g} on average ({self.num_equal} are equal)"
        )


def closeness(recorded: Sequence[Logprob], scores: Sequence[Logprob]) -> Closeness:
    """How near recorded log-probabilities are to scores.

    A missing number on one side only is infinitely far.
    """
    distances = [
        0.0 if one == other else float("inf") if one is None or other is None else abs(one - other)
        for one, other in zip(recorded, scores, strict=False)
    ]
    count = len(distances)
    return Closeness(count, distances.count(0.0), max(distances, default=0.0), sum(distances) / max(1, count))


def other_samplers(params: SamplingParams) -> Iterator[tuple[str, SamplingParams]]:
    """Sampling parameters that a server may have used instead, each with words for it."""
    plain = SamplingParams()
    if not params.greedy:
        yield "greedily", msgspec.structs.replace(params, temperature=0.0)
    for name in ("top_p", "top_k", "min_p", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens"):
        if getattr(params, name) != getattr(plain, name):
            yield f"without {name}", msgspec.structs.replace(params, **{name: getattr(plain, name)})
    if params.shapes_logits_by_history:
        none = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
        yield "without penalties", msgspec.structs.replace(params, **none)
    if params.grammar is not None:
        yield "without the grammar", msgspec.structs.replace(params, grammar=None)
    if params.thinking is not None:
        yield "without the reasoning budget", msgspec.structs.replace(params, thinking=None)
    if not params.greedy and params.temperature != 1.0:
        yield "with temperature 1", msgspec.structs.replace(params, temperature=1.0)
