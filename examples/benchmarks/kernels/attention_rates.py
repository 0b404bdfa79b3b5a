#!/usr/bin/env python3
"""Rates of the native kernels' attention alone: prompts in pieces, decode of many sequences.

    python examples/benchmarks/kernels/attention_rates.py
    python examples/benchmarks/kernels/attention_rates.py --heads 16 --kv-heads 8 --dim 128 --lengths 2048
    python examples/benchmarks/kernels/attention_rates.py --kv-cache-dtype auto int8 --context 4096 --layers 9

One layer's ATTEND operation runs on made-up queries, keys and values. Printed for each prompt length: the
time of the whole prompt, which comes in pieces as a server would cut it, operations per second, and their
share of the rate at which these threads multiply matrices. For each number of sequences: one decode step, the
bytes of keys and values that it reads per second, and their share of the rate at which these threads read
memory. Several kinds of caches take turns, round by round, and their times are compared with the first one's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

import numpy as np
import torch

from engine.attention.base import LayerShape
from engine.attention.kv_codes import KVCodes
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.core import library
from engine.kernels.core.library import KernelLibrary
from engine.kernels.core.operations import OperationKind, OperationList, StepArguments
from engine.kernels.core.rows import SLACK, pitch_of
from engine.roofline.work import BLOCK, Rows, packed_step
from examples.benchmarks.bench_lockstep import print_table
from examples.benchmarks.roofline import limits
from router.tools.bench.report import machine


class Heads(NamedTuple):
    """Shape of the attention."""

    queries: int
    kv: int
    dim: int
    window: int


Run = Callable[[], None]


def least_of_each(runs: Sequence[Run], times: int) -> list[float]:
    """Seconds of the fastest round of each.

    Other work on the machine only makes it slower. They take turns, so that it slows down all of them.
    """
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(times):
        for own, run in zip(seconds, runs, strict=True):
            began = time.perf_counter()
            run()
            own.append(time.perf_counter() - began)
    return [min(own) for own in seconds]


class Layers:
    """Attention of layers over a cache full of numbers, one layer a run."""

    def __init__(
        self,
        kernels: KernelLibrary,
        heads: Heads,
        positions: int,
        dtype: torch.dtype,
        codes: KVCodes | None = None,
        number: int = 1,
    ) -> None:
        self._kernels, self._heads, self._dtype = kernels, heads, dtype
        shape = LayerShape(heads.kv, heads.dim, heads.dim, heads.window or None)
        self._cache = NativeCache(
            [shape] * number, num_blocks=positions // BLOCK, block_size=BLOCK, dtype=dtype, codes=codes
        )
        for stored in (*self._cache.keys, *self._cache.values):
            if codes is None:
                stored.copy_(torch.randn(stored.shape[1]).to(dtype).expand(stored.shape))
            else:
                stored.copy_(
                    torch.randint(-100, 100, stored.shape[1:], dtype=torch.int8).expand(stored.shape)
                )
        for scales in self._cache.scales:
            if scales is not None:
                scales.fill_(0.03)

    def run_of(self, rows: Rows) -> Run:
        """Computes the attention of these tokens, with the next layer each time."""
        heads, tokens = self._heads, sum(count for _, count in rows)
        packed, _, wanted = packed_step(rows, 1)
        plan = self._cache.plan(packed, wanted)
        queries = torch.randn(
            tokens + SLACK, pitch_of((heads.queries + 2 * heads.kv) * heads.dim, self._dtype)
        ).to(self._dtype)
        out = torch.zeros(tokens + SLACK, pitch_of(heads.queries * heads.dim, self._dtype), dtype=self._dtype)
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
        )
        layers = cycle([self._operations(number, queries, out) for number in range(len(self._cache.keys))])

        def run() -> None:
            next(layers).run(self._kernels, step, self._dtype, begin=1)

        return run

    def _operations(self, number: int, queries: torch.Tensor, out: torch.Tensor) -> OperationList:
        heads, cache = self._heads, self._cache
        keys, values = cache.keys[number], cache.values[number]
        operations = OperationList(2)
        shape = {"a": heads.queries, "b": heads.kv, "c": heads.dim, "d": heads.window, "n": heads.dim}
        kept = {"codes": cache.codes, "scales": cache.scales[number]}
        operations.add(OperationKind.QKV, into=queries, out=values, extra=keys, **shape, **kept)
        operations.add(
            OperationKind.ATTEND,
            into=queries,
            out=out,
            weights=values,
            extra=keys,
            number=heads.dim**-0.5,
            **shape,
            **kept,
        )
        return operations


def pairs_of(rows: Rows, window: int) -> int:
    """Pairs of a query and a key that it sees."""
    total = 0
    for start, count in rows:
        seen = np.arange(start + 1, start + count + 1)
        total += int((np.minimum(seen, window) if window else seen).sum())
    return total


def of_prompts(
    caches: Sequence[Layers], heads: Heads, length: int, piece: int, times: int
) -> tuple[list[float], float]:
    """Seconds of a prompt in pieces with each cache, and its operations."""
    seconds, operations = [0.0 for _ in caches], 0.0
    for start in range(0, length, piece):
        rows = [(start, min(piece, length - start))]
        found = least_of_each([layers.run_of(rows) for layers in caches], times)
        seconds = [one + more for one, more in zip(seconds, found, strict=True)]
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
    add("--layers", type=int, default=1, help="caches that take turns (default: %(default)s)")
    add(
        "--kv-cache-dtype",
        nargs="+",
        choices=["auto", "int8", "fp8"],
        default=["auto"],
        help="what keys and values are kept as, by turns (default: auto)",
    )
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
    kinds: list[KVCodes | None] = [None if each == "auto" else each for each in args.kv_cache_dtype]
    caches = [Layers(kernels, heads, positions, dtype, codes, args.layers) for codes in kinds]
    shape = LayerShape(heads.kv, heads.dim, heads.dim, None)
    cached = [shape.bytes_per_token(dtype, codes) for codes in kinds]
    kind = kernels.kind(bfloat16=dtype == torch.bfloat16)
    reach = limits(dtype, min(1 << 28, positions * max(cached)), args.threads, kind)
    print(f"{heads}, {args.dtype}, {args.threads} thread(s), {kind}; {machine()}")
    print(f"Memory {reach['memory'] / 1e9:.1f} GB/s, products {reach['matrix'] / 1e9:.0f} GFLOP/s\n")
    lines = []

    def note(step: str, name: str, seconds: float, first: float, rate: float, unit: str, limit: str) -> None:
        share = f"{100 * rate / reach[limit]:.0f}%"
        lines.append(
            [
                step,
                name,
                f"{1000 * seconds:.3f}",
                f"{rate / 1e9:.1f} {unit}/s",
                share,
                f"{seconds / first:.2f}",
            ]
        )

    for length in args.lengths:
        found, operations = of_prompts(caches, heads, length, args.piece, args.times)
        for name, seconds in zip(args.kv_cache_dtype, found, strict=True):
            note(f"prompt of {length}", name, seconds, found[0], operations / seconds, "GFLOP", "matrix")
    for batch in args.batches:
        rows = [(args.context - 1, 1)] * batch
        found = least_of_each([layers.run_of(rows) for layers in caches], 20 * args.times)
        seen = batch * min(args.context, args.window or args.context)
        for name, seconds, size in zip(args.kv_cache_dtype, found, cached, strict=True):
            note(f"decode, batch {batch}", name, seconds, found[0], seen * size / seconds, "GB", "memory")
    print_table(["step", "cache", "ms", "rate", "share", "of first"], lines)


if __name__ == "__main__":
    main()
