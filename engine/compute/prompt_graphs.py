"""Steps with prompts as captured graphs, padded to some numbers of tokens.

A step has rows of one token and longer rows, in any mixture that fits a captured size. It is launched as one
graph, after one upload. Steps that fit none are launched kernel by kernel: those with more tokens, with
more rows, or with more tokens whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from engine.attention.base import (
    PLAN_KEYWORD,
    CapturableAttention,
    Int64s,
    PackedRows,
    PromptBuffers,
)
from engine.attention.prompt_size import PromptSize
from engine.compute.decode_graphs import Capture, Compute, eager_logits, relative_differences
from engine.compute.followed_tokens import FollowedTokens
from engine.model.weights import LoadedModel


class PromptGraphs:
    """The captured steps with prompts of one model over one cache."""

    def __init__(
        self,
        model: LoadedModel,
        cache: CapturableAttention,
        sizes: Sequence[PromptSize],
        max_tokens: int,
        most_chosen: int = 0,
    ) -> None:
        """``sizes``: the smallest first. Others are as for :class:`.DecodeGraphs`."""
        self._model, self._cache, self._sizes = model, cache, tuple(sizes)
        self._max_tokens, self._most_chosen = max_tokens, most_chosen
        self._buffers: PromptBuffers | None = None
        self._logits: torch.Tensor | None = None
        """[most wanted, vocabulary] of the last step, which all sizes share."""
        self._replays: dict[PromptSize, Compute] = {}

    def __repr__(self) -> str:
        return f"PromptGraphs({', '.join(map(str, self.tokens))})"

    @property
    def tokens(self) -> list[int]:
        """Numbers of tokens of the captured sizes."""
        return sorted({size.tokens for size in self._replays})

    def capture(self, capture: Capture) -> None:
        """Capture all sizes, the largest first. Writes to the cache's first block."""
        largest = PromptSize(*(max(numbers) for numbers in zip(*map(_numbers, self._sizes), strict=True)))
        with torch.inference_mode():
            step = _prompt_of(2, np.zeros((1, 1), dtype=np.int32))
            first = eager_logits(self._model, self._cache, step, np.zeros(2, dtype=np.int64))
            self._buffers = self._cache.prompt_buffers(largest, self._max_tokens, self._most_chosen)
            self._logits = first.new_empty(largest.wanted, first.shape[1])
            for size in reversed(self._sizes):
                self._replays[size] = capture(partial(self._compute, size))

    def _compute(self, size: PromptSize) -> torch.Tensor:
        """Logits [wanted, vocabulary] of the step in the buffers, in memory that stays."""
        buffers = self._buffers
        assert buffers is not None
        assert self._logits is not None
        plan = buffers.plan(size)
        logits = self._model.stage.forward(
            self._model.module,
            None,
            input_ids=buffers.inputs[0:1, : size.tokens],
            position_ids=buffers.inputs[1:2, : size.tokens],
            use_cache=False,
            logits_to_keep=buffers.wanted[: size.wanted],
            **{PLAN_KEYWORD: plan},
        )
        return self._logits[: size.wanted].copy_(logits)

    def forward(
        self, packed: PackedRows, input_ids: Int64s, wanted: Int64s, followed: FollowedTokens | None = None
    ) -> torch.Tensor | None:
        """Logits [wanted, vocabulary], valid until the next call; None without a captured step.

        ``wanted``: numbers of packed tokens. ``followed``: see :meth:`.DecodeGraphs.forward`.
        """
        if int((packed.starts + packed.counts).max()) > self._max_tokens:
            return None
        singles = packed.num_single
        needed = len(input_ids), singles, len(packed.starts) - singles, len(wanted)
        size = next((each for each in self._sizes if each.fits(*needed)), None)
        if size is None or self._buffers is None:
            return None
        if followed is not None:
            self._buffers.chosen[: len(followed.tokens)].copy_(followed.tokens)
        sources = None if followed is None else followed.sources
        self._buffers.fill(packed, size, input_ids, wanted, sources)
        return self._replays[size]()[: len(wanted)]

    def check(self, num_blocks: int, block_size: int) -> float:
        """The greatest difference, over all sizes, from steps without graphs.

        Writes to blocks of the cache, so it comes before they hold anything.
        """
        numbers = np.random.default_rng(0)
        worst = 0.0
        for size in self._sizes:
            packed = _checked_step(size, num_blocks, block_size, self._max_tokens)
            if packed is None:
                continue
            ids = numbers.integers(0, self._model.vocab_size, len(packed.positions))
            beside = size.wanted - packed.num_single
            wanted = np.concatenate([np.arange(packed.num_single), np.arange(len(ids))[-beside:]])
            with torch.inference_mode():
                expected = eager_logits(self._model, self._cache, packed, ids, wanted)
                found = self.forward(packed, ids, wanted)
            assert found is not None
            difference = float(relative_differences(found, expected).median())
            worst = difference if not difference <= worst else worst  # not a number is the worst
        return worst


def _numbers(size: PromptSize) -> tuple[int, int, int]:
    return size.tokens, size.singles, size.prompts


def _prompt_of(length: int, table: np.ndarray[tuple[int, int], np.dtype[np.int32]]) -> PackedRows:
    return PackedRows(np.zeros(1, dtype=np.int64), np.array([length]), table, np.arange(length), 0)


def _checked_step(size: PromptSize, num_blocks: int, block_size: int, most: int) -> PackedRows | None:
    """Step of the check: a prompt and a few rows of one token.

    They almost fill the size. None if the cache or the longest context leaves no room for a prompt.
    """
    singles = min(size.singles, 3, num_blocks - 1)
    length = min(size.tokens - singles - 1, (num_blocks - singles) * block_size, most)
    if length < 2:
        return None
    blocks = -(-length // block_size)
    tables = np.zeros((singles + 1, blocks), dtype=np.int32)
    tables[:singles, 0] = blocks + np.arange(singles)
    tables[singles] = np.arange(blocks)
    counts = np.array([*[1] * singles, length])
    starts = np.array([*[min(block_size, most) - 1] * singles, 0])
    positions = np.concatenate([starts[:singles], np.arange(length)])
    return PackedRows(starts, counts, tables, positions, singles)
