"""Captured graphs of a model's steps: decode steps by rows, steps with prompts by tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.attention.base import CapturableAttention, Int64s, PackedRows
from engine.attention.prompt_size import PromptSize
from engine.attention.transfer import upload
from engine.compute.decode_graphs import TOLERANCE, Capture, DecodeGraphs
from engine.compute.followed_tokens import FollowedTokens
from engine.compute.prompt_graphs import PromptGraphs
from engine.model.weights import LoadedModel

logger = logging.getLogger(__name__)


class StepGraphs:
    """Graphs of decode steps, and those of steps with prompts where they could be captured."""

    def __init__(self, decode: DecodeGraphs, prompts: PromptGraphs | None = None) -> None:
        self._decode = decode
        self._prompts = prompts

    def __repr__(self) -> str:
        return f"StepGraphs({self._decode!r}, {self._prompts!r})"

    def forward(
        self, packed: PackedRows, input_ids: Int64s, wanted: Int64s, followed: FollowedTokens | None = None
    ) -> torch.Tensor | None:
        """Logits [wanted, vocabulary], valid until the next call; None without a captured step.

        ``wanted``: numbers of packed tokens. ``followed``: see :meth:`.DecodeGraphs.forward`.
        """
        logits = self._decode.forward(packed, input_ids, followed)
        if logits is not None:
            every = len(wanted) == len(logits) and bool((wanted == np.arange(len(wanted))).all())
            return logits if every else logits.index_select(0, upload(wanted, logits.device))
        if self._prompts is None:
            return None
        return self._prompts.forward(packed, input_ids, wanted, followed)


def make_graphs(
    model: LoadedModel,
    cache: CapturableAttention,
    sizes: Sequence[int],
    *,
    num_blocks: int,
    block_size: int,
    max_tokens: int,
    capture: Capture,
    most_chosen: int = 0,
    prompt_sizes: Sequence[PromptSize] = (),
) -> StepGraphs | None:
    """Checked graphs, or None where steps are computed without; the reason is logged."""
    if not model.stage.shard.is_whole or model.experts is not None:
        logger.info("CUDA graphs: off, since a step waits for other workers in between")
        return None
    if not sizes:
        return None

    def checked(graphs: DecodeGraphs | PromptGraphs, kind: str, captured: Callable[[], str]) -> bool:
        began = time.monotonic()
        try:
            graphs.capture(capture)
            difference = graphs.check(num_blocks, block_size)
        except Exception as error:  # noqa: BLE001 (a compiler of kernels may raise anything)
            reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0][:200]
            logger.warning("%s: off, this model's step cannot be captured: %s", kind, reason)
            return False
        if not difference <= TOLERANCE.get(model.dtype, 0.05):
            logger.warning("%s: off, results differ by %.2g from those without", kind, difference)
            return False
        logger.info("%s: %s, captured in %.1f s", kind, captured(), time.monotonic() - began)
        return True

    decode = DecodeGraphs(model, cache, sizes, max_tokens, most_chosen)
    rows = ", ".join(map(str, sizes))
    if not checked(decode, "CUDA graphs", lambda: f"decode steps of {rows} rows"):
        return None
    if not prompt_sizes:
        return StepGraphs(decode)
    prompts = PromptGraphs(model, cache, prompt_sizes, max_tokens, most_chosen)
    tokens = ", ".join(map(str, sorted({size.tokens for size in prompt_sizes})))
    if not checked(prompts, "CUDA graphs of prompts", lambda: f"steps of {tokens} tokens"):
        return StepGraphs(decode)
    return StepGraphs(decode, prompts)
