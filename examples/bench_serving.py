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
import random
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

Args = argparse.Namespace
Session = aiohttp.ClientSession
Prompt = list[int] | str
Result = dict[str, Any]

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
REPORT = {
    "Successful requests:": "completed",
    "Failed requests:": "failed",
    "Maximum request concurrency:": "max_concurrency",
    "Request rate configured (RPS):": "request_rate",
    "Benchmark duration (s):": "duration",
    "Total input tokens:": "total_input_tokens",
    "Total generated tokens:": "total_output_tokens",
    "Request throughput (req/s):": "request_throughput",
    "Output token throughput (tok/s):": "output_throughput",
    "Total Token throughput (tok/s):": "total_token_throughput",
}
COLUMNS = {
    "concurrency": "max_concurrency",
    "failed": "failed",
    "output tok/s": "output_throughput",
    "req/s": "request_throughput",
    **{f"{name.upper()} {p}": f"{p}_{name}_ms" for name in METRICS for p in ("p50", "p99")},
}
"""Of the table of a series: title and key of the result."""
DETAILS = ("input_len", "output_len", "ttft", "itl", "error")
"""What --save-result writes for every request, as input_lens and so on; --output-json does not."""

LOWEST_ID = 16  # special tokens often live below
READ_TIMEOUT = 600.0  # seconds without a byte after which a request has failed
STOP_TIMEOUT = 20.0  # seconds that the mesh of --serve may take to end


@dataclass
class Outcome:
    """What became of a request. Times in seconds."""

    input_len: int
    output_len: int = 0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    error: str = ""


async def send(session: Session, args: Args, prompt: Prompt) -> Outcome:
    """Stream one answer and time its chunks."""
    outcome = Outcome(input_len=len(prompt))
    began = latest = time.perf_counter()
    num_chunks, is_done = 0, False
    try:
        async with session.post(args.base_url + args.endpoint, json=body_of(args, prompt)) as response:
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {await response.text()}"
                return outcome
            async for line in response.content:
                data = line.removeprefix(b"data:").strip()
                is_done |= data == b"[DONE]"
                if is_done or not data or not line.startswith(b"data:"):
                    continue
                now, event = time.perf_counter(), json.loads(data)
                outcome.error = str(event.get("error") or outcome.error)
                if usage := event.get("usage"):
                    outcome.input_len = usage["prompt_tokens"]
                    outcome.output_len = usage["completion_tokens"]
                if says_something(event):
                    if num_chunks:
                        outcome.itl.append(now - latest)
                    else:
                        outcome.ttft = now - began
                    num_chunks, latest = num_chunks + 1, now
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.latency = latest - began
    outcome.output_len = outcome.output_len or num_chunks
    if not outcome.error and not (is_done and num_chunks):
        outcome.error = f"the stream ended after {num_chunks} chunks{'' if is_done else ' without [DONE]'}"
    if not outcome.error and args.ignore_eos and outcome.output_len != args.random_output_len:
        outcome.error = f"{outcome.output_len} tokens came instead of {args.random_output_len}"
    return outcome


def body_of(args: Args, prompt: Prompt) -> dict[str, Any]:
    """The request for a prompt."""
    body = {"model": args.model, "temperature": args.temperature}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if args.backend == "openai-chat":
        messages = [{"role": "user", "content": prompt}]
        body |= {"messages": messages, "max_completion_tokens": args.random_output_len}
    else:
        body |= {"prompt": prompt, "max_tokens": args.random_output_len}
    return body | ({"ignore_eos": True} if args.ignore_eos else {})


def says_something(event: dict[str, Any]) -> bool:
    """Whether a chunk carries a token: the one with the role and the one with usage alone do not."""
    deltas = [choice.get("delta", {}) for choice in event.get("choices") or ()]
    return any(delta.get("content") or not delta.get("role") for delta in deltas)


async def run(session: Session, args: Args, concurrency: int | None, number: int) -> Result:
    """Send all prompts and sum up. ``number`` makes the prompts of the runs of a series differ."""
    count = args.num_prompts or max(32, 4 * (concurrency or 8))
    rng = random.Random(f"{args.seed}-{number}")
    prompts = make_prompts(args, rng, args.num_warmups + count)
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


def make_prompts(args: Args, rng: random.Random, count: int) -> list[Prompt]:
    """Random token ids; for chat as many random words, which are more tokens than that."""

    def ids(length: int) -> list[int]:
        return [rng.randrange(LOWEST_ID, args.random_vocab) for _ in range(length)]

    prefix = ids(args.random_prefix_len)
    prompts = [prefix + ids(args.random_input_len) for _ in range(count)]
    if args.backend == "openai":
        return [*prompts]
    return [" ".join(f"{token_id:x}" for token_id in prompt) for prompt in prompts]


def summary(args: Args, concurrency: int | None, outcomes: Sequence[Outcome], duration: float) -> Result:
    """The result of a run, under vLLM's keys."""
    good = [outcome for outcome in outcomes if not outcome.error]
    num_input, num_output = sum(one.input_len for one in good), sum(one.output_len for one in good)
    result: Result = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "model_id": args.model,
        "num_prompts": len(outcomes),
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
        **{f"{name}s": [getattr(outcome, name) for outcome in outcomes] for name in DETAILS},
    }
    values = {
        "ttft": [one.ttft for one in good],
        "tpot": [(one.latency - one.ttft) / (one.output_len - 1) for one in good if one.output_len > 1],
        "itl": [gap for one in good for gap in one.itl],
        "e2el": [one.latency for one in good],
    }
    for name, seconds in values.items():
        ms = sorted(1000 * value for value in seconds) or [0.0]
        mean, median, deviation = statistics.fmean(ms), statistics.median(ms), statistics.pstdev(ms)
        result |= {f"mean_{name}_ms": mean, f"median_{name}_ms": median, f"std_{name}_ms": deviation}
        for percent in {50.0, 99.0, *args.metric_percentiles}:
            result[f"p{percent:g}_{name}_ms"] = percentile(ms, percent)
    return result


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, with linear interpolation."""
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def print_report(args: Args, result: Result) -> None:
    """The layout of ``vllm bench serve``."""
    print("{:=^50}".format(" Serving Benchmark Result "))
    for label, key in REPORT.items():
        if result[key] not in (None, "inf"):
            print_line(label, result[key])
    for name in args.percentile_metrics.split(","):
        print(f"{METRICS[name]:-^50}")
        print_line(f"Mean {name.upper()} (ms):", result[f"mean_{name}_ms"])
        print_line(f"Median {name.upper()} (ms):", result[f"median_{name}_ms"])
        for percent in args.metric_percentiles:
            print_line(f"P{percent:g} {name.upper()} (ms):", result[f"p{percent:g}_{name}_ms"])
    print("=" * 50, flush=True)
    if result["failed"]:
        first_error = next(filter(None, result["errors"]))
        print(f"{result['failed']} requests failed, the first with: {first_error}", file=sys.stderr)


def print_line(label: str, value: float | int) -> None:
    print(f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}")


def print_table(results: Sequence[Result]) -> None:
    """One row per run, as a Markdown table."""
    cells = [[result[key] for key in COLUMNS.values()] for result in results]
    rows = [[f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row] for row in cells]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    print("\nLatencies in ms.\n")
    for row in (list(COLUMNS), ["-" * (width - 1) + ":" for width in widths], *rows):
        print("| " + " | ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) + " |")


def save(args: Args, results: Sequence[Result]) -> None:
    """--save-result: a file per run, named as vLLM does; --output-json: the sums of all in one."""
    for result in results if args.save_result else ():
        limit = f"-concurrency{result['max_concurrency']}" if result["max_concurrency"] else ""
        model = str(result["model_id"]).rstrip("/").split("/")[-1]
        name = f"{args.backend}-{result['request_rate']}qps{limit}-{model}-{result['date']}.json"
        args.result_dir.mkdir(parents=True, exist_ok=True)
        (args.result_dir / name).write_text(json.dumps(result))
    if args.output_json:
        sums = [{key: result[key] for key in result if key[:-1] not in DETAILS} for result in results]
        page = {"command": shlex.join(["python", *sys.argv]), "machine": machine(), "runs": sums}
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        args.output_json.write_text(json.dumps(page, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return {"cpu": cpu[1] if cpu else "unknown", "cores": os.cpu_count(), "memory_gib": memory}


@contextlib.contextmanager
def mesh(arguments: str) -> Iterator[str]:
    """``serve`` with these arguments, as a child on free ports: its base URL, once all of it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, rpc_port = one.getsockname()[1], other.getsockname()[1]
    command = [sys.executable, "-P", "-m", "router.serve", "--disable-access-log", *shlex.split(arguments)]
    command += [f"--port={port}", f"--data-parallel-rpc-port={rpc_port}"]
    environment = {**os.environ, "LOCKSTEP_PARENT_PID": str(os.getpid())}  # it ends with us, however we end
    with tempfile.NamedTemporaryFile("w+", prefix="lockstep-bench-", suffix=".log") as log:
        print(f"Starting serve {arguments} (log: {log.name}) ...", file=sys.stderr)
        child = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while "ready at" not in (said := Path(log.name).read_text(errors="replace")):
                if child.poll() is not None:
                    raise SystemExit(f"serve ended with status {child.returncode}:\n{said[-3000:]}")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            child.terminate()
            try:
                child.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                print(f"serve did not end within {STOP_TIMEOUT:g} s and is killed", file=sys.stderr)
                child.kill()


async def until_ready(session: Session, args: Args) -> None:
    """Learn the model's name if it was not given, and send one request until it succeeds."""
    deadline = time.monotonic() + args.ready_check_timeout_sec
    while True:
        error = ""
        try:
            if args.model is None:
                async with session.get(f"{args.base_url}/v1/models", raise_for_status=True) as response:
                    args.model = (await response.json())["data"][0]["id"]
            if args.ready_check_timeout_sec > 0:
                error = (await send(session, args, make_prompts(args, random.Random(), 1)[0])).error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        if not error:
            return
        if error.startswith("HTTP 4") or time.monotonic() > deadline:
            raise SystemExit(f"{args.base_url} cannot be measured: {error}")
        await asyncio.sleep(0.5)


def percents(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def parse_args() -> Args:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--backend", choices=["openai", "openai-chat"], default="openai", help="completions or chat")
    add("--base-url", help="of the server (default: http://127.0.0.1:8000)")
    add("--serve", metavar="ARGS", help="start 'serve ARGS' for the runs, instead of --base-url")
    add("--endpoint", help="path (default: /v1/completions or /v1/chat/completions)")
    add("--model", help="name in requests (default: the first that the server lists)")
    add("--dataset-name", choices=["random"], default="random", help="prompts of random tokens")
    add("--random-input-len", type=int, default=128, help="tokens per prompt (default: %(default)s)")
    add("--random-output-len", type=int, default=64, help="tokens asked for (default: %(default)s)")
    add("--random-prefix-len", type=int, default=0, help="further tokens, the same in all prompts of a run")
    add("--random-vocab", type=int, default=4096, help="token ids are below this (default: %(default)s)")
    add("--num-prompts", type=int, help="requests per run (default: 4 x concurrency, at least 32)")
    add("--request-rate", type=float, default=float("inf"), help="requests per second (default: inf)")
    add("--burstiness", type=float, default=1.0, help="of arrivals: 1 is Poisson, less has more bursts")
    add("--max-concurrency", type=int, help="most requests in flight")
    add("--concurrency", type=int, nargs="+", help="a series of runs with these --max-concurrency")
    add("--ignore-eos", action="store_true", help="every answer is --random-output-len tokens long")
    add("--temperature", type=float, default=0.0, help="of sampling (default: 0, greedy)")
    add("--seed", type=int, default=0, help="of prompts and arrivals")
    add("--percentile-metrics", default=",".join(METRICS), help="which to report (default: %(default)s)")
    add("--metric-percentiles", type=percents, default="99", help="such as 50,99 (default: %(default)s)")
    add("--num-warmups", type=int, default=4, help="requests before each run (default: %(default)s)")
    add("--save-result", action="store_true", help="write a JSON file per run into --result-dir")
    add("--result-dir", type=Path, default=Path(), help="(default: here)")
    add("--output-json", type=Path, metavar="FILE", help="write the sums of all runs into one file")
    add("--ready-check-timeout-sec", type=float, default=600.0, help="0: no check (default: %(default)g)")
    args = parser.parse_args()
    counts = [args.num_prompts, args.max_concurrency, *(args.concurrency or [])]
    counts += [args.random_input_len, args.random_output_len, args.random_vocab - LOWEST_ID]
    counts += [args.random_prefix_len + 1, args.num_warmups + 1]
    for is_wrong, problem in (
        (args.serve is not None and args.base_url, "--serve starts its own server: leave out --base-url"),
        (any(n is not None and n < 1 for n in counts), "a count or a length is too small"),
        (min(args.request_rate, args.burstiness) <= 0, "--request-rate and --burstiness must be above 0"),
        (set(args.percentile_metrics.split(",")) - set(METRICS), f"metrics are {', '.join(METRICS)}"),
        (not all(0 <= p <= 100 for p in args.metric_percentiles), "percentiles are numbers from 0 to 100"),
    ):
        if is_wrong:
            parser.error(problem)
    args.base_url = (args.base_url or "http://127.0.0.1:8000").rstrip("/")
    args.endpoint = args.endpoint or f"/v1/{'chat/' * (args.backend == 'openai-chat')}completions"
    return args


async def bench(args: Args) -> int:
    results = []
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=READ_TIMEOUT),
        headers={"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"},
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
    server = contextlib.nullcontext(args.base_url) if args.serve is None else mesh(args.serve)
    with contextlib.suppress(KeyboardInterrupt), server as args.base_url:
        return asyncio.run(bench(args))
    return 130


if __name__ == "__main__":
    sys.exit(main())
