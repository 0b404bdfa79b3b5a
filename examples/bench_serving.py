#!/usr/bin/env python3
"""Load generator for OpenAI-compatible servers: streams random prompts, prints throughput and latencies.

Flags, report and result files are those of ``vllm bench serve``, so that numbers compare by eye::

    python examples/bench_serving.py --base-url http://127.0.0.1:8000 --ignore-eos --max-concurrency 8

Beyond that, ``--concurrency 1 8 32`` makes a series of runs with one table at the end, and ``--serve ARGS``
starts a Lockstep mesh with these arguments for the runs and stops it afterwards::

    python examples/bench_serving.py --serve "-dp 2" --ignore-eos --concurrency 1 8 32

Time to first token is taken at the first chunk that says something, inter-token latency between such chunks;
token counts are those that the server reports as usage. The exit code is 1 if any request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

Prompt = list[int] | str

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
COLUMNS = {
    "concurrency": "max_concurrency",
    "requests": "completed",
    "failed": "failed",
    "output tok/s": "output_throughput",
    "req/s": "request_throughput",
    "TTFT p50": "median_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "TPOT p50": "median_tpot_ms",
    "TPOT p99": "p99_tpot_ms",
    "ITL p50": "median_itl_ms",
    "ITL p99": "p99_itl_ms",
    "E2EL p50": "median_e2el_ms",
}
"""Of the table of a series: title and key of the result."""
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "errors")
"""Keys of a result with one value per request; --save-result writes them, --output-json does not."""
LOWEST_ID = 16
"""Token ids below are not sent: special tokens often live there."""
READ_TIMEOUT = 600.0
"""Seconds without a byte after which a request has failed."""
STOP_TIMEOUT = 20.0
"""Seconds that the mesh of --serve may take to end."""


# ---- one request


@dataclass
class Outcome:
    """What became of a request. Times in seconds."""

    input_len: int
    output_len: int = 0
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    latency: float = 0.0
    error: str = ""
    status: int = 0


async def send(session: aiohttp.ClientSession, args: argparse.Namespace, prompt: Prompt) -> Outcome:
    """Stream one answer and time its chunks."""
    outcome = Outcome(input_len=len(prompt))
    began = latest = time.perf_counter()
    num_chunks, is_done = 0, False
    try:
        async with session.post(args.base_url + args.endpoint, json=body_of(args, prompt)) as response:
            outcome.status = response.status
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {await response.text()}")
            async for line in response.content:
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    is_done = True
                elif data and line.startswith(b"data:"):
                    now = time.perf_counter()
                    event = json.loads(data)
                    if event.get("error"):
                        raise ValueError(f"in the stream: {event['error']}")
                    if usage := event.get("usage"):
                        outcome.input_len = usage["prompt_tokens"]
                        outcome.output_len = usage["completion_tokens"]
                    if not says_something(event):
                        continue
                    if num_chunks:
                        outcome.itls.append(now - latest)
                    else:
                        outcome.ttft = now - began
                    num_chunks, latest = num_chunks + 1, now
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as error:
        outcome.error = f"{type(error).__name__}: {error}"[:400]
        return outcome
    outcome.latency = latest - began
    outcome.output_len = outcome.output_len or num_chunks
    if not is_done or not num_chunks:
        outcome.error = f"the stream ended after {num_chunks} chunks{'' if is_done else ' without [DONE]'}"
    elif args.ignore_eos and outcome.output_len != args.random_output_len:
        outcome.error = f"{outcome.output_len} tokens came instead of {args.random_output_len}"
    return outcome


def body_of(args: argparse.Namespace, prompt: Prompt) -> dict[str, Any]:
    """The request for a prompt."""
    body = {
        "model": args.model,
        "temperature": args.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if args.backend == "openai-chat":
        messages = [{"role": "user", "content": prompt}]
        body |= {"messages": messages, "max_completion_tokens": args.random_output_len}
    else:
        body |= {"prompt": prompt, "max_tokens": args.random_output_len}
    return body | ({"ignore_eos": True} if args.ignore_eos else {})


def says_something(event: dict[str, Any]) -> bool:
    """Whether a chunk carries a token: the one with the role and the one with usage alone do not."""
    if not event.get("choices"):
        return False
    delta = event["choices"][0].get("delta")
    return delta is None or bool(delta.get("content")) or not delta.get("role")


# ---- one run


async def run(
    session: aiohttp.ClientSession, args: argparse.Namespace, concurrency: int | None, number: int
) -> dict[str, Any]:
    """Send all prompts and sum up. ``number`` makes the prompts of the runs of a series differ."""
    count = args.num_prompts or max(32, 4 * (concurrency or 8))
    rng = random.Random(f"{args.seed}-{number}")
    prompts = await make_prompts(session, args, rng, args.num_warmups + count)
    limit = asyncio.Semaphore(concurrency or len(prompts))

    async def limited(prompt: Prompt) -> Outcome:
        async with limit:
            return await send(session, args, prompt)

    await asyncio.gather(*map(limited, prompts[: args.num_warmups]))
    print(f"Sending {count} requests, at most {concurrency or count} at once ...", file=sys.stderr)
    tasks = []
    began = time.perf_counter()
    for prompt in prompts[args.num_warmups :]:
        tasks.append(asyncio.create_task(limited(prompt)))
        if args.request_rate != float("inf"):
            await asyncio.sleep(rng.gammavariate(args.burstiness, 1 / (args.request_rate * args.burstiness)))
    outcomes = await asyncio.gather(*tasks)
    return summary(args, concurrency, outcomes, time.perf_counter() - began)


async def make_prompts(
    session: aiohttp.ClientSession, args: argparse.Namespace, rng: random.Random, count: int
) -> list[Prompt]:
    """Random token ids; for chat their text, which only the server can tell."""

    def ids(length: int) -> list[int]:
        return [rng.randrange(LOWEST_ID, args.random_vocab) for _ in range(length)]

    prefix = ids(args.random_prefix_len)
    prompts: list[Prompt] = [prefix + ids(args.random_input_len) for _ in range(count)]
    if args.backend == "openai-chat":
        for index, prompt in enumerate(prompts):
            body = {"model": args.model, "tokens": prompt}
            async with session.post(f"{args.base_url}/detokenize", json=body) as response:
                if response.status != 200:
                    raise SystemExit(
                        f"chat prompts need text, but {args.base_url}/detokenize answers {response.status}: "
                        "use --backend openai, which sends token ids"
                    )
                prompts[index] = (await response.json())["prompt"]
    return prompts


def summary(
    args: argparse.Namespace, concurrency: int | None, outcomes: Sequence[Outcome], duration: float
) -> dict[str, Any]:
    """The result of a run, under vLLM's keys."""
    good = [outcome for outcome in outcomes if not outcome.error]
    num_input = sum(outcome.input_len for outcome in good)
    num_output = sum(outcome.output_len for outcome in good)
    result: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "model_id": args.model,
        "num_prompts": len(outcomes),
        "random_input_len": args.random_prefix_len + args.random_input_len,
        "random_output_len": args.random_output_len,
        "request_rate": args.request_rate if args.request_rate != float("inf") else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": concurrency,
        "duration": duration,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "input_lens": [outcome.input_len for outcome in outcomes],
        "output_lens": [outcome.output_len for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.itls for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }
    longer = [outcome for outcome in good if outcome.output_len > 1]
    values = {
        "ttft": [outcome.ttft for outcome in good],
        "tpot": [(outcome.latency - outcome.ttft) / (outcome.output_len - 1) for outcome in longer],
        "itl": [gap for outcome in good for gap in outcome.itls],
        "e2el": [outcome.latency for outcome in good],
    }
    for name, seconds in values.items():
        ms = sorted(1000 * value for value in seconds) or [0.0]
        result[f"mean_{name}_ms"] = statistics.fmean(ms)
        result[f"median_{name}_ms"] = statistics.median(ms)
        result[f"std_{name}_ms"] = statistics.pstdev(ms)
        for percent in {99.0, *args.metric_percentiles}:
            result[f"p{percent:g}_{name}_ms"] = percentile(ms, percent)
    return result


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, with linear interpolation."""
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


# ---- reports


def print_report(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """The layout of ``vllm bench serve``."""

    def line(label: str, value: float | int | None) -> None:
        print(f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}")

    print("{:=^50}".format(" Serving Benchmark Result "))
    line("Successful requests:", result["completed"])
    line("Failed requests:", result["failed"])
    if result["max_concurrency"]:
        line("Maximum request concurrency:", result["max_concurrency"])
    if result["request_rate"] != "inf":
        line("Request rate configured (RPS):", result["request_rate"])
    line("Benchmark duration (s):", result["duration"])
    line("Total input tokens:", result["total_input_tokens"])
    line("Total generated tokens:", result["total_output_tokens"])
    line("Request throughput (req/s):", result["request_throughput"])
    line("Output token throughput (tok/s):", result["output_throughput"])
    line("Total Token throughput (tok/s):", result["total_token_throughput"])
    for name in args.percentile_metrics:
        print(f"{METRICS[name]:-^50}")
        line(f"Mean {name.upper()} (ms):", result[f"mean_{name}_ms"])
        line(f"Median {name.upper()} (ms):", result[f"median_{name}_ms"])
        for percent in args.metric_percentiles:
            line(f"P{percent:g} {name.upper()} (ms):", result[f"p{percent:g}_{name}_ms"])
    print("=" * 50, flush=True)
    if result["failed"]:
        first = next(filter(None, result["errors"]))
        print(f"{result['failed']} requests failed, the first with: {first}", file=sys.stderr)


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """One row per run, as a Markdown table."""
    cells = [[result[key] for key in COLUMNS.values()] for result in results]
    rows = [[f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row] for row in cells]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    print("\nLatencies in ms.\n")
    for row in (list(COLUMNS), ["-" * (width - 1) + ":" for width in widths], *rows):
        print("| " + " | ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) + " |")


def save(args: argparse.Namespace, results: Sequence[dict[str, Any]]) -> None:
    """--save-result: a file per run, named as vLLM does; --output-json: the sums of all in one."""
    for result in results if args.save_result else ():
        limit = f"-concurrency{result['max_concurrency']}" if result["max_concurrency"] else ""
        model = str(result["model_id"]).rstrip("/").split("/")[-1]
        name = f"{args.backend}-{result['request_rate']}qps{limit}-{model}-{result['date']}.json"
        args.result_dir.mkdir(parents=True, exist_ok=True)
        (args.result_dir / name).write_text(json.dumps(result))
    if args.output_json:
        sums = [{key: value for key, value in result.items() if key not in DETAILS} for result in results]
        page = {"command": shlex.join(["python", *sys.argv]), "machine": machine(), "runs": sums}
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        args.output_json.write_text(json.dumps(page, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """That of the load generator; with --serve that of the server, too."""
    cpu = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": memory, "system": platform.platform()}


# ---- the server


@contextlib.contextmanager
def mesh(arguments: str) -> Iterator[str]:
    """``serve`` with these arguments, as a child on free ports: its base URL, once all of it is ready."""
    port, rpc_port = free_ports(2)
    command = [sys.executable, "-P", "-m", "router.serve", "--disable-access-log", *shlex.split(arguments)]
    command += [f"--port={port}", f"--data-parallel-rpc-port={rpc_port}"]
    environment = {**os.environ, "LOCKSTEP_PARENT_PID": str(os.getpid())}  # it ends with us, however we end
    with tempfile.NamedTemporaryFile("w+", prefix="lockstep-bench-", suffix=".log", delete=False) as log:
        print(f"Starting serve {arguments} (log: {log.name}) ...", file=sys.stderr)
        child = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while not is_healthy(port) or "ready at" not in Path(log.name).read_text(errors="replace"):
                if child.poll() is not None:
                    last_words = "\n".join(Path(log.name).read_text(errors="replace").splitlines()[-15:])
                    raise SystemExit(f"serve ended with status {child.returncode}:\n{last_words}")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            child.terminate()
            try:
                child.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                print(f"serve did not end within {STOP_TIMEOUT:g} s and is killed", file=sys.stderr)
                child.kill()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def is_healthy(port: int) -> bool:
    with contextlib.suppress(OSError):  # urllib's errors are of that kind, a 503 included
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return bool(response.status == 200)
    return False


async def until_ready(session: aiohttp.ClientSession, args: argparse.Namespace) -> None:
    """Learn the model's name if it was not given, and send one request until it succeeds."""
    deadline = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            if args.model is None:
                async with session.get(f"{args.base_url}/v1/models", raise_for_status=True) as response:
                    args.model = (await response.json())["data"][0]["id"]
            if args.ready_check_timeout_sec <= 0:
                return
            outcome = await send(session, args, (await make_prompts(session, args, random.Random(), 1))[0])
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError) as error:
            outcome = Outcome(0, error=f"{type(error).__name__}: {error}")
        if not outcome.error:
            return
        if 400 <= outcome.status < 500:
            raise SystemExit(f"the server refuses the benchmark's requests: {outcome.error}")
        if time.monotonic() > deadline:
            raise SystemExit(f"{args.base_url} is not ready: {outcome.error}")
        await asyncio.sleep(0.5)


# ---- the command line


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


def rate(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number above 0 (or inf), not {text!r}")


def percents(text: str) -> list[float]:
    with contextlib.suppress(ValueError):
        values = [float(part) for part in text.split(",")]
        if all(0 <= value <= 100 for value in values):
            return values
    raise argparse.ArgumentTypeError(f"must be numbers from 0 to 100 such as 50,99, not {text!r}")


def metrics(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(METRICS):
        raise argparse.ArgumentTypeError(f"knows {', '.join(METRICS)}, not {', '.join(sorted(unknown))}")
    return text.split(",")


def parse_args() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    add = parser.add_argument
    add("--backend", choices=["openai", "openai-chat"], default="openai", help="completions or chat")
    add("--base-url", help="of the server (default: http://127.0.0.1:8000)")
    add("--serve", metavar="ARGS", help="start 'serve ARGS' for the runs, instead of --base-url")
    add("--endpoint", help="path (default: /v1/completions or /v1/chat/completions)")
    add("--model", help="name in requests (default: the first that the server lists)")
    add("--dataset-name", choices=["random"], default="random", help="prompts of random tokens")
    add("--random-input-len", type=count, default=128, help="tokens per prompt (default: %(default)s)")
    add("--random-output-len", type=count, default=64, help="tokens asked for (default: %(default)s)")
    add("--random-prefix-len", type=int, default=0, help="further tokens, the same in all prompts of a run")
    add("--random-vocab", type=count, default=4096, help="token ids are below this (default: %(default)s)")
    add("--num-prompts", type=count, help="requests per run (default: 4 x concurrency, at least 32)")
    add("--request-rate", type=rate, default=float("inf"), help="requests per second (default: inf)")
    add("--burstiness", type=rate, default=1.0, help="of arrivals: 1 is Poisson, less has more bursts")
    add("--max-concurrency", type=count, help="most requests in flight")
    add("--concurrency", type=count, nargs="+", help="a series of runs with these --max-concurrency")
    add("--ignore-eos", action="store_true", help="every answer is --random-output-len tokens long")
    add("--temperature", type=float, default=0.0, help="of sampling (default: 0, greedy)")
    add("--seed", type=int, default=0, help="of prompts and arrivals")
    add("--percentile-metrics", type=metrics, default="ttft,tpot,itl,e2el", help="(default: %(default)s)")
    add("--metric-percentiles", type=percents, default="99", help="such as 50,99 (default: %(default)s)")
    add("--num-warmups", type=int, default=4, help="requests before each run (default: %(default)s)")
    add("--save-result", action="store_true", help="write a JSON file per run into --result-dir")
    add("--result-dir", type=Path, default=Path(), help="(default: here)")
    add("--output-json", type=Path, metavar="FILE", help="write the sums of all runs into one file")
    add("--ready-check-timeout-sec", type=float, default=600.0, help="0: no check (default: %(default)g)")
    args = parser.parse_args()
    if args.serve is not None and args.base_url is not None:
        parser.error("--serve starts a server of its own: leave out --base-url")
    if args.random_vocab <= LOWEST_ID:
        parser.error(f"--random-vocab must be above {LOWEST_ID}")
    args.base_url = (args.base_url or "http://127.0.0.1:8000").rstrip("/")
    args.endpoint = args.endpoint or f"/v1/{'chat/' * (args.backend == 'openai-chat')}completions"
    return args


async def bench(args: argparse.Namespace) -> int:
    key = os.environ.get("OPENAI_API_KEY")
    results = []
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=READ_TIMEOUT),
        headers={"Authorization": f"Bearer {key}"} if key else {},
    ) as session:
        await until_ready(session, args)
        for number, concurrency in enumerate(args.concurrency or [args.max_concurrency]):
            results.append(await run(session, args, concurrency, number))
            print_report(args, results[-1])
    if args.concurrency:
        print_table(results)
    save(args, results)
    return 1 if any(result["failed"] for result in results) else 0


def main() -> int:
    args = parse_args()
    with contextlib.ExitStack() as stack:
        if args.serve is not None:
            args.base_url = stack.enter_context(mesh(args.serve))
        return asyncio.run(bench(args))


if __name__ == "__main__":
    sys.exit(main())
