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
def normed_number(number, scale, weight, inside, element, PLUS_ONE: tl.constexpr):
    """Numbers of a row as :func:`rms_norm` gives them, rounded to ``element``."""
    factor = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    if PLUS_ONE:
        result = number * scale * (factor + 1.0)
    else:
        result = (number * scale).to(element).to(tl.float32) * factor
    return result.to(element).to(tl.float32)


@triton.jit
def turned(
    source,
    target,
    cosines,
    sines,
    angle,
    inside,
    scale,
    weight,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """Write to ``target`` the vector at ``source``, turned; pointers and angles of its first half.

    With ``NORMED`` it is normalised first: by ``scale``, and by the weights from ``weight`` on.
    """
    lower = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    upper = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        lower = normed_number(lower, scale, weight, inside, source.dtype.element_ty, PLUS_ONE)
        upper = normed_number(upper, scale, weight + HALF, inside, source.dtype.element_ty, PLUS_ONE)
    cosine = tl.load(cosines + angle, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + angle, mask=inside, other=0.0).to(tl.float32)
    element = target.dtype.element_ty
    tl.store(target, (lower * cosine - upper * sine).to(element), mask=inside)
    cosine = tl.load(cosines + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + HALF, (upper * cosine + lower * sine).to(element), mask=inside)


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
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)  # strides times them are large
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
    turned(source, target, cosines, sines, angle, inside, 1.0, source, HALF, False, False)


@triton.jit
def rotate_and_store(
    query,
    key,
    value,
    cosines,
    sines,
    rotated_query,
    keys,
    values,
    slots,
    query_weight,
    key_weight,
    epsilon,
    query_head,
    query_token,
    key_head,
    key_token,
    value_head,
    value_token,
    angle_token,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NORMED: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """Program (token, head): :func:`rotate`, but keys go to the cache, and so do values.

    rotated_query is [tokens, HEADS, DIM] in one piece; keys and values [slots, KV_HEADS, dim] are written at
    ``slots[token]``, both by the program of the key. With ``NORMED`` queries and keys are normalised first.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)  # strides times them are large
    HALF: tl.constexpr = DIM // 2
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    angle = token * angle_token + column
    if head < HEADS:
        vector = query + head * query_head + token * query_token
        target = rotated_query + (token * HEADS + head) * DIM + column
        weight = query_weight
    else:
        kv_head = head - HEADS
        cell = tl.load(slots + token).to(tl.int64) * KV_HEADS + kv_head
        vector = key + kv_head * key_head + token * key_token
        target = keys + cell * DIM + column
        weight = key_weight
        v = tl.arange(0, BLOCK_V)
        new_value = tl.load(value + kv_head * value_head + token * value_token + v, mask=v < VALUE_DIM)
        tl.store(values + cell * VALUE_DIM + v, new_value, mask=v < VALUE_DIM)
    scale = 1.0
    if NORMED:
        every = tl.arange(0, 2 * BLOCK)
        wide = tl.load(vector + every, mask=every < DIM, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / DIM + epsilon)
    source, first = vector + column, weight + column
    turned(source, target, cosines, sines, angle, inside, scale, first, HALF, NORMED, PLUS_ONE)


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
    last,
    keys,
    speeds,
    winners,
    logits_row,
    width,
    parts,
    BLOCK: tl.constexpr,
    LIMITED: tl.constexpr,
):
    """Program (row, part): the fastest of ``BLOCK`` tokens in the race of ``engine.compute.torch_logits``.

    logits [rows, width]; of each row the best logit, the temperature, the lowest scaled logit that may come,
    two keys, and with ``LIMITED`` the last token that may come with just the lowest. speeds and winners
    [rows, parts].
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < width
    logit = tl.load(logits + row * logits_row + token, mask=inside, other=float("-inf")).to(tl.float32)
    scaled = (logit - tl.load(best + row)) / tl.load(temperatures + row)
    least = tl.load(lowest + row)
    enters = scaled >= least
    if LIMITED:
        enters = (scaled > least) | ((scaled == least) & (token <= tl.load(last + row)))
    hashed = mixed(mixed(token * -1640531527 + tl.load(keys + 2 * row)) + tl.load(keys + 2 * row + 1))
    uniform = tl.minimum(
        ((hashed & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552
    )
    rest = 1.0 - uniform
    clock = tl.where(rest == 1.0, uniform, -tl.log(rest) * (uniform / (1.0 - rest)))  # -log1p(-uniform)
    speed = tl.where(inside & enters, tl.exp(scaled) / clock, -1.0)
    fastest = tl.max(speed, 0)
    first = tl.min(tl.where(speed == fastest, token, width - 1), 0)
    tl.store(speeds + row * parts + part, fastest)
    tl.store(winners + row * parts + part, first)


@triton.jit
def scaled_logits(line, token, width, highest, heat, least):
    """Logits of some tokens over the temperature, 0 for the best.

    They are minus infinity where a token may not come.
    """
    logit = tl.load(line + token, mask=token < width, other=float("-inf")).to(tl.float32)
    scaled = (logit - highest) / heat
    return tl.where((scaled >= least) & (token < width), scaled, float("-inf"))


@triton.jit
def reach_of(steps, REACHES: tl.constexpr):
    """Distances from the best token of reaches by number: 1, 2, 3, and so on.

    The last one is infinite.
    """
    return tl.where(steps < REACHES - 1, steps.to(tl.float32) + 1.0, float("inf"))


@triton.jit(do_not_specialize=["logits_row", "width", "parts"])
def crowd(
    logits,
    best,
    temperatures,
    lowest,
    masses,
    counts,
    logits_row,
    width,
    parts,
    BLOCK: tl.constexpr,
    REACHES: tl.constexpr,
):
    """Program (row, part): of ``BLOCK`` tokens, number and weight of those nearer than each reach.

    masses float32 and counts int32 are [rows, parts, REACHES].
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, steps = part * BLOCK + tl.arange(0, BLOCK), tl.arange(0, REACHES)
    highest, heat, least = tl.load(best + row), tl.load(temperatures + row), tl.load(lowest + row)
    scaled = scaled_logits(logits + row * logits_row, token, width, highest, heat, least)
    nearer = (0.0 - scaled)[None, :] < reach_of(steps, REACHES)[:, None]
    place = (row * parts + part) * REACHES + steps
    tl.store(masses + place, tl.sum(tl.where(nearer, tl.exp(scaled)[None, :], 0.0), 1))
    tl.store(counts + place, tl.sum(nearer.to(tl.int32), 1))


@triton.jit
def bracket_of(mass, count, most, share, is_cut, NEAR: tl.constexpr, REACHES: tl.constexpr):
    """Reaches between which top-k and top-p are decided.

    Numbers of both, or ``REACHES`` twice, and how many tokens lie between, at most ``NEAR``. With top-k these
    are the tokens that it leaves, else those among which the last one of top-p is. The lower number is -1
    where there is none. mass and count [REACHES] are of all tokens.
    """
    steps = tl.arange(0, REACHES)
    everything = tl.sum(tl.where(steps == REACHES - 1, count, 0), 0)
    wanted = share * tl.sum(tl.where(steps == REACHES - 1, mass, 0.0), 0)
    holds = tl.where(is_cut, count >= tl.minimum(most, everything), mass >= 1.0001 * wanted)
    upper = tl.min(tl.where(holds, steps, REACHES), 0)
    lacks = (mass <= 0.9999 * wanted) & (steps < upper) & (is_cut == 0)  # in whatever order of sums
    lower = tl.max(tl.where(lacks, steps, -1), 0)
    between = tl.sum(tl.where(steps == upper, count, 0), 0) - tl.sum(tl.where(steps == lower, count, 0), 0)
    is_near = (upper < REACHES) & (between <= NEAR)
    return tl.where(is_near, lower, REACHES), tl.where(is_near, upper, REACHES), between


@triton.jit
def in_all(source, row, parts, PARTS: tl.constexpr, REACHES: tl.constexpr):
    """Masses or counts [PARTS, REACHES] of each part of a row."""
    part, steps = tl.arange(0, PARTS), tl.arange(0, REACHES)
    place = (row * parts + part)[:, None] * REACHES + steps[None, :]
    return tl.load(source + place, mask=(part < parts)[:, None] & (steps < REACHES)[None, :], other=0)


@triton.jit(do_not_specialize=["logits_row", "width", "parts"])
def pick_near(
    logits,
    best,
    temperatures,
    lowest,
    top_k,
    top_p,
    masses,
    counts,
    near,
    near_ids,
    logits_row,
    width,
    parts,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    REACHES: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Program (row, part): copy the tokens of the row's bracket, if they are few.

    Scaled logits go to near and ids to near_ids [rows, NEAR], in the order of ids.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    steps = tl.arange(0, REACHES)
    most, share = tl.load(top_k + row), tl.load(top_p + row)
    of_parts = in_all(counts, row, parts, PARTS, REACHES)
    mass = tl.sum(in_all(masses, row, parts, PARTS, REACHES), 0)
    lower, upper, _ = bracket_of(mass, tl.sum(of_parts, 0), most, share, most < width, NEAR, REACHES)
    if upper < REACHES:
        before = tl.sum(tl.where((tl.arange(0, PARTS) < part)[:, None], of_parts, 0), 0)
        first = tl.sum(tl.where(steps == upper, before, 0) - tl.where(steps == lower, before, 0), 0)
        highest, heat, least = tl.load(best + row), tl.load(temperatures + row), tl.load(lowest + row)
        token = part * BLOCK + tl.arange(0, BLOCK)
        scaled = scaled_logits(logits + row * logits_row, token, width, highest, heat, least)
        distance = 0.0 - scaled
        nearest = tl.where(lower < 0, -1.0, reach_of(lower, REACHES))
        comes = (distance >= nearest) & (distance < reach_of(upper, REACHES))
        place = row * NEAR + first + tl.cumsum(comes.to(tl.int32), 0) - 1
        tl.store(near + place, scaled, mask=comes)
        tl.store(near_ids + place, token, mask=comes)


@triton.jit
def farthest_of(
    line, width, highest, heat, least, wanted, most, mass_nearer, count_nearer, BLOCK: tl.constexpr
):
    """The bits of the greatest distance from the best at which a token may come.

    Fewer than ``most`` tokens are nearer, and they weigh less than ``wanted``, with those that are left out
    of the line because they are nearer than all in it. Also returned: how much nearer tokens weigh, how many
    they are, and how many are as far. Two bits are found by each pass over the line, whose sums are added up
    across the program's threads once, at its end.
    """
    column, steps = tl.arange(0, BLOCK), tl.arange(0, 4)
    bound = (0.0 - least).to(tl.int32, bitcast=True)  # infinity's without min-p
    farthest = tl.zeros([1], tl.int32)
    for digit in range(16):
        shift = 30 - 2 * digit
        pivots = farthest + (steps << shift)
        masses, counts = tl.zeros([4, BLOCK], tl.float32), tl.zeros([4, BLOCK], tl.int32)
        for start in range(0, width, BLOCK):
            scaled = scaled_logits(line, start + column, width, highest, heat, least)
            nearer = (0.0 - scaled).to(tl.int32, bitcast=True)[None, :] < pivots[:, None]
            masses += tl.where(nearer, tl.exp(scaled)[None, :], 0.0)
            counts += nearer.to(tl.int32)
        mass, count = mass_nearer + tl.sum(masses, 1), count_nearer + tl.sum(counts, 1)
        may_come = (mass < wanted) & (count < most) & (pivots >= farthest) & (pivots <= bound)
        farthest += tl.max(tl.where(may_come, steps, 0), 0) << shift
    weights = tl.zeros([BLOCK], tl.float32)
    befores, equals = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        scaled = scaled_logits(line, start + column, width, highest, heat, least)
        distance = (0.0 - scaled).to(tl.int32, bitcast=True)
        weights += tl.where(distance < farthest, tl.exp(scaled), 0.0)
        befores += (distance < farthest).to(tl.int32)
        equals += (distance == farthest).to(tl.int32)
    one = tl.zeros([1], tl.int32)
    return (
        farthest,
        mass_nearer + tl.sum(weights, 0) + one,
        count_nearer + tl.sum(befores, 0) + one,
        tl.sum(equals, 0) + one,
    )


@triton.jit(do_not_specialize=["logits_row", "width", "parts"])
def nucleus(
    logits,
    best,
    temperatures,
    lowest,
    top_k,
    top_p,
    masses,
    counts,
    near,
    near_ids,
    cut,
    last,
    logits_row,
    width,
    parts,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    REACHES: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Program (row): which tokens top-k leaves, and of these top-p; equal ones by their ids.

    Of each row: best logit, temperature, lowest scaled logit of min-p, and both limits. Written are the
    lowest scaled logit that may come (cut), and the last token that may come with just that (last).

    Nothing is sorted. Distances from the best are floats above 0, whose bits rise as they do, and that of the
    farthest token which may come is found bit by bit: among the tokens of the row's bracket, or among all
    where these are too many.
    """
    row = tl.program_id(0).to(tl.int64)
    column, steps = tl.arange(0, BLOCK), tl.arange(0, REACHES)
    line = logits + row * logits_row
    highest, heat = tl.load(best + row), tl.load(temperatures + row)
    least, most, share = tl.load(lowest + row), tl.load(top_k + row), tl.load(top_p + row)
    is_cut = most < width
    mass = tl.sum(in_all(masses, row, parts, PARTS, REACHES), 0)
    count = tl.sum(in_all(counts, row, parts, PARTS, REACHES), 0)
    lower, upper, between = bracket_of(mass, count, most, share, is_cut, NEAR, REACHES)
    total = tl.sum(tl.where(steps == REACHES - 1, mass, 0.0), 0) + tl.zeros([1], tl.float32)
    mass_nearer = tl.sum(tl.where(steps == lower, mass, 0.0), 0)
    count_nearer = tl.sum(tl.where(steps == lower, count, 0), 0)
    is_near = upper < REACHES
    if is_near:
        line, width = near + row * NEAR, between
        highest, heat = tl.full([], 0.0, tl.float32), tl.full([], 1.0, tl.float32)
    if is_cut:
        far, mass_before, before, equal = farthest_of(
            line, width, highest, heat, least, float("inf"), most, mass_nearer, count_nearer, BLOCK
        )
        weight = tl.exp(0.0 - far.to(tl.float32, bitcast=True))
        total = mass_before + tl.minimum(equal, most - before).to(tl.float32) * weight
    wanted = total * share
    far, mass_before, before, _ = farthest_of(
        line, width, highest, heat, least, wanted, most, mass_nearer, count_nearer, BLOCK
    )
    edge = 0.0 - far.to(tl.float32, bitcast=True)
    room = tl.minimum(tl.ceil((wanted - mass_before) / tl.maximum(tl.exp(edge), 1e-30)), 1e9).to(tl.int32)
    room = tl.maximum(tl.minimum(room, most - before), 1)
    seen, final = tl.zeros([1], tl.int32), tl.zeros([1], tl.int32)
    for start in range(0, width, BLOCK):
        place = start + column
        equals = (scaled_logits(line, place, width, highest, heat, least) == edge) & (place < width)
        token = place
        if is_near:
            token = tl.load(near_ids + row * NEAR + place, mask=place < width, other=0)
        rank = seen + tl.cumsum(equals.to(tl.int32), 0)
        final = tl.maximum(final, tl.max(tl.where(equals & (rank <= room), token, 0), 0))
        seen += tl.sum(equals.to(tl.int32), 0)
    one = tl.arange(0, 1)
    tl.store(cut + row + one, edge)
    tl.store(last + row + one, final)
