"""Triton kernels of experts for few tokens: each pair's matrices by its vector.

A pair of a token and an expert reads the matrices of its expert by itself, so nothing is sorted. Sums are
those of the pair alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matrix_by_vector(
    matrix,
    vector,
    n,
    stride,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sums [BLOCK_N], in float32, of a matrix's lines ``n`` times a vector.

    The matrix is [OUT, IN].
    """
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, IN, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        number = tl.load(vector + k, mask=k < IN, other=0.0).to(tl.float32)
        line = matrix + n.to(tl.int64)[:, None] * stride + k[None, :]
        weight = tl.load(line, mask=(n < OUT)[:, None] & (k < IN)[None, :], other=0.0).to(tl.float32)
        sums += weight * number[None, :]
    return tl.sum(sums, 1)


@triton.jit(do_not_specialize=["top_k"], do_not_specialize_on_alignment=["hidden", "expert_ids"])
def few_up(
    hidden,
    expert_ids,
    weights,
    inner,
    top_k,
    row_stride,
    weight_expert,
    weight_out,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TANH: tl.constexpr,
):
    """Program (part, pair): inner [pairs, OUT], activations of the first product times the second.

    hidden [tokens, IN], weights [EXPERTS, 2 OUT, IN]. Nothing is written for numbers beyond the experts.
    """
    part, pair = tl.program_id(0), tl.program_id(1)
    expert = tl.load(expert_ids + pair).to(tl.int64)
    if (expert >= 0) & (expert < EXPERTS):
        n = part * BLOCK_N + tl.arange(0, BLOCK_N)
        vector = hidden + (pair // top_k).to(tl.int64) * row_stride
        matrix = weights + expert * weight_expert
        element = inner.dtype.element_ty
        gate = matrix_by_vector(matrix, vector, n, weight_out, IN, OUT, BLOCK_N, BLOCK_K)
        other = matrix_by_vector(matrix + OUT * weight_out, vector, n, weight_out, IN, OUT, BLOCK_N, BLOCK_K)
        gate, other = gate.to(element).to(tl.float32), other.to(element).to(tl.float32)
        steep = gate
        if TANH:
            steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
        found = gate / (1.0 + tl.exp(-steep)) * other
        tl.store(inner + pair.to(tl.int64) * OUT + n, found.to(element), mask=n < OUT)


@triton.jit(
    do_not_specialize=["top_k"], do_not_specialize_on_alignment=["inner", "expert_ids", "shares", "outputs"]
)
def few_down(
    inner,
    expert_ids,
    shares,
    weights,
    outputs,
    top_k,
    weight_expert,
    weight_out,
    EXPERTS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (part, token): outputs [tokens, OUT], sums of a token's experts times their shares.

    inner [pairs, IN], shares [tokens, top_k], weights [EXPERTS, OUT, IN]. Terms are added in the order of the
    router's choice.
    """
    part, token = tl.program_id(0), tl.program_id(1)
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for choice in range(top_k):
        pair = token * top_k + choice
        expert = tl.load(expert_ids + pair).to(tl.int64)
        if (expert >= 0) & (expert < EXPERTS):
            vector, matrix = inner + pair.to(tl.int64) * IN, weights + expert * weight_expert
            found = matrix_by_vector(matrix, vector, n, weight_out, IN, OUT, BLOCK_N, BLOCK_K)
            total += tl.load(shares + pair).to(tl.float32) * found.to(inner.dtype.element_ty).to(tl.float32)
    tl.store(outputs + token.to(tl.int64) * OUT + n, total.to(outputs.dtype.element_ty), mask=n < OUT)


@triton.jit(do_not_specialize_on_alignment=["logits", "scores", "chosen"])
def choose_experts(
    logits,
    scores,
    chosen,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    NORMALISED: tl.constexpr,
):
    """Program (token): the most likely experts, and their shares; of equal ones the first.

    logits [tokens, EXPERTS]; scores and chosen [tokens, TOP_K]. With ``NORMALISED`` shares add up to 1.
    """
    token = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_C)
    logit = tl.load(logits + token * EXPERTS + expert, mask=expert < EXPERTS, other=float("-inf")).to(
        tl.float32
    )
    weight = tl.exp(logit - tl.max(logit, 0))
    share = tl.where(expert < EXPERTS, weight / tl.sum(weight, 0), -1.0)
    found, numbers = tl.zeros([BLOCK_C], tl.float32), tl.zeros([BLOCK_C], tl.int64)
    for place in range(TOP_K):
        best = tl.max(share, 0)
        first = tl.min(tl.where(share == best, expert, BLOCK_E), 0)
        found = tl.where(choice == place, best, found)
        numbers = tl.where(choice == place, first, numbers)
        share = tl.where(expert == first, -1.0, share)
    if NORMALISED:
        found = found / tl.sum(found, 0)
    line = token * TOP_K + choice
    tl.store(scores + line, found.to(scores.dtype.element_ty), mask=choice < TOP_K)
    tl.store(chosen + line, numbers, mask=choice < TOP_K)
