#!/usr/bin/env python3
r"""Benchmark of growth: tokens per second by requests at once, context and instances.

Results are tables and plots.

    python examples/benchmarks/bench_growth.py --output-json build/bench-growth.json --plots build/plots
    python examples/benchmarks/bench_growth.py --model build/models/moe-small --axes batch
    python examples/benchmarks/bench_growth.py --show build/bench-growth.json \
        --plots build/plots  # an earlier run

    batch      one instance with all cores, 1 to 128 requests at once; prompts of 128 tokens, answers of 64
    context    the same with prompts of 128 to 8k tokens, 4 at once: answers to prompts that are in the cache,
               so that nothing but decoding is measured, and prompts that come alone
    dp         1 to 4 instances, 32 requests at once: dense, and a model of experts with them spread (-ep) and
               whole on each. There are only so many cores: what is to be seen is what dividing them costs

``decode`` is requests at once over the median gap between two tokens of a stream (of ``context``: the
mean one), ``prompt`` the tokens of a prompt that came alone over the time to its first token. Each point is
the median of the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this is not installed

import uvloop

from examples.benchmarks.bench_lockstep import print_table
from examples.benchmarks.machine_limits import calibrate
from router.tools.bench.client import BenchTarget, session
from router.tools.bench.client import run as send_all
from router.tools.bench.datasets import PromptLengths, random_prompts
from router.tools.bench.report import machine, summary
from router.tools.local_mesh import mesh

Args = argparse.Namespace
Page = dict[str, Any]
Point = dict[str, Any]

MODELS = Path(__file__).parents[2] / "build" / "models"
DENSE, EXPERTS = "dense-small", "moe-small"
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
INSTANCES = (1, 2, 3, 4)
PROMPT, ANSWER = 128, 64
CONTEXT_REQUESTS, CONTEXT_ANSWER = 4, 64
DP_REQUESTS = 32
ROUNDS = {1: 4, 2: 4, 4: 4}
"""Requests of a run, times those at once; 2 by default."""
AXES = ("batch", "context", "dp")


class Load:
    """Sends random prompts; no two runs have any in common, unless asked to."""

    def __init__(self, url: str) -> None:
        self._url, self._runs = url, 0

    def run(self, *, at_once: int, requests: int, prompt: int, answer: int, again: bool = False) -> Point:
        """Send one run of requests.

        ``again``: the prompts of the run before, of which there must be as many.
        """
        self._runs += not again
        shape = PromptLengths(input_len=prompt, output_len=answer)
        asks = random_prompts(shape, random.Random(f"{self._runs} {at_once} {prompt}"), requests)
        target = BenchTarget(base_url=self._url, endpoint="/v1/completions", model="bench", ignore_eos=True)

        async def measured() -> Point:
            async with session() as http:
                outcomes, seconds = await send_all(http, target, asks, concurrency=at_once)
            return summary(outcomes, seconds, described={})

        found = uvloop.run(measured())
        if found["failed"]:
            raise SystemExit(f"{found['failed']} failed: {next(filter(None, found['errors']))}")
        gap = found["p50_itl_ms"]  # none in answers of one token
        return {
            "tokens_per_second": found["output_throughput"],
            "ttft_ms": found["p50_ttft_ms"],
            "itl_ms": gap,
            "tpot_ms": found.get("p50_tpot_ms", 0.0),
            "decode_per_second": 1000 * at_once / gap if gap else 0.0,
            "load_average": os.getloadavg()[0],
        }


def find(name: str) -> Path:
    """A model by its directory, or one of ours, made if need be."""
    model = Path(name) if Path(name).is_dir() else MODELS / name
    if not (model / "config.json").exists():
        maker = Path(__file__).with_name("make_bench_models.py")
        subprocess.run([sys.executable, str(maker), str(MODELS), name], check=True, stdout=sys.stderr)
    return model


def flags_of(model: Path, dtype: str, flags: str) -> str:
    """Arguments of ``serve`` for a point."""
    served = f"{shlex.quote(str(model))} --served-model-name bench"
    return f"{served} --dtype {dtype} --kv-cache-memory-bytes 1G {flags}"


def batch_points(model: Path, args: Args) -> Iterator[Point]:
    with mesh(flags_of(model, args.dtype, "-dp 1 --max-model-len 2048")) as url:
        load = Load(url)
        load.run(at_once=8, requests=8, prompt=PROMPT, answer=ANSWER)
        for _ in range(args.repeats):
            for batch in BATCHES:
                requests = batch * ROUNDS.get(batch, 2)
                found = load.run(at_once=batch, requests=requests, prompt=PROMPT, answer=ANSWER)
                yield {"curve": model.name, "at": batch, **found}


def context_points(model: Path, args: Args) -> Iterator[Point]:
    longest = min(max(CONTEXTS), context_of(model) - CONTEXT_ANSWER)
    with mesh(flags_of(model, args.dtype, f"-dp 1 --max-model-len {longest + CONTEXT_ANSWER}")) as url:
        load = Load(url)
        load.run(at_once=4, requests=4, prompt=PROMPT, answer=ANSWER)
        for _ in range(args.repeats):
            for length in CONTEXTS:
                if length > longest:
                    continue
                alone = load.run(at_once=1, requests=2, prompt=length, answer=1)
                many = {"at_once": CONTEXT_REQUESTS, "requests": CONTEXT_REQUESTS, "prompt": length}
                load.run(**many, answer=1)
                found = load.run(**many, answer=CONTEXT_ANSWER, again=True)
                # Nothing but decoding goes on, so the mean gap is as good as the median one, which chunks
                # that come two at a time would bring down to nothing.
                found["decode_per_second"] = 1000 * CONTEXT_REQUESTS / found["tpot_ms"]
                found["prompt_per_second"] = 1000 * length / alone["ttft_ms"]
                yield {"curve": model.name, "at": length, **found}


def dp_points(model: Path, experts: Path, args: Args) -> Iterator[Point]:
    curves = {
        model.name: (model, ""),
        f"{experts.name}, whole": (experts, "--no-enable-expert-parallel"),
        f"{experts.name}, spread": (experts, "-ep"),
    }
    for number in INSTANCES:
        for curve, (path, flags) in curves.items():
            with mesh(flags_of(path, args.dtype, f"-dp {number} --max-model-len 2048 {flags}")) as url:
                load = Load(url)
                many = {"at_once": DP_REQUESTS, "prompt": PROMPT, "answer": ANSWER}
                load.run(**many, requests=DP_REQUESTS)
                for _ in range(args.repeats):
                    yield {"curve": curve, "at": number, **load.run(**many, requests=2 * DP_REQUESTS)}


def context_of(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["max_position_embeddings"])


def bench(args: Args, page: Page, save: Callable[[], None]) -> None:
    """All axes, one after the other; the page is saved after each point."""
    model = find(args.model)
    page["calibration"].append(calibrate())
    points = {
        "batch": lambda: batch_points(model, args),
        "context": lambda: context_points(model, args),
        "dp": lambda: dp_points(model, find(args.experts), args),
    }
    for axis in args.axes:
        page["axes"][axis] = []
        for point in points[axis]():
            page["axes"][axis].append(
                {key: round(value, 3) if isinstance(value, float) else value for key, value in point.items()}
            )
            save()
            text = f"{axis} {point['at']}: {point['curve']}: {point['tokens_per_second']:.0f} tok/s"
            print(text, file=sys.stderr, flush=True)
    page["calibration"].append(calibrate())
    save()


# ---- tables and plots

SHOWN = {
    "batch": {"output": "tokens_per_second", "decode": "decode_per_second"},
    "context": {"decode": "decode_per_second", "prompt": "prompt_per_second"},
    "dp": {"output": "tokens_per_second"},
}
LABELS = {
    "batch": "requests at once",
    "context": "tokens of a prompt",
    "dp": "instances",
}


def curves(axis: str, points: list[Point]) -> dict[str, dict[int, float]]:
    """Medians of the repeats by name, then by point on the axis."""
    found: dict[str, dict[int, float]] = {}
    for name in dict.fromkeys(point["curve"] for point in points):
        for what, key in SHOWN[axis].items():
            values: dict[int, list[float]] = {}
            for point in points:
                if point["curve"] == name:
                    values.setdefault(point["at"], []).append(point[key])
            found[f"{name}, {what}"] = {at: statistics.median(all_) for at, all_ in values.items()}
    return found


def show(page: Page, plots: Path | None) -> None:
    reach = " and ".join(
        f"{one['read_gb_per_s']} GB/s, {one['bf16_gflop_per_s']} GFLOP/s" for one in page["calibration"]
    )
    print(f"The machine before and after: {reach}.")
    for axis, points in page["axes"].items():
        if not points:
            continue
        found = curves(axis, points)
        places = list(dict.fromkeys(point["at"] for point in points))
        print(f"\nTokens per second by {LABELS[axis]}\n")
        rows = [
            [name, *(f"{curve[at]:.0f}" if at in curve else "" for at in places)]
            for name, curve in found.items()
        ]
        print_table(["", *map(str, places)], rows)
        if plots is not None:
            plot(plots / f"growth-{axis}.svg", axis, found, places)


def plot(path: Path, axis: str, found: dict[str, dict[int, float]], places: list[int]) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plots: pip install '.[bench]' brings matplotlib", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, curve in found.items():
        axes.plot([*curve], [*curve.values()], marker="o", label=name)
    if axis != "dp":
        axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(at) for at in places])
    if axis == "context":  # prompts are tens of times faster than decode
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(LABELS[axis])
    axes.set_ylabel("tokens/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)


def parse_args() -> Args:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--model", default=DENSE, help="directory or name (default: %(default)s)")
    add("--experts", default=EXPERTS, help="the model of experts of axis dp (default: %(default)s)")
    add("--axes", nargs="+", choices=AXES, default=[*AXES], help="(default: all)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="(default: %(default)s)")
    add("--repeats", type=int, default=2, help="of each point (default: %(default)s)")
    add("--output-json", type=Path, metavar="FILE", help="write all numbers into this file, after each point")
    add("--plots", type=Path, metavar="DIRECTORY", help="draw growth-batch.svg and so on there")
    add("--show", type=Path, metavar="FILE", help="measure nothing: the tables (and plots) of such a file")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats is too small")
    return args


def main() -> None:
    args = parse_args()
    if args.show is not None:
        show(json.loads(args.show.read_text()), args.plots)
        return
    page: Page = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "dtype": args.dtype,
        "calibration": [],
        "axes": {},
    }

    def save() -> None:
        if args.output_json is not None:
            args.output_json.parent.mkdir(parents=True, exist_ok=True)
            partly = args.output_json.with_suffix(".partly")
            partly.write_text(json.dumps(page, indent=1) + "\n")
            partly.replace(args.output_json)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: what was measured is shown
    try:
        bench(args, page, save)
    finally:
        show(page, args.plots)


if __name__ == "__main__":
    main()
