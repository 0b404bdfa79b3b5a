"""Triton kernels of a mixture's experts: sort pairs by expert, multiply, weight and sum.

A pair is a token and one of the experts that the router chose for it. Nothing here depends on values on the
host: the grid is large enough for any routing, and programs without rows end at once. So a launch can be
captured in a CUDA graph, and an empty expert costs nothing.

Numbers are added up in float32. ``WIDEN`` multiplies in float32 whatever the type: Triton's interpreter,
which runs these kernels without a GPU, has no bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl

STEP_ADDRESSES = ["order", "places", "ends"]
"""Arguments whose alignment depends on the number of pairs.

Nothing is to be compiled anew for it while an instance serves.
"""


@triton.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=STEP_ADDRESSES)
def sort_pairs(
    expert_ids,
    order,
    places,
    ends,
    pairs,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOK: tl.constexpr,
):
    """Programs of ``BLOCK`` pairs, then programs of ``BLOCK`` experts.

    The former write where each pair stands when pairs are sorted by expert (places [pairs]), and the inverse
    (order [pairs]); the latter write where each expert's pairs end (ends [EXPERTS]). Each compares its own
    with all pairs, ``LOOK`` at a time: quadratic work, meant for some thousand pairs.
    """
    program = tl.program_id(0)
    pair_programs = tl.cdiv(pairs, BLOCK)
    own = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    if program < pair_programs:
        mine = program * BLOCK + own
        expert = tl.load(expert_ids + mine, mask=mine < pairs, other=0).to(tl.int32)
        for start in range(0, pairs, LOOK):
            others = start + tl.arange(0, LOOK)
            theirs = tl.load(expert_ids + others, mask=others < pairs, other=EXPERTS).to(tl.int32)
            first = theirs[None, :] < expert[:, None]
            first = first | ((theirs[None, :] == expert[:, None]) & (others[None, :] < mine[:, None]))
            before += tl.sum(first.to(tl.int32), 1)
        tl.store(places + mine, before, mask=mine < pairs)
        tl.store(order + before, mine, mask=mine < pairs)
    else:
        expert = (program - pair_programs) * BLOCK + own
        for start in range(0, pairs, LOOK):
            others = start + tl.arange(0, LOOK)
            theirs = tl.load(expert_ids + others, mask=others < pairs, other=EXPERTS).to(tl.int32)
            before += tl.sum((theirs[None, :] <= expert[:, None]).to(tl.int32), 1)
        tl.store(ends + expert, before, mask=expert < EXPERTS)


@triton.jit
def group_of_tile(ends, tile, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert of a tile of ``BLOCK_M`` rows, its first row, and the expert's end.

    The expert is ``EXPERTS`` if there are fewer tiles. ``ends``: [EXPERTS], rising.
    """
    experts = tl.arange(0, BLOCK_E)
    last = tl.load(ends + EXPERTS - 1)
    stop = tl.load(ends + experts, mask=experts < EXPERTS, other=0)
    stop = tl.where(experts < EXPERTS, stop, last)
    start = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < EXPERTS), other=0)
    start = tl.where(experts < EXPERTS, start, last)
    tiles = (stop - start + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum(((upto <= tile) & (experts < EXPERTS)).to(tl.int32), 0)
    chosen = experts == expert
    first = tl.sum(tl.where(chosen, start + (tile - (upto - tiles)) * BLOCK_M, 0), 0)
    return expert, first, tl.sum(tl.where(chosen, stop, 0), 0)


@triton.jit
def with_products(
    sums,
    line,
    column,
    weight_in,
    in_rows,
    in_out,
    begin,
    end,
    IN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Sums [BLOCK_M, BLOCK_N] and the products of a tile's inputs from ``begin`` to ``end``.

    ``line``: addresses of rows; ``column``: those of outputs' weights.
    """
    for start in range(begin, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        in_k = k < IN
        left = tl.load(line[:, None] + k[None, :], mask=in_rows[:, None] & in_k[None, :], other=0.0)
        right = tl.load(
            column[None, :] + k[:, None] * weight_in, mask=in_out[None, :] & in_k[:, None], other=0.0
        )
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        sums += tl.dot(left, right, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["top_k"], do_not_specialize_on_alignment=STEP_ADDRESSES)
def grouped_product(
    rows,
    weights,
    bias,
    outputs,
    ends,
    order,
    top_k,
    row_stride,
    weight_expert,
    weight_out,
    weight_in,
    bias_expert,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATHER: tl.constexpr,
    BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Program (part, tile): outputs [pairs, OUT] of sorted pairs, by their experts' matrices.

    With ``GATHER`` rows are [tokens, IN], and sorted pair i reads that of token ``order[i] // top_k``;
    without it they are [pairs, IN], sorted. weights: [EXPERTS, OUT, IN] by the strides given.
    """
    part, tile = tl.program_id(0), tl.program_id(1)
    expert, first, end = group_of_tile(ends, tile, EXPERTS, BLOCK_E, BLOCK_M)
    if expert < EXPERTS:
        m = first + tl.arange(0, BLOCK_M)
        n = part * BLOCK_N + tl.arange(0, BLOCK_N)
        in_rows, in_out = m < end, n < OUT
        source = m
        if GATHER:
            source = tl.load(order + m, mask=in_rows, other=0) // top_k
        line = rows + source.to(tl.int64) * row_stride
        column = weights + expert.to(tl.int64) * weight_expert + n.to(tl.int64) * weight_out
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        sums = with_products(sums, line, column, weight_in, in_rows, in_out, 0, IN, IN, BLOCK_K, WIDEN)
        if BIAS:
            sums += tl.load(bias + expert * bias_expert + n, mask=in_out, other=0.0).to(tl.float32)[None, :]
        tl.store(
            outputs + m.to(tl.int64)[:, None] * OUT + n[None, :],
            sums.to(outputs.dtype.element_ty),
            mask=in_rows[:, None] & in_out[None, :],
        )


@triton.jit(do_not_specialize=["top_k"], do_not_specialize_on_alignment=[*STEP_ADDRESSES, "weights"])
def weighted_sum(
    computed,
    weights,
    places,
    ends,
    outputs,
    top_k,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (token, part): sum of a token's expert outputs, each times its weight.

    computed [pairs, WIDTH] is sorted by expert; ``places`` [tokens, top_k] says where a token's are. Terms
    are added in the order of the router's choice. Pairs of numbers beyond the last expert are left out: their
    place is behind all ``ends``, where nothing was computed.
    """
    token, part = tl.program_id(0), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    computed_rows = tl.load(ends + EXPERTS - 1).to(tl.int64)
    for choice in range(top_k):
        pair = token * top_k + choice
        place = tl.load(places + pair).to(tl.int64)
        factor = tl.load(weights + pair).to(tl.float32)
        is_here = inside & (place + tl.zeros([BLOCK], tl.int64) < computed_rows)
        line = computed + place * WIDTH + column
        total += factor * tl.load(line, mask=is_here, other=0.0).to(tl.float32)
    tl.store(outputs + token.to(tl.int64) * WIDTH + column, total.to(outputs.dtype.element_ty), mask=inside)
