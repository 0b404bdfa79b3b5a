#!/usr/bin/env python3
r"""Benchmark of `serve` from its command line to the first token, by phase.

    python examples/benchmarks/bench_startup.py
    python examples/benchmarks/bench_startup.py --model build/models/dense-small \
        --serve "-dp 1" "-dp 4" --repeats 3

Starts each mesh in turn, as often as --repeats says, asks for one token as soon as it logs that it is ready,
and ends it. The moments are those of the log lines of its processes (--log-format json), in seconds since the
command was started; of several instances, the last one's. One start of each before that is not counted: it
compiles what is not in its cache yet, and brings files into the page cache. --whole also starts each with all
that torch and transformers load by default (LOCKSTEP_WHOLE_LIBRARIES=1).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this is not installed

from coordinator.process.process import PARENT_VARIABLE
from router.tools.bench.report import machine

MOMENTS = {
    "processes started": ("Coordinator", "listening on"),
    "endpoint listens": ("Router", "listening on"),
    "libraries loaded, registered": ("Engine", "instance "),
    "weights read, model checked": ("Engine", "# KV blocks"),
    "kernels ready": ("Engine", "native kernels: on"),
    "instances loaded": ("Engine", ("ready on", "loaded after")),
}
"""Process and beginning of the log line of each milestone."""
READY, FIRST_TOKEN = "mesh ready", "first token"
TIMEOUT = 120.0


def one_start(model: str, arguments: str, environment: dict[str, str]) -> dict[str, float]:
    """Seconds from the start of a mesh to each moment."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, rpc_port = one.getsockname()[1], other.getsockname()[1]
    command = [
        sys.executable,
        "-P",
        "-m",
        "router.launcher.serve",
        model,
        *shlex.split(arguments),
        "--log-format=json",
    ]
    command += [f"--port={port}", f"--data-parallel-rpc-port={rpc_port}"]
    began = time.time()
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    try:
        assert child.stdout is not None
        lines = []
        for line in child.stdout:
            lines.append(line)
            if "ready at http" in line:
                break
        else:
            raise SystemExit(f"serve ended with status {child.wait()}:\n{''.join(lines)[-3000:]}")
        ready = time.time()
        ask_for_a_token(f"http://127.0.0.1:{port}")
        answered = time.time()
    finally:
        child.terminate()
        child.communicate(timeout=TIMEOUT)
    return {**moments(lines, began), READY: ready - began, FIRST_TOKEN: answered - began}


def ask_for_a_token(base_url: str) -> None:
    body = json.dumps({"prompt": "It is a truth universally acknowledged, that", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{base_url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 1


def moments(lines: list[str], began: float) -> dict[str, float]:
    """Times of the milestones that the log has."""
    found: dict[str, float] = {}
    for line in lines:
        if not line.startswith("{"):
            continue
        entry = json.loads(line)
        at = datetime.datetime.fromisoformat(entry["time"]).timestamp() - began
        for name, (process, beginning) in MOMENTS.items():
            if entry["process"].startswith(process) and entry["message"].startswith(beginning):
                found[name] = max(at, found.get(name, 0.0))
    return found


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """Table of medians, with the least and the most."""
    names = [*MOMENTS, READY, FIRST_TOKEN]
    lines = [f"| seconds since the command | {' | '.join(results)} |"]
    lines.append(f"| --- | {' | '.join('---:' for _ in results)} |")
    for name in names:
        cells = []
        for runs in results.values():
            times = [run[name] for run in runs if name in run]
            cells.append(
                f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})" if times else "-"
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--model", default="lockstep-moe", help="(default: the shipped one)")
    add("--serve", nargs="+", default=["-dp 1", "-dp 2"], metavar="FLAGS", help="the meshes to start")
    add("--whole", action="store_true", help="also with all of the libraries loaded")
    add("--repeats", type=int, default=5, help="(default: %(default)s)")
    add("--output-json", type=Path, metavar="FILE", help="write all numbers into this file")
    args = parser.parse_args()
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}  # they end with us, however we end
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # our sources are compiled once, as for a user
    variants = {f"serve {arguments}": (arguments, environment) for arguments in args.serve}
    if args.whole:
        whole = {**environment, "LOCKSTEP_WHOLE_LIBRARIES": "1"}
        variants |= {f"serve {arguments}, whole": (arguments, whole) for arguments in args.serve}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for number in range(args.repeats + 1):
        for name, runs in results.items():
            times = one_start(args.model, *variants[name])
            print(f"{name}: ready after {times[READY]:.2f} s", file=sys.stderr)
            if number:
                runs.append(times)
    print(table(results))
    if args.output_json is not None:
        page: dict[str, Any] = {"machine": machine(), "model": args.model, "date": time.strftime("%Y-%m-%d")}
        page["load_average"] = os.getloadavg()
        page["results"] = results
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        args.output_json.write_text(json.dumps(page, indent=1) + "\n")


if __name__ == "__main__":
    main()
