#!/usr/bin/env python3
r"""Benchmark of requests with images: decodes beside them, and images a second against vLLM.

    PEERS=build/peers python examples/benchmarks/images/bench_images.py --systems lockstep-dp1 vllm-cores

The model has the shape of SmolVLM-256M with random weights (``seeing_model.py``); each image has a megapixel
and is new. All systems are started first, and loaded in turn. ``decodes`` measures the gaps between tokens of
running answers, alone and while 20 images are served beside them. ``images`` measures images a second and the
time to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from examples.benchmarks.images.seeing_model import make_seeing_model, question
from examples.benchmarks.machine_limits import calibrate
from examples.benchmarks.peer_systems import ROOT, SYSTEMS, started, until_ready
from router.tools.bench.client import BenchTarget, send, session
from router.tools.bench.datasets import BenchRequest
from router.tools.bench.report import RequestResult, machine

NUM_IMAGES = 20
NUM_DECODES = 4
LOWEST_ID = 300
PROMPT = [*range(LOWEST_ID, LOWEST_ID + 128)]
ANSWER = 8
"""Tokens of an answer about an image."""
MOST_TOKENS = 1500
"""Tokens of a running answer, which another one follows."""
SETTLE_SECONDS = 3.0
"""Seconds that the gaps of the running answers are taken alone, before any image."""

VLLM_FLAGS = """--skip-mm-profiling --limit-mm-per-prompt '{{"image":1,"video":0}}'"""
"""Else it encodes 32 images before it serves, which takes minutes."""

Rates = dict[str, dict[str, list[float]]]
"""By system and measure, one of each repeat."""

_numbers = itertools.count(1)
"""Pictures: none is sent twice."""


def target_of(url: str, *, images: int = 0) -> BenchTarget:
    """A completion, or a chat with so many new images."""
    body = {} if not images else {"messages": question([next(_numbers) for _ in range(images)])}
    return BenchTarget(
        base_url=url,
        endpoint="/v1/chat/completions" if images else "/v1/completions",
        model="bench",
        is_chat=bool(images),
        ignore_eos=True,
        extra_body=body,
    )


def checked(results: Sequence[RequestResult]) -> Sequence[RequestResult]:
    if bad := next((each.error for each in results if each.error), ""):
        raise SystemExit(f"a request failed: {bad}")
    return results


async def images_of(url: str, count: int, concurrency: int) -> tuple[float, float]:
    """Images a second, and median seconds to the first token."""
    targets = [target_of(url, images=1) for _ in range(count)]
    room = asyncio.Semaphore(concurrency)
    async with session() as http:

        async def one(target: BenchTarget) -> RequestResult:
            async with room:
                return await send(http, target, BenchRequest("", ANSWER))

        began = time.perf_counter()
        results = checked(await asyncio.gather(*map(one, targets)))
        seconds = time.perf_counter() - began
    return count / seconds, statistics.median(each.ttft for each in results)


async def decodes_beside(url: str, num_images: int) -> tuple[float, float, float]:
    """99th percentile of gaps in ms, alone and beside images, and images a second.

    The running answers are ended with the last image.
    """
    targets = [target_of(url, images=1) for _ in range(num_images)]
    gaps: list[tuple[float, float]] = []
    """When each ended, and its seconds."""
    async with session() as http:

        async def decode(number: int) -> None:
            for turn in itertools.count():  # until it is cancelled
                latest: float | None = None

                def on_token(now: float) -> None:
                    nonlocal latest
                    if latest is not None:
                        gaps.append((now, now - latest))
                    latest = now

                prompt = BenchRequest([number, LOWEST_ID + turn, *PROMPT], MOST_TOKENS)
                checked([await send(http, target_of(url), prompt, on_token=on_token)])

        running = [asyncio.create_task(decode(LOWEST_ID + number)) for number in range(NUM_DECODES)]
        await asyncio.sleep(1.0)  # all of them decode
        first = time.perf_counter()
        await asyncio.sleep(SETTLE_SECONDS)
        began = time.perf_counter()
        checked(await asyncio.gather(*(send(http, each, BenchRequest("", ANSWER)) for each in targets)))
        ended = time.perf_counter()
        if failed := next((task for task in running if task.done()), None):
            failed.result()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    alone = [gap for at, gap in gaps if first <= at < began]
    beside = [gap for at, gap in gaps if began <= at < ended]
    return p99_ms(alone), p99_ms(beside), num_images / (ended - began)


def p99_ms(seconds: Sequence[float]) -> float:
    return 1000 * statistics.quantiles(seconds, n=100)[98]


async def measure(
    url: str, parts: Sequence[str], num_images: int, rounds: int
) -> AsyncIterator[tuple[str, float]]:
    """All measures of one repeat, as they come."""
    if "decodes" in parts:
        alone, beside, rate = await decodes_beside(url, num_images)
        yield "p99 gap alone, ms", alone
        yield "p99 gap beside images, ms", beside
        yield "times as long", beside / alone
        yield "images/s beside decodes", rate
    for concurrency in (1, 4) if "images" in parts else ():
        rate, first = await images_of(url, rounds * concurrency, concurrency)
        yield f"images/s, {concurrency} at once", rate
        yield f"ms to the first token, {concurrency} at once", 1000 * first


async def keep(cells: dict[str, list[float]], name: str, found: AsyncIterator[tuple[str, float]]) -> None:
    async for measured, value in found:
        cells.setdefault(measured, []).append(value)
        print(f"{name}: {measured}: {value:.2f}", file=sys.stderr, flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--model", type=Path, default=ROOT / "build" / "models" / "seeing-256m")
    add("--systems", nargs="+", choices=[*SYSTEMS], default=["lockstep-dp1", "vllm-cores"])
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add("--parts", nargs="+", choices=["images", "decodes"], default=["images", "decodes"])
    add("--repeats", type=int, default=3, help="(default: %(default)s)")
    add("--images", type=int, default=NUM_IMAGES, help="beside decodes (default: %(default)s)")
    add("--rounds", type=int, default=4, help="images of each client (default: %(default)s)")
    add("--output-json", type=Path)
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    model = make_seeing_model(args.model.absolute())
    before = calibrate()
    rates: Rates = {}
    with ExitStack() as stack:
        urls = {}
        for name in args.systems:
            if SYSTEMS[name].peer == "vllm":
                SYSTEMS[name] = replace(SYSTEMS[name], command=f"{SYSTEMS[name].command} {VLLM_FLAGS}")
            if reason := SYSTEMS[name].lacks(model):
                raise SystemExit(f"{name} {reason}")
            child, urls[name], log = stack.enter_context(started(name, model, args.dtype))
            until_ready(child, urls[name], log)
            asyncio.run(images_of(urls[name], 2, 1))  # warm
        for _ in range(args.repeats):
            for name, url in urls.items():
                found = measure(url, args.parts, args.images, args.rounds)
                asyncio.run(keep(rates.setdefault(name, {}), name, found))
    print(f"{args.model.name}, {args.dtype}, on {machine()['cpu']}")
    print(f"machine before and after: {before}, {calibrate()}")
    for name, cells in rates.items():
        for measured, values in cells.items():
            middle = statistics.median(values)
            print(f"{name:14} {measured:36} {middle:9.2f}  ({min(values):.2f}-{max(values):.2f})")
    if args.output_json is not None:
        page = {"cpu": machine()["cpu"], "dtype": args.dtype, "machine": before, "rates": rates}
        args.output_json.write_text(json.dumps(page, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
