"""Triton kernels of packed weights: codes are widened inside the product.

Weights are read as they are stored, so a decode step reads a half or a quarter of the bytes of bfloat16.
Codes of 4 bits stand in words of 32 inputs: byte j has the input j in its low half and the input j + 16 in
its high half, so that both halves meet inputs that are neighbours. Floats of 8 bits (e4m3) become halves by
shifting their bits, which gives 1/256 of each number on any device; the scales make up for it.

Where activations are rounded, too, sums are whole numbers, and everything around them is rounded as
:mod:`engine.model.quantization.rounding` does it. ``WIDEN`` is as in :mod:`engine.gpu.grouped_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.gpu.grouped_kernels import STEP_ADDRESSES, group_of_tile

INT8, INT4, FLOAT8, FLOAT4 = 0, 1, 2, 3
"""Kinds of codes."""
_MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2 ** 23: adding it and taking it away rounds.

Halves go to the even one.
"""
_FAR = tl.constexpr(1048576.0)


@triton.jit
def number_of(codes, KIND: tl.constexpr):
    """Numbers of codes: of a byte, or of the low half of each."""
    if KIND == 0:
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    wide = codes.to(tl.int32)
    if KIND == 2:
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    nibble = wide & 15
    if KIND == 1:
        return ((nibble ^ 8) - 8).to(tl.float32)
    exponent, fraction = (nibble >> 1) & 3, nibble & 1
    size = tl.where(exponent == 0, fraction, (2 + fraction) << (tl.maximum(exponent, 1) - 1))
    return tl.where(nibble >= 8, -size, size).to(tl.float32)


@triton.jit
def weights_of(codes, scale, zero, KIND: tl.constexpr, ZEROS: tl.constexpr, SCALED: tl.constexpr):
    """Weights [k, n] of codes, with scale and zero point [n] of their group.

    Without ``SCALED`` the scale is left for the sums.
    """
    numbers = number_of(codes, KIND)
    if ZEROS:
        numbers = numbers - zero[None, :]
    if SCALED:
        numbers = numbers * scale[None, :]
    return numbers


@triton.jit(
    do_not_specialize=["count", "top_k"], do_not_specialize_on_alignment=[*STEP_ADDRESSES, "rows", "outputs"]
)
def coded_product(
    rows,
    codes,
    scales,
    zeros,
    bias,
    outputs,
    ends,
    order,
    count,
    top_k,
    row_stride,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CUT: tl.constexpr,
    GATHER: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Program (part, tile, cut): outputs [cuts, count, OUT] of rows [count, IN], by coded weights.

    A cut adds up ``CUT`` inputs, a multiple of ``BLOCK_K`` if there are several; the caller adds up cuts.
    Their size is known to the compiler: it reads whole vectors only where it knows that they are aligned.

    codes: uint8 [experts, OUT, BYTES]; scales and zeros: float32 [experts, GROUPS, OUT], of groups of
    neighbours. ``BLOCK_K`` divides their inputs; of 4 bits it may be 32 where these are 16. With no
    ``EXPERTS`` there is one matrix; otherwise rows are sorted by expert, as in ``grouped_product``.
    """
    part, tile = tl.program_id(0), tl.program_id(1)
    if EXPERTS == 0:
        expert, first, end = 0, tile * BLOCK_M, count
    else:
        expert, first, end = group_of_tile(ends, tile, EXPERTS, BLOCK_E, BLOCK_M)
    if first < end:
        m = first + tl.arange(0, BLOCK_M)
        n = part * BLOCK_N + tl.arange(0, BLOCK_N)
        in_rows, in_out = m < end, n < OUT
        source = m
        if GATHER:
            source = tl.load(order + m, mask=in_rows, other=0) // top_k
        line = rows + source.to(tl.int64) * row_stride
        matrix = tl.zeros([BLOCK_N], tl.int64) + expert
        column = codes + (matrix * OUT + n) * BYTES
        factors = matrix * GROUPS * OUT + n
        GROUP: tl.constexpr = IN // GROUPS
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        scale = tl.load(scales + factors, mask=in_out, other=0.0)
        zero = scale
        if ZEROS:
            zero = tl.load(zeros + factors, mask=in_out, other=0.0)
        cut = tl.program_id(2)
        for step in range(0, CUT, BLOCK_K):
            start = cut * CUT + step
            if KIND == 0 or KIND == 2:
                if GROUPS > 1:
                    of_group = factors + (start // GROUP) * OUT
                    scale = tl.load(scales + of_group, mask=in_out, other=0.0)
                    if ZEROS:
                        zero = tl.load(zeros + of_group, mask=in_out, other=0.0)
                k = start + tl.arange(0, BLOCK_K)
                held = tl.load(
                    column[None, :] + k[:, None], mask=in_out[None, :] & (k < IN)[:, None], other=0
                )
                left = tl.load(
                    line[:, None] + k[None, :], mask=in_rows[:, None] & (k < IN)[None, :], other=0.0
                )
                right = weights_of(held, scale, zero, KIND, ZEROS, GROUPS > 1)
                if WIDEN:
                    left = left.to(tl.float32)
                sums += tl.dot(left, right.to(left.dtype), input_precision="ieee")
            else:
                place = tl.arange(0, BLOCK_K // 2)
                byte = start // 2 + place
                held = tl.load(
                    column[None, :] + byte[:, None], mask=in_out[None, :] & (byte < BYTES)[:, None], other=0
                )
                for high in tl.static_range(2):
                    if GROUPS > 1:
                        group = (start + 16 * high) // GROUP
                        there = in_out & (n * 0 + group < GROUPS)  # the last word may be half empty
                        scale = tl.load(scales + factors + group * OUT, mask=there, other=0.0)
                        if ZEROS:
                            zero = tl.load(zeros + factors + group * OUT, mask=there, other=0.0)
                    k = start + place // 16 * 32 + place % 16 + 16 * high
                    left = tl.load(
                        line[:, None] + k[None, :], mask=in_rows[:, None] & (k < IN)[None, :], other=0.0
                    )
                    right = weights_of(held >> (4 * high), scale, zero, KIND, ZEROS, GROUPS > 1)
                    if WIDEN:
                        left = left.to(tl.float32)
                    sums += tl.dot(left, right.to(left.dtype), input_precision="ieee")
        if GROUPS == 1:
            sums = sums * scale[None, :]
        if BIAS:
            first_cut = in_out & (n * 0 + cut == 0)
            sums += tl.load(bias + matrix * OUT + n, mask=first_cut, other=0.0).to(tl.float32)[None, :]
        tl.store(
            outputs + (cut * count + m.to(tl.int64))[:, None] * OUT + n[None, :],
            sums.to(outputs.dtype.element_ty),
            mask=in_rows[:, None] & in_out[None, :],
        )


@triton.jit(do_not_specialize=["numel", "count"])
def added_up(cuts, outputs, numel, count, BLOCK: tl.constexpr):
    """Program (part): sums of cuts [count, numel], in their order."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    total = tl.zeros([BLOCK], tl.float32)
    for cut in range(0, count):
        total += tl.load(cuts + cut * numel + place, mask=inside, other=0.0)
    tl.store(outputs + place, total.to(outputs.dtype.element_ty), mask=inside)


@triton.jit
def widen(
    codes,
    scales,
    zeros,
    weights,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """Program (output, part): ``BLOCK`` bytes of codes [OUT, BYTES] as weights [OUT, IN]."""
    output = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = tl.load(codes + output * BYTES + byte, mask=byte < BYTES, other=0)
    for high in tl.static_range(1 if KIND == 0 or KIND == 2 else 2):
        place = byte
        if KIND == 1 or KIND == 3:
            place = byte // 16 * 32 + byte % 16 + 16 * high
        inside = place < IN
        factor = place // (IN // GROUPS) * OUT + output
        numbers = number_of(held >> (4 * high), KIND)
        if ZEROS:
            numbers = numbers - tl.load(zeros + factor, mask=inside, other=0.0)
        numbers = numbers * tl.load(scales + factor, mask=inside, other=0.0)
        tl.store(weights + output * IN + place, numbers.to(weights.dtype.element_ty), mask=inside)


@triton.jit
def rounded(x):
    """The nearest whole numbers, of halves the even ones, up to a million."""
    near = tl.minimum(tl.maximum(x, -_FAR), _FAR)
    return (near + _MAGIC) - _MAGIC


@triton.jit(do_not_specialize=["fixed_scale", "fixed_zero"], do_not_specialize_on_alignment=["rows"])
def round_rows(
    rows,
    codes,
    scales,
    zeros,
    row_stride,
    fixed_scale,
    fixed_zero,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    FIXED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    """Program (row, part): a part of a row as int8, with scale and zero point."""
    row, part = tl.program_id(0), tl.program_id(1)
    parts = tl.num_programs(1)
    k = tl.arange(0, BLOCK)
    inside = k < PART
    x = tl.load(rows + row.to(tl.int64) * row_stride + part * PART + k, mask=inside, other=0.0).to(tl.float32)
    if FIXED:
        none = tl.full([], 0.0, tl.float32)
        scale, zero = none + fixed_scale, none + fixed_zero
    else:
        least, most = tl.minimum(tl.min(x, 0), 0.0), tl.maximum(tl.max(x, 0), 0.0)
        if SYMMETRIC:
            scale = tl.div_rn(tl.maximum(most, -least), 127.0)
            zero = scale * 0.0
        else:
            scale = tl.div_rn(most - least, 255.0)
            zero = tl.where(
                scale > 0, rounded(-128.0 - tl.div_rn(least, tl.where(scale > 0, scale, 1.0))), 0.0
            )
    found = tl.where(scale > 0, rounded(tl.div_rn(x, tl.where(scale > 0, scale, 1.0))), 0.0) + zero
    found = tl.minimum(tl.maximum(found, -128.0), 127.0)
    place = row.to(tl.int64) * parts + part
    tl.store(codes + place * PART + k, found.to(tl.int8), mask=inside)
    tl.store(scales + place, scale)
    tl.store(zeros + place, zero.to(tl.int32))


@triton.jit(
    do_not_specialize=["count", "top_k"], do_not_specialize_on_alignment=[*STEP_ADDRESSES, "rows", "outputs"]
)
def integer_product(
    rows,
    row_scales,
    row_zeros,
    codes,
    scales,
    code_sums,
    bias,
    outputs,
    ends,
    order,
    count,
    top_k,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    OUT: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATHER: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Program (part of outputs, tile): outputs [count, OUT] of whole numbers, whose sums are exact.

    rows: int8 [count, PARTS, PART], with scales and zero points [count, PARTS]; codes: int8 [experts, OUT,
    PARTS * PART]; scales: float32 [experts, OUT]; code_sums: int32 [experts, PARTS, OUT]. Each part is added
    up and scaled by itself; of the results neighbours are added first. To be launched without fused
    multiplications and additions, which would round less often.
    """
    piece, tile = tl.program_id(0), tl.program_id(1)
    if EXPERTS == 0:
        expert, first, end = 0, tile * BLOCK_M, count
    else:
        expert, first, end = group_of_tile(ends, tile, EXPERTS, BLOCK_E, BLOCK_M)
    if first < end:
        m = first + tl.arange(0, BLOCK_M)
        n = piece * BLOCK_N + tl.arange(0, BLOCK_N)
        in_rows, in_out = m < end, n < OUT
        source = m
        if GATHER:
            source = tl.load(order + m, mask=in_rows, other=0) // top_k
        source = source.to(tl.int64)
        matrix = tl.zeros([BLOCK_N], tl.int64) + expert
        line, column = rows + source * PARTS * PART, codes + (matrix * OUT + n) * PARTS * PART
        scale = tl.load(scales + matrix * OUT + n, mask=in_out, other=0.0)
        before, pair = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        total = before
        for part in tl.static_range(PARTS):
            sums = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
            for start in range(0, PART, BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                inside, place = k < PART, part * PART + k
                left = tl.load(
                    line[:, None] + place[None, :], mask=in_rows[:, None] & inside[None, :], other=0
                )
                right = tl.load(
                    column[None, :] + place[:, None], mask=in_out[None, :] & inside[:, None], other=0
                )
                sums += tl.dot(left, right, out_dtype=tl.int32)
            if not SYMMETRIC:
                zero = tl.load(row_zeros + source * PARTS + part, mask=in_rows, other=0)
                of_codes = tl.load(code_sums + (matrix * PARTS + part) * OUT + n, mask=in_out, other=0)
                sums -= zero[:, None] * of_codes[None, :]
            row_scale = tl.load(row_scales + source * PARTS + part, mask=in_rows, other=0.0)
            total = sums.to(tl.float32) * scale[None, :] * row_scale[:, None]
            if part % 2 == 1:
                total = before + total
                if part == 3:
                    total = pair + total
                pair = total
            before = total
        if BIAS:
            total += tl.load(bias + matrix * OUT + n, mask=in_out, other=0.0).to(tl.float32)[None, :]
        tl.store(
            outputs + m.to(tl.int64)[:, None] * OUT + n[None, :],
            total.to(outputs.dtype.element_ty),
            mask=in_rows[:, None] & in_out[None, :],
        )
