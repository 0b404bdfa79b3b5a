#!/usr/bin/env python3
"""Rates of the native kernels' attention alone: prompts in pieces, decode of many sequences.

    python examples/benchmarks/kernels/attention_rates.py
    python examples/benchmarks/kernels/attention_rates.py --heads 16 --kv-heads 8 --dim 128 --lengths 2048

One layer's ATTEND operation runs on made-up queries, keys and values. Printed for each prompt length: the
time of the whole prompt, which comes in pieces as a server would cut it, operations per second, and their
share of the rate at which these threads multiply matrices. For each number of sequences: one decode step, the
bytes of keys and values that it reads per second, and their share of the rate at which these threads read
memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

import numpy as np
import torch

from engine.attention.base import LayerShape
from engine.kernels import library
from engine.kernels.cache import NativeCache
from engine.kernels.library import Library
from engine.kernels.operations import OperationKind, Operations, StepArguments
from engine.kernels.rows import SLACK, pitch_of
from examples.benchmarks.bench_lockstep import print_table
from examples.benchmarks.roofline import BLOCK, Rows, limits, packed_step
from router.tools.bench.report import machine


class Heads(NamedTuple):
    """Shape of the attention."""

    queries: int
    kv: int
    dim: int
    window: int


def least_of(action: Callable[[], object], times: int) -> float:
    """Seconds of the fastest run: other work on the machine only makes it slower."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


class Layer:
    """One layer's attention over a cache full of numbers."""

    def __init__(self, kernels: Library, heads: Heads, positions: int, dtype: torch.dtype) -> None:
        self._kernels, self._heads, self._dtype = kernels, heads, dtype
        shape = LayerShape(heads.kv, heads.dim, heads.dim, heads.window or None)
        self._cache = NativeCache([shape], num_blocks=positions // BLOCK, block_size=BLOCK, dtype=dtype)
        for stored in (*self._cache.keys, *self._cache.values):
            stored.copy_(torch.randn(stored.shape[1]).to(dtype).expand(stored.shape))

    def seconds(self, rows: Rows, times: int) -> float:
        """Least time of the attention of these tokens."""
        heads, tokens = self._heads, sum(count for _, count in rows)
        packed, _, wanted = packed_step(rows, 1)
        plan = self._cache.plan(packed, wanted)
        queries = torch.randn(
            tokens + SLACK, pitch_of((heads.queries + 2 * heads.kv) * heads.dim, self._dtype)
        ).to(self._dtype)
        out = torch.zeros(tokens + SLACK, pitch_of(heads.queries * heads.dim, self._dtype), dtype=self._dtype)
        keys, values = self._cache.keys[0], self._cache.values[0]
        operations = Operations(2)
        shape = {"a": heads.queries, "b": heads.kv, "c": heads.dim, "d": heads.window, "n": heads.dim}
        operations.add(OperationKind.QKV, into=queries, out=values, extra=keys, **shape)
        operations.add(
            OperationKind.ATTEND,
            into=queries,
            out=out,
            weights=values,
            extra=keys,
            number=heads.dim**-0.5,
            **shape,
        )
        spent = np.zeros(len(OperationKind))
        step = StepArguments(
            tokens=tokens,
            num_tasks=len(plan.tasks),
            table_width=plan.tables.shape[1],
            block_size=BLOCK,
            slots=plan.slots,
            positions=packed.positions,
            angles=np.zeros(0, dtype=np.int64),
            starts=packed.starts,
            counts=packed.counts,
            offsets=plan.offsets,
            tables=plan.tables,
            tasks=plan.tasks,
            seconds=spent,
        )
        return least_of(lambda: operations.run(self._kernels, step, self._dtype, begin=1), times)


def pairs_of(rows: Rows, window: int) -> int:
    """Pairs of a query and a key that it sees."""
    total = 0
    for start, count in rows:
        seen = np.arange(start + 1, start + count + 1)
        total += int((np.minimum(seen, window) if window else seen).sum())
    return total


def of_prompts(layer: Layer, heads: Heads, length: int, piece: int, times: int) -> tuple[float, float]:
    """Seconds and operations of a prompt in pieces."""
    seconds = operations = 0.0
    for start in range(0, length, piece):
        rows = [(start, min(piece, length - start))]
        seconds += layer.seconds(rows, times)
        operations += 4 * heads.queries * heads.dim * pairs_of(rows, heads.window)
    return seconds, operations


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="(default: %(default)s)")
    add("--threads", type=int, default=2, help="(default: %(default)s)")
    add("--heads", type=int, default=8, help="of queries (default: %(default)s, as dense-small)")
    add("--kv-heads", type=int, default=4, help="(default: %(default)s)")
    add("--dim", type=int, default=64, help="of a head (default: %(default)s)")
    add(
        "--window",
        type=int,
        default=0,
        help="keys that a query sees, 0: all before it (default: %(default)s)",
    )
    add("--lengths", type=int, nargs="*", default=[512, 2048, 4096, 8192, 16384], help="of prompts")
    add("--piece", type=int, default=512, help="tokens of a prompt in one step (default: %(default)s)")
    add("--batches", type=int, nargs="*", default=[1, 8, 32, 64, 128, 256], help="of decode")
    add("--context", type=int, default=300, help="tokens of each sequence in decode (default: %(default)s)")
    add("--times", type=int, default=5, help="of each step, the fastest counts (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    kernels = library.load()
    if kernels is None:
        raise SystemExit("there are no native kernels here: see docs/design/kernels.md")
    heads = Heads(args.heads, args.kv_heads, args.dim, args.window)
    width = args.context // BLOCK + 1
    positions = max([*args.lengths, *(batch * width * BLOCK for batch in args.batches)]) + BLOCK
    layer = Layer(kernels, heads, positions, dtype)
    cached = 2 * heads.kv * heads.dim * dtype.itemsize
    reach = limits(dtype, min(1 << 28, positions * cached))
    kind = kernels.kind(bfloat16=dtype == torch.bfloat16)
    print(f"{heads}, {args.dtype}, {args.threads} thread(s), {kind}; {machine()}")
    print(f"Memory {reach['memory'] / 1e9:.1f} GB/s, products {reach['matrix'] / 1e9:.0f} GFLOP/s\n")
    lines = []
    for length in args.lengths:
        seconds, operations = of_prompts(layer, heads, length, args.piece, args.times)
        rate = operations / seconds
        lines.append(
            [
                f"prompt of {length}",
                f"{1000 * seconds:.2f}",
                f"{rate / 1e9:.0f} GFLOP/s",
                f"{100 * rate / reach['matrix']:.0f}%",
            ]
        )
    for batch in args.batches:
        seconds = layer.seconds([(args.context - 1, 1)] * batch, 20 * args.times)
        seen = min(args.context, args.window or args.context)
        rate = batch * seen * cached / seconds
        lines.append(
            [
                f"decode, batch {batch}",
                f"{1000 * seconds:.3f}",
                f"{rate / 1e9:.1f} GB/s",
                f"{100 * rate / reach['memory']:.0f}%",
            ]
        )
    print_table(["step", "ms", "rate", "share"], lines)


if __name__ == "__main__":
    main()
