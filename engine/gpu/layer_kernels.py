"""Triton kernel of a layer's product with norm, activation and residual, for few rows.

With few rows a product takes as long as its weights take to be read, and whatever else is computed on the way
is free. ``WIDEN`` is as in :mod:`engine.gpu.grouped_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["rows", "residual", "outputs"]
)  # nothing is compiled anew while an instance serves
def layer_product(
    rows,
    weights,
    bias,
    norm_weight,
    residual,
    outputs,
    count,
    row_stride,
    weight_out,
    epsilon,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORMED: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    GATED: tl.constexpr,
    TANH: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Program (part, tile): outputs [count, OUT] of rows by weights [OUT, IN].

    With ``NORMED`` rows [count, IN] are divided by their root mean square first, and multiplied by the norm's
    weights. With ``GATED`` rows are [count, 2 IN]: activations of their first half times the second one. Both
    are rounded as kernels of their own round them. With ``RESIDUAL`` its rows [count, OUT], in one piece, are
    added.
    """
    part, tile = tl.program_id(0), tl.program_id(1)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_out = m < count, n < OUT
    line = rows + m.to(tl.int64) * row_stride
    column = weights + n.to(tl.int64) * weight_out
    element = rows.dtype.element_ty
    scale = tl.zeros([BLOCK_M], tl.float32)
    if NORMED:
        squares = tl.zeros([BLOCK_M], tl.float32)
        for start in range(0, IN, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            inside = in_rows[:, None] & (k < IN)[None, :]
            wide = tl.load(line[:, None] + k[None, :], mask=inside, other=0.0).to(tl.float32)
            squares += tl.sum(wide * wide, 1)
        scale = 1.0 / tl.sqrt(squares / IN + epsilon)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        in_k = k < IN
        inside = in_rows[:, None] & in_k[None, :]
        left = tl.load(line[:, None] + k[None, :], mask=inside, other=0.0)
        right = tl.load(column[None, :] + k[:, None], mask=in_out[None, :] & in_k[:, None], other=0.0)
        if NORMED:
            factor = tl.load(norm_weight + k, mask=in_k, other=0.0).to(tl.float32)
            scaled = left.to(tl.float32) * scale[:, None]
            if PLUS_ONE:
                left = (scaled * (factor + 1.0)[None, :]).to(element)
            else:
                left = (scaled.to(element).to(tl.float32) * factor[None, :]).to(element)
        if GATED:
            gate = left.to(tl.float32)
            other = tl.load(line[:, None] + IN + k[None, :], mask=inside, other=0.0).to(tl.float32)
            steep = gate
            if TANH:
                steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
            left = (gate / (1.0 + tl.exp(-steep)) * other).to(element)
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        sums += tl.dot(left, right, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + n, mask=in_out, other=0.0).to(tl.float32)[None, :]
    place = m.to(tl.int64)[:, None] * OUT + n[None, :]
    inside = in_rows[:, None] & in_out[None, :]
    if RESIDUAL:
        sums += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(outputs + place, sums.to(outputs.dtype.element_ty), mask=inside)
