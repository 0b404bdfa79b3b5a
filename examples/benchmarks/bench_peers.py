#!/usr/bin/env python3
r"""Benchmark of Lockstep against other serving systems, in turn in one run.

All get the same model, prompts and load generator.

    examples/benchmarks/install_peers.sh  # once; what is missing is left out, and listed
    python examples/benchmarks/bench_peers.py                             # dense-small in bfloat16
    python examples/benchmarks/bench_peers.py --models moe-small \
        --systems lockstep lockstep-ep vllm transformers
    python examples/benchmarks/bench_peers.py --workloads prefix --concurrency 32
    python examples/benchmarks/bench_peers.py --models dense-wide --workloads plain sampled penalised
    python examples/benchmarks/bench_peers.py --workloads code \
        --systems lockstep-dp1 lockstep-drafts vllm-drafts
    python examples/benchmarks/bench_peers.py --models dense-0.5b --workloads plain --context 512 --systems \
        lockstep-dp1 lockstep-int8 lockstep-int4 llama.cpp-q8_0 llama.cpp-q4_0 vllm-int8 vllm-awq vllm-gptq
    python examples/benchmarks/bench_peers.py --show build/bench-peers.json  # of a run

All servers of a model are started first and stay; those that are not measured sleep. Then each is loaded in
turn, again and again, so that other load on the machine hits all of them. Printed are medians over the
repeats with the lowest and the highest, and how many times each of Lockstep's settings is ahead of each other
system and of the best of vLLM's, per repeat. The models are made at the first run (``make_bench_models.py``).
``--output-json`` is written after each run, so what an interrupted benchmark has measured is kept.

    lockstep          serve MODEL -dp 2: an instance for each core, experts whole on each
    lockstep-dp1      serve MODEL -dp 1: one instance with all cores
    lockstep-drafts   the same with --speculative-config: tokens looked up in the text are computed ahead
    lockstep-ep       serve MODEL -dp 2 -ep: experts spread, in lockstep
    lockstep-pp2      serve MODEL -pp 2: half of the layers on each core
    lockstep-tp2      serve MODEL -tp 2: half of every layer on each core
    lockstep-tp2-torch  the same on torch's operators
    vllm              vllm serve MODEL: compiled, a core left free, as is its default
    vllm-cores        the same on all cores
    vllm-drafts       the same with --speculative-config
    vllm-dp2          vllm serve MODEL -dp 2: a rank for each core; not compiled: with experts
                      it would not start
    vllm-eager        vllm serve MODEL --enforce-eager
    vllm-pp2          vllm serve MODEL -pp 2, a core each
    vllm-tp2          vllm serve MODEL -tp 2, a core each
    transformers      transformers serve MODEL --continuous-batching, all cores
    llama.cpp         one sequence, behind a small HTTP loop (``llama_cpp_server.py``), all cores
    llama.cpp-bf16    the same with 32 sequences; -q8_0 and -q4_0: quantised
    lockstep-int8     as lockstep-dp1 with W8A8; -int4, -gptq and -awq: weights of 4 bits (``formats``)
    vllm-int8         as vllm-cores with the same checkpoint, and so the others

transformers takes texts, so it gets the prompts as text. Before and after, memory bandwidth and the rate of
matrix products are measured: compare runs only where these agree, and numbers of one run rather than of two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this is not installed

import psutil
import uvloop

from examples.benchmarks.machine_limits import calibrate
from examples.benchmarks.peer_systems import ROOT, SYSTEMS, NotReady, Room, started, until_ready
from examples.benchmarks.peer_tables import plot, print_model
from router.tools.bench.client import BenchTarget, session
from router.tools.bench.client import run as send_all
from router.tools.bench.datasets import BenchRequest
from router.tools.bench.report import RequestResult, machine, summary

Args = argparse.Namespace
Page = dict[str, Any]

MODELS = ROOT / "build" / "models"
WORKLOADS = {
    "plain": (0, 128, 64),
    "prefix": (512, 32, 64),
    "code": (0, 256, 256),
    "sampled": (0, 128, 64),
    "penalised": (0, 128, 64),
}
"""Shared tokens, further prompt tokens and answer tokens of each workload.

Prompts are of random tokens, but for ``code``: they are pieces of the project's own, after which answers
repeat more.
"""
SAMPLING: dict[str, dict[str, float]] = {
    "sampled": {"temperature": 0.8, "top_p": 0.95},
    "penalised": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
}
"""Sampling parameters by workload: greedy where none are given.

The second ones are what Qwen2.5 comes with.
"""
USUAL = ["plain", "prefix"]
ROUNDS, USUAL_ROUNDS = {1: 6}, 8
"""Requests of a run, times its concurrency.

With fewer the run's end, when some have ended and no others come, would weigh more in the figures of a system
whose requests do not all end together.
"""
LOWEST_ID = 300
"""Lowest token id in prompts: below it are special tokens and single bytes."""
WARM = 8
"""Requests at once for the warm-up, which does not count."""
REST, REST_SECONDS = 10.0, 10.0
"""Percent of all cores that counts as rest, and longest wait for it.

Some systems compute on after their answer.
"""
DEFAULT = {
    "dense-small": ["lockstep", "lockstep-dp1", "vllm", "vllm-cores", "transformers", "llama.cpp"],
    "dense-0.5b": ["lockstep", "lockstep-dp1", "vllm", "vllm-cores"],
    "moe-small": ["lockstep", "lockstep-dp1", "lockstep-ep", "vllm", "vllm-cores", "transformers"],
}
KEPT = {
    "tokens_per_second": "output_throughput",
    "ttft_ms": "p50_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "itl_ms": "p50_itl_ms",
    "duration": "duration",
    "failed": "failed",
}


class Load:
    """Sends the same prompts to every system."""

    def __init__(self, model: Path, seed: int, rounds: int | None) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._model, self._seed, self._rounds = model, seed, rounds
        sources = sorted((ROOT / "router").glob("*.py"))
        self._code = self._tokenizer.encode("\n".join(file.read_text() for file in sources)).ids

    def prompts(self, workload: str, concurrency: int, number: int, count: int) -> list[list[int]]:
        """Prompts of repeat ``number``; no two repeats have any in common."""
        shared, own, _ = WORKLOADS[workload]
        rng = random.Random(f"{self._seed} {workload} {concurrency} {number}")

        def ids(length: int) -> list[int]:
            return [rng.randrange(LOWEST_ID, self._tokenizer.get_vocab_size()) for _ in range(length)]

        if workload == "code":
            places = (rng.randrange(len(self._code) - own) for _ in range(count))
            return [self._code[place : place + own] for place in places]
        prefix = ids(shared)
        return [prefix + ids(own) for _ in range(count)]

    async def run(self, name: str, url: str, workload: str, concurrency: int, number: int) -> dict[str, Any]:
        """One run; one with a number below 0 is short."""
        system = SYSTEMS[name]
        rounds = 1 if number < 0 else self._rounds or ROUNDS.get(concurrency, USUAL_ROUNDS)
        prompts = self.prompts(workload, concurrency, number, rounds * concurrency)
        answer = WORKLOADS[workload][2]
        asks = [
            [BenchRequest(self._tokenizer.decode(one) if system.texts else one, answer)] for one in prompts
        ]
        sampling = SAMPLING.get(workload, {})
        target = BenchTarget(
            base_url=url,
            endpoint="/v1/completions",
            model=system.name or str(self._model),
            temperature=sampling.get("temperature", 0.0),
            ignore_eos=not system.texts,
            extra_body={name: value for name, value in sampling.items() if name != "temperature"},
        )
        async with session() as http:
            outcomes, seconds = await send_all(http, target, asks, concurrency=concurrency)
        if system.texts:
            outcomes = list(map(forgiven, outcomes))
        result = summary(outcomes, seconds, described={})
        if result["failed"]:
            tell(f"{name}: {result['failed']} failed: {next(filter(None, result['errors']))}")
        return {ours: round(result[theirs], 4) for ours, theirs in KEPT.items()} | {
            "load_average": os.getloadavg()[0]
        }


def forgiven(outcome: RequestResult) -> RequestResult:
    """The outcome without the error that transformers makes.

    Its streams just end.
    """
    if outcome.error.endswith(" chunks without [DONE]"):
        outcome.error = ""
    return outcome


def bench_model(name: str, args: Args, model_page: Page, save: Callable[[], None]) -> None:
    """All systems on one model; ``model_page`` is filled, and saved after each run."""
    model = find(name)
    model_page |= {"model": model.name, "dtype": args.dtype, "workloads": WORKLOADS, "sampling": SAMPLING}
    model_page |= {"calibration": [calibrate()], "start_seconds": {}, "left_out": {}, "cells": []}
    load = Load(model, args.seed, args.rounds)
    urls: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for system in args.systems or DEFAULT.get(model.name, ["lockstep", "vllm"]):
            if why := SYSTEMS[system].lacks(model):
                leave_out(model_page, system, why)
                continue
            child, url, log = stack.enter_context(started(system, model, args.dtype, Room(args.context)))
            try:
                model_page["start_seconds"][system] = round(until_ready(child, url, log), 1)
            except NotReady as error:
                leave_out(model_page, system, str(error))
                continue
            urls[system] = url
            at_once = min(WARM, SYSTEMS[system].most)  # what is made at first use is made now
            uvloop.run(load.run(system, url, "plain", at_once, -1))
        model_page["cells"] = [
            {"system": system, "workload": workload, "concurrency": concurrency, "runs": []}
            for workload in args.workloads
            for concurrency in args.concurrency
            for system in urls
            if concurrency <= SYSTEMS[system].most
        ]
        for number in range(args.repeats):
            for cell in model_page["cells"]:
                which = (cell["workload"], cell["concurrency"])
                come_to_rest()
                run = uvloop.run(load.run(cell["system"], urls[cell["system"]], *which, number))
                cell["runs"].append(run)
                save()
                what = f"{name} {number + 1}: {which[0]} {which[1]}: {cell['system']}"
                tell(f"{what}: {run['tokens_per_second']:.0f} tok/s, TTFT {run['ttft_ms']:.0f} ms")
    model_page["calibration"].append(calibrate())
    save()


def come_to_rest() -> None:
    """Wait until no system computes: a run must not pay for the one before."""
    deadline = time.monotonic() + REST_SECONDS
    while psutil.cpu_percent(interval=0.5) > REST and time.monotonic() < deadline:
        pass


def find(name: str) -> Path:
    """A model by its directory, or one of ours, made if need be."""
    model = Path(name) if Path(name).is_dir() else MODELS / name
    if not (model / "config.json").exists():
        maker = Path(__file__).with_name("make_bench_models.py")
        subprocess.run([sys.executable, str(maker), str(MODELS), name], check=True, stdout=sys.stderr)
    return model.resolve()


def leave_out(model_page: Page, system: str, why: str) -> None:
    tell(f"{system} is left out: {why}")
    model_page["left_out"][system] = why


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def show(page: Page, plots: Path | None) -> None:
    """Print tables, and save plots if asked for."""
    for model in page["models"]:
        if model.get("cells"):
            print_model(model)
    if plots is not None:
        try:
            plot(plots, page)
        except ImportError:
            tell("no plots: pip install '.[bench]' brings matplotlib")


def parse_args() -> Args:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--models", nargs="+", default=["dense-small"], help="names or directories (default: %(default)s)")
    add("--systems", nargs="+", choices=[*SYSTEMS], help="(default: those that fit the model)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="(default: %(default)s)")
    add("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="(default: %(default)s)")
    add("--workloads", nargs="+", choices=[*WORKLOADS], default=USUAL, help="(default: %(default)s)")
    add("--repeats", type=int, default=3, help="of every cell, interleaved (default: %(default)s)")
    add(
        "--rounds",
        type=int,
        help="requests per run, times its concurrency (default: 6 for 1, else 8)",
    )
    add("--instructions", choices=["avx2"], help="forbid all systems what is beyond (default: the CPU's own)")
    add("--context", type=int, default=Room.context, help="most tokens of a request (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--output-json", type=Path, metavar="FILE", help="write all numbers into this file, after each run")
    add("--plots", type=Path, metavar="DIRECTORY", help="draw them, too")
    add("--show", type=Path, metavar="FILE", help="measure nothing: the tables (and plots) of such a file")
    args = parser.parse_args()
    if min(*args.concurrency, args.repeats, args.rounds or 1) < 1:
        parser.error("a count is too small")
    if args.instructions:
        SYSTEMS.update({name: system.only_avx2() for name, system in SYSTEMS.items()})
    return args


def bench_all(
    args: argparse.Namespace,
    bench: Callable[[str, argparse.Namespace, Page, Callable[[], None]], None],
    show: Callable[[Page, Path | None], None],
) -> int:
    """Measure all models of ``args``, saving after each run; returns an exit code."""
    page: Page = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "systems": {name: system.command for name, system in SYSTEMS.items()},
        "models": [],
    }

    def save() -> None:
        if args.output_json is not None:
            args.output_json.parent.mkdir(parents=True, exist_ok=True)
            partly = args.output_json.with_suffix(".partly")
            partly.write_text(json.dumps(page, indent=1) + "\n")
            partly.replace(args.output_json)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended
    try:
        for name in args.models:
            page["models"].append({})
            bench(name, args, page["models"][-1], save)
    finally:
        show(page, args.plots)
    failed = sum(run["failed"] for model in page["models"] for cell in model["cells"] for run in cell["runs"])
    if failed:
        tell(f"{failed:g} requests failed")
    return 1 if failed else 0


def main() -> int:
    args = parse_args()
    if args.show is not None:
        show(json.loads(args.show.read_text()), args.plots)
        return 0
    return bench_all(args, bench_model, show)


if __name__ == "__main__":
    sys.exit(main())
