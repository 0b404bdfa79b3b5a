#!/usr/bin/env python3
"""Benchmark of first tokens where another instance has the prompt's KV blocks.

    python examples/benchmarks/transfers/bench_transfers.py --model build/models/dense-0.5b

Two instances, each asked by its rank. In each round a new prompt is computed by the first one. The second one
then answers another new prompt (computed), that of the first instance (fetched), and that again (cached).

With ``--namespaces 0:10`` the instances are on two hosts, network namespaces with such a link between them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from coordinator.rpc import keys
from examples.benchmarks.links import netns
from router.tools.bench.report import machine

KINDS = ("computed", "fetched", "cached")
REPORTED = 0.5
"""Seconds within which routers know what an instance holds."""


class Mesh(NamedTuple):
    """A running mesh."""

    url: str
    """Base URL of its endpoint."""
    coordinator: str
    """Port of its coordinator, as a flag."""
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")


@contextlib.contextmanager
def mesh(
    model: str, flags: str, headless: str | None = None, hosts: Sequence[netns.Namespace] = ()
) -> Iterator[Mesh]:
    """Two instances that share no experts.

    ``headless``: flags of the second one, which then has a ``serve`` of its own. ``hosts``: where both run;
    this process is on the first of them.
    """
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [f"--port={one.getsockname()[1]}", f"--data-parallel-rpc-port={other.getsockname()[1]}"]
    wanted = [model] * bool(model) + shlex.split(
        f"-dp 2 --dtype bfloat16 --no-enable-expert-parallel {flags}"
    )
    local = ["-dpl", "1"] if headless is not None or hosts else []
    serve = [sys.executable, "-P", "-m", "router.launcher.serve"]
    command = [*serve, *wanted, *local, "--disable-access-log", *ports]
    environment = {**os.environ, "LOCKSTEP_PARENT_PID": str(os.getpid())}
    with (
        tempfile.NamedTemporaryFile("w+", prefix="lockstep-bench-", suffix=".log") as log,
        tempfile.TemporaryDirectory(prefix="lockstep-bench-") as directory,
    ):
        prefix: list[str] = []
        apart: list[str] = []
        if hosts:
            keys.write(keys.generate(), key := Path(directory) / "mesh.key")
            headless, prefix = headless or "", hosts[1].prefix
            apart = ["-dpa", hosts[0].address, "--mesh-key-file", str(key)]
        command += apart
        children = [subprocess.Popen(command, stdout=log, stderr=log, env=environment)]
        child = children[0]
        if headless is not None:
            alike = "--headless -dpl 1 --dtype bfloat16 --no-enable-expert-parallel"
            other = [
                *prefix,
                *serve,
                *[model] * bool(model),
                *shlex.split(f"{alike} {headless}"),
                ports[1],
                *apart,
            ]
            children.append(subprocess.Popen(other, stdout=log, stderr=log, env=environment))
        running = Mesh(f"http://127.0.0.1:{ports[0].partition('=')[2]}", ports[1], Path(log.name))
        try:
            while "ready at" not in running.log or "2 instances ready" not in running.log:
                if child.poll() is not None:
                    raise SystemExit(f"serve ended with status {child.returncode}:\n{running.log[-3000:]}")
                time.sleep(0.2)
            yield running
        finally:
            for each in reversed(children):
                each.terminate()
                each.wait(60)


def first_token(url: str, prompt: list[int], rank: int) -> float:
    """Milliseconds until an instance has given the first token, which is the whole answer."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-data-parallel-rank": str(rank)},
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()
    return 1000 * (time.perf_counter() - began)


def outcomes(url: str) -> list[str]:
    """What the instances counted of their transfers."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return [line for line in lines if line.startswith(("lockstep:kv_", "vllm:external_prefix"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", required=True, help="directory or name of a model")
    add("--length", type=int, default=1500, help="tokens of a prompt (default: %(default)s)")
    add("--rounds", type=int, default=5, help="rounds, after one that is not counted (default: %(default)s)")
    add("--serve-flags", default="", help="for the mesh")
    add("--output-json", type=Path, help="write the numbers here")
    netns.add_flag(parser)
    args = parser.parse_args()
    if args.namespaces is not None and (status := netns.rerun_inside(args.namespaces)) is not None:
        return status
    hosts = netns.ends_here() if args.namespaces is not None else ()
    chance, times = random.Random(1), {kind: [0.0] * 0 for kind in KINDS}

    def prompt() -> list[int]:
        return [chance.randrange(10, 8000) for _ in range(args.length)]

    loads = [os.getloadavg()[0]]
    with mesh(args.model, args.serve_flags, hosts=hosts) as running:
        url = running.url
        for number in range(args.rounds + 1):
            held = prompt()
            first_token(url, held, 0)
            found = {"computed": first_token(url, prompt(), 1)}
            time.sleep(REPORTED)
            found |= {"fetched": first_token(url, held, 1), "cached": first_token(url, held, 1)}
            print(
                f"round {number}: " + ", ".join(f"{kind} {ms:.0f} ms" for kind, ms in found.items()),
                flush=True,
            )
            for kind, ms in found.items() if number else ():
                times[kind].append(ms)
        counted = outcomes(url)
    loads.append(os.getloadavg()[0])
    medians = {kind: statistics.median(each) for kind, each in times.items()}
    print("\n".join(counted))
    print(f"computed over fetched: {medians['computed'] / medians['fetched']:.2f}x (medians)")
    if args.output_json:
        result = {
            **machine(),
            "load_average": loads,
            "args": {"model": args.model, "length": args.length},
            "link": str(args.namespaces or "one host"),
            "milliseconds": times,
        }
        args.output_json.write_text(json.dumps({**result, "medians": medians}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
