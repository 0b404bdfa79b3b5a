#!/usr/bin/env python3
"""Benchmark of first tokens after a restart of a mesh with KV blocks in files.

    python examples/benchmarks/transfers/bench_restarts.py --model build/models/dense-0.5b

In each round a new prompt is computed. Then the mesh ends, and starts again with the same ``--kv-cache-dir``.
A short prompt takes the costs of any first request. The long prompt follows, and follows again (warm). Token
ids and log-probabilities of the three answers are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from examples.benchmarks.transfers.bench_transfers import mesh
from router.tools.bench.report import machine

KINDS = ("computed", "warm", "after restart")
WRITTEN = 1.0
"""Seconds for blocks to be written, beside what the end of an instance writes."""


def answer(url: str, prompt: list[int], tokens: int = 8) -> tuple[float, Any]:
    """Milliseconds until the first token, then ids and log-probabilities of all."""
    body = {
        "prompt": prompt, "max_tokens": tokens, "temperature": 0.8, "seed": 7, "ignore_eos": True,
        "logprobs": 1, "return_token_ids": True, "stream": True,
    }  # fmt: skip
    headers = {"content-type": "application/json", "x-data-parallel-rank": "0"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    began, first, found = time.perf_counter(), 0.0, []
    with urllib.request.urlopen(request, timeout=300) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                for choice in json.loads(line[6:])["choices"]:
                    found.append((choice.get("token_ids"), (choice["logprobs"] or {}).get("token_logprobs")))
    ids = [each for part, _ in found for each in part or ()]
    logprobs = [each.hex() for _, part in found for each in part or ()]
    return 1000 * first, (ids, logprobs)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", default="", help="directory or name of a model (default: the shipped one)")
    add("--length", type=int, default=1500, help="tokens of a prompt (default: %(default)s)")
    add("--rounds", type=int, default=3, help="restarts (default: %(default)s)")
    add("--serve-flags", default="", help="for the mesh")
    add("--output-json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    chance, times, different = random.Random(1), {kind: [0.0] * 0 for kind in KINDS}, 0
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="lockstep-kv-") as directory:
        flags = f"--kv-cache-dir {directory} {args.serve_flags}"
        prompt: list[int] = []
        expected: Any = None
        for number in range(args.rounds + 1):
            with mesh(args.model, flags) as running:
                answer(running.url, [7] * 10)
                found: dict[str, float] = {}
                if prompt:
                    found["after restart"], again = answer(running.url, prompt)
                    found["warm"], warm = answer(running.url, prompt)
                    different += len({str(each) for each in (again, warm, expected)}) - 1
                prompt = [chance.randrange(10, 4000) for _ in range(args.length)]
                found["computed"], expected = answer(running.url, prompt)
                time.sleep(WRITTEN)
            print(
                f"start {number}: " + ", ".join(f"{kind} {ms:.0f} ms" for kind, ms in found.items()),
                flush=True,
            )
            for kind, ms in found.items():
                times[kind].append(ms)
    loads.append(os.getloadavg()[0])
    medians = {kind: statistics.median(each) for kind, each in times.items()}
    print(f"after a restart over warm: {medians['after restart'] / medians['warm']:.2f}x (medians)")
    print(f"computed over after a restart: {medians['computed'] / medians['after restart']:.2f}x")
    print(f"answers that differ: {different}")
    if args.output_json:
        result = {
            **machine(),
            "load_average": loads,
            "args": {"model": args.model, "length": args.length},
            "milliseconds": times,
            "different": different,
        }
        args.output_json.write_text(json.dumps({**result, "medians": medians}, indent=1) + "\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
