#!/usr/bin/env python3
"""Memory and time of loading a model in each format of weights, without serving it.

    python examples/benchmarks/formats/bench_loading.py build/models/dense-0.5b --json out.json

Each load is in a process of its own, with one thread by default, formats in turns. Printed for each
``--quantization``, and for further checkpoints of the same model (``--copies``): bytes that weights take for
each parameter once steps can run, and the least of the rounds' seconds of CPU, for reading and for laying
out. A round before these is left out: it brings files into memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from engine.config.quantization import ONLINE

PLAIN = "none"
BLOCK = 16
"""Tokens of a KV block."""


def loaded(directory: Path, online: str, threads: int) -> dict[str, float]:
    """Load a model in this process; seconds of CPU and bytes per parameter."""
    import torch

    from engine.config import ModelConfig
    from engine.kernels.make import make_program
    from engine.model.checkpoint import read_model_info
    from engine.model.weights import load_model

    torch.set_num_threads(threads)
    began = time.process_time()
    settings = ModelConfig(model=str(directory), quantization=None if online == PLAIN else online)
    model = load_model(read_model_info(directory), settings, dtype=torch.bfloat16, device=torch.device("cpu"))
    read = time.process_time()
    parameters, kept = model.num_parameters, model.weight_bytes
    program = make_program(model, BLOCK)
    laid_out = time.process_time()
    if program is not None:
        kept = program.weight_bytes
    return {"read": read - began, "laid_out": laid_out - read, "bytes_per_parameter": kept / parameters}


def in_a_process(directory: Path, online: str, threads: int) -> dict[str, float]:
    """The same in a process of its own."""
    words = [sys.executable, __file__, str(directory), "--one", online, "--threads", str(threads)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{directory} with {online}:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--formats", nargs="*", default=[*ONLINE], choices=ONLINE)
    parser.add_argument("--copies", nargs="*", type=Path, default=[], help="checkpoints of the same model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(loaded(args.model, args.one, args.threads)))
        return
    from examples.benchmarks.bench_lockstep import print_table
    from router.tools.bench.report import machine

    cases = [(name, args.model, name) for name in (PLAIN, *args.formats)]
    cases += [(path.name, path, PLAIN) for path in args.copies]
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name, _, _ in cases}
    for number in range(args.rounds + 1):
        for name, directory, online in cases:
            found = in_a_process(directory, online, args.threads)
            seconds = found["read"] + found["laid_out"]
            print(f"round {number}, {name}: {seconds:.1f} s of CPU", file=sys.stderr, flush=True)
            if number:
                rounds[name].append(found)
    lines: list[list[Any]] = []
    for name, runs in rounds.items():
        total, best = min((run["read"] + run["laid_out"], at) for at, run in enumerate(runs))
        run = runs[best]
        lines.append([name, f"{run['bytes_per_parameter']:.2f}"])
        lines[-1] += [f"{run['read']:.1f}", f"{run['laid_out']:.1f}", f"{total:.1f}"]
    print_table(["format", "bytes/parameter", "read", "laid out", "seconds of CPU"], lines)
    if args.json:
        page = {"machine": machine(), "model": args.model.name, "threads": args.threads, "rounds": rounds}
        args.json.write_text(json.dumps(page, indent=1) + "\n")


if __name__ == "__main__":
    main()
