"""Which instance gets a request (pure): filter, score, pick.

Each step is a small function over :class:`Candidate` values; none of them keeps state.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

DECODE_COST = 32
"""What a running request costs, in prompt tokens: it takes a token of many steps to come."""
TYPICAL_COST = 2048
"""Cost at which a score has fallen to one half."""
STALLED_AFTER = 15.0
"""Seconds without a step, having work, after which an instance gets nothing new."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as the policy sees it: its last report, plus what was sent since."""

    rank: int
    ready: bool
    """Takes requests: in the world, connected, not draining."""
    admitted: bool = True
    """Has not failed lately, or may be tried again."""
    stalled_for: float
    """Seconds without progress although it has work."""
    waiting_tokens: int
    """Prompt tokens that wait there, the unreported ones included."""
    requests: int
    """Requests there, the unreported ones included."""
    dispatches: int
    """Requests ever sent to it; breaks ties in turn."""


def eligible(candidates: Sequence[Candidate], excluded: frozenset[int] = frozenset()) -> list[Candidate]:
    """Those that may get a request. ``excluded`` ranks (they just failed it) and those that have failed
    others lately only if nobody else is there, stalled ones never."""
    able = [
        candidate for candidate in candidates if candidate.ready and candidate.stalled_for < STALLED_AFTER
    ]
    fresh = [candidate for candidate in able if candidate.rank not in excluded]
    return [candidate for candidate in fresh if candidate.admitted] or fresh or able


def load_score(candidate: Candidate, prompt_tokens: int) -> float:
    """1 for an idle instance and a short prompt, towards 0 with the work that would be there."""
    cost = candidate.waiting_tokens + prompt_tokens + DECODE_COST * candidate.requests
    return TYPICAL_COST / (TYPICAL_COST + cost)


def pick(candidates: Sequence[Candidate], prompt_tokens: int) -> Candidate:
    """The best of some eligible candidates (at least one); among equals the one used least, then by rank."""
    return max(
        candidates,
        key=lambda candidate: (load_score(candidate, prompt_tokens), -candidate.dispatches, -candidate.rank),
    )
