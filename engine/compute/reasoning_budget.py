"""Budget of reasoning tokens in an output (pure)."""

from __future__ import annotations

import numpy as np

from engine.attention.base import Int64s
from engine.sampling import ThinkingBudget


def forced_token(output: Int64s, budget: ThinkingBudget) -> int | None:
    """Token forced next to end the reasoning at its budget; None: any.

    Any token may come while the budget lasts, and after the end of the reasoning. The result depends on
    nothing but the output so far, so an instance that resumes a request forces the same token.
    """
    begun = _begun(output, budget)
    if begun is None:
        return None
    thought = output[begun:]
    over, end = len(thought) - budget.tokens, budget.end
    if over < 0 or _has(thought, end):
        return None
    written = next((k for k in range(min(over, len(end) - 1), 0, -1) if _ends_with(thought, end[:k])), 0)
    return end[written]


def _begun(output: Int64s, budget: ThinkingBudget) -> int | None:
    """Output tokens before the reasoning begins; None if there is no reasoning."""
    if not budget.begin:
        return 0
    fits = (len(begin) for begin in budget.begin if np.array_equal(output[: len(begin)], begin))
    return next(fits, None)


def _has(tokens: Int64s, part: tuple[int, ...]) -> bool:
    starts = np.flatnonzero(tokens[: len(tokens) - len(part) + 1] == part[0])
    return any(np.array_equal(tokens[start : start + len(part)], part) for start in starts)


def _ends_with(tokens: Int64s, part: tuple[int, ...]) -> bool:
    return np.array_equal(tokens[len(tokens) - len(part) :], part)
