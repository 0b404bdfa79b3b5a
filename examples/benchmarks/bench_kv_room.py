#!/usr/bin/env python3
"""Benchmark of KV cache room and throughput by number of workers of an instance.

    python examples/benchmarks/bench_kv_room.py --model MODEL --worker-memory 80M --output-json kv_room.json

Each worker stands for a device with ``--worker-memory`` bytes and one compute thread. What its weights
leave is its KV cache. With more workers the weights of each are fewer, so the cache grows by more than the
number of workers; more requests run at once; each reading of the weights serves more of them. For each
layout a mesh is started twice: once to see what the weights take, and once with the room that they leave.
Prompts and answers are the same for all.

The native kernels are switched off for all layouts (they serve whole models only), so that layouts compare.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))
"""(tensor parallel, pipeline parallel) sizes."""
WEIGHTS = re.compile(r"(?:layers \d+ to \d+|M parameters), ([\d.]+) MiB of weights")
"""Pattern of a worker's log line about its weights; the last line has all workers."""
BLOCKS = re.compile(r"# KV blocks: (\d+), (\d+) tokens \(([\d.]+) MiB\)")
RUNNING = re.compile(r"^vllm:num_requests_running\{[^}]*\} ([\d.e+]+)", re.MULTILINE)
BENCH = [sys.executable, str(Path(__file__).with_name("bench_serving.py"))]
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def size(text: str) -> int:
    """Number of bytes in a text like ``80M``."""
    number, unit = text.rstrip("KMG"), text[-1:]
    return int(float(number) * UNITS.get(unit, 1))


@contextlib.contextmanager
def mesh(args: argparse.Namespace, layout: tuple[int, int], room: str) -> Iterator[tuple[str, str]]:
    """A mesh with one instance of this layout: its base URL and startup output."""
    tp, pp = layout
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [f"--port={one.getsockname()[1]}", f"--data-parallel-rpc-port={other.getsockname()[1]}"]
    flags = f"{shlex.quote(args.model)} -tp {tp} -pp {pp} --dtype {args.dtype} --cpu-threads {tp * pp} {room}"
    flags += f" --max-num-seqs 256 --no-enable-prefix-caching --disable-access-log {args.serve_flags}"
    command = [sys.executable, "-P", "-m", "router.launcher.serve", *shlex.split(flags), *ports]
    environment = {**os.environ, "LOCKSTEP_PARENT_PID": str(os.getpid()), "LOCKSTEP_NATIVE_KERNELS": "0"}
    with tempfile.NamedTemporaryFile("w+", prefix="lockstep-bench-", suffix=".log") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while "ready at" not in (said := Path(log.name).read_text(errors="replace")):
                if child.poll() is not None:
                    raise SystemExit(f"serve ended with status {child.returncode}:\n{said[-3000:]}")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{ports[0].partition('=')[2]}", said
        finally:
            child.terminate()
            child.wait(60)


def measure(args: argparse.Namespace, layout: tuple[int, int]) -> dict[str, Any]:
    with mesh(args, layout, "--num-gpu-blocks-override 64 --max-model-len 256") as (_, said):
        *workers, whole = map(float, WEIGHTS.findall(said))
        weights = max(workers, default=whole)
    room = int(args.worker_memory - weights * 2**20)
    row: dict[str, Any] = {"tp": layout[0], "pp": layout[1], "weights_mib_per_worker": round(weights, 1)}
    row |= {"kv_mib_per_worker": round(room / 2**20, 1), "kv_blocks": 0, "tokens": 0}
    row |= {"output_throughput": 0.0, "running": 0.0}
    if room <= 0:
        return row  # its weights alone do not fit
    with mesh(args, layout, f"--kv-cache-memory-bytes {room} --max-model-len {args.max_model_len}") as (
        url,
        said,
    ):
        found = BLOCKS.search(said)
        assert found, said
        row |= {"kv_blocks": int(found[1]), "tokens": int(found[2])}
        runs = [load(args, url) for _ in range(args.repeats)]
    row["runs"] = runs
    for name in ("output_throughput", "running"):
        row[name] = round(statistics.median(run[name] for run in runs), 1)
    return row


def load(args: argparse.Namespace, url: str) -> dict[str, float]:
    """Throughput, and how many requests ran at once on average."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        flags = ["--base-url", url, "--ignore-eos", "--max-concurrency", str(args.concurrency)]
        flags += ["--num-prompts", str(2 * args.concurrency), "--random-input-len", str(args.input_len)]
        flags += ["--random-output-len", str(args.output_len), "--output-json", file.name]
        child = subprocess.Popen([*BENCH, *flags], stdout=subprocess.DEVNULL)
        running = []
        while child.poll() is None:
            time.sleep(0.5)
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
                running.append(sum(map(float, RUNNING.findall(response.read().decode()))))
        if child.returncode:
            raise SystemExit("the load failed")
        (result,) = json.loads(file.read())["runs"]
    return {"output_throughput": result["output_throughput"], "running": statistics.mean(running)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", required=True, help="directory or name of a dense model")
    add("--dtype", default="bfloat16", help="(default: %(default)s)")
    add("--worker-memory", type=size, required=True, help="bytes of each worker, such as 80M")
    add("--concurrency", type=int, default=64, help="requests in flight (default: %(default)s)")
    add("--input-len", type=int, default=128, help="tokens per prompt (default: %(default)s)")
    add("--output-len", type=int, default=64, help="tokens per answer (default: %(default)s)")
    add("--max-model-len", type=int, default=1024, help="(default: %(default)s)")
    add("--repeats", type=int, default=3, help="runs per layout; the median counts (default: %(default)s)")
    add("--serve-flags", default="", help="for all meshes")
    add("--output-json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    print(f"each worker: {args.worker_memory / 2**20:.0f} MiB, 1 thread; {os.cpu_count()} cores")
    print(" tp  pp  weights MiB  KV MiB  KV blocks   tokens  running   tok/s  against the first")
    rows: list[dict[str, Any]] = []
    for layout in LAYOUTS:
        row = measure(args, layout)
        rows.append(row)
        first = next((each["output_throughput"] for each in rows if each["output_throughput"]), 0.0)
        print(
            f"{row['tp']:>3}{row['pp']:>4}{row['weights_mib_per_worker']:>13.1f}{row['kv_mib_per_worker']:>8.1f}"
            f"{row['kv_blocks']:>11}{row['tokens']:>9}{row['running']:>9.1f}{row['output_throughput']:>8.1f}"
            f"{row['output_throughput'] / first if first else 0:>10.2f}x",
            flush=True,
        )
    if args.output_json:
        said = {name: value for name, value in vars(args).items() if name != "output_json"}
        args.output_json.write_text(json.dumps({"args": said, "results": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
