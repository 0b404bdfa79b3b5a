"""Least work of a step, in bytes and operations, and its time on native kernels.

Callers are ``python -m engine.roofline`` and examples/benchmarks. Layers with recurrent states are not
counted.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import numpy as np

from engine.attention.base import PackedRows
from engine.kernels.attention.attention import Attention
from engine.kernels.decoder import DecoderModel
from engine.kernels.experts.mixture import Moe
from engine.kernels.mlp.mlp import Mlp
from engine.kernels.program import Program

BLOCK = 16
Rows = list[tuple[int, int]]
"""(start, count) of each sequence's tokens in a step."""
ALL_TOKENS = 1 << 20
"""Tokens that choose all experts of a mixture."""


class StepWork(NamedTuple):
    """Least work of a step."""

    read_bytes: float
    """Weights as they are laid out, and cached keys and values, each once."""
    operations: float
    """Operations of products with weights and of attention; a multiply-add counts as two."""


def is_counted(decoder: DecoderModel) -> bool:
    """Whether the work of a model is known: all its layers attend."""
    return decoder.output is not None and all(isinstance(layer.mixer, Attention) for layer in decoder.layers)


def work_of(decoder: DecoderModel, program: Program, rows: Rows, wanted: int) -> StepWork:
    """Work of a step with these rows, of which ``wanted`` tokens get logits."""
    read, products = weight_numbers(decoder, sum(count for _, count in rows), wanted)
    every, _ = weight_numbers(decoder, ALL_TOKENS, ALL_TOKENS)
    cached, attention = attention_work(decoder, rows, decoder.dtype.itemsize)
    return StepWork(program.weight_bytes * read / every + cached, 2 * products + attention)


def vocabulary_of(decoder: DecoderModel) -> int:
    """Width of the logits."""
    assert decoder.output is not None
    return decoder.output.vocab


def weight_numbers(decoder: DecoderModel, tokens: int, wanted: int) -> tuple[float, float]:
    """Weights that a step with so many tokens reads, and products with them.

    Logits are wanted for ``wanted`` tokens. Experts count as if all tokens chose at random.
    """
    read = float(vocabulary_of(decoder) * decoder.hidden)
    products = wanted * read
    for layer in decoder.layers:
        rows = wanted if layer is decoder.layers[-1] else tokens  # behind the last layer's keys and values
        assert isinstance(layer.mixer, Attention)
        qkv, own = sum(each.numel() for each in layer.mixer.qkv), layer.mixer.out.numel()
        if isinstance(layer.mlp, Mlp):
            own += sum(each.numel() for each in layer.mlp.matrices())
        elif isinstance(moe := layer.mlp, Moe):
            one = 3 * moe.width * decoder.hidden
            missed = (1 - moe.top_k / moe.num_experts) ** rows
            own += moe.router.numel()
            read += moe.num_experts * (1 - missed) * one
            products += rows * moe.top_k * one
        read, products = read + qkv + own, products + tokens * qkv + rows * own
    return read, products


def packed_step(rows: Rows, vocabulary: int) -> tuple[PackedRows, np.ndarray, np.ndarray]:
    starts, counts = (np.array(column) for column in zip(*rows, strict=True))
    positions = np.concatenate([np.arange(start, start + count) for start, count in rows])
    width = int((starts + counts).max()) // BLOCK + 1
    tables = np.arange(len(rows) * width, dtype=np.int32).reshape(len(rows), width)
    ids = (positions * 31 + np.repeat(np.arange(len(rows)), counts) * 977) % vocabulary
    return PackedRows(starts, counts, tables, positions, int((counts == 1).sum())), ids, np.cumsum(counts) - 1


def attention_work(decoder: DecoderModel, rows: Rows, size: int) -> tuple[float, float]:
    """Bytes of keys and values that attention reads, and operations of its products."""
    keys = sum(start + count for start, count in rows)
    pairs = sum(count * (start + (count + 1) / 2) for start, count in rows)
    mixers = [layer.mixer for layer in decoder.layers if isinstance(layer.mixer, Attention)]
    cached = sum(2 * each.kv_heads * each.dim for each in mixers)
    *widths, last = (each.heads * each.dim for each in mixers)
    return cached * keys * size, 4 * sum(widths) * pairs + 4 * last * keys


def consecutive(program: Program, vocabulary: int, rows: Rows, times: int) -> tuple[float, Any]:
    """Median seconds of a decode step that follows another, and its mean seconds by kind.

    Each chooses its tokens, as when serving. They stay in one block of the cache, then begin again.
    """
    seconds: list[float] = []
    spent = np.zeros_like(program.seconds)
    while len(seconds) < times:
        program.choose(*packed_step(rows, vocabulary))
        before = program.seconds.copy()
        for _ in range(min(BLOCK - 1, times - len(seconds))):
            began = time.perf_counter()
            chosen = program.continue_rows({})
            seconds.append(time.perf_counter() - began)
            assert chosen is not None, "the rows are the same"
        spent += program.seconds - before
    return statistics.median(seconds), spent / times
