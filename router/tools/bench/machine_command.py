"""``lockstep bench machine``: what this machine's cores multiply and its memory reads."""

from __future__ import annotations

import argparse
import json
import sys

import msgspec

from coordinator.process import process
from parallel.kernel_kinds import KINDS
from parallel.machine_rates import MachineRates, measure_machine

PROG = "lockstep bench machine"
DESCRIPTION = (
    "Measures the limits of this machine: multiply-adds by the best kind of native kernels (or another one), "
    "and the rate at which memory is read. What else runs on the machine lowers them."
)


def main(argv: list[str]) -> int:
    """Print the rates of this machine; returns 1 where they cannot be measured."""
    parser = argparse.ArgumentParser(prog=PROG, description=DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--kind", choices=[*KINDS], default="", help="kind of kernels (default: the fastest)")
    args = parser.parse_args(argv)
    rates = measure_machine(args.kind)
    if rates is None:
        print(f"{PROG}: error: there is no C++ compiler here", file=sys.stderr)
        return process.EXIT_FAILED
    print(json.dumps(msgspec.to_builtins(rates)) if args.json else in_words(rates))
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
