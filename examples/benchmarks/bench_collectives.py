#!/usr/bin/env python3
"""Benchmark of a group's collectives: sockets beside shared memory, gloo and what plain sockets take.

    python examples/benchmarks/bench_collectives.py --ranks 2 4 --output-json collectives.json

Each member is a process with one thread. The transports are measured by the same processes, in turn and in
short blocks, so that other load on the machine hits all of them:

    plain           plain TCP sockets in C, both ends looking again and again: the same bytes to and from all
                    others, nothing else (links/plain_sockets.cpp). It offers its core where members are more
                    than cores
    asleep          the same, sleeping in poll until something comes
    tcp             parallel/communicators/network.py, a whole collective in one native call
    tcp Python      the same over the same sockets, without a compiler
    ucx             the same as tcp over UCX, by its TCP on loopback, where UCX is installed
    ucx shm         the same by UCX's shared memory
    shared memory   parallel/communicators/shared_memory.py, results in memory of the caller's own
    views           the same, results left where the members wrote them (all-gather and all-to-all)
    our gloo        parallel/communicators/gloo.py, by gloo's send and receive
    torch gloo      the collectives of PyTorch's gloo process group, as torch.distributed calls them

All but views give results that are the caller's. A view has not been fetched from the other cores when the
call returns; its reader pays for that later, at most what the copy in "shared memory" costs.

A size is that of the tensor that each member gives. Compare the numbers of one run only.

Then what waiting costs: rank 0 does the same piece of work before each all-reduce while all others wait in
the collective. Shown are how much longer the work takes than with nobody waiting, and how much of a core
each waiting member used: with more members than cores, a waiting member must not take the core from a working
one.
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
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this is not installed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupGloo

    from parallel.communicators import Communicator
    from parallel.communicators.network import NetworkCommunicator
    from parallel.links.meeting_contract import Meeting

GROUPS = ("tcp", "tcp_python", "shared_memory", "gloo")
UCX = {"ucx": "tcp", "ucx_shm": "posix,sysv,cma,self"}
"""Columns of UCX, where it is installed, and its transports."""
TRANSPORTS = ("plain", "asleep", *GROUPS, *UCX, "torch_gloo", "views")
SHOWN = ("plain", "asleep", "tcp", "tcp_python", *UCX, "shared_memory", "views", "gloo", "torch_gloo")
"""Columns of the table, medians in microseconds."""
RATIOS = (("tcp", "plain"), ("gloo", "tcp"), ("torch_gloo", "tcp"))
"""Columns of the table that follow: the median of one, divided by the other's."""
VIEWED = ("all_gather", "all_to_all")
SIZES = (64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
FULL = 64 << 10  # bytes up to which a cell has all its repeats; larger ones have fewer, down to FEWEST
FEWEST = 40
HEADER_INTS = 7
BLOCK = 20  # calls of one transport before it is the other's turn
TIMEOUT = 60.0
WORK_ROWS = 1500  # of the square matrix whose product is the work that others wait for: some 50 ms
WAITS = 20


Block = Callable[[], list[float]]
"""Makes the calls of one turn, and returns the seconds of each."""


def block_of(call: Callable[[], Any]) -> Block:
    def block() -> list[float]:
        seconds = []
        for _ in range(BLOCK):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        return seconds

    return block


def run_member(rank: int, size: int, port: int, repeats: int) -> None:
    """One member: makes all calls with all transports. Rank 0 prints what it measured."""
    import torch

    from examples.benchmarks.links import plain_sockets
    from parallel.groups import form
    from parallel.links.connecting import connect
    from parallel.links.forming_group import FormingGroup
    from parallel.links.meeting import MeetingClient, MeetingHost
    from parallel.links.meeting_contract import Prefixed

    torch.set_num_threads(1)
    host = "127.0.0.1"
    meeting = MeetingHost(host) if rank == 0 else MeetingClient(host, port, timeout=TIMEOUT)
    if isinstance(meeting, MeetingHost):
        print(meeting.port, flush=True)
    groups: dict[str, Communicator] = {
        "tcp": over_sockets(meeting, rank, size, native=True),
        "tcp_python": over_sockets(meeting, rank, size, native=False),
        "shared_memory": form(meeting, 1, rank, size, "shared_memory", TIMEOUT, group="shared_memory"),
        "gloo": form(meeting, 1, rank, size, "gloo", TIMEOUT, group="gloo"),
        **over_ucx(meeting, rank, size),
    }
    torch_gloo = process_group(meeting, rank, size)
    forming = FormingGroup(Prefixed(meeting, "plain"), rank, size, timeout=TIMEOUT)
    plain = connect(forming, host=host, name="plain", key=None)
    peers = [stream for streams in plain.data.values() for stream in streams]
    looks = "looking" if size <= len(os.sched_getaffinity(0)) else "offering"

    def calls(group: Communicator, name: str, num_bytes: int) -> Callable[[], Any]:
        whole = torch.ones(num_bytes // 4)
        per_rank, by_rank = [len(whole) // size] * size, [len(whole)] * size
        made: dict[str, Callable[[], Any]] = {
            "all_gather_ints": lambda: group.all_gather_ints(range(HEADER_INTS)),
            "all_reduce": lambda: group.all_reduce(whole),
            "all_gather": lambda: group.all_gather(whole, by_rank),
            "all_gather_view": lambda: group.all_gather_view(whole, by_rank),
            "all_to_all": lambda: group.all_to_all(whole, per_rank, per_rank),
            "all_to_all_view": lambda: group.all_to_all_views(whole, per_rank, per_rank),
        }
        return made[name]

    def calls_of_torch(name: str, num_bytes: int) -> Callable[[], Any]:
        """The same calls of PyTorch, with results in tensors that exist already."""
        given = torch.arange(HEADER_INTS) if name == "all_gather_ints" else torch.ones(num_bytes // 4)
        parts, exchanged = [torch.empty_like(given) for _ in range(size)], torch.empty_like(given)
        return {
            "all_gather_ints": lambda: torch_gloo.allgather([parts], [given]).wait(),
            "all_reduce": lambda: torch_gloo.allreduce([exchanged]).wait(),
            "all_gather": lambda: torch_gloo.allgather([parts], [given]).wait(),
            "all_to_all": lambda: torch_gloo.alltoall_base(exchanged, given, [], []).wait(),
        }[name]

    def plain_block(num_bytes: int, waiting: str) -> Block:
        return lambda: plain_sockets.exchange(peers, num_bytes, waiting, BLOCK)

    def blocks(name: str, num_bytes: int) -> dict[str, Block]:
        to_each = num_bytes // size if name == "all_to_all" else num_bytes
        made = {"plain": plain_block(to_each, looks), "asleep": plain_block(to_each, "sleeping")}
        made |= {each: block_of(calls(group, name, num_bytes)) for each, group in groups.items()}
        made["torch_gloo"] = block_of(calls_of_torch(name, num_bytes))
        if name in VIEWED:
            made["views"] = block_of(calls(groups["shared_memory"], f"{name}_view", num_bytes))
        return made

    with torch.inference_mode():
        cells = [("all_gather_ints", 8 * HEADER_INTS)]
        cells += [(name, each) for name in ("all_reduce", "all_gather", "all_to_all") for each in SIZES]
        for name, num_bytes in cells:
            made = blocks(name, num_bytes)
            for block in made.values():  # warm
                block()
            seconds: dict[str, list[float]] = {each: [] for each in made}
            enough = max(FEWEST, int(repeats * min(1.0, FULL / num_bytes)))
            while len(seconds["tcp"]) < enough:
                for each, block in made.items():
                    seconds[each] += block()
            if rank == 0:
                row = {"ranks": size, "collective": name, "bytes": num_bytes}
                for each, taken in seconds.items():
                    row |= {f"{each}_p50_us": percentile(taken, 50), f"{each}_p99_us": percentile(taken, 99)}
                print(json.dumps(row), flush=True)
        cost = {each: cost_of_waiting(group) for each, group in groups.items()}
        if rank == 0:
            print(json.dumps({"ranks": size, "waiting": cost}), flush=True)
    for group in groups.values():
        group.close()
    plain.close()


def over_sockets(meeting: Meeting, rank: int, size: int, *, native: bool) -> NetworkCommunicator:
    """A group over TCP sockets on loopback, with native collectives or in Python."""
    from parallel.communicators.network import NetworkCommunicator
    from parallel.links.connecting import connect
    from parallel.links.forming_group import FormingGroup
    from parallel.links.meeting_contract import Prefixed

    name = "native" if native else "python"
    forming = FormingGroup(Prefixed(meeting, name), rank, size, timeout=TIMEOUT)
    sockets = connect(forming, host="127.0.0.1", name=name, key=None)
    return NetworkCommunicator(sockets, rank, size, timeout=TIMEOUT, native=native)


def over_ucx(meeting: Meeting, rank: int, size: int) -> dict[str, Communicator]:
    """Groups over UCX by name; none where it is not installed."""
    from parallel.groups import form
    from parallel.links import ucx_links

    if ucx_links.why_not() is not None:
        return {}
    groups = {}
    for name, transports in UCX.items():
        os.environ["UCX_TLS"] = transports
        groups[name] = form(meeting, 1, rank, size, "ucx", TIMEOUT, group=name)
    return groups


def process_group(meeting: Meeting, rank: int, size: int) -> ProcessGroupGloo:
    """PyTorch's own gloo group, bound to loopback."""
    from torch.distributed import ProcessGroupGloo

    from parallel.communicators.gloo import MeetingStore
    from parallel.links.meeting_contract import Prefixed

    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=TIMEOUT)
    return ProcessGroupGloo(MeetingStore(Prefixed(meeting, "torch"), TIMEOUT), rank, size, options)


def cost_of_waiting(group: Communicator) -> dict[str, float]:
    """Slowdown of rank 0's work while the others wait, and the waiters' processor time."""
    import torch

    square, word = torch.rand(WORK_ROWS, WORK_ROWS), torch.ones(16)

    def seconds_of_work() -> float:
        began = time.perf_counter()
        square @ square
        return time.perf_counter() - began

    alone: list[float] = []
    if group.rank == 0:
        time.sleep(0.5)  # nobody calls anything: the others sleep as well, see below
        alone = [seconds_of_work() for _ in range(WAITS)]
    else:
        time.sleep(0.5 + 0.2 * WAITS)
    group.all_gather_ints([0])
    waited_for: list[float] = []
    began, used = time.perf_counter(), time.process_time()
    for _ in range(WAITS):
        if group.rank == 0:
            waited_for.append(seconds_of_work())
        group.all_reduce(word)
    share = (time.process_time() - used) / (time.perf_counter() - began)
    rows = group.all_gather_ints([int(1e6 * share)])
    return {
        "work_alone_ms": round(1e3 * statistics.median(alone), 2) if alone else 0.0,
        "work_waited_for_ms": round(1e3 * statistics.median(waited_for), 2) if alone else 0.0,
        "core_per_waiting_member": round(statistics.mean(row[0] for row in rows[1:]) / 1e6, 4),
    }


def percentile(seconds: list[float], percent: int) -> float:
    """Percentile in microseconds."""
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
            print(
                lines_of_waiting(rows[-1]) if "waiting" in rows[-1] else line_of_table(rows[-1]), flush=True
            )
        if any(member.wait() for member in members):
            raise SystemExit("a member failed")
        return rows
    finally:
        for member in members:
            member.kill()
            member.wait()


def line_of_table(row: dict[str, Any]) -> str:
    def median(transport: str) -> float | None:
        return row.get(f"{transport}_p50_us")

    times = "".join(f"{median(each) or '':>11}" for each in SHOWN)
    ratios = "".join(f"{row[f'{one}_p50_us'] / row[f'{two}_p50_us']:>10.2f}x" for one, two in RATIOS)
    times += f"{row['tcp_p99_us']:>11.0f}"
    return f"{row['ranks']:>5}  {row['collective']:<16}{row['bytes']:>8}{times}{ratios}"


def lines_of_waiting(row: dict[str, Any]) -> str:
    return "\n".join(
        f"{row['ranks']:>5}  waiting by {backend:<15} work of {cost['work_alone_ms']:.1f} ms takes "
        f"{cost['work_waited_for_ms'] / cost['work_alone_ms']:.2f} times as long while the others wait; "
        f"each of them uses {100 * cost['core_per_waiting_member']:.1f} % of a core"
        for backend, cost in row["waiting"].items()
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
    titles = [each.replace("_", " ").replace("shared memory", "shared") for each in SHOWN]
    titles += ["tcp p99", *(f"{one.split('_')[0]}/{two}" for one, two in RATIOS)]
    print("ranks  collective         bytes" + "".join(f"{title:>11}" for title in titles))
    rows = [row for size in args.ranks for row in bench(size, args.repeats)]
    if args.output_json:
        machine = {"cores": cores, "load_before": load}
        args.output_json.write_text(json.dumps({"machine": machine, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
