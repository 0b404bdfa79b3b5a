"""Packed upload of a decode step: what captured kernels read, in one array.

Each row is a line of int32 numbers: token id, source, position, and its block table behind them. A source is
the index of a token that the step before chose, and that the host need not know; else it is negative. One
copy brings all lines to the device. There a kernel takes them apart, as a part of the captured graph.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.attention.base import Int64s, PackedRows

TOKEN, SOURCE, POSITION = 0, 1, 2
"""Columns of a line."""
HEADER = 4
"""Numbers before the block table, which so begins at a multiple of 16 bytes."""

Lines = npt.NDArray[np.int32]


def pack_lines(
    rows: PackedRows,
    size: int,
    null_block: int,
    input_ids: Int64s | None = None,
    sources: Int64s | None = None,
) -> Lines:
    """Lines [size, HEADER + width] of rows of one token each.

    Lines behind the rows have the block ``null_block`` only. ``input_ids`` and ``sources`` are [rows]; None:
    tokens are 0, and no row has a source.
    """
    num_rows, width = rows.block_tables.shape
    lines = np.full((size, HEADER + width), null_block, dtype=np.int32)
    lines[:, :HEADER] = 0, -1, 0, 0
    if input_ids is not None:
        lines[:num_rows, TOKEN] = input_ids
    if sources is not None:
        lines[:num_rows, SOURCE] = sources
    lines[:num_rows, POSITION] = rows.starts
    lines[:num_rows, HEADER:] = rows.block_tables
    return lines
