#!/usr/bin/env python3
"""Benchmark of roles: gaps between tokens of decodes beside long prompts.

    python examples/benchmarks/transfers/bench_roles.py --output-json roles.json

Two instances, both mixed or one for prefill and one for decode. Streams with short prompts run all the time:
alone, then beside long prompts, and alone again, since contexts grow. Rounds of both ways are interleaved.

Each instance first computes some prompts (``--warm``), so that its cache was used before. The system's price
of fresh pages is paid then. Give as many as fill the cache once, and make it small (``--serve-flags``).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from examples.benchmarks.transfers.bench_drains import Client, check
from examples.benchmarks.transfers.bench_transfers import mesh
from router.tools.bench.report import machine, percentile

KINDS = {"both mixed": ("null", "null"), "prefill and decode": ("decode", "prefill")}
"""``--disaggregation-mode`` of each instance."""
SHORT = 32
"""Tokens of a decode's prompt."""


def run(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    chance = random.Random(1)

    def client(length: int, tokens: int, rank: int | None = None) -> Client:
        made = Client(running.url, [chance.randrange(10, 2000) for _ in range(length)], tokens, rank=rank)
        made.start()
        return made

    one, other = (
        f"--disaggregation-mode {role} --drain-timeout 0 {args.serve_flags}" for role in KINDS[kind]
    )
    with mesh(args.model, one, headless=other) as running:
        for _ in range(args.warm):
            for each in [client(args.length, 1, rank) for rank in (0, 1)]:
                each.join(120)
        first = client(args.length, args.answer)  # what is slow for the first time only
        first.join(120)
        decodes = [client(SHORT, args.tokens) for _ in range(args.decodes)]
        while not all(len(each.tokens) > 5 for each in decodes):
            time.sleep(0.05)
        before = time.perf_counter()
        time.sleep(args.alone)
        began, firsts = time.perf_counter(), [0.0] * 0
        while time.perf_counter() < began + args.seconds and all(each.is_alive() for each in decodes):
            asked = time.perf_counter()
            long = [client(args.length, args.answer) for _ in range(args.prompts)]
            for each in long:
                each.join(120)
            check(long)
            firsts += [1000 * (each.times[0] - asked) for each in long]
        ended = time.perf_counter()
        time.sleep(args.alone)
        after = time.perf_counter()
        check([first, *decodes])
        for each in decodes:
            each.stop()
        gaps = sorted(gap for each in decodes for gap in each.gaps(began, ended))
        alone = sorted(
            gap for each in decodes for gap in [*each.gaps(before, began), *each.gaps(ended, after)]
        )
        tokens = sum(sum(began < at < ended for at in each.times) for each in decodes)
    return {
        "kind": kind,
        "seconds": ended - began,
        "load": os.getloadavg()[0],
        "decode_tokens_per_second": tokens / (ended - began),
        "long_prompts": len(firsts),
        "itl_ms": {f"p{percent}": percentile(gaps, percent) for percent in (50, 90, 99, 100)},
        "itl_alone_ms": {f"p{percent}": percentile(alone, percent) for percent in (50, 90, 99)},
        "ttft_of_long_prompts_ms": {
            f"p{percent}": percentile(sorted(firsts), percent) for percent in (50, 99)
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", default="", help="directory or name of a model (default: the shipped one)")
    add("--decodes", type=int, default=8, help="streams with short prompts (default: %(default)s)")
    add("--tokens", type=int, default=1900, help="most tokens of each (default: %(default)s)")
    add("--prompts", type=int, default=2, help="long prompts at once (default: %(default)s)")
    add("--length", type=int, default=1500, help="tokens of a long prompt (default: %(default)s)")
    add("--answer", type=int, default=32, help="tokens of its answer (default: %(default)s)")
    add(
        "--warm", type=int, default=6, help="prompts that each instance computes first (default: %(default)s)"
    )
    add("--alone", type=float, default=2.0, help="seconds alone, before and after (default: %(default)s)")
    add("--seconds", type=float, default=12.0, help="seconds beside them (default: %(default)s)")
    add("--rounds", type=int, default=2, help="rounds of both ways (default: %(default)s)")
    add("--serve-flags", default="", help="for both instances")
    add("--output-json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    results = []
    for _ in range(args.rounds):
        for kind in KINDS:
            results.append(run(args, kind))
            print(json.dumps(results[-1]), flush=True)
    if args.output_json:
        args.output_json.write_text(json.dumps({**machine(), "rounds": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
