"""Choice of the attention backend: by flag, or by a few compared steps.

The steps run on the model itself. In each attention layer both backends compute, the layer gets torch's
result, and the other's is compared. So models with shards, windows, sinks or soft caps are all tested as they
are, and ranks that compute together stay together whatever happens to one of them.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from engine.attention import Backend, make_attention, why_not_triton
from engine.attention.base import (
    PLAN_KEYWORD,
    AttentionPlan,
    AttentionUse,
    PackedRows,
    PagedAttention,
    Scoring,
)
from engine.attention.splits import SPLIT_KEYS
from engine.config import CacheConfig
from engine.model.checkpoint import CheckpointError
from engine.model.probe import run_stage

if TYPE_CHECKING:
    from engine.model.weights import LoadedModel

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest difference of a token, relative to the size of its output (:func:`greatest_difference`).

Rounding makes less, another formula more.
"""
LEAST_SIZE = 0.1
"""Least size of a token's output, as a part of the mean size."""
PROMPT, OTHER_PROMPT = 3 * SPLIT_KEYS + 32, 7
"""Tokens of the two requests of the comparison.

They are enough for several tiles, and for a context of four parts.
"""
PROGRAMS = 1 << 16
"""Number of GPU programs assumed in the check: one for each part."""


def choose_backend(
    wanted: Literal["auto", "TORCH_SDPA", "TRITON_ATTN"],
    model: LoadedModel,
    cache: CacheConfig,
    *,
    whole_images: bool = False,
) -> Backend:
    """The backend for this model; ``whole_images``: see :attr:`.ModelInfo.images_are_whole`.

    It is logged where there was a choice.

    Raises:
        CheckpointError: the wanted backend cannot run here, or computes something else.
    """
    if cache.kv_codes is not None and any(layer.bias_numbers for layer in model.layers):
        raise CheckpointError(
            f"--kv-cache-dtype {cache.kv_codes}: this model's keys carry linear biases (ALiBi), which codes "
            "would round away: leave the flag out"
        )
    if wanted == "TORCH_SDPA" or (wanted == "auto" and model.device.type != "cuda"):
        return "TORCH_SDPA"
    if cache.kv_codes is not None:
        logger.info("attention: TORCH_SDPA, since TRITON_ATTN reads no %s KV cache", cache.kv_codes)
        return "TORCH_SDPA"
    began = time.monotonic()
    problem = why_not_triton(model.device)
    if problem is None and any(layer.chunk is not None or layer.index_dim for layer in model.layers):
        problem = "its kernels have neither chunked attention nor chosen keys"
    if problem is None and whole_images:
        problem = "in its kernels no row of an image sees rows behind it"
    if problem is None:
        problem = _compare(model, cache.block_size)
    if problem is None:
        logger.info("attention: TRITON_ATTN, checked in %.1f s", time.monotonic() - began)
        return "TRITON_ATTN"
    if wanted == "TRITON_ATTN":
        raise CheckpointError(
            f"--attention-backend TRITON_ATTN cannot serve: {problem}. Leave the flag out, or use TORCH_SDPA"
        )
    logger.warning("attention: TORCH_SDPA, since TRITON_ATTN cannot serve: %s", problem)
    return "TORCH_SDPA"


def _compare(model: LoadedModel, block_size: int) -> str | None:
    """Reason why the Triton kernels cannot serve this model; None if they can."""
    context = getattr(model.module.config.get_text_config(), "max_position_embeddings", None) or PROMPT
    longest = min(PROMPT, int(context))
    pages = -(-longest // block_size), -(-OTHER_PROMPT // block_size)
    tables = np.zeros((2, pages[0]), dtype=np.int32)
    order = np.arange(sum(pages), dtype=np.int32)[::-1]
    tables[0], tables[1, : pages[1]] = order[: pages[0]], order[pages[0] :]
    both = _Both(model, len(order), block_size)
    steps = [  # [(request, start, count)]: prompts in pieces, then decode beside a prompt
        [(1, 0, OTHER_PROMPT - 3), (0, 0, longest // 8)],
        [(1, OTHER_PROMPT - 3, 1), (0, longest // 8, longest - 2 - longest // 8)],
        [(1, OTHER_PROMPT - 2, 1), (0, longest - 2, 1)],
        [(0, longest - 1, 1)],
    ]
    with torch.inference_mode():
        for rows in steps:
            requests = [request for request, _, _ in rows]
            starts = np.array([start for _, start, _ in rows])
            counts = np.array([count for _, _, count in rows])
            positions = np.concatenate([np.arange(start, start + count) for _, start, count in rows])
            packed = PackedRows(starts, counts, tables[requests], positions, int((counts == 1).sum()))
            ids = (positions * 7919 + np.repeat(requests, counts) * 13) % model.vocab_size
            run_stage(
                model.module,
                model.stage,
                torch.from_numpy(ids).to(model.device),
                torch.from_numpy(positions).to(model.device),
                logits_to_keep=torch.zeros(1, dtype=torch.int64, device=model.device),
                **{PLAN_KEYWORD: both.plan(packed)},
            )
    return both.verdict(TOLERANCE.get(model.dtype, 3e-2))


def greatest_difference(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The largest difference of a token's output [tokens, heads, dim], relative to its own size.

    A token whose output is far smaller than the others' counts as a tenth of their mean: that of a token
    with a long context is an average over many values, and stands beside those of tokens with short ones.
    """
    sizes = expected.double().flatten(1).norm(dim=1)
    differences = (found.double() - expected.double()).flatten(1).norm(dim=1)
    least = (LEAST_SIZE * sizes.mean()).clamp(min=1e-6)
    return (differences / torch.maximum(sizes, least)).max()


class _Both:
    """Two attention backends in one, compared at each step; the first one's results count."""

    def __init__(self, model: LoadedModel, num_blocks: int, block_size: int) -> None:
        self._failure: str | None = None
        self._differences: list[torch.Tensor] = []
        self.use = AttentionUse()

        def make(backend: Backend) -> PagedAttention:
            return make_attention(
                model.layers,
                num_blocks=num_blocks,
                block_size=block_size,
                dtype=model.dtype,
                device=model.device,
                backend=backend,
                programs=PROGRAMS,
            )

        self._first = make("TORCH_SDPA")
        self._second: PagedAttention | None = None
        try:
            self._second = make("TRITON_ATTN")
        except Exception as error:  # noqa: BLE001 (a compiler of kernels may raise anything)
            self.fail(error)

    def plan(self, rows: PackedRows) -> AttentionPlan:
        """See ``base.PagedAttention``."""
        second = None
        if self._second is not None:
            try:
                second = self._second.plan(rows)
            except Exception as error:  # noqa: BLE001
                self.fail(error)
        return _BothPlans(self, self._first.plan(rows), second)

    def fail(self, error: Exception) -> None:
        """Note that the second backend failed."""
        if self._failure is None:
            lines = str(error).strip().splitlines()
            self._failure = f"{type(error).__name__}: {lines[-1][:200] if lines else ''}"
        self._second = None

    def note(self, difference: torch.Tensor) -> None:
        """Note the difference in one layer of one step."""
        self._differences.append(difference)

    def verdict(self, tolerance: float) -> str | None:
        """Reason why the second backend is refused; None if it agrees."""
        if self._failure is not None:
            return f"its kernels fail: {self._failure}"
        worst = float(torch.stack(self._differences).max())
        if not worst <= tolerance:
            return f"on a few steps of this model it differs from TORCH_SDPA by {worst:.2g}"
        return None


class _BothPlans:
    """Attention plan of two backends in one, which compares their results."""

    def __init__(self, both: _Both, first: AttentionPlan, second: AttentionPlan | None) -> None:
        self.use = both.use
        self._both = both
        self._first = first
        self._second = second

    @property
    def positions(self) -> torch.Tensor:
        """See ``base.AttentionPlan``."""
        return self._first.positions

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """See ``base.AttentionPlan.attend``."""
        expected = self._first.attend(layer, query, key, value, scoring)
        if self._second is None:
            return expected
        try:
            found = self._second.attend(layer, query, key, value, scoring)
            self._both.note(greatest_difference(found, expected))
        except Exception as error:  # noqa: BLE001 (a compiler of kernels may raise anything)
            self._second = None
            self._both.fail(error)
        return expected
