"""Sizes of captured steps: rows of decode steps, tokens of steps with prompts (pure)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from engine.attention.prompt_size import PromptSize

SMALL = (1, 2, 4, 8)
STRIDE = 8
MOST_SMALL = 32
"""Rows up to which each number is captured for low latency, as in vLLM."""
MOST_ROWS = 512
"""Largest size that is captured by default.

Each takes time when an instance starts, and a step of more rows computes for so long that launching its
kernels one by one costs little.
"""


PROMPT_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tokens of captured steps with prompts: at most half of a step's tokens are padding."""
MOST_SINGLES = 256
"""Most rows of one token beside prompts in a captured step."""
MOST_PROMPTS = 16
"""Most rows of more than one token in a captured step."""


def capture_sizes(wanted: Sequence[int], max_num_seqs: int, *, each_small: bool = False) -> tuple[int, ...]:
    """Row counts to capture graphs for, ascending.

    They are those of ``wanted`` (--cudagraph-capture-sizes) that can occur. By default they are a few small
    ones and then every eighth, so that at most 7 rows of a larger step compute for no request. With
    ``each_small`` (--performance-mode interactivity) all up to :data:`MOST_SMALL` are captured.
    """
    if wanted:
        return tuple(sorted({size for size in wanted if size <= max_num_seqs}))
    most = min(max_num_seqs, MOST_ROWS)
    small = range(1, MOST_SMALL + 1) if each_small else SMALL
    sizes = {*small, *range(2 * STRIDE, most + 1, STRIDE), most}
    return tuple(sorted(size for size in sizes if size <= most))


def size_for(num_rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest size for so many rows; None if they are too many."""
    index = bisect_left(sizes, num_rows)
    return sizes[index] if index < len(sizes) else None


def prompt_sizes(wanted: Sequence[int], max_num_seqs: int, most_tokens: int) -> tuple[PromptSize, ...]:
    """Sizes of steps with prompts to capture graphs for, the smallest first.

    Numbers of tokens are those of ``wanted`` (--cudagraph-prompt-sizes), or :data:`PROMPT_TOKENS`, as far as
    steps of at most ``most_tokens`` need them. Each has a size for prompts alone, and one for prompts beside
    rows of one token.
    """
    tokens = sorted({size for size in wanted if size > 1}) if wanted else PROMPT_TOKENS
    needed = [size for index, size in enumerate(tokens) if not index or tokens[index - 1] < most_tokens]
    found = []
    for size in needed:
        prompts = min(MOST_PROMPTS, max_num_seqs, max(size // 2, 1))
        singles = min(MOST_SINGLES, max_num_seqs, size - 1)
        found += [PromptSize(size, 0, prompts), PromptSize(size, singles, prompts)]
    return tuple(found)
