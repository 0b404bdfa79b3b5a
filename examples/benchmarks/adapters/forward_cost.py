#!/usr/bin/env python3
r"""CPU time that eight low-rank adapters add to a forward pass.

    chrt -f 10 taskset -c 1 python examples/benchmarks/adapters/forward_cost.py build/models/dense-small

One thread computes the same step of the model alone, and with an adapter for each eighth of the rows, in
turn. Printed are lower quartiles of all repeats; with more ``--threads``, of time that passes. Adapters are
those of ``bench_adapters.py``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from coordinator.messages import AdapterSource
from engine.adapters.held import HeldAdapters
from engine.attention.base import PackedRows
from engine.config import ModelConfig
from engine.kernels.adapters.sites import AdapterRoom
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.make import make_program
from engine.kernels.program import Program
from engine.model.checkpoint import read_model_info
from engine.model.weights import load_model
from examples.benchmarks.adapters.bench_adapters import AT_ONCE, make_adapters

BLOCK, CONTEXT = 16, 512
SHAPES = {
    "1 row": [1],
    "8 rows, each with an adapter of its own": [1] * 8,
    "32 rows, four of each adapter": [1] * 32,
    "a prompt of 128 tokens": [128],
    "four prompts of 64 tokens": [64] * 4,
}
"""Tokens of each row, by what is printed."""


class Measured:
    """A model with eight adapters, whose steps are timed."""

    def __init__(self, path: Path, rank: int, dtype: torch.dtype) -> None:
        model = load_model(read_model_info(path), ModelConfig(), dtype=dtype, device=torch.device("cpu"))
        program = make_program(model, BLOCK, AdapterRoom(AT_ONCE, rank))
        assert program is not None
        assert program.sites is not None
        self.program: Program = program
        blocks = 32 * CONTEXT // BLOCK
        cache = NativeCache(model.layers, num_blocks=blocks, block_size=BLOCK, dtype=dtype)
        for stored in (*cache.keys, *cache.values):
            stored.fill_(0.5)  # memory that nobody has written is one page of zeros
        program.use(cache)
        held = HeldAdapters(model, program.sites)
        places = make_adapters(path, path.parent / f"{path.name}-adapters-{rank}", AT_ONCE, rank)
        for number, place in enumerate(places, 1):
            held.use(number, held.read(AdapterSource(place.name, str(place))).digest)

    def seconds(self, counts: list[int], *, adapted: bool, clock: Callable[[], float]) -> float:
        """Time of one pass over rows of so many tokens, each behind 256 others."""
        starts, rows = np.full(len(counts), 256), len(counts)
        tables = np.arange(rows * CONTEXT // BLOCK, dtype=np.int32).reshape(rows, -1)
        positions = np.concatenate([np.arange(256, 256 + count) for count in counts])
        numbers = np.arange(rows) % AT_ONCE + 1 if adapted else None
        packed = PackedRows(starts, np.array(counts), tables, positions, counts.count(1), numbers)
        ids = positions * 31 % 8000 + 10
        began = clock()
        self.program.forward(packed, ids, np.cumsum(counts) - 1)
        return clock() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rank", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=60, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="(default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    measured = Measured(args.model.absolute(), args.rank, getattr(torch, args.dtype))
    for name, counts in SHAPES.items():
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(args.repeats):
            for adapted, found in times.items():
                found.append(measured.seconds(counts, adapted=adapted, clock=clock))
        base, more = (statistics.quantiles(found, n=4)[0] for found in times.values())
        print(f"{name:42} {1e3 * base:7.2f} ms  {1e3 * more:7.2f} ms  {more / base - 1:+.0%}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
