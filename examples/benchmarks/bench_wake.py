#!/usr/bin/env python3
"""Benchmark of waking: time to first token asleep and awake, on the same mesh.

    python examples/benchmarks/bench_wake.py
    python examples/benchmarks/bench_wake.py --serve "-dp 2 -ep --all2all-backend all_to_all" --requests 100

Every round sends one request of each of these kinds to the same instance, in a random order:

    asleep       nobody has had work for 50 to 300 ms: the request wakes all instances
    back to back at once after another one's last token: the mesh has just gone to sleep, or is about to
    beside       while one long stream runs on another instance: the mesh steps, and the request joins in
    among        while one long stream runs on the same instance

``back to back`` and ``beside`` are what being awake means. A request beside a stream waits for the step under
way, then shares its own with it, so awake is not free either; what waking costs is the difference of the
medians of ``asleep`` and of the cheaper of these two. ``--limit-ms`` makes the exit code 1 if that is more.
Prompts are short and all different, so a prefill is about as long as a step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this is not installed

from examples.benchmarks.soak import Prompt, ask, body_of
from router.tools.bench.report import machine, percentile
from router.tools.local_mesh import mesh

Args = argparse.Namespace
Session = aiohttp.ClientSession

KINDS = ("asleep", "back to back", "beside", "among")
RANK = 0
"""The instance that gets the requests."""
ANSWER = 3
LONG_ANSWER = 1500
SETTLE = 0.05
"""Seconds after the last token in which the mesh goes to sleep."""


def some_prompt(rng: random.Random) -> Prompt:
    return Prompt(tuple(rng.randrange(16, 4000) for _ in range(rng.randrange(4, 16))), 0.0, 0)


async def first_token(session: Session, rng: random.Random) -> float:
    """Seconds to the first token of a short answer."""
    _, seconds = await ask(session, some_prompt(rng), ANSWER, leave_after=None, rank=RANK, stream=True)
    assert seconds is not None, "an answer without tokens"
    return seconds


@contextlib.asynccontextmanager
async def long_stream(session: Session, rank: int, rng: random.Random) -> AsyncIterator[None]:
    """One request that keeps an instance busy meanwhile, from its fifth token on."""
    body = body_of(some_prompt(rng), LONG_ANSWER, stream=True)
    async with session.post(
        "/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)}
    ) as response:
        response.raise_for_status()
        for _ in range(10):
            await response.content.readline()
        reading = asyncio.create_task(response.read())
        try:
            yield
            if reading.done():
                raise ValueError("the long stream ended too soon")
        finally:
            reading.cancel()
            response.close()


async def measure(session: Session, kind: str, rng: random.Random) -> float:
    """One request of a kind; the mesh sleeps before and after."""
    await asyncio.sleep(SETTLE + rng.uniform(0.0, 0.25))
    match kind:
        case "asleep":
            return await first_token(session, rng)
        case "back to back":
            await first_token(session, rng)
            return await first_token(session, rng)
        case _:
            other = RANK + 1 if kind == "beside" else RANK
            async with long_stream(session, other, rng):
                await asyncio.sleep(rng.uniform(0.0, 0.03))
                return await first_token(session, rng)


async def run(args: Args) -> int:
    rng = random.Random(args.seed)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    async with aiohttp.ClientSession(
        args.base_url, timeout=aiohttp.ClientTimeout(total=None, sock_read=60)
    ) as session:
        for _ in range(5):
            await first_token(session, rng)
        for _ in range(args.requests):
            for kind in rng.sample(KINDS, len(KINDS)):
                seconds[kind].append(await measure(session, kind, rng))
    print(f"time to first token, ms, {args.requests} requests each, load average {os.getloadavg()[0]:.1f}")
    rows: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        ms = sorted(1000 * each for each in seconds[kind])
        rows[kind] = {f"p{percent}": percentile(ms, percent) for percent in (10, 50, 90, 99)}
        print(f"{kind:>14}  " + "  ".join(f"{name} {value:7.2f}" for name, value in rows[kind].items()))
    cost = {other: rows["asleep"]["p50"] - rows[other]["p50"] for other in KINDS[1:]}
    awake = min(("back to back", "beside"), key=lambda kind: rows[kind]["p50"])
    error = spread_of_difference(seconds["asleep"], seconds[awake], rng)
    for other, difference in cost.items():
        print(f"asleep - {other}: {difference:+.2f} ms")
    print(f"waking costs {cost[awake]:+.2f} ms, in 95 of 100 resamplings {error[0]:+.2f} to {error[1]:+.2f}")
    if args.output_json:
        page: dict[str, Any] = {
            "serve": args.serve,
            "machine": machine(),
            "ttft_ms": rows,
            "asleep_minus": cost,
        }
        page |= {"waking_costs_ms": cost[awake], "waking_costs_ms_95": error}
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        args.output_json.write_text(json.dumps(page, indent=1) + "\n")
    if args.limit_ms is not None and cost[awake] > args.limit_ms:
        print(f"more than the limit of {args.limit_ms:g} ms", file=sys.stderr)
        return 1
    return 0


def spread_of_difference(one: list[float], other: list[float], rng: random.Random) -> tuple[float, float]:
    """95 % interval of the difference of two samples' medians, in ms, by resampling."""
    differences = sorted(
        1000
        * (
            statistics.median(rng.choices(one, k=len(one)))
            - statistics.median(rng.choices(other, k=len(other)))
        )
        for _ in range(1000)
    )
    return percentile(differences, 2.5), percentile(differences, 97.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--serve", metavar="ARGS", help="start 'serve ARGS' (default: -dp 2 -ep)")
    add("--base-url", help="of a mesh of at least two instances that runs already, instead of --serve")
    add("--requests", type=int, default=60, help="of each kind (default: %(default)s)")
    add("--limit-ms", type=float, help="most that waking may cost")
    add("--seed", type=int, default=0, help="of prompts and order")
    add("--output-json", type=Path, metavar="FILE", help="write the numbers into this file")
    args = parser.parse_args()
    if args.serve is not None and args.base_url:
        parser.error("--serve starts its own mesh: leave out --base-url")
    if args.serve is None and not args.base_url:
        args.serve = "-dp 2 -ep"
    server = contextlib.nullcontext(args.base_url) if args.serve is None else mesh(args.serve)
    with contextlib.suppress(KeyboardInterrupt), server as args.base_url:
        return asyncio.run(run(args))
    return 130


if __name__ == "__main__":
    sys.exit(main())
