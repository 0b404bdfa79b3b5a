"""GGUF's K types written in numpy, as the gguf package reads them.

It does not write them. A block has 256 numbers in sub-blocks. Each of these has a small whole scale, and with Q4_K and Q5_K a small
whole number that is taken off; both are multiples of a float16 of the block.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Numbers = np.ndarray[Any, Any]

BLOCK = 256
MOST_SCALE = 63
"""Largest scale of a sub-block of Q4_K and Q5_K."""


def k_quantized(tensor: Numbers, kind: str) -> Numbers:
    """Bytes of a tensor [..., numbers], rounded to the nearest codes.

    ``kind``: Q4_K, Q5_K or Q6_K.
    """
    blocks = tensor.reshape(-1, BLOCK).astype(np.float32)
    written = _q6(blocks) if kind == "Q6_K" else _with_minimum(blocks, 4 if kind == "Q4_K" else 5)
    return written.reshape(*tensor.shape[:-1], -1)


def _with_minimum(blocks: Numbers, bits: int) -> Numbers:
    """Q4_K and Q5_K: eight sub-blocks of 32.

    A number is ``d * scale * code - dmin * minimum``.
    """
    subs, most = blocks.reshape(-1, 8, 32), 2**bits - 1
    low, high = np.minimum(subs.min(-1), 0), np.maximum(subs.max(-1), 0)
    d, scales = _multiples((high - low) / most, MOST_SCALE)
    dmin, minima = _multiples(-low, MOST_SCALE)
    step, off = d * scales, dmin * minima
    codes = _nearest(subs + off[..., None], step[..., None], 0, most)
    first, second = scales.astype(np.uint8), minima.astype(np.uint8)
    packed = np.concatenate(
        [
            (first[:, :4] & 63) | (first[:, 4:] >> 4 << 6),
            (second[:, :4] & 63) | (second[:, 4:] >> 4 << 6),
            (first[:, 4:] & 15) | ((second[:, 4:] & 15) << 4),
        ],
        axis=-1,
    )
    lower = codes & 15
    nibbles = (lower[:, 0::2] | lower[:, 1::2] << 4).reshape(len(blocks), -1)
    parts = [_half(d), _half(dmin), packed]
    if bits == 5:
        parts.append(np.bitwise_or.reduce(codes >> 4 << np.arange(8, dtype=np.uint8)[:, None], axis=1))
    return np.concatenate([*parts, nibbles], axis=-1)


def _q6(blocks: Numbers) -> Numbers:
    """Q6_K: sixteen sub-blocks of 16.

    A number is ``d * scale * (code - 32)``.
    """
    subs = blocks.reshape(-1, 16, 16)
    d, scales = _multiples(np.abs(subs).max(-1) / 31, 127)
    codes = (_nearest(subs, (d * scales)[..., None], -32, 31, np.int8) + 32).astype(np.uint8)
    rows = codes.reshape(-1, 2, 4, 32)  # halves of a block
    lower = np.concatenate([rows[:, :, :2] & 15, rows[:, :, 2:] & 15], axis=2)
    nibbles = (lower[:, :, :2] | lower[:, :, 2:] << 4).reshape(len(blocks), -1)
    upper = rows >> 4 << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    upper = np.bitwise_or.reduce(upper, axis=2).reshape(len(blocks), -1)
    return np.concatenate([nibbles, upper, scales.astype(np.int8).view(np.uint8), _half(d)], axis=-1)


def _multiples(values: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """A float16 for each block, and the multiples of it nearest to the values.

    It is given as float32 [blocks, 1].
    """
    unit = (values.max(-1, keepdims=True) / most).astype(np.float16).astype(np.float32)
    return unit, _nearest(values, unit, 0, most, np.float32)


def _nearest(values: Numbers, step: Numbers, least: int, most: int, kind: Any = np.uint8) -> Numbers:
    quotients = np.divide(values, step, out=np.zeros_like(values), where=step > 0)
    return np.rint(quotients).clip(least, most).astype(kind)


def _half(unit: Numbers) -> Numbers:
    return unit.astype(np.float16).view(np.uint8)
