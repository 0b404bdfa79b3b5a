#!/usr/bin/env python3
"""Benchmark of overload: three times more requests than a mesh can serve.

Admitted requests are served as fast as ever, the others are refused at once, and memory stays flat.

    python examples/benchmarks/bench_overload.py --seconds 120 --output-json build/overload.json

First as many clients as there are slots ask one request after the other: that is the capacity, and the
latency that requests have at it. Then requests come at ``--factor`` times that rate, whatever becomes of
them. The exit code is 1 if the median latency of those let in is more than 20 % longer than at capacity, if
an answer is neither 200 nor 429 or 503 with Retry-After, if half of the refusals took over 100 ms, or if the
processes' memory grew by more than 5 % over the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from router.tools.local_mesh import mesh

MOST_SLOWDOWN = 1.2
MOST_REFUSAL_SECONDS = 0.1
MOST_GROWTH = 1.05
CONNECTIONS = 2000


class Answer:
    """Outcome of one request, with times in seconds."""

    def __init__(self, status: int, first: float, took: float, says_when: bool) -> None:
        self.status = status
        self.first = first
        self.took = took
        self.says_when = says_when


def percentile(values: Sequence[float], share: float) -> float:
    """Percentile by nearest rank; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


async def ask(
    session: aiohttp.ClientSession, url: str, rng: random.Random, args: argparse.Namespace
) -> Answer:
    body = {
        "prompt": [rng.randrange(5, 4000) for _ in range(args.input_len)],
        "max_tokens": args.output_len,
        "ignore_eos": True,
        "stream": True,
    }
    began = time.perf_counter()
    first = 0.0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        async for _ in response.content:
            first = first or time.perf_counter() - began
        says_when = "retry-after" in response.headers and "x-should-retry" in response.headers
        return Answer(response.status, first, time.perf_counter() - began, says_when)


async def at_capacity(
    session: aiohttp.ClientSession, url: str, seconds: float, args: argparse.Namespace
) -> list[Answer]:
    """Answers to one client for each slot."""
    answers: list[Answer] = []
    until = time.perf_counter() + seconds

    async def client(number: int) -> None:
        rng = random.Random(number)
        while time.perf_counter() < until:
            answer = await ask(session, url, rng, args)
            answers.append(answer)
            if answer.status != 200:
                await asyncio.sleep(0.05)

    await asyncio.gather(*(client(number) for number in range(args.dp * args.max_num_seqs)))
    return answers


async def overloaded(
    session: aiohttp.ClientSession, url: str, rate: float, args: argparse.Namespace
) -> list[Answer]:
    """Answers to requests at random times, ``rate`` a second."""
    rng = random.Random(0)
    asking: list[asyncio.Task[Answer]] = []
    began, at = time.perf_counter(), 0.0
    while at < args.seconds:
        at += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        asking.append(asyncio.create_task(ask(session, url, random.Random(len(asking)), args)))
    return await asyncio.gather(*asking)


async def watch_memory(samples: list[int]) -> None:
    """Bytes of all processes that this one has started, once a second."""
    while True:
        total = 0
        for process in psutil.Process().children(recursive=True):
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
        samples.append(total)
        await asyncio.sleep(1.0)


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    served = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status in (429, 503)]
    return {
        "requests": len(answers),
        "served": len(served),
        "served_per_second": len(served) / seconds,
        "statuses": dict(Counter(str(answer.status) for answer in answers)),
        "latency_p50": percentile([answer.took for answer in served], 0.5),
        "latency_p99": percentile([answer.took for answer in served], 0.99),
        "ttft_p50": percentile([answer.first for answer in served], 0.5),
        "ttft_p99": percentile([answer.first for answer in served], 0.99),
        "refusal_p50": percentile([answer.took for answer in refused], 0.5),
        "refusal_p99": percentile([answer.took for answer in refused], 0.99),
        "refusals_without_headers": sum(not answer.says_when for answer in refused),
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    arguments = (
        f"-dp {args.dp} --no-enable-expert-parallel --max-num-seqs {args.max_num_seqs} "
        f"--max-num-queued-reqs {args.max_num_queued_reqs} --num-gpu-blocks-override 2000 {args.flags}"
    )
    memory: list[int] = []
    with mesh(arguments) as url:
        connector = aiohttp.TCPConnector(limit=CONNECTIONS)
        async with aiohttp.ClientSession(connector=connector) as session:
            await at_capacity(session, url, min(5.0, args.capacity_seconds), args)
            before = await at_capacity(session, url, args.capacity_seconds, args)
            normal = figures(before, args.capacity_seconds)
            watching = asyncio.create_task(watch_memory(memory))
            rate = args.factor * normal["served_per_second"]
            overload = figures(await overloaded(session, url, rate, args), args.seconds)
            watching.cancel()
    half = memory[len(memory) // 2]
    return {
        "arguments": arguments,
        "factor": args.factor,
        "seconds": args.seconds,
        "at_capacity": normal,
        "overloaded": overload,
        "slowdown_p50": overload["latency_p50"] / normal["latency_p50"],
        "slowdown_p99": overload["latency_p99"] / normal["latency_p99"],
        "memory_bytes": {"begin": memory[0], "half": half, "end": memory[-1], "most": max(memory)},
        "memory_growth_second_half": memory[-1] / half,
    }


def problems(found: dict[str, Any]) -> list[str]:
    overload = found["overloaded"]
    others = set(overload["statuses"]) - {"200", "429", "503"}
    checks = {
        f"those let in took {found['slowdown_p50']:.2f} times as long": found["slowdown_p50"] > MOST_SLOWDOWN,
        f"statuses {sorted(others)}": bool(others),
        "refusals without Retry-After and x-should-retry": overload["refusals_without_headers"] > 0,
        f"refusals took {overload['refusal_p50']:.3f} s": overload["refusal_p50"] > MOST_REFUSAL_SECONDS,
        f"memory grew {found['memory_growth_second_half']:.3f} times": found["memory_growth_second_half"]
        > MOST_GROWTH,
        "nothing was refused": overload["requests"] == overload["served"],
    }
    return [text for text, is_so in checks.items() if is_so]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of overload")
    parser.add_argument("--capacity-seconds", type=float, default=40.0, help="of the load before it")
    parser.add_argument("--factor", type=float, default=3.0, help="times the capacity")
    parser.add_argument("-dp", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--max-num-queued-reqs", type=int, default=0)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--flags", default="", help="more flags for serve, as one word")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    print(json.dumps(found, indent=1))
    if args.output_json:
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        args.output_json.write_text(json.dumps(found, indent=1) + "\n")
    wrong = problems(found)
    print("\n".join(wrong) or "ok", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
