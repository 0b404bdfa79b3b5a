#!/usr/bin/env python3
r"""Benchmark of lockstep: experts spread over two instances, against independent ones.

Each way of exchange is measured.

    python examples/benchmarks/bench_lockstep.py
    python examples/benchmarks/bench_lockstep.py --models moe-16 --concurrency 8 \
        --variants shared_memory independent
    python examples/benchmarks/bench_lockstep.py --models moe-small --serve-flags "--dtype bfloat16 \
        --kv-cache-memory-bytes 128M"

For the shipped model and one of 16 experts and 61 M parameters (random, made at the first run by
``make_moe_model.py``), meshes of all variants are started and stay; those that are not measured sleep. Then
each is loaded in turn, again and again, so that other load on the machine hits all of them. Printed are
medians over the repeats with the lowest and the highest, and where the instances' step time went by their own
account (``lockstep:step_seconds_total``):

    wait         for the headers of the others before a step: mostly for the slower one
    attention    of this instance's own tokens
    dispatch     routing, and tokens on their way to their experts, waiting for the others included
    experts      products of the experts held here
    combine      results on their way home, waiting for the others included
    rest         all else: projections, norms, output head, sampling

The overhead of lockstep is what is not computing: (wait + dispatch + combine) / step time. Compare numbers of
one run only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this is not installed

from examples.benchmarks.soak import by_rank, metrics
from router.tools.bench.client import BenchTarget
from router.tools.bench.client import run as send_all
from router.tools.bench.datasets import PromptLengths, random_prompts
from router.tools.bench.report import machine, summary
from router.tools.local_mesh import mesh

Args = argparse.Namespace

ROOT = Path(__file__).parents[2]
MADE = ROOT / "build" / "models"
MODELS = {
    "lockstep-moe": "lockstep-moe",
    "moe-16": str(MADE / "moe-16"),
    "moe-small": str(MADE / "moe-small"),
}
"""Models by name; moe-small is that of ``make_bench_models.py``, for the other benchmarks of sockets."""
VARIANTS = {
    "shared_memory": "-dp 2 -ep --all2all-backend shared_memory",
    "tcp": "-dp 2 -ep --all2all-backend tcp",
    "gloo all-gather": "-dp 2 -ep --all2all-backend allgather_reducescatter",
    "gloo all-to-all": "-dp 2 -ep --all2all-backend all_to_all",
    "independent": "-dp 2 --no-enable-expert-parallel",
    "one, both cores": "-dp 1",
}
"""Arguments of ``serve`` by the name in the tables."""
PARTS = ("wait", "attention", "dispatch", "experts", "combine", "rest")
EXCHANGE = ("wait", "dispatch", "combine")
REPORT_SECONDS = 0.5
"""Seconds after the last token until all instances have reported their counts."""


@dataclass
class Cell:
    """All repeats of one variant at one concurrency."""

    variant: str
    concurrency: int
    runs: list[dict[str, Any]] = field(default_factory=list)

    def of(self, key: str) -> list[float]:
        return [run[key] for run in self.runs if key in run]


async def counted(session: aiohttp.ClientSession, base_url: str) -> dict[str, float]:
    """Steps, and seconds by part, that each instance of a mesh has counted."""
    found = await metrics(session, base_url)
    if "lockstep:steps_total" not in found:
        return {}
    steps = by_rank(found["lockstep:steps_total"])
    totals = {"steps": statistics.fmean(steps.values())}
    for part in PARTS:
        samples = found["lockstep:step_seconds_total"].items()
        totals[part] = sum(value for labels, value in samples if dict(labels)["part"] == part) / len(steps)
    sent = found.get("lockstep:link_bytes_total", {}).items()
    totals["link_bytes"] = sum(value for labels, value in sent if dict(labels)["direction"] == "sent")
    for name in ("busiest_tokens", "mean_tokens"):
        totals[name] = statistics.fmean(found[f"lockstep:{name}_total"].values())
    return totals


async def measure(base_url: str, model: str, args: Args, concurrency: int, number: int) -> dict[str, Any]:
    """One run: load, and what the instances counted meanwhile."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_read=120)
    ) as session:
        before = await counted(session, base_url)
        rng = random.Random(f"{args.seed}-{number}")
        shape = PromptLengths(input_len=args.input_len, output_len=args.output_len)
        target = BenchTarget(base_url=base_url, endpoint="/v1/completions", model=model, ignore_eos=True)
        outcomes, duration = await send_all(
            session, target, random_prompts(shape, rng, max(4, 2 * concurrency)), concurrency=concurrency
        )
        result = summary(outcomes, duration, described={})
        await asyncio.sleep(REPORT_SECONDS)
        after = await counted(session, base_url)
    run = {
        "load_average": os.getloadavg()[0],
        "failed": result["failed"],
        "tokens_per_second": result["output_throughput"],
        "ttft_ms": result["p50_ttft_ms"],
        "tpot_ms": result["p50_tpot_ms"],
    }
    if after and (steps := after["steps"] - before["steps"]):
        spent = {part: after[part] - before[part] for part in PARTS}
        whole = sum(spent.values())
        run |= {f"{part}_ms": 1000 * seconds / steps for part, seconds in spent.items()}
        run["step_ms"] = 1000 * whole / steps
        run["link_bytes"] = after["link_bytes"] - before["link_bytes"]
        run["overhead"] = sum(spent[part] for part in EXCHANGE) / whole
        run["imbalance"] = (after["busiest_tokens"] - before["busiest_tokens"]) / (
            after["mean_tokens"] - before["mean_tokens"]
        )
    return run


def bench_model(name: str, args: Args, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All variants of one model, in turn.

    What is known so far is saved after each repeat.
    """
    path = MODELS.get(name, name)
    makers = {"moe-16": ["make_moe_model.py", path], "moe-small": ["make_bench_models.py", str(MADE), name]}
    if name in makers and not Path(path, "config.json").exists():
        script, *argv = makers[name]
        maker = str(Path(__file__).with_name(script))
        subprocess.run([sys.executable, maker, *argv], check=True, stdout=sys.stderr)
    cells = [Cell(variant, each) for each in args.concurrency for variant in args.variants]
    with contextlib.ExitStack() as stack:
        meshes = {}
        for variant in args.variants:
            flags = f"{shlex.quote(path)} {VARIANTS[variant]} {args.serve_flags}"
            meshes[variant] = stack.enter_context(mesh(flags))
        for base_url in meshes.values():  # what is made at first use is made now
            uvloop.run(measure(base_url, path, args, 8, 0))
        for number in range(args.repeats):
            for cell in cells:
                began = time.monotonic()
                prompts = 1000 * (number + 1) + cell.concurrency  # nothing in any prefix cache
                measured = measure(meshes[cell.variant], path, args, cell.concurrency, prompts)
                cell.runs.append(uvloop.run(measured))
                tell(name, number, cell, time.monotonic() - began)
            save(page_of(name, cells))
    print_throughput(name, cells, args)
    print_split(name, cells)
    return page_of(name, cells)


def page_of(name: str, cells: Sequence[Cell]) -> dict[str, Any]:
    return {
        "model": name,
        "cells": [
            {"variant": cell.variant, "concurrency": cell.concurrency, "runs": rounded(cell.runs)}
            for cell in cells
        ],
    }


def rounded(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: round(value, 4) for key, value in run.items()} for run in runs]


def tell(name: str, number: int, cell: Cell, seconds: float) -> None:
    run = cell.runs[-1]
    speed = f"{run['tokens_per_second']:.0f} tok/s ({seconds:.1f} s, load {run['load_average']:.1f})"
    print(f"{name} {number + 1}: {cell.variant}, {cell.concurrency} at once: {speed}", file=sys.stderr)


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Median (lowest-highest), or the only one."""
    if len(values) < 2:
        return "".join(f"{value:.{digits}f}" for value in values)
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def print_throughput(name: str, cells: Sequence[Cell], args: Args) -> None:
    """Print output tokens per second, and their ratio to independent instances.

    Ratios are taken within a repeat.
    """
    print(f"\n{name}: output tokens/s, median (lowest-highest) of {args.repeats}\n")
    base = {cell.concurrency: cell.of("tokens_per_second") for cell in cells if cell.variant == "independent"}
    rows = []
    for variant in args.variants:
        row = [variant]
        for concurrency in args.concurrency:
            (cell,) = (one for one in cells if (one.variant, one.concurrency) == (variant, concurrency))
            speed = cell.of("tokens_per_second")
            row.append(spread(speed))
            if base:
                ratios = [a / b for a, b in zip(speed, base[concurrency], strict=True)]
                row.append(f"{statistics.median(ratios):.2f}")
        rows.append(row)
    titles = ["variant"]
    for concurrency in args.concurrency:
        titles += [f"{concurrency} at once", *(["of independent"] if base else [])]
    print_table(titles, rows)


def print_split(name: str, cells: Sequence[Cell]) -> None:
    """Print the parts of a step's time."""
    stepping = [cell for cell in cells if cell.of("step_ms")]
    if not stepping:
        return
    print(f"\n{name}: time of a step by part, ms, mean of the instances, median of the repeats\n")
    rows = []
    for cell in stepping:
        parts = [f"{statistics.median(cell.of(f'{part}_ms')):.2f}" for part in PARTS]
        overhead = f"{100 * statistics.median(cell.of('overhead')):.0f}%"
        imbalance = f"{statistics.median(cell.of('imbalance')):.2f}"
        step = spread(cell.of("step_ms"), 1)
        rows.append([cell.variant, str(cell.concurrency), step, *parts, overhead, imbalance])
    print_table(["variant", "at once", "step", *PARTS, "overhead", "imbalance"], rows)


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, ["-" * (width - 1) + ":" for width in widths], *rows):
        print("| " + " | ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) + " |")
    sys.stdout.flush()


def parse_args() -> Args:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        default=["lockstep-moe", "moe-16"],
        help="names or directories (default: %(default)s)",
    )
    add("--variants", nargs="+", choices=[*VARIANTS], default=[*VARIANTS], help="(default: all)")
    add("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="(default: %(default)s)")
    add("--repeats", type=int, default=3, help="of every cell, interleaved (default: %(default)s)")
    add("--input-len", type=int, default=64, help="tokens per prompt (default: %(default)s)")
    add("--output-len", type=int, default=48, help="tokens per answer (default: %(default)s)")
    add("--serve-flags", default="--kv-cache-memory-bytes 256M", help="for all meshes (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--output-json", type=Path, metavar="FILE", help="write all numbers into this file")
    args = parser.parse_args()
    if min(*args.concurrency, args.repeats, args.input_len, args.output_len) < 1:
        parser.error("a count or a length is too small")
    return args


def write(args: Args, models: Sequence[dict[str, Any]]) -> None:
    """Write the file of --output-json."""
    if args.output_json is None:
        return
    page = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "variants": VARIANTS,
        "models": models,
    }
    args.output_json.parent.mkdir(parents=True, exist_ok=True)
    args.output_json.write_text(json.dumps(page, indent=1) + "\n")


def main() -> int:
    args = parse_args()
    models: list[dict[str, Any]] = []
    for name in args.models:
        models.append(bench_model(name, args, lambda page: write(args, [*models, page])))
    failed = sum(run["failed"] for model in models for cell in model["cells"] for run in cell["runs"])
    if failed:
        print(f"{failed} requests failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
