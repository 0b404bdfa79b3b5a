"""Decode steps as captured graphs, for some numbers of rows, replayed in the same memory.

A step whose rows have one token each is padded to the next captured size. The rows that fill it up read and
write a KV block that belongs to no request, and their logits are cut off. Steps with prompts are captured by
:mod:`engine.compute.prompt_graphs`, all others launched kernel by kernel. What captures is an argument:
:class:`CudaCapture` on a GPU; in tests, a function that only computes again, so that all but the capture
itself is tested without a GPU.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from engine.attention.base import PLAN_KEYWORD, CapturableAttention, Int64s, PackedRows
from engine.attention.transfer import upload
from engine.compute.followed_tokens import FollowedTokens
from engine.compute.graph_sizes import size_for
from engine.model.weights import LoadedModel

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest relative difference of a row's logits with and without a graph.

It is the median over the rows of a size: where rounding gives a token to another expert, its row may differ
by a few tenths.
"""
CHECKED_TOKENS = 600
"""Tokens of the contexts of the check, enough for several parts where contexts are cut."""
CHECKED_ROWS = 16
"""Least rows checked of each size, in as many steps as it takes.

The median of one or two rows would be a bad one.
"""

Compute = Callable[[], torch.Tensor]


class Capture(Protocol):
    """Interface of graph capture: makes a computation replayable."""

    def __call__(self, compute: Compute) -> Compute:
        """A function that repeats the computation in the same memory.

        It reads what stands there by then, and writes to the same memory.
        """
        ...


class CudaCapture:
    """CUDA graphs that share one pool of memory.

    Only one of them may be in use at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool: tuple[int, int] | None = None

    def __call__(self, compute: Compute) -> Compute:
        """See :class:`Capture`.

        Raises:
            RuntimeError: something in it waits for the device, or cannot be captured for another reason.
            Exception: whatever a compiler of kernels raises.
        """
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute()  # what is only done once (compiling kernels, workspaces) must not be captured
            with _waits_raise():  # a capture that fails would leave torch's allocator capturing
                compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",  # what other threads do does not spoil it
            ):
                output = compute()
        finally:
            torch.cuda.set_stream(current)  # if the end of a capture fails, torch leaves ours the current one
        self._pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


@contextlib.contextmanager
def _waits_raise() -> Iterator[None]:
    """Context in which torch operators that synchronise with the device raise an error."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # torch warns that the mode is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class DecodeGraphs:
    """The captured decode steps of one model over one cache."""

    def __init__(
        self,
        model: LoadedModel,
        cache: CapturableAttention,
        sizes: Sequence[int],
        max_tokens: int,
        most_chosen: int = 0,
    ) -> None:
        """``sizes``: numbers of rows, rising. ``max_tokens``: no context has more.

        ``most_chosen``: no step chooses more tokens, if that is more than the largest size.
        """
        self._model = model
        self._cache = cache
        self._sizes = tuple(sizes)
        self._max_tokens = max_tokens
        self._buffers = cache.decode_buffers(sizes[-1], max_tokens, most_chosen)
        self._logits: torch.Tensor | None = None
        """[largest size, vocabulary] of the last step.

        All sizes share it: what a graph gives stays alive as long as the graph, and that would be a matrix
        for each of them.
        """
        self._replays: dict[int, Compute] = {}

    def __repr__(self) -> str:
        return f"DecodeGraphs({', '.join(map(str, self._replays))})"

    def capture(self, capture: Capture) -> None:
        """Capture all sizes, the largest first: the smaller ones fit into its memory."""
        with torch.inference_mode():
            for size in reversed(self._sizes):
                self._replays[size] = capture(partial(self._compute, size))

    def _compute(self, size: int) -> torch.Tensor:
        """Logits [size, vocabulary] of the first rows of the buffers, in memory that stays."""
        plan, inputs = self._buffers.plan(size), self._buffers.inputs
        logits = self._model.stage.forward(
            self._model.module,
            None,
            input_ids=inputs[0:1, :size],
            position_ids=inputs[1:2, :size],
            use_cache=False,
            **{PLAN_KEYWORD: plan},
        )
        if self._logits is None:  # the largest size comes first
            self._logits = torch.empty_like(logits)
        return self._logits[:size].copy_(logits)

    def forward(
        self, packed: PackedRows, input_ids: Int64s, followed: FollowedTokens | None = None
    ) -> torch.Tensor | None:
        """Logits [rows, vocabulary], valid until the next call; None without a captured step.

        ``followed``: tokens that are not among ``input_ids``, since only the device knows them.
        """
        num_rows = len(packed.starts)
        if packed.num_single != num_rows or int(packed.starts.max()) >= self._max_tokens:
            return None
        size = size_for(num_rows, self._sizes)
        if size is None:
            return None
        if followed is not None:
            self._buffers.chosen[: len(followed.tokens)].copy_(followed.tokens)
        self._buffers.fill(packed, size, input_ids, None if followed is None else followed.sources)
        return self._replays[size]()[:num_rows]

    def check(self, num_blocks: int, block_size: int) -> float:
        """The greatest difference, over all sizes, from steps without graphs.

        Writes to blocks of the cache, so it comes before they hold anything. Most sizes are checked with a
        row less, to have one filled up.
        """
        worst = 0.0
        numbers = np.random.default_rng(0)
        filled = 0
        for size in self._sizes:
            num_rows = min(max(size - 1, 1), num_blocks)
            width = _checked_blocks(num_rows, num_blocks, block_size, self._max_tokens)
            with torch.inference_mode():
                if width - 1 > filled:
                    filled = width - 1
                    self._fill(filled * block_size, block_size, numbers)
                parts = [
                    self._differences(num_rows, width, block_size, numbers)
                    for _ in range(-(-CHECKED_ROWS // num_rows))
                ]
            difference = float(torch.cat(parts).median())
            worst = difference if not difference <= worst else worst  # not a number is the worst
        return worst

    def _fill(self, length: int, block_size: int, numbers: np.random.Generator) -> None:
        """Fill the cache's first blocks with a prompt that rows of the check share."""
        positions = np.arange(length)
        table = np.arange(length // block_size, dtype=np.int32)[None]
        packed = PackedRows(np.zeros(1, dtype=np.int64), np.array([length]), table, positions, 0)
        ids = numbers.integers(0, self._model.vocab_size, length)
        eager_logits(self._model, self._cache, packed, ids, wanted=positions[-1:])

    def _differences(
        self, num_rows: int, width: int, block_size: int, numbers: np.random.Generator
    ) -> torch.Tensor:
        """Relative differences [rows] of logits with and without graphs.

        The step has contexts of ``width`` blocks, the last of which each row has for itself.
        """
        tables = np.tile(np.arange(width, dtype=np.int32), (num_rows, 1))
        tables[:, -1] += np.arange(num_rows, dtype=np.int32)
        shared = (width - 1) * block_size
        starts = numbers.integers(shared, min(shared + block_size, self._max_tokens), num_rows)
        packed = PackedRows(starts, np.ones_like(starts), tables, starts, num_rows)
        ids = numbers.integers(0, self._model.vocab_size, num_rows)
        expected = eager_logits(self._model, self._cache, packed, ids).clone()
        found = self.forward(packed, ids)
        assert found is not None
        return relative_differences(found, expected)


def eager_logits(
    model: LoadedModel,
    cache: CapturableAttention,
    packed: PackedRows,
    ids: Int64s,
    wanted: Int64s | None = None,
) -> torch.Tensor:
    """Logits of the wanted tokens of a step, or of all, without graphs."""
    device = model.device
    keep = {} if wanted is None else {"logits_to_keep": upload(wanted, device)}
    return model.stage.forward(
        model.module,
        None,
        input_ids=upload(ids, device).unsqueeze(0),
        position_ids=upload(packed.positions, device).unsqueeze(0),
        use_cache=False,
        **keep,
        **{PLAN_KEYWORD: cache.plan(packed)},
    )


def relative_differences(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative differences [rows] of logits."""
    wide = expected.float()
    spread = (wide - wide.mean(dim=-1, keepdim=True)).norm(dim=-1)
    return (found.float() - wide).norm(dim=-1) / spread.clamp(min=1e-6)


def _checked_blocks(num_rows: int, num_blocks: int, block_size: int, max_tokens: int) -> int:
    """Blocks of each row's context in the check; rows share all but the last one.

    They are as many as the check wants, as far as the cache and the longest context allow.
    """
    wanted, longest = -(-CHECKED_TOKENS // block_size), -(-max_tokens // block_size)
    return min(wanted, longest, num_blocks - num_rows + 1)
