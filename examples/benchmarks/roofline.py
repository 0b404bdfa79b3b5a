#!/usr/bin/env python3
"""Profile of a step's time, against what memory and cores allow.

    python examples/benchmarks/roofline.py build/models/dense-small
    python examples/benchmarks/roofline.py build/models/dense-0.5b --threads 2 --batches 1 8 32

Loads a model into this process and runs its steps with the native kernels, without any server: decode of
so many sequences with 160 to 175 tokens of context each, one step after the other as in serving; prompts
(whole, or in steps of --piece tokens); and decode with a piece of a prompt beside it.
Printed for each step:

    ms          median of the steps' wall time
    bytes       weights and cached keys and values that the step must read, each once; weights as they are
                laid out, compressed or not (LOCKSTEP_COMPRESS_WEIGHTS=0)
    limit ms    the longer of bytes / measured memory bandwidth and operations / measured matrix rate
    share       limit / ms
    attention   GFLOP/s of attention's two products, and its share of what memory and products allow it
    then        ms by kind of operation, by the kernels' own account

The limits are measured first, on as many threads: reading memory, and reading a block of the model's size
again and again (which a large cache may hold); multiply-adds of the kind of kernels from its registers, in
this type or in float32, whichever is faster, or a product of 1024 x 1024 matrices where tiles make it faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this is not installed

import numpy as np
import torch

from engine.attention.base import PackedRows
from engine.config import ModelConfig
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.core import library
from engine.kernels.core.operations import OperationKind
from engine.kernels.decoder import DecoderModel, recognise
from engine.kernels.program import Program
from engine.model.checkpoint import read_model_info
from engine.model.weights import load_model
from engine.roofline.work import (
    BLOCK,
    Rows,
    attention_work,
    consecutive,
    packed_step,
    vocabulary_of,
    work_of,
)
from examples.benchmarks.bench_lockstep import print_table
from parallel.kernel_kinds import KINDS
from parallel.machine_rates import best_kind, probe
from router.tools.bench.report import machine

CONTEXT = 160
BATCHES = [1, 8, 32, 64, 128, 256]
PROMPTS = [128, 512, 2048, 4096, 8192, 16_384]
ROW_SECONDS = 5.0
"""Seconds of measuring a kind of step, unless one alone takes longer."""


def median_of(action: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def limits(dtype: torch.dtype, model_bytes: int, threads: int, kind: str) -> dict[str, float]:
    """Bytes and operations per second that these threads reach."""
    rates = probe(best_kind(kind))
    assert rates is not None, "the kernels were compiled"
    types = {str(dtype).removeprefix("torch."), "float32"}
    matrices = [torch.ones(1024, 1024, dtype=each) for each in {dtype, torch.float32}]  # bfloat16 may be slow
    products = [2 * 1024**3 / median_of(lambda each=each: each @ each, 5) for each in matrices]
    return {
        "memory": rates.reading(threads),
        "memory_model_size": rates.reading(threads, model_bytes),
        "matrix": max(*(rates.operations(name, threads) for name in types), *products),
    }


def repeated(
    program: Program, given: list[tuple[PackedRows, np.ndarray, np.ndarray]], times: int
) -> tuple[float, Any]:
    """Median seconds of these steps together, and their mean seconds by kind."""

    def run() -> None:
        for packed, ids, wanted in given:
            program.forward(packed, ids, wanted)

    times = max(1, min(times, int(ROW_SECONDS / median_of(run, 1))))
    before = program.seconds.copy()
    seconds = median_of(run, times)
    return seconds, (program.seconds - before) / times


def measure(
    program: Program, decoder: DecoderModel, steps: list[Rows], reach: dict[str, float], times: int
) -> dict[str, Any]:
    """Measure steps that follow each other, as those of a prompt do, as one."""
    if all(count == 1 for _, count in steps[0]):
        seconds, spent = consecutive(program, vocabulary_of(decoder), steps[0], times)
        steps = [[(start + BLOCK // 2, 1) for start, _ in steps[0]]]
        given = [packed_step(rows, vocabulary_of(decoder)) for rows in steps]
    else:
        given = [packed_step(rows, vocabulary_of(decoder)) for rows in steps]
        seconds, spent = repeated(program, given, times)
    num_bytes = operations = cached = attention = 0.0
    for rows, (_, _, wanted) in zip(steps, given, strict=True):
        work = work_of(decoder, program, rows, len(wanted))
        step_cached, step_attention = attention_work(decoder, rows, decoder.dtype.itemsize)
        num_bytes, operations = num_bytes + work.read_bytes, operations + work.operations
        cached, attention = cached + step_cached, attention + step_attention
    limit = max(num_bytes / reach["memory"], operations / reach["matrix"])
    attended = max(float(spent[OperationKind.ATTEND]), 1e-9)
    return {
        "ms": 1000 * seconds,
        "mb": num_bytes / 1e6,
        "gflop": operations / 1e9,
        "limit_ms": 1000 * limit,
        "share": limit / seconds,
        "attention_gflop_per_s": attention / attended / 1e9,
        "attention_share": max(cached / reach["memory"], attention / reach["matrix"]) / attended,
        "parts_ms": {
            kind.name.lower(): 1000 * float(spent[kind]) for kind in OperationKind if spent[kind] > 0
        },
    }


def pieces(length: int, piece: int | None) -> list[Rows]:
    """The steps of a prompt."""
    size = piece or length
    return [[(start, min(size, length - start))] for start in range(0, length, size)]


def steps_of(args: argparse.Namespace) -> dict[str, list[Rows]]:
    """Steps by the title of their row."""
    in_pieces = f" by {args.piece}" if args.piece else ""
    found: dict[str, list[Rows]] = {
        f"decode, batch {batch}": [[(CONTEXT, 1)] * batch] for batch in args.batches
    }
    found |= {f"prompt of {length}{in_pieces}": pieces(length, args.piece) for length in args.prompts}
    return found | {
        f"decode of {rows}, {tokens} of a prompt": [[(CONTEXT, 1)] * rows + [(tokens, tokens)]]
        for rows, tokens in args.beside
    }


def print_results(results: dict[str, dict[str, Any]]) -> None:
    kinds = [kind.name.lower() for kind in OperationKind]
    shown = [
        k for k in kinds if any(one["parts_ms"].get(k, 0) > 0.02 * one["ms"] for one in results.values())
    ]
    titles = ["step", "ms", "MB", "GFLOP", "limit ms", "share", "attention GFLOP/s", "its share"]
    print_table(
        [*titles, *shown],
        [
            [
                title,
                *(f"{one[key]:.2f}" for key in ("ms", "mb", "gflop", "limit_ms")),
                f"{100 * one['share']:.0f}%",
                f"{one['attention_gflop_per_s']:.0f}",
                f"{100 * one['attention_share']:.0f}%",
            ]
            + [f"{one['parts_ms'].get(kind, 0):.2f}" for kind in shown]
            for title, one in results.items()
        ],
    )


def beside(text: str) -> tuple[int, int]:
    """Numbers of a text like ``31:64``: decode rows, and tokens of a prompt."""
    rows, _, tokens = text.partition(":")
    return int(rows), int(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("model", type=Path, help="a directory")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="(default: %(default)s)")
    add("--quantization", "-q", metavar="METHOD", help="of the weights, as for serve")
    add("--threads", type=int, default=1, help="(default: %(default)s)")
    add("--batches", type=int, nargs="*", default=BATCHES, help="of decode (default: %(default)s)")
    add("--prompts", type=int, nargs="*", default=PROMPTS, help="lengths (default: %(default)s)")
    add("--piece", type=int, metavar="TOKENS", help="of a prompt in a step (default: all of it)")
    add("--beside", type=beside, nargs="*", default=[(31, 64)], metavar="ROWS:TOKENS",
        help="decode of so many, with so many tokens of a prompt (default: 31:64)")  # fmt: skip
    add("--times", type=int, default=20, help=f"of each step, in {ROW_SECONDS:.0f} s (default: %(default)s)")
    add("--output-json", type=Path, metavar="FILE", help="write all numbers into this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    kernels = library.load()
    if kernels is None:
        raise SystemExit("there are no native kernels here: see docs/design/kernels.md")
    settings = ModelConfig(quantization=args.quantization)
    model = load_model(read_model_info(args.model), settings, dtype=dtype, device=torch.device("cpu"))
    decoder = recognise(model.module, model.layers, dtype)
    program = Program(kernels, decoder)
    steps = steps_of(args)
    blocks = max(
        sum((start + count) // BLOCK + 1 for start, count in rows) + len(rows)
        for row in steps.values()
        for rows in row
    )
    cache = NativeCache(model.layers, num_blocks=blocks, block_size=BLOCK, dtype=dtype)
    for stored in (*cache.keys, *cache.values):
        stored.fill_(0.5)  # memory that nobody has written is one page of zeros, read from the first cache
    program.use(cache)
    kind = kernels.kind(bfloat16=dtype == torch.bfloat16)
    reach = limits(dtype, model.weight_bytes, args.threads, kind)
    title = KINDS[kernels.kind(bfloat16=dtype == torch.bfloat16)].title
    weights = args.quantization or args.dtype
    print(f"{args.model.name}, {weights}, {args.threads} thread(s), {title}; {machine()}")
    memory, cached, matrix = (value / 1e9 for value in reach.values())
    print(f"Memory {memory:.1f} GB/s (a block of the model's size: {cached:.1f}), ", end="")
    print(f"products {matrix:.0f} GFLOP/s\n")
    results = {}
    with torch.inference_mode():
        for title, row in steps.items():
            results[title] = measure(program, decoder, row, reach, args.times)
    print_results(results)
    if args.output_json is not None:
        page = {"model": args.model.name, "weights": weights, "threads": args.threads, "machine": machine()}
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        args.output_json.write_text(json.dumps(page | {"limits": reach, "steps": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
