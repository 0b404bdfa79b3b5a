"""Triton kernels of norms, rotary embeddings, gates, and the races of the sampler.

Each takes the place of many operators. They read tensors by their strides, so that parts of a merged product
need no copy, and compute in float32.
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


@triton.jit
def gated(rows, results, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TANH: tl.constexpr):
    """Program (row, part): activations of a row's first ``WIDTH`` numbers, times the others.

    SiLU, or with ``TANH`` GELU by its tanh. results [rows, WIDTH], in one piece.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(rows + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(rows + row * row_stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if TANH:
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    else:
        steep = gate
    result = gate / (1.0 + tl.exp(-steep)) * other
    tl.store(results + row * WIDTH + column, result.to(results.dtype.element_ty), mask=inside)


@triton.jit
def mixed(bits):
    """The 32-bit finaliser of MurmurHash3 (Appleby 2011), in wrapping int32."""
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * -2048144789
    bits = bits ^ ((bits >> 13) & 0x7FFFF)
    bits = bits * -1028477387
    return bits ^ ((bits >> 16) & 0xFFFF)


@triton.jit(
    do_not_specialize=["logits_row", "width", "parts"]
)  # else the first request would compile it anew
def race(
    logits,
    best,
    temperatures,
    lowest,
    keys,
    speeds,
    winners,
    logits_row,
    width,
    parts,
    BLOCK: tl.constexpr,
):
    """Program (row, part): the fastest of ``BLOCK`` tokens in the race of ``engine.compute.torch_logits``.

    logits [rows, width]; of each row the best logit, the temperature, the lowest scaled logit that may come,
    and two keys. speeds and winners [rows, parts].
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < width
    logit = tl.load(logits + row * logits_row + token, mask=inside, other=float("-inf")).to(tl.float32)
    scaled = (logit - tl.load(best + row)) / tl.load(temperatures + row)
    hashed = mixed(mixed(token * -1640531527 + tl.load(keys + 2 * row)) + tl.load(keys + 2 * row + 1))
    uniform = tl.minimum(
        ((hashed & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552
    )
    rest = 1.0 - uniform
    clock = tl.where(rest == 1.0, uniform, -tl.log(rest) * (uniform / (1.0 - rest)))  # -log1p(-uniform)
    speed = tl.where(inside & (scaled >= tl.load(lowest + row)), tl.exp(scaled) / clock, -1.0)
    fastest = tl.max(speed, 0)
    first = tl.min(tl.where(speed == fastest, token, width - 1), 0)
    tl.store(speeds + row * parts + part, fastest)
    tl.store(winners + row * parts + part, first)
