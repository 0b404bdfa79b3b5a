"""Triton kernels that take the place of many small operators: norms, and rotary position embeddings.

They read tensors by their strides, so that parts of a merged product need no copy, and compute in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    rows,
    weight,
    normed,
    outer_stride,
    inner_stride,
    inner,
    epsilon,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """Program (outer, inner): one row over its root mean square, times the weight.

    rows [outer, inner, WIDTH] by strides; normed is in one piece. The quotient is rounded before it is
    multiplied, as in Llama; with ``PLUS_ONE`` it is multiplied by weight + 1 and rounded then, as in Gemma.
    """
    first, second = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    row = tl.load(rows + first * outer_stride + second * inner_stride + column, mask=inside, other=0.0)
    wide = row.to(tl.float32)
    scaled = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + epsilon))
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PLUS_ONE:
        result = scaled * (factor + 1.0)
    else:
        result = scaled.to(row.dtype).to(tl.float32) * factor
    line = (first * inner + second) * WIDTH
    tl.store(normed + line + column, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def rotate(
    query,
    key,
    cosines,
    sines,
    rotated_query,
    rotated_key,
    query_head,
    query_token,
    key_head,
    key_token,
    angle_token,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (token, head): turn a query's or a key's vector by the token's angles.

    query and key [heads, tokens, DIM] by strides, the queries' heads first; cosines and sines [tokens, DIM].
    Results are [tokens, heads, DIM], in one piece.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    angle = token * angle_token + column
    if head < HEADS:
        source = query + head * query_head + token * query_token + column
        target = rotated_query + (token * HEADS + head) * DIM + column
    else:
        source = key + (head - HEADS) * key_head + token * key_token + column
        target = rotated_key + (token * KV_HEADS + head - HEADS) * DIM + column
    lower = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    upper = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + angle, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + angle, mask=inside, other=0.0).to(tl.float32)
    element = rotated_query.dtype.element_ty
    tl.store(target, (lower * cosine - upper * sine).to(element), mask=inside)
    cosine = tl.load(cosines + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + HALF, (upper * cosine + lower * sine).to(element), mask=inside)
