"""Triton kernels with tiles of one size for any number of rows.

They are products, and sums along rows.

A row's bits then depend on the row and on the matrix alone. Numbers are added up in float32. ``WIDEN`` is as
in :mod:`engine.gpu.grouped_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.gpu.grouped_kernels import with_products


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["rows", "sums"]
)  # nothing is compiled anew while an instance serves
def fixed_product(
    rows,
    weights,
    bias,
    sums,
    count,
    row_stride,
    weight_out,
    weight_in,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    CUT: tl.constexpr,
    CUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPREAD: tl.constexpr,
    BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Program (part, tile, cut): sums [count, OUT] of rows [count, IN] by weights [OUT, IN].

    Inputs are cut into ``CUTS`` of ``CUT``, a multiple of ``BLOCK_K``. Cuts are added in their order: here,
    or with ``SPREAD`` by :func:`add_cuts`, which finds each program's cut in sums [CUTS, count, OUT].
    """
    part, tile, own = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_out = m < count, n < OUT
    line = rows + m.to(tl.int64) * row_stride
    column = weights + n.to(tl.int64) * weight_out
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first, last = 0, CUTS
    if SPREAD:
        first, last = own, own + 1
    for cut in range(first, last):
        added = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        end = tl.minimum(cut * CUT + CUT, IN)
        total += with_products(
            added, line, column, weight_in, in_rows, in_out, cut * CUT, end, IN, BLOCK_K, WIDEN
        )
    place = m.to(tl.int64)[:, None] * OUT + n[None, :]
    if SPREAD:
        place += own.to(tl.int64) * count * OUT
    elif BIAS:
        total += tl.load(bias + n, mask=in_out, other=0.0).to(tl.float32)[None, :]
    tl.store(sums + place, total.to(sums.dtype.element_ty), mask=in_rows[:, None] & in_out[None, :])


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["cuts", "outputs"])
def add_cuts(
    cuts,
    bias,
    outputs,
    count,
    OUT: tl.constexpr,
    CUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Program (part): outputs [count, OUT] as sums of cuts [CUTS, count, OUT], in order."""
    numel = count.to(tl.int64) * OUT
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    total = tl.zeros([BLOCK], tl.float32)
    for cut in range(CUTS):
        total += tl.load(cuts + cut * numel + place, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + place % OUT, mask=inside, other=0.0).to(tl.float32)
    tl.store(outputs + place, total.to(outputs.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["rows", "sums"])
def sum_rows(rows, sums, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row): sum of ``WIDTH`` neighbours, in float32."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.load(rows + row * row_stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(sums + row, tl.sum(total, 0))
