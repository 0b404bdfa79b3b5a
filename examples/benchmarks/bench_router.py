#!/usr/bin/env python3
"""Benchmark of routers: CPU per token and request, and added time to first token.

    python examples/benchmarks/bench_router.py --output-json build/bench-router.json
    python examples/benchmarks/bench_router.py --systems lockstep lockstep-2 sglang-router vllm

The instances are real processes whose model computes nothing and waits ``--step-ms`` per step
(examples/benchmarks/null_model.py), so that what is measured is the way of requests and tokens. Systems:

    lockstep        one router in front of one such instance
    lockstep-all    the same with --resumable all: each token is committed to the store of answers first
    lockstep-2      two routers that share the port (--api-server-count 2)
    sglang-router   SGLang's router (a compiled program) in front of ``lockstep``: its CPU alone, and the time
                    to first token that it adds to that of the mesh
    vllm            vLLM's own front end; its engine is a process of its own that computes ``--vllm-model``
    writes          no front end: a loop that writes events of the same size and does nothing else
                    (examples/benchmarks/bare_writer.py), the floor for all who give each token a write of its
                    own

Loads: ``--streams`` streams at once, of ``--output-len`` tokens; then ``--few-streams``, whose tokens share
a wake-up with few others; then requests for one token each, ``--streams`` at once; then one request for one
token after the other, whose time is what a first token costs.
CPU is that of the front end's processes between the first and the last byte, from the kernel's counts (every
system pays for the same bytes of events, about 200 a token). Peers: examples/benchmarks/install_peers.sh.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this is not installed

from examples.benchmarks.null_model import STEP_VARIABLE
from router.tools.bench.report import machine, percentile

ROOT = Path(__file__).parents[2]
START_TIMEOUT = 300.0


class Stream(asyncio.Protocol):
    """One connection that asks again and again, and counts events without parsing them.

    The client must cost less than what it measures. The prompt is a text, since sglang-router takes no token
    ids.
    """

    def __init__(self, request: bytes, times: int, results: list[tuple[float, int]]) -> None:
        self._request, self._left, self._results = request, times, results
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._ask()

    def _ask(self) -> None:
        self._began, self._first, self._events = time.perf_counter(), 0.0, 0
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._events and not data.startswith(b"HTTP/1.1 200") and not self._tail:
            kind = ConnectionError if data.startswith(b"HTTP/1.1 503") else RuntimeError
            self._fail(kind(data[:500].decode(errors="replace")))
            return
        seen = self._tail + data
        events = seen.count(b"data: ") - self._tail.count(b"data: ")
        if events and not self._events:
            self._first = time.perf_counter() - self._began
        self._events += events
        self._tail = seen[-16:]
        if b"0\r\n\r\n" in self._tail[-5:]:
            self._results.append((self._first, self._events - 1))  # without [DONE]
            self._tail = b""
            self._left -= 1
            if self._left:
                self._ask()
            else:
                self._transport.close()
                self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._fail(error or ConnectionResetError("the server closed the connection"))

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
        self._transport.close()


def load(port: int, model: str, streams: int, output_len: int, times: int) -> dict[str, Any]:
    """Run so many streams at once, each so many times."""
    body = json.dumps(
        {
            "model": model, "prompt": "The dog sat down", "max_tokens": output_len, "ignore_eos": True,
            "stream": True, "temperature": 0,
        }
    ).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    results: list[tuple[float, int]] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        made = [
            await loop.create_connection(lambda: Stream(request, times, results), "127.0.0.1", port)
            for _ in range(streams)
        ]
        await asyncio.gather(*(stream.done for _, stream in made))

    began = time.perf_counter()
    uvloop.run(run())
    seconds = time.perf_counter() - began
    firsts = sorted(first for first, _ in results)
    return {
        "requests": len(results),
        "events": sum(events for _, events in results),
        "seconds": seconds,
        "ttft_p50_ms": 1000 * percentile(firsts, 50),
        "ttft_p99_ms": 1000 * percentile(firsts, 99),
    }


class System:
    """A server under load, and its processes that are its front end."""

    def __init__(self, port: int, model: str, front_ends: list[psutil.Process]) -> None:
        self.port, self.model, self._front_ends = port, model, front_ends

    def cpu(self) -> float:
        """CPU seconds of the front end's processes."""
        return sum(cpu_seconds(process) for process in self._front_ends)

    def written(self) -> int:
        """Bytes that the front end's processes have written: to connections, and into a store."""
        return sum(process.io_counters().write_chars for process in self._front_ends)

    def measure(self, streams: int, output_len: int, times: int) -> dict[str, Any]:
        """Measure in a separate process, so that its events are not delayed by ours."""
        code = (
            f"import json, sys; sys.path.insert(0, {str(ROOT)!r});"
            "from examples.benchmarks.bench_router import load;"
            f"print(json.dumps(load({self.port}, {self.model!r}, {streams}, {output_len}, {times})))"
        )
        before, written, sent = self.cpu(), self.written(), loopback_bytes()
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        found |= {"cpu_seconds": self.cpu() - before, "bytes_written": self.written() - written}
        return found | {"loopback_bytes": loopback_bytes() - sent}


def loopback_bytes() -> int:
    """Bytes that any process has sent over loopback: messages of the mesh, and answers."""
    return int(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)


def cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds of all threads.

    They are exact to a nanosecond where the kernel counts so, else to a tick of 10 ms.
    """
    counts = [path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat")]
    if counts:
        return sum(int(count.split()[0]) for count in counts) / 1e9
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def running(command: list[str], until: str, **environment: str) -> Iterator[psutil.Process]:
    """A child process that has printed ``until``; it is ended at the end."""
    with tempfile.NamedTemporaryFile("w+", prefix="lockstep-bench-", suffix=".log") as log:
        child = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **environment}, start_new_session=True
        )
        try:
            deadline = time.monotonic() + START_TIMEOUT
            while until not in (said := Path(log.name).read_text(errors="replace")):
                if child.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{command[0]} is not ready (status {child.poll()}):\n{said[-3000:]}")
                time.sleep(0.2)
            yield psutil.Process(child.pid)
        finally:
            family = psutil.Process(child.pid).children(recursive=True) if child.poll() is None else []
            child.terminate()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
            for each in family:
                with contextlib.suppress(psutil.Error):
                    each.kill()


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def children_named(process: psutil.Process, title: str) -> list[psutil.Process]:
    return [each for each in process.children(recursive=True) if title in " ".join(each.cmdline())]


@contextlib.contextmanager
def lockstep(args: argparse.Namespace, front_ends: int = 1, *flags: str) -> Iterator[System]:
    port = free_port()
    command = [
        sys.executable, str(ROOT / "examples/benchmarks/null_model.py"), "serve", "-dp", "1",
        "--no-enable-expert-parallel",
        "--port", str(port), "-dpp", str(free_port()), "--max-num-seqs", str(args.streams),
        "--api-server-count", str(front_ends), "--disable-access-log", "--max-num-batched-tokens", "8192",
        *flags,
    ]  # fmt: skip
    with running(command, "ready at", **{STEP_VARIABLE: str(args.step_ms)}) as process:
        routers = children_named(process, "lockstep: Router")
        assert len(routers) == front_ends, routers
        time.sleep(2)  # all front ends listen
        wait_until_answers(port, "lockstep-moe")
        yield System(port, "lockstep-moe", routers)


@contextlib.contextmanager
def sglang_router(args: argparse.Namespace) -> Iterator[System]:
    port = free_port()
    python = Path(args.peers) / "sglang-router/bin/python"
    with lockstep(args) as behind:
        command = [
            str(python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port),
            "--worker-urls", f"http://127.0.0.1:{behind.port}", "--policy", "round_robin",
            "--prometheus-port", str(free_port()), "--log-level", "warn",
        ]  # fmt: skip
        with running(command, "") as process:
            wait_until_answers(port, behind.model)
            yield System(port, behind.model, [process, *process.children(recursive=True)])


@contextlib.contextmanager
def vllm(args: argparse.Namespace) -> Iterator[System]:
    port = free_port()
    command = [
        str(Path(args.peers) / "vllm/bin/vllm"), "serve", args.vllm_model, "--served-model-name", "bench",
        "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "1024",
        "--max-num-seqs", str(args.streams), "--disable-uvicorn-access-log",
    ]  # fmt: skip
    with running(command, "Application startup complete", VLLM_CPU_KVCACHE_SPACE="1") as process:
        wait_until_answers(port, "bench")
        yield System(port, "bench", [process])


@contextlib.contextmanager
def writes(args: argparse.Namespace) -> Iterator[System]:
    port = free_port()
    command = [sys.executable, str(ROOT / "examples/benchmarks/bare_writer.py"), str(port), str(args.step_ms)]
    with running(command, "writes") as process:
        yield System(port, "any", [process])


def wait_until_answers(port: int, model: str) -> None:
    """Wait until a server answers.

    Raises RuntimeError if the request itself is refused: more tries would not help.
    """
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        try:
            load(port, model, 1, 1, 1)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


SYSTEMS = {
    "lockstep": lockstep,
    "lockstep-all": lambda args: lockstep(args, 1, "--resumable", "all"),
    "lockstep-2": lambda args: lockstep(args, 2),
    "sglang-router": sglang_router,
    "vllm": vllm,
    "writes": writes,
}


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    with SYSTEMS[name](args) as system:
        system.measure(args.streams, 20, 1)  # warm
        runs = [system.measure(args.streams, args.output_len, 2) for _ in range(args.repeats)]
        tokens = [1e6 * run["cpu_seconds"] / run["events"] for run in runs]
        rates = [run["events"] / run["seconds"] for run in runs]
        written = [run["bytes_written"] / run["events"] for run in runs]
        sent = [run["loopback_bytes"] / run["events"] for run in runs]
        few = {
            count: 1e6 * run["cpu_seconds"] / run["events"]
            for count in args.few_streams
            for run in [system.measure(count, args.output_len, args.repeats)]
        }
        short = [system.measure(args.streams, 1, args.requests // args.streams) for _ in range(args.repeats)]
        alone = system.measure(1, 1, args.requests // 4)
    return {
        "system": name,
        "tokens_per_second": statistics.median(rates),
        "cpu_us_per_token": statistics.median(tokens),
        "cpu_us_per_token_all": tokens,
        "cpu_us_per_token_of_few": few,
        "bytes_written_per_token": statistics.median(written),
        "loopback_bytes_per_token": statistics.median(sent),
        "requests_per_second": statistics.median(run["requests"] / run["seconds"] for run in short),
        "cpu_us_per_request": statistics.median(1e6 * run["cpu_seconds"] / run["requests"] for run in short),
        "ttft_p50_ms": alone["ttft_p50_ms"],
        "ttft_p99_ms": alone["ttft_p99_ms"],
    }


def table(results: list[dict[str, Any]]) -> str:
    few = list(results[0]["cpu_us_per_token_of_few"])
    beside = "".join(f" of {count} |" for count in few)
    lines = [
        f"| front end | tokens/s | CPU us per token |{beside} requests/s | CPU us per request "
        "| TTFT p50 ms | p99 | bytes written per token | bytes over loopback per token |",
        "|---|" + "--:|" * (8 + len(few)),
    ]
    for one in results:
        beside = "".join(f" {one['cpu_us_per_token_of_few'][count]:.0f} |" for count in few)
        lines.append(
            f"| {one['system']} | {one['tokens_per_second']:.0f} | {one['cpu_us_per_token']:.1f} |{beside} "
            f"{one['requests_per_second']:.0f} | {one['cpu_us_per_request']:.0f} "
            f"| {one['ttft_p50_ms']:.2f} | {one['ttft_p99_ms']:.2f} | {one['bytes_written_per_token']:.0f} "
            f"| {one['loopback_bytes_per_token']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--systems", nargs="+", choices=[*SYSTEMS], default=["lockstep", "lockstep-2"])
    add("--streams", type=int, default=64, help="at once (default: %(default)s)")
    add("--few-streams", type=int, nargs="*", default=[1, 8], help="(default: %(default)s)")
    add("--output-len", type=int, default=400, help="tokens of a stream (default: %(default)s)")
    add("--requests", type=int, default=2048, help="of one token each (default: %(default)s)")
    add("--repeats", type=int, default=3, help="(default: %(default)s)")
    add("--step-ms", type=float, default=5.0, help="that a step waits (default: %(default)s)")
    add("--peers", default=str(ROOT / "build/peers"), help="where they are installed (default: %(default)s)")
    add("--vllm-model", default="build/models/dense-small", help="(default: %(default)s)")
    add("--output-json", type=Path, metavar="FILE", help="write the numbers into this file")
    args = parser.parse_args()
    results = []
    for name in args.systems:
        results.append(measure(name, args))
        print(table(results[-1:]).splitlines()[-1], file=sys.stderr)
        if args.output_json is not None:
            args.output_json.parent.mkdir(parents=True, exist_ok=True)
            found = {
                "machine": machine(),
                "step_ms": args.step_ms,
                "streams": args.streams,
                "results": results,
            }
            args.output_json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
