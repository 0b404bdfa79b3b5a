"""``lockstep bench machine``: what this machine's cores multiply and its memory reads."""

from __future__ import annotations

import argparse
import json
import sys
from typing import get_args

import msgspec

from coordinator.process import process
from engine.config.quantization import ONLINE
from engine.roofline.facts import RooflineDtype, RooflineRequest
from parallel.kernel_kinds import KINDS
from parallel.machine_rates import MachineRates, measure_machine
from router.tools.bench.model_share import ModelShare, measure_model

PROG = "lockstep bench machine"
DESCRIPTION = (
    "Measures the limits of this machine: multiply-adds by the best kind of native kernels (or another one), "
    "and the rate at which memory is read. What else runs on the machine lowers them. With --model, decode "
    "steps of a model are timed, too, and compared with the time that these limits allow."
)


def main(argv: list[str]) -> int:
    """Print the rates of this machine; returns 1 where they cannot be measured."""
    parser = argparse.ArgumentParser(prog=PROG, description=DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--kind", choices=[*KINDS], default="", help="kind of kernels (default: the fastest)")
    parser.add_argument(
        "--model", metavar="DIR", help="checkpoint whose decode steps are timed at 1, 8 and 32 sequences"
    )
    parser.add_argument(
        "--dtype", choices=get_args(RooflineDtype), default="bfloat16", help="(default: %(default)s)"
    )
    parser.add_argument(
        "-q", "--quantization", choices=ONLINE, help="quantise the checkpoint while it is read"
    )
    args = parser.parse_args(argv)
    rates = measure_machine(args.kind)
    if rates is None:
        print(f"{PROG}: error: there is no C++ compiler here", file=sys.stderr)
        return process.EXIT_FAILED
    share: ModelShare | str | None = None
    if args.model is not None:
        ask = RooflineRequest(args.model, rates.cores, args.dtype, args.quantization)
        share = measure_model(ask, rates)
    if isinstance(share, str):
        print(f"{PROG}: error: {share}", file=sys.stderr)
        return process.EXIT_FAILED
    if args.json:
        steps = {} if share is None else {"model": msgspec.to_builtins(share)}
        print(json.dumps(msgspec.to_builtins(rates) | steps))
    else:
        print(in_words(rates))
        if share is not None:
            print(steps_in_words(share))
    return 0


def in_words(rates: MachineRates) -> str:
    """Rates as lines of text."""
    rows = [("kernels", rates.kind), ("cores", str(rates.cores))]
    rows += [
        (f"{name} products", f"{one:.0f} G/s by one core, {rates.all_cores[name]:.0f} by all")
        for name, one in rates.one_core.items()
    ]
    rows.append(("memory", f"{rates.read_one_core:.1f} GB/s by one core, {rates.read_all_cores:.1f} by all"))
    rows += [(f"{level} cache", f"{size / 2**20:g} MiB") for level, size in rates.caches.items()]
    return "\n".join(f"{name:18} {value}" for name, value in rows)


def steps_in_words(share: ModelShare) -> str:
    """Steps of a model as lines of text."""
    lines = [f"{'model':18} {share.model}, {share.kind} kernels"]
    for step in share.steps:
        ms, read, products = 1000 * step.seconds, step.read_gb / step.seconds, step.gflop / step.seconds
        reached = f"{100 * step.share:.0f} % of what {step.limit} allows"
        lines.append(
            f"{f'decode of {step.batch}':18} {ms:.2f} ms, {read:.1f} GB/s, {products:.0f} G/s: {reached}"
        )
    return "\n".join(lines)
