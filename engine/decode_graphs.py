"""Decode steps as graphs: captured for a few numbers of rows, replayed with other numbers in the same memory.

A step whose rows have one token each is padded to the next captured size. The rows that fill it up read and
write a KV block that belongs to nobody, and their logits are cut off. Everything else is launched kernel by
kernel. What captures is an argument: :class:`CudaCapture` on a GPU; in tests, a function that only computes
again, so that all but the capture itself is tested without a GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from engine.attention.base import PLAN_KEYWORD, CapturableAttention, Int64s, PackedRows
from engine.graph_sizes import size_for
from engine.transfer import upload
from engine.weights import LoadedModel

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Relative difference of a row's logits from those of the same step without a graph, median over rows."""
CHECKED_BLOCKS = 3
"""Of the contexts of the check."""

Compute = Callable[[], torch.Tensor]


class Capture(Protocol):
    """How a computation becomes one that can be repeated."""

    def __call__(self, compute: Compute) -> Compute:
        """Gives a function that does the same again: it reads the same memory, whatever stands there by then,
        and writes to the same memory."""
        ...


class CudaCapture:
    """CUDA graphs that share one pool of memory. Only one of them may be in use at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool: tuple[int, int] | None = None

    def __call__(self, compute: Compute) -> Compute:
        """See :class:`Capture`.

        Raises:
            RuntimeError: something in it waits for the device, or cannot be captured for another reason.
        """
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute()  # what is only done once (compiling kernels, workspaces) must not be captured
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = compute()
        self._pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


class DecodeGraphs:
    """The captured decode steps of one model over one cache."""

    def __init__(
        self, model: LoadedModel, cache: CapturableAttention, sizes: Sequence[int], max_tokens: int
    ) -> None:
        """``sizes``: numbers of rows, rising. ``max_tokens``: no context has more."""
        self._model = model
        self._cache = cache
        self._sizes = tuple(sizes)
        self._max_tokens = max_tokens
        self._inputs = torch.zeros(2, sizes[-1], dtype=torch.int64, device=model.device)
        """Token ids and positions."""
        self._buffers = cache.decode_buffers(sizes[-1], max_tokens)
        self._replays: dict[int, Compute] = {}

    def __repr__(self) -> str:
        return f"DecodeGraphs({', '.join(map(str, self._replays))})"

    def capture(self, capture: Capture) -> None:
        """All sizes, the largest first: the smaller ones fit into its memory."""
        with torch.inference_mode():
            for size in reversed(self._sizes):
                self._replays[size] = capture(partial(self._compute, size))

    def _compute(self, size: int) -> torch.Tensor:
        """Logits [size, vocabulary] of the first rows of the buffers."""
        return self._model.stage.forward(
            self._model.module,
            None,
            input_ids=self._inputs[0:1, :size],
            position_ids=self._inputs[1:2, :size],
            use_cache=False,
            **{PLAN_KEYWORD: self._buffers.plan(size)},
        )

    def forward(self, packed: PackedRows, input_ids: Int64s) -> torch.Tensor | None:
        """Logits [rows, vocabulary], valid until the next call; None if this is no step that was captured."""
        num_rows = len(packed.starts)
        if packed.num_single != num_rows or int(packed.starts.max()) >= self._max_tokens:
            return None
        size = size_for(num_rows, self._sizes)
        if size is None:
            return None
        inputs = np.zeros((2, size), dtype=np.int64)
        inputs[0, :num_rows], inputs[1, :num_rows] = input_ids, packed.positions
        self._inputs[:, :size].copy_(upload(inputs, self._inputs.device))
        self._buffers.fill(packed, size)
        return self._replays[size]()[:num_rows]

    def check(self, num_blocks: int, block_size: int) -> float:
        """The greatest difference, over all sizes, from steps without graphs. Writes to blocks of the cache,
        so it comes before they hold anything. Most sizes are checked with a row less, to have one filled up.
        """
        worst = 0.0
        numbers = np.random.default_rng(0)
        for size in self._sizes:
            num_rows = min(max(size - 1, 1), num_blocks)
            width = min(CHECKED_BLOCKS, num_blocks, -(-self._max_tokens // block_size))
            tables = (
                np.arange(num_rows)[:, None] + np.arange(width)[::-1]
            ) % num_blocks  # each ends in its own
            longest = min(width * block_size, self._max_tokens)
            starts = numbers.integers((width - 1) * block_size, longest, num_rows)
            packed = PackedRows(starts, np.ones_like(starts), tables.astype(np.int32), starts, num_rows)
            ids = numbers.integers(0, self._model.vocab_size, num_rows)
            with torch.inference_mode():
                expected = self._eager(packed, ids).float()
                found = self.forward(packed, ids)
                assert found is not None
                spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
                differences = (found.float() - expected).norm(dim=-1) / spread.clamp(min=1e-6)
            difference = float(differences.median())
            worst = difference if not difference <= worst else worst  # not a number is the worst
        return worst

    def _eager(self, packed: PackedRows, ids: Int64s) -> torch.Tensor:
        device = self._model.device
        return self._model.stage.forward(
            self._model.module,
            None,
            input_ids=upload(ids, device).unsqueeze(0),
            position_ids=upload(packed.positions, device).unsqueeze(0),
            use_cache=False,
            **{PLAN_KEYWORD: self._cache.plan(packed)},
        )


def make_graphs(
    model: LoadedModel,
    cache: CapturableAttention,
    sizes: Sequence[int],
    *,
    num_blocks: int,
    block_size: int,
    max_tokens: int,
    capture: Capture,
) -> DecodeGraphs | None:
    """Graphs that were checked, or None, with the reason in the log, where steps are computed without."""
    if not model.stage.shard.is_whole or model.experts is not None:
        logger.info("CUDA graphs: off, since a step waits for other workers in between")
        return None
    if not sizes:
        return None
    began = time.monotonic()
    graphs = DecodeGraphs(model, cache, sizes, max_tokens)
    try:
        graphs.capture(capture)
        difference = graphs.check(num_blocks, block_size)
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0][:200]
        logger.warning("CUDA graphs: off, this model's step cannot be captured: %s", reason)
        return None
    if not difference <= TOLERANCE.get(model.dtype, 0.05):
        logger.warning("CUDA graphs: off, results differ by %.2g from those without", difference)
        return None
    logger.info(
        "CUDA graphs: decode steps of %s rows, captured in %.1f s",
        ", ".join(map(str, sizes)),
        time.monotonic() - began,
    )
    return graphs
