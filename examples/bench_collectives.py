#!/usr/bin/env python3
"""How long the collectives between instances take: gloo and shared memory side by side, p50 and p99.

    python examples/bench_collectives.py --ranks 2 4 --output-json collectives.json

Each member is a process with one thread. Both transports are measured by the same processes, in turn and in
short blocks, so that whatever else the machine does hits both. A size is that of the tensor that each member
gives. Compare the numbers of one run only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where this is not installed

BACKENDS = ("gloo", "shared_memory")
SIZES = (64, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
HEADER_INTS = 7
BLOCK = 20  # calls of one transport before it is the other's turn
WARM_UP = 20
TIMEOUT = 60.0


def measure(call: Callable[[], Any], seconds: list[float]) -> None:
    for _ in range(BLOCK):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)


def run_member(rank: int, size: int, port: int, repeats: int) -> None:
    """One member: makes all calls with both transports. Rank 0 prints what it measured."""
    import torch

    from parallel.communicators import Communicator
    from parallel.groups import form, open_store

    torch.set_num_threads(1)
    store = open_store("127.0.0.1", port or None, is_host=rank == 0, timeout=TIMEOUT)
    if rank == 0:
        print(store.port, flush=True)
    groups: list[Communicator] = [
        form(store, 1, rank, size, backend, TIMEOUT, group=backend) for backend in BACKENDS
    ]

    def calls(group: Communicator, name: str, num_bytes: int) -> Callable[[], Any]:
        whole = torch.ones(num_bytes // 4)
        per_rank, by_rank = [len(whole) // size] * size, [len(whole)] * size
        return {
            "all_gather_ints": lambda: group.all_gather_ints(range(HEADER_INTS)),
            "all_reduce": lambda: group.all_reduce(whole),
            "all_gather": lambda: group.all_gather(whole, by_rank),
            "all_to_all": lambda: group.all_to_all(whole, per_rank, per_rank),
        }[name]

    with torch.inference_mode():
        cells = [("all_gather_ints", 8 * HEADER_INTS)]
        cells += [(name, each) for name in ("all_reduce", "all_gather", "all_to_all") for each in SIZES]
        for name, num_bytes in cells:
            both = [calls(group, name, num_bytes) for group in groups]
            for call in both:
                for _ in range(WARM_UP):
                    call()
            seconds: list[list[float]] = [[] for _ in groups]
            while len(seconds[0]) < repeats:
                for call, taken in zip(both, seconds, strict=True):
                    measure(call, taken)
            if rank == 0:
                row = {"ranks": size, "collective": name, "bytes": num_bytes}
                for backend, taken in zip(BACKENDS, seconds, strict=True):
                    row |= {
                        f"{backend}_p50_us": percentile(taken, 50),
                        f"{backend}_p99_us": percentile(taken, 99),
                    }
                print(json.dumps(row), flush=True)
    for group in groups:
        group.close()


def percentile(seconds: list[float], percent: int) -> float:
    """In microseconds."""
    return round(1e6 * statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1], 1)


def bench(size: int, repeats: int) -> list[dict[str, Any]]:
    """All cells with this many members; prints each when it is known."""

    def start(rank: int, port: str) -> subprocess.Popen[str]:
        arguments = ["--member", str(rank), str(size), port, "--repeats", str(repeats)]
        return subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    members = [start(0, "0")]
    try:
        lines = members[0].stdout
        assert lines is not None
        port = lines.readline().strip()
        members += [start(rank, port) for rank in range(1, size)]
        rows = []
        for line in lines:
            rows.append(json.loads(line))
            print(line_of_table(rows[-1]), flush=True)
        if any(member.wait() for member in members):
            raise SystemExit("a member failed")
        return rows
    finally:
        for member in members:
            member.kill()
            member.wait()


def line_of_table(row: dict[str, Any]) -> str:
    ratio = row["gloo_p50_us"] / row["shared_memory_p50_us"]
    return (
        f"{row['ranks']:>5}  {row['collective']:<16}{row['bytes']:>8}"
        f"{row['gloo_p50_us']:>11.0f}{row['gloo_p99_us']:>10.0f}"
        f"{row['shared_memory_p50_us']:>12.0f}{row['shared_memory_p99_us']:>10.0f}{ratio:>8.1f}x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="group sizes (default: 2 4)")
    parser.add_argument(
        "--repeats", type=int, default=400, help="calls per cell and transport (default: 400)"
    )
    parser.add_argument("--output-json", type=Path, help="write the numbers here")
    parser.add_argument("--member", type=int, nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member:
        run_member(*args.member, repeats=args.repeats)
        return
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{cores} cores, load {load:.1f} before the start; microseconds, {args.repeats} calls each\n")
    print("                                       -------- gloo ------  ---- shared memory --")
    print("ranks  collective         bytes        p50       p99         p50       p99   p50 ratio")
    rows = [row for size in args.ranks for row in bench(size, args.repeats)]
    if args.output_json:
        machine = {"cores": cores, "load_before": load}
        args.output_json.write_text(json.dumps({"machine": machine, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
