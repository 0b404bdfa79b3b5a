"""Kernels for rows of logits: ``shaping.hpp``, ``choosing.hpp``, ``logprobs.hpp``.

:mod:`engine.compute.torch_logits` does the same with torch, but for rounding. Logits are [rows, columns] in
float32, and contiguous; all work with as many threads as torch uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import Int64s
from engine.kernels.core.library import KernelLibrary
from engine.sampling import SamplingParams

Draws: TypeAlias = npt.NDArray[np.void]
"""Sampling parameters of all rows, by which their tokens are drawn."""

DRAW = np.dtype(
    [
        ("seed", np.uint64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("min_p", np.float32),
    ]
)
SHAPE = np.dtype(
    [(name, np.int64) for name in ("row", "tokens", "num_tokens", "num_prompt", "mask")]
    + [(name, np.float32) for name in ("repetition", "presence", "frequency", "unused")]
)
_BEST = np.dtype([("token", np.int64), ("score", np.float64)])
NO_DRAWS: Draws = np.empty(0, dtype=DRAW)
"""Each token is the most likely one."""
_LARGEST = float(np.finfo(np.float32).max)


def draw_of(params: SamplingParams, seed: int) -> bytes:
    """A request's sampling parameters as the kernels read them.

    :func:`draws` joins those of several rows.
    """
    top_k = params.top_k if params.top_k > 0 else 0
    temperature = min(params.temperature, _LARGEST)
    return np.array((seed % (1 << 64), top_k, params.top_p, temperature, params.min_p), dtype=DRAW).tobytes()


GREEDY = draw_of(SamplingParams(temperature=0.0), 0)


def draws(rows: Sequence[bytes]) -> Draws:
    """Sampling parameters of several rows in one array."""
    return np.frombuffer(b"".join(rows), dtype=DRAW)


def draw(library: KernelLibrary, logits: torch.Tensor, how: Draws, positions: Int64s) -> Int64s:
    """Tokens of all rows, drawn for these positions."""
    rows, columns = _size(logits)
    found = np.empty(rows, dtype=np.int64)
    library.call(
        "draw",
        logits.data_ptr(),
        rows,
        columns,
        how.ctypes.data,
        positions.ctypes.data,
        found.ctypes.data,
        torch.get_num_threads(),
    )
    return found


def can_contest(how: Draws) -> bool:
    """Whether each rank can find its best token by itself, since all tokens take part."""
    wanted = (how["temperature"] == 0) | ((how["top_k"] == 0) & (how["top_p"] == 1) & (how["min_p"] == 0))
    return bool(wanted.all())


def contestants(
    library: KernelLibrary, logits: torch.Tensor, how: Draws, positions: Int64s, first: int
) -> tuple[npt.NDArray[np.float64], Int64s]:
    """Best token of each row on a tensor-parallel rank, and its score.

    Column 0 is token ``first``. The best of all ranks is found by the score.
    """
    rows, columns = _size(logits)
    found = np.empty(rows, dtype=_BEST)
    library.call(
        "contestants",
        logits.data_ptr(),
        rows,
        columns,
        first,
        how.ctypes.data,
        positions.ctypes.data,
        found.ctypes.data,
        torch.get_num_threads(),
    )
    return found["score"], found["token"]


class TokenHistory(NamedTuple):
    """A row, with the tokens that its penalties count."""

    row: int
    token_ids: Int64s
    """Prompt and output so far."""
    num_prompt: int
    params: SamplingParams


def penalise(
    library: KernelLibrary, logits: torch.Tensor, histories: Sequence[TokenHistory], first: int
) -> None:
    """Apply penalties to rows of logits, whose column 0 is token ``first``."""
    rows = [
        (
            each.row,
            each.token_ids.ctypes.data,
            len(each.token_ids),
            each.num_prompt,
            0,
            _within(each.params.repetition_penalty),
            _within(each.params.presence_penalty),
            _within(each.params.frequency_penalty),
            0.0,
        )
        for each in histories
    ]
    _shape(library, logits, rows, first)


def leave_out(
    library: KernelLibrary,
    logits: torch.Tensor,
    rows: Sequence[int],
    masks: Sequence[npt.NDArray[np.uint8]],
    first: int,
) -> None:
    """Set logits that a row's mask forbids to -infinity.

    Masks have a bit for each token of the vocabulary, the lowest of a byte first.
    """
    named = zip(rows, masks, strict=True)
    _shape(
        library, logits, [(row, 0, 0, 0, mask.ctypes.data, 1.0, 0.0, 0.0, 0.0) for row, mask in named], first
    )


def _shape(
    library: KernelLibrary, logits: torch.Tensor, shapes: Sequence[tuple[Any, ...]], first: int
) -> None:
    _, columns = _size(logits)
    array = np.array(shapes, dtype=SHAPE)
    library.call(
        "shape", logits.data_ptr(), columns, first, array.ctypes.data, len(array), torch.get_num_threads()
    )


def logprobs(
    library: KernelLibrary, logits: torch.Tensor, targets: Int64s, num_top: int
) -> npt.NDArray[np.float64]:
    """See :meth:`engine.compute.logits_backend.LogitsBackend.logprob_table`."""
    rows, columns = _size(logits)
    table = np.empty((rows, 3 + 2 * num_top))
    library.call(
        "logprobs",
        logits.data_ptr(),
        rows,
        columns,
        targets.ctypes.data,
        num_top,
        table.ctypes.data,
        torch.get_num_threads(),
    )
    return table


def _within(number: float) -> float:
    return min(max(number, -_LARGEST), _LARGEST)


def _size(logits: torch.Tensor) -> tuple[int, int]:
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    rows, columns = logits.shape
    return rows, columns
