#!/usr/bin/env python3
r"""Soak of a mesh in lockstep: bursts of short requests, and gaps to sleep in.

    python examples/benchmarks/soak.py --minutes 10
    python examples/benchmarks/soak.py --serve "-dp 3 -ep --dtype float32 \
        --all2all-backend all_to_all" --minutes 1

Starts ``serve`` (or takes a mesh that runs, with ``--base-url``), and asks each of some prompts once, alone.
Then come bursts: streams, whole answers and streams whose client leaves, of mixed lengths, sent to instances
of the router's choice or to a certain one. Every answer must have the right number of tokens and be the
beginning of what the same prompt gave alone, so that a lost, doubled or wrong token shows. (For that the mesh
computes in float32: in bfloat16 the rounding depends on the neighbours in a batch.)

In the end the mesh must come to rest: nothing running, waiting or held, and processes that use no CPU. Steps
and sleeps are counted by the instances themselves. The exit code is 1 if a request failed, if the mesh does
not rest, or if a step took longer than ``--max-step-seconds``. The default of that is far above what a step
of short requests takes (milliseconds), what a busy machine adds (a process that waits for its core: up to
some tenths of a second) and what a lost wake costs (20 ms each), and far below a hang, which lasts until
``--collective-timeout``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from router.tools.bench.report import machine, percentile
from router.tools.local_mesh import mesh

Args = argparse.Namespace
Session = aiohttp.ClientSession
Labels = tuple[tuple[str, str], ...]
Samples = dict[str, dict[Labels, float]]

NUM_PROMPTS = 48
LONGEST_ANSWER = 32
VOCABULARY = 4096
KINDS = {"stream": 0.5, "whole": 0.35, "left": 0.15}
"""Share of each kind of request.

The client of the last one leaves before its stream ends.
"""
REQUEST_TIMEOUT = 30.0
REST_TIMEOUT = 15.0
"""Seconds in which all gauges must be zero after the last request."""
MOST_IDLE_CPU = 0.01
"""Largest share of a core that a sleeping instance may use."""
MUST_BE_ZERO = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "lockstep:requests_in_flight",
)


@dataclass(frozen=True)
class Prompt:
    """What is asked, and how it is sampled; the answer is a function of both."""

    ids: tuple[int, ...]
    temperature: float
    seed: int


@dataclass
class Tally:
    """What became of the requests."""

    kinds: Counter[str] = field(default_factory=Counter)
    bursts: int = 0
    tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def make_prompts(rng: random.Random) -> list[Prompt]:
    """Mostly short ones, some of hundreds of tokens.

    Three in four greedy, the others sampled with a seed.
    """
    prompts = []
    for number in range(NUM_PROMPTS):
        length = rng.randrange(200, 600) if number % 8 == 7 else rng.randrange(1, 64)
        ids = tuple(rng.randrange(16, VOCABULARY) for _ in range(length))
        prompts.append(Prompt(ids, temperature=0.8 if number % 4 == 3 else 0.0, seed=number))
    return prompts


def body_of(prompt: Prompt, length: int, *, stream: bool) -> dict[str, Any]:
    return {
        "prompt": list(prompt.ids),
        "max_tokens": length,
        "temperature": prompt.temperature,
        "seed": prompt.seed,
        "stream": stream,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def ask(
    session: Session, prompt: Prompt, length: int, *, leave_after: int | None, rank: int | None, stream: bool
) -> tuple[list[int], float | None]:
    """Token ids of an answer, and seconds to the first one of a stream.

    ``leave_after``: that many tokens are enough, the connection is closed then.
    """
    began, first = time.perf_counter(), None
    ids: list[int] = []
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    async with (
        asyncio.timeout(REQUEST_TIMEOUT),
        session.post(
            "/v1/completions", json=body_of(prompt, length, stream=stream), headers=headers
        ) as response,
    ):
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}: {await response.text()}")
        if not stream:
            return (await response.json())["choices"][0]["token_ids"], None
        async for line in response.content:
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return ids, first
            if not data:
                continue
            event = json.loads(data)
            if "error" in event:
                raise ValueError(str(event["error"]))
            for choice in event["choices"]:
                ids += choice["token_ids"]
                first = first or time.perf_counter() - began
            if leave_after is not None and len(ids) >= leave_after:
                response.close()
                return ids, first
    raise ValueError("the stream ended without [DONE]")


async def one_request(
    session: Session, tally: Tally, prompt: Prompt, answer: list[int], rng: random.Random, size: int
) -> None:
    """Ask for a beginning of the answer and see whether it is one."""
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    length = min(len(answer), 1 + int(rng.expovariate(1 / 6)))
    leave_after = rng.randrange(0, length) if kind == "left" else None
    rank = rng.choice([None, *range(size)])
    try:
        ids, ttft = await ask(
            session, prompt, length, leave_after=leave_after, rank=rank, stream=kind != "whole"
        )
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError) as error:
        tally.failures.append(f"{kind} of {length} tokens: {type(error).__name__}: {error}")
        return
    tally.kinds[kind] += 1
    tally.tokens += len(ids)
    if ttft is not None:
        tally.ttft.append(ttft)
    if kind != "left" and len(ids) != length:
        tally.failures.append(f"{kind}: {len(ids)} tokens instead of {length}")
    elif ids != answer[: len(ids)]:
        tally.failures.append(f"{kind}: {ids} instead of {answer[: len(ids)]}")


async def burst(
    session: Session, tally: Tally, prompts: list[Prompt], answers: list[list[int]], size: int, seed: str
) -> None:
    """Some requests, all at once or a few milliseconds apart, until each has ended."""
    rng = random.Random(seed)
    count = 1 if rng.random() < 0.5 else rng.randrange(2, 17)
    spread = rng.choice([0.0, 0.0, 0.001, 0.01])
    requests = []
    for number in range(count):
        chosen = rng.randrange(len(prompts))
        own = random.Random(f"{seed}-{number}")
        requests.append(
            asyncio.create_task(one_request(session, tally, prompts[chosen], answers[chosen], own, size))
        )
        if spread:
            await asyncio.sleep(rng.random() * spread)
    await asyncio.gather(*requests)
    tally.bursts += 1


def gap(rng: random.Random) -> float:
    """Seconds until the next burst.

    Mostly they are enough to sleep, sometimes they end just when sleep is decided.
    """
    return rng.uniform(0.0, 0.008) if rng.random() < 0.3 else rng.uniform(0.02, 0.2)


async def metrics(session: Session, base_url: str = "") -> Samples:
    """Samples of /metrics by name and labels."""
    async with session.get(f"{base_url}/metrics") as response:
        page = await response.text()
    found: Samples = {}
    for name, labels, value in re.findall(r"^([a-z_:]+)(?:\{(.*?)\})? (\S+)$", page, re.M):
        found.setdefault(name, {})[tuple(re.findall(r'(\w+)="(.*?)"', labels))] = float(value)
    return found


def by_rank(samples: dict[Labels, float]) -> dict[int, float]:
    return {int(dict(labels)["engine"]): value for labels, value in sorted(samples.items())}


async def rest(session: Session, args: Args) -> tuple[dict[str, float], list[str]]:
    """Wait for rest, then measure what sleep costs: CPU by process, and problems."""
    deadline = time.monotonic() + REST_TIMEOUT
    while True:
        found = await metrics(session)
        left = {name: found.get(name) for name in MUST_BE_ZERO}
        if all(samples and not any(samples.values()) for samples in left.values()):
            break
        if time.monotonic() > deadline:
            return {}, [f"after {REST_TIMEOUT:g} s without requests, not all is zero: {left}"]
        await asyncio.sleep(0.2)
    if args.serve is None:
        return {}, []
    await asyncio.sleep(1.0)
    engines = {}
    for process in psutil.Process().children(recursive=True):
        title = "".join(process.cmdline()[:1])
        if title.startswith("lockstep: Engine"):
            engines[title.removeprefix("lockstep: ").split()[0]] = process
    before = {name: sum(process.cpu_times()[:2]) for name, process in engines.items()}
    await asyncio.sleep(args.rest_seconds)
    shares = {
        name: (sum(process.cpu_times()[:2]) - before[name]) / args.rest_seconds
        for name, process in engines.items()
    }
    busy = [f"{name} uses {share:.2%} of a core asleep" for name, share in shares.items()]
    return shares, [line for line, share in zip(busy, shares.values(), strict=True) if share > MOST_IDLE_CPU]


async def soak(session: Session, args: Args) -> tuple[Tally, int]:
    """Bursts and gaps until the time is over; returns with nothing left in flight."""
    rng, tally = random.Random(args.seed), Tally()
    prompts = make_prompts(rng)
    answers = []
    for prompt in prompts:
        ids, _ = await ask(session, prompt, LONGEST_ANSWER, leave_after=None, rank=None, stream=True)
        answers.append(ids)
    size = len((await metrics(session))["vllm:num_requests_running"])
    began = told = time.monotonic()
    number = 0
    while (now := time.monotonic()) < began + 60 * args.minutes and len(tally.failures) < args.max_failures:
        await burst(session, tally, prompts, answers, size, f"{args.seed}-{number}")
        await asyncio.sleep(gap(rng))
        number += 1
        if now - told > 30:
            told = now
            done, failed = sum(tally.kinds.values()), len(tally.failures)
            print(f"{(now - began) / 60:.1f} min: {done} requests, {failed} failed", file=sys.stderr)
    return tally, size


async def run(args: Args) -> int:
    async with aiohttp.ClientSession(
        args.base_url,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=REQUEST_TIMEOUT),
    ) as session:
        began = time.monotonic()
        try:
            tally, size = await soak(session, args)
            seconds = time.monotonic() - began
            idle_cpu, problems = await rest(session, args)
            found = await metrics(session)
        except (aiohttp.ClientError, OSError, ValueError, LookupError) as error:
            print(
                f"the mesh at {args.base_url} cannot be asked: {type(error).__name__}: {error}",
                file=sys.stderr,
            )
            return 1
    if "lockstep:steps_total" not in found:
        problems.append("no instance steps in lockstep: serve a mixture-of-experts model with -dp 2 -ep")
    if not sum(tally.kinds.values()):
        problems.append("no request has ended")
    problems += [f"request failed: {failure}" for failure in tally.failures]
    page = summary(args, tally, size, seconds, found, idle_cpu)
    longest = max(page["longest_step_seconds"].values(), default=0.0)
    if longest > args.max_step_seconds:
        problems.append(f"a step took {longest:.3f} s; the bound is {args.max_step_seconds:g} s")
    page["problems"] = problems
    print_page(page)
    if args.output_json:
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        args.output_json.write_text(json.dumps(page, indent=1) + "\n")
    return 1 if problems else 0


def summary(
    args: Args,
    tally: Tally,
    size: int,
    seconds: float,
    found: Samples,
    idle_cpu: dict[str, float],
) -> dict[str, Any]:
    """Everything that is printed and written."""
    ttft = sorted(tally.ttft) or [0.0]
    below: Counter[str] = Counter()
    for labels, count in found.get("lockstep:step_duration_seconds_bucket", {}).items():
        below[dict(labels)["le"]] += int(count)
    totals = {
        name: by_rank(found.get(f"lockstep:{name}_total", {})) for name in ("steps", "empty_steps", "sleeps")
    }
    return {
        "serve": args.serve,
        "seed": args.seed,
        "minutes": round(seconds / 60, 2),
        "machine": machine(),
        "instances": size,
        "bursts": tally.bursts,
        "requests": dict(tally.kinds),
        "failed": len(tally.failures),
        "tokens": tally.tokens,
        **totals,
        "longest_step_seconds": by_rank(found.get("lockstep:longest_step_seconds", {})),
        "max_step_seconds": args.max_step_seconds,
        "steps_up_to_seconds": dict(sorted(below.items(), key=lambda each: float(each[0]))),
        "ttft_ms": {
            "p50": 1000 * statistics.median(ttft),
            "p99": 1000 * percentile(ttft, 99),
            "longest": 1000 * ttft[-1],
        },
        "idle_cpu_share": idle_cpu,
    }


def print_page(page: dict[str, Any]) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in page["requests"].items())
    num_requests = sum(page["requests"].values())
    print(f"{page['minutes']} minutes, {page['instances']} instances, seed {page['seed']}")
    print(f"{page['bursts']} bursts, {num_requests} requests: {kinds}; {page['tokens']} tokens")
    print(f"failed: {page['failed']}")
    for name in ("steps", "empty_steps", "sleeps"):
        print(f"{name} by instance: " + ", ".join(f"{count:.0f}" for count in page[name].values()))
    print("steps and sleeps by duration, all instances:")
    before = 0
    for bound, count in page["steps_up_to_seconds"].items():
        if count > before:
            print(f"  up to {bound:>6} s  {count - before:>8}")
        before = count
    longest = ", ".join(f"{1000 * each:.0f}" for each in page["longest_step_seconds"].values())
    print(f"longest step by instance: {longest} ms (bound: {1000 * page['max_step_seconds']:.0f} ms)")
    ttft = page["ttft_ms"]
    print(f"first token (ms): p50 {ttft['p50']:.1f}, p99 {ttft['p99']:.1f}, longest {ttft['longest']:.1f}")
    for name, share in page["idle_cpu_share"].items():
        print(f"{name} asleep: {share:.2%} of a core")
    for problem in page["problems"]:
        print(f"PROBLEM: {problem}")
    print("FAILED" if page["problems"] else "passed", flush=True)


def parse_args() -> Args:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--serve", metavar="ARGS", help="start 'serve ARGS' (default: -dp 2 -ep --dtype float32)")
    add("--base-url", help="of a mesh that runs already, instead of --serve")
    add("--minutes", type=float, default=10.0, help="of bursts (default: %(default)g)")
    add("--seed", type=int, default=0, help="of prompts, bursts and gaps (default: %(default)s)")
    add("--max-step-seconds", type=float, default=1.0, help="longest step allowed (default: %(default)g)")
    add("--max-failures", type=int, default=20, help="stop after so many (default: %(default)s)")
    add("--rest-seconds", type=float, default=10.0, help="of measuring sleep (default: %(default)g)")
    add("--output-json", type=Path, metavar="FILE", help="write everything into this file")
    args = parser.parse_args()
    if min(args.minutes, args.max_step_seconds, args.max_failures, args.rest_seconds) <= 0:
        parser.error("--minutes, --max-step-seconds, --max-failures and --rest-seconds must be above 0")
    if args.serve is not None and args.base_url:
        parser.error("--serve starts its own mesh: leave out --base-url")
    if args.serve is None and not args.base_url:
        args.serve = "-dp 2 -ep --dtype float32"
    return args


def main() -> int:
    args = parse_args()
    server = contextlib.nullcontext(args.base_url) if args.serve is None else mesh(args.serve)
    with contextlib.suppress(KeyboardInterrupt), server as args.base_url:
        return asyncio.run(run(args))
    return 130


if __name__ == "__main__":
    sys.exit(main())
