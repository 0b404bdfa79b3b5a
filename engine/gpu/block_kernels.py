"""Triton kernel that gathers KV blocks into rows of bytes, and scatters them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["places", "widths", "begins", "blocks", "rows"])
def copy_blocks(
    places,
    widths,
    begins,
    blocks,
    rows,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    GATHERS: tl.constexpr,
):
    """Program (chunk, tensor, row): copy a part of one block, either way.

    Sizes are words of ``rows`` [count, ROW]. ``places``: address of each tensor. ``widths``: words of a block
    in it. ``begins``: where these begin in a row. ``blocks`` [count]: the block of each row.
    """
    chunk, tensor, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    width = tl.load(widths + tensor)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    place = tl.load(places + tensor).to(rows.dtype)
    there = place + tl.load(blocks + row) * width + at
    here = rows + row.to(tl.int64) * ROW + tl.load(begins + tensor) + at
    if GATHERS:
        tl.store(here, tl.load(there, mask=inside), mask=inside)
    else:
        tl.store(there, tl.load(here, mask=inside), mask=inside)
