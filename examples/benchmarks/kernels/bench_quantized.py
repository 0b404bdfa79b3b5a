#!/usr/bin/env python3
"""Decode with weights in 8 and 4 bits beside bfloat16, on the native step alone.

    python examples/benchmarks/kernels/bench_quantized.py build/models/dense-0.5b --json out.json

One checkpoint of plain weights is loaded once for each value of ``--quantization``, all in this process.
``--copies`` names further checkpoints of the same model, such as quantised ones. Then decode steps of so many
sequences are measured in turns: in each round one format after the other, so that all see the same moments of
the machine. Printed for each number of sequences: the median of the rounds' medians
in milliseconds, how many times as fast as bfloat16 that is (median of the rounds' ratios), and bytes per
parameter of the weights that steps read.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

import torch

from engine.config import ModelConfig
from engine.config.quantization import ONLINE, OnlineName
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.make import make_program
from engine.kernels.program import Program
from engine.model.checkpoint import read_model_info
from engine.model.weights import load_model
from engine.roofline.work import BLOCK, consecutive
from examples.benchmarks.bench_lockstep import print_table
from examples.benchmarks.roofline import CONTEXT
from router.tools.bench.report import machine

PLAIN = "bfloat16"


class Loaded:
    """A model in one format."""

    def __init__(self, directory: Path, online: OnlineName | None, most: int) -> None:
        info, name = read_model_info(directory), online or directory.name
        settings = ModelConfig(model=str(directory), quantization=online)
        model = load_model(info, settings, dtype=torch.bfloat16, device=torch.device("cpu"))
        self.parameters, self.vocabulary = model.num_parameters, model.vocab_size
        program = make_program(model, BLOCK)
        if program is None:
            raise SystemExit(f"{name}: the native kernels do not compute this model")
        self.program: Program = program
        blocks = most * (CONTEXT // BLOCK + 2)
        cache = NativeCache(model.layers, num_blocks=blocks, block_size=BLOCK, dtype=torch.bfloat16)
        for stored in (*cache.keys, *cache.values):
            stored.fill_(0.5)  # memory that nobody has written is one page of zeros
        program.use(cache)

    @property
    def bytes_per_parameter(self) -> float:
        return self.program.weight_bytes / self.parameters


def measured(formats: dict[str, Loaded], batch: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds of a step by format, one median for each round."""
    rows = [(CONTEXT, 1)] * batch
    found: dict[str, list[float]] = {name: [] for name in formats}
    for _ in range(rounds):
        for name, loaded in formats.items():
            seconds, _ = consecutive(loaded.program, loaded.vocabulary, rows, steps)
            found[name].append(1000 * seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--formats", nargs="*", default=[*ONLINE], choices=ONLINE)
    parser.add_argument("--copies", nargs="*", type=Path, default=[], help="checkpoints of the same model")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15, help="steps of a round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    most = max(args.batches)
    formats = {PLAIN: Loaded(args.model, None, most)}
    formats |= {name: Loaded(args.model, name, most) for name in args.formats}
    formats |= {path.name: Loaded(path, None, most) for path in args.copies}
    result: dict[str, Any] = {
        "machine": machine(),
        "model": args.model.name,
        "bytes_per_parameter": {name: each.bytes_per_parameter for name, each in formats.items()},
        "ms": {},
    }
    columns = [[name, f"{each.bytes_per_parameter:.2f}"] for name, each in formats.items()]
    for batch in args.batches:
        found = result["ms"][batch] = measured(formats, batch, args.rounds, args.steps)
        for column, times in zip(columns, found.values(), strict=True):
            ratios = [plain / one for plain, one in zip(found[PLAIN], times, strict=True)]
            column += [f"{statistics.median(times):.1f}", f"{statistics.median(ratios):.2f}"]
    heads = [head for batch in args.batches for head in (f"ms at {batch}", "times as fast")]
    print_table(["format", "bytes/parameter", *heads], columns)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
