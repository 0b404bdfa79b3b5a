"""Triton kernels of paged attention: write keys and values, attend over blocks, merge splits.

A tile is a few consecutive queries of one row. One program computes a tile for one KV head: the heads that
share it stand under each other, so that each key is read once for all of them. Softmax is computed online
(Milakov and Gimelshein 2018), blocks are looked up in the row's table as they are needed (Kwon et al. 2023),
and where few rows have long contexts, each context is cut over several programs (Flash-Decoding, Dao et al.
2023). Nothing here depends on values on the host, so a launch can be captured in a CUDA graph.

Numbers are added up in float32, and products of float32 are not rounded to TF32. ``WIDEN`` multiplies in
float32 whatever the type: Triton's interpreter, which runs these kernels without a GPU, has no bfloat16.

Triton compiles a kernel anew for arguments that are 1, or that begin to be multiples of 16 (addresses of 16
bytes). Where that changes from step to step and gains nothing, the kernel's arguments are marked so that
Triton does not: nothing is to be compiled while an instance serves.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store(
    key,
    value,
    keys,
    values,
    slots,
    key_head,
    key_token,
    value_head,
    value_token,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (token, kv_head): write the keys and values of a token.

    key and value [kv_heads, tokens, dim] (strides given, last one 1) go to ``slots[token]`` of keys and
    values [slots, kv_heads, dim].
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)  # strides times them are large
    cell = tl.load(slots + token).to(tl.int64) * KV_HEADS + head
    k, v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_key, in_value = k < KEY_DIM, v < VALUE_DIM
    new_key = tl.load(key + head * key_head + token * key_token + k, mask=in_key)
    new_value = tl.load(value + head * value_head + token * value_token + v, mask=in_value)
    tl.store(keys + cell * KEY_DIM + k, new_key, mask=in_key)
    tl.store(values + cell * VALUE_DIM + v, new_value, mask=in_value)


@triton.jit(do_not_specialize=["width", "most_rows"])
def take_apart(
    lines,
    width,
    chosen,
    inputs,
    most_rows,
    positions,
    slots,
    BLOCK_SIZE: tl.constexpr,
    HEADER: tl.constexpr,
):
    """Program (row): take apart the packed line of a decode row.

    lines [rows, width] are those of :mod:`engine.attention.packed_rows`. Written are inputs [2, most_rows]
    (token ids and positions), positions [rows] as int32, and the cache's slots [rows].
    """
    row = tl.program_id(0).to(tl.int64)
    line = lines + row * width
    token, source = tl.load(line).to(tl.int64), tl.load(line + 1)
    position = tl.load(line + 2)
    token = tl.load(chosen + source, mask=source >= 0, other=token)
    block = tl.load(line + HEADER + position // BLOCK_SIZE).to(tl.int64)
    tl.store(inputs + row, token)
    tl.store(inputs + most_rows + row, position.to(tl.int64))
    tl.store(positions + row, position)
    tl.store(slots + row, block * BLOCK_SIZE + position % BLOCK_SIZE)


STEP_NUMBERS = [
    "input_width", "table_width", "null_block", "num_tokens", "num_rows", "num_wanted", "wanted_at",
    "tables_at",
]  # fmt: skip


@triton.jit(do_not_specialize=STEP_NUMBERS)
def take_tokens_apart(
    packed,
    chosen,
    inputs,
    slots,
    wanted,
    tables,
    input_width,
    table_width,
    null_block,
    num_tokens,
    num_rows,
    num_wanted,
    wanted_at,
    tables_at,
    BLOCK_SIZE: tl.constexpr,
    HEADER: tl.constexpr,
    LINE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take apart a packed step with prompts.

    Programs are those of tokens, then those of rows, and one more. The array is that of
    :mod:`engine.attention.packed_tokens`. Written are inputs [2, input_width] (token ids and positions) and
    slots, by token; tables [num_rows, table_width], by row; and wanted.
    """
    program = tl.program_id(0)
    width = tl.load(packed)
    if program < num_tokens:
        line = packed + HEADER + program * LINE
        token, source = tl.load(line).to(tl.int64), tl.load(line + 1)
        position, row = tl.load(line + 2), tl.load(line + 3)
        token = tl.load(chosen + source, mask=source >= 0, other=token)
        place = tables_at + row.to(tl.int64) * width + position // BLOCK_SIZE
        block = tl.load(packed + place, mask=row >= 0, other=null_block).to(tl.int64)
        tl.store(inputs + program, token)
        tl.store(inputs + input_width + program, position.to(tl.int64))
        tl.store(slots + program, block * BLOCK_SIZE + position % BLOCK_SIZE)
    elif program < num_tokens + num_rows:
        row = (program - num_tokens).to(tl.int64)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            blocks = tl.load(packed + tables_at + row * width + column, mask=column < width, other=0)
            tl.store(tables + row * table_width + column, blocks, mask=column < width)
    else:
        for start in range(0, num_wanted, BLOCK):
            index = start + tl.arange(0, BLOCK)
            number = tl.load(packed + wanted_at + index, mask=index < num_wanted, other=0)
            tl.store(wanted + index, number.to(tl.int64), mask=index < num_wanted)


STEP_SIZES = ["table_width"]
STEP_ADDRESSES = ["part_sums", "part_peaks", "part_totals"]
TILE_ADDRESSES = ["tile_rows", "tile_tokens", "tile_counts", "tile_positions"]


@triton.jit
def keys_per_part(seen, PART_KEYS: tl.constexpr, MOST_PARTS: tl.constexpr):
    """Keys of each part of a context of which ``seen`` keys are looked at."""
    share = seen * 0 + PART_KEYS
    while share * MOST_PARTS < seen:
        share *= 2
    return share


@triton.jit
def merged(peak, total, part_peak, part_total):
    """Highest score and sum of weights with one part more.

    And the factors of the sums of values before it, and of its own.
    """
    higher = tl.maximum(peak, part_peak)
    base = tl.where(higher == float("-inf"), 0.0, higher)  # products may overflow
    shrink, grow = tl.exp(peak - base), tl.exp(part_peak - base)
    return higher, total * shrink + part_total * grow, shrink, grow


@triton.jit
def attend_to_keys(
    q,
    keys,
    values,
    table,
    begin,
    end,
    kv_head,
    query_position,
    scale,
    softcap,
    window,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Attention of queries [BLOCK_M, BLOCK_K] to the keys from ``begin`` to ``end``.

    Returns highest scores and sums of weights [BLOCK_M], and sums of values [BLOCK_M, BLOCK_V]. Keys that a
    query does not see add exactly nothing.
    """
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    in_key, in_value = k < KEY_DIM, v < VALUE_DIM
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in range(begin, end, BLOCK_N):
        key_position = start + n
        inside = key_position < end
        block = tl.load(table + key_position // BLOCK_SIZE, mask=inside, other=0)
        cell = (block.to(tl.int64) * BLOCK_SIZE + key_position % BLOCK_SIZE) * KV_HEADS + kv_head
        key = tl.load(
            keys + cell[None, :] * KEY_DIM + k[:, None], mask=inside[None, :] & in_key[:, None], other=0.0
        )
        if WIDEN:
            key = key.to(tl.float32)
        scores = tl.dot(q, key, input_precision="ieee") * scale
        if CAPPED:  # tanh(x) = 2 / (1 + exp(-2x)) - 1
            scores = softcap * (2.0 / (1.0 + tl.exp(scores * (-2.0 / softcap))) - 1.0)
        seen = inside[None, :] & (key_position[None, :] <= query_position[:, None])
        if WINDOWED:
            seen = seen & (key_position[None, :] > query_position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a query that has seen no key yet
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(peak - base)
        value = tl.load(
            values + cell[:, None] * VALUE_DIM + v[None, :],
            mask=inside[:, None] & in_value[None, :],
            other=0.0,
        )
        if WIDEN:
            value = value.to(tl.float32)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        peak = higher
    return peak, total, sums


@triton.jit(do_not_specialize=STEP_SIZES, do_not_specialize_on_alignment=STEP_ADDRESSES + TILE_ADDRESSES)
def attend(
    query,
    keys,
    values,
    attended,
    part_sums,
    part_peaks,
    part_totals,
    sinks,
    tables,
    tile_rows,
    tile_tokens,
    tile_counts,
    tile_positions,
    scale,
    softcap,
    window,
    query_head,
    query_token,
    table_width,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART_KEYS: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    FOLDED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Program (tile, kv_head, split): attention of a tile to its context.

    With ``SPLIT`` (tiles of one query) a program takes each ``num_programs(2)``-th part of the context.
    Sums, peaks and totals go to the parts [parts, tiles, heads(, value_dim)], which :func:`merge` puts
    together. Otherwise results go to attended [tokens, heads, value_dim]; with ``FOLDED`` they are put
    together from the same parts in the same way.

    query: [heads, tokens, key_dim], strides given, last one 1. tables: [rows, table_width] of blocks.
    tile_*: [tiles] row, first packed token, queries, and position of the first. With ``SPLIT`` or ``FOLDED``
    contexts of all queries of a tile have parts of one size."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(tile_rows + tile).to(tl.int64)
    first = tl.load(tile_tokens + tile).to(tl.int64)  # times a stride, it may be beyond int32
    count = tl.load(tile_counts + tile).to(tl.int32)
    position = tl.load(tile_positions + tile).to(tl.int32)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    in_key, in_value = k < KEY_DIM, v < VALUE_DIM
    head = kv_head * GROUP + m % GROUP
    token = first + m // GROUP
    in_tile = m // GROUP < count
    query_position = position + m // GROUP
    q = tl.load(
        query + head.to(tl.int64)[:, None] * query_head + token[:, None] * query_token + k[None, :],
        mask=in_tile[:, None] & in_key[None, :],
        other=0.0,
    )
    if WIDEN:
        q = q.to(tl.float32)
    begin = position * 0
    if WINDOWED:
        begin = tl.maximum(position - window + 1, 0)
    end = position + count
    table = tables + row * table_width
    if SPLIT or FOLDED:
        seen = position + 1
        if WINDOWED:
            seen = tl.minimum(seen, window)
        share = keys_per_part(seen, PART_KEYS, MOST_PARTS)
        first_part = begin // share
        parts = tl.cdiv(end, share) - first_part
        begin = begin // BLOCK_N * BLOCK_N
    if SPLIT:
        for number in range(split, parts, tl.num_programs(2)):
            start = (first_part + number) * share
            peak, total, sums = attend_to_keys(
                q, keys, values, table, tl.maximum(start, begin), tl.minimum(start + share, end), kv_head,
                query_position, scale, softcap, window, BLOCK_SIZE, BLOCK_M, BLOCK_N,
                BLOCK_K, BLOCK_V, KV_HEADS, KEY_DIM, VALUE_DIM, WINDOWED, CAPPED, WIDEN,
            )  # fmt: skip
            part = (number * tl.num_programs(0) + tile) * HEADS + head
            tl.store(part_peaks + part, peak, mask=in_tile)
            tl.store(part_totals + part, total, mask=in_tile)
            tl.store(
                part_sums + part.to(tl.int64)[:, None] * VALUE_DIM + v[None, :],
                sums,
                mask=in_tile[:, None] & in_value[None, :],
            )
    else:
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        if SINKS:
            peak = tl.load(sinks + head).to(tl.float32)
            total += 1.0
        if FOLDED:
            for number in range(0, parts):
                start = (first_part + number) * share
                part_peak, part_total, added = attend_to_keys(
                    q, keys, values, table, tl.maximum(start, begin), tl.minimum(start + share, end), kv_head,
                    query_position, scale, softcap, window, BLOCK_SIZE, BLOCK_M, BLOCK_N,
                    BLOCK_K, BLOCK_V, KV_HEADS, KEY_DIM, VALUE_DIM, WINDOWED, CAPPED, WIDEN,
                )  # fmt: skip
                peak, total, shrink, grow = merged(peak, total, part_peak, part_total)
                sums = sums * shrink[:, None] + added * grow[:, None]
        else:
            part_peak, part_total, added = attend_to_keys(
                q, keys, values, table, begin, end, kv_head,
                query_position, scale, softcap, window, BLOCK_SIZE, BLOCK_M, BLOCK_N,
                BLOCK_K, BLOCK_V, KV_HEADS, KEY_DIM, VALUE_DIM, WINDOWED, CAPPED, WIDEN,
            )  # fmt: skip
            peak, total, shrink, grow = merged(peak, total, part_peak, part_total)
            sums = added * grow[:, None]
        sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]  # 0: lines beyond the tile
        tl.store(
            attended + (token[:, None] * HEADS + head[:, None]) * VALUE_DIM + v[None, :],
            sums.to(attended.dtype.element_ty),
            mask=in_tile[:, None] & in_value[None, :],
        )


@triton.jit(do_not_specialize_on_alignment=[*STEP_ADDRESSES, "tile_tokens", "tile_counts", "tile_positions"])
def merge(
    part_sums,
    part_peaks,
    part_totals,
    sinks,
    attended,
    tile_tokens,
    tile_counts,
    tile_positions,
    window,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PART_KEYS: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Program (tile, head): merge the parts of a context that :func:`attend` left.

    They become one line of attended [tokens, heads, value_dim]. A tile without queries has none.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(tile_tokens + tile).to(tl.int64)
    v = tl.arange(0, BLOCK_V)
    in_value = v < VALUE_DIM
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if SINKS:
        peak = tl.zeros([1], tl.float32) + tl.load(sinks + head).to(tl.float32)
        total = tl.zeros([1], tl.float32) + 1.0
    sums = tl.zeros([BLOCK_V], tl.float32)
    end = tl.load(tile_positions + tile).to(tl.int32) + 1
    seen, begin = end, end * 0
    if WINDOWED:
        seen, begin = tl.minimum(end, window), tl.maximum(end - window, 0)
    share = keys_per_part(seen, PART_KEYS, MOST_PARTS)
    parts = tl.cdiv(end, share) - begin // share
    for number in range(parts * tl.minimum(tl.load(tile_counts + tile), 1)):
        part = (number * tl.num_programs(0) + tile) * HEADS + head
        peak, total, shrink, grow = merged(
            peak, total, tl.load(part_peaks + part), tl.load(part_totals + part)
        )
        line = part_sums + part.to(tl.int64) * VALUE_DIM + v
        sums = sums * shrink + tl.load(line, mask=in_value, other=0.0) * grow
    line = (token * HEADS + head) * VALUE_DIM + v
    found = sums / tl.where(total == 0.0, 1.0, total)  # 0: no queries
    is_used = tl.load(tile_counts + tile) + v * 0 > 0
    tl.store(attended + line, found.to(attended.dtype.element_ty), mask=in_value & is_used)
