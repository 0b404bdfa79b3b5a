"""Layout of the rows between operations, as ``pitch_of`` of ``numbers.hpp`` has it."""

from __future__ import annotations

import torch

LINE = 64
"""Bytes of a line of the cache."""
SLACK = 16
"""Rows that products may read beyond their inputs: they take 16 at a time."""


def pitch_of(width: int, dtype: torch.dtype) -> int:
    """Numbers from one row of ``width`` to the next.

    They fill whole lines of the cache, an odd number of them.
    """
    per_line = LINE // int(dtype.itemsize)
    return (-(-width // per_line) | 1) * per_line


def bytes_pitch(width: int) -> int:
    """Bytes from one row of ``width`` that was rounded to 8 bits to the next.

    A line behind them says how they were rounded.
    """
    return (-(-width // LINE) + 1 | 1) * LINE


def spaced(rows: torch.Tensor) -> torch.Tensor:
    """Rows [n, width] as operations read them: [n + SLACK, pitch], padded with 0."""
    number, width = rows.shape
    laid = rows.new_zeros(number + SLACK, pitch_of(width, rows.dtype))
    laid[:number, :width] = rows
    return laid
