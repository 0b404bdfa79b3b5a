#!/usr/bin/env python3
"""Benchmark of scale: one coordinator, thousands of simulated instances, routers and watchers.

    python examples/benchmarks/scale/bench_scale.py --instances 1024 --output-json build/scale.json

Four phases: all join and become ready; nothing changes but loads; one instance in a hundred leaves each
second and another one joins; the coordinator is killed and started again. For each: CPU (share of a core) and
memory of the coordinator, the router and a watcher, and bytes per second. The exit code is 1 if a limit is
missed.

    python examples/benchmarks/scale/bench_scale.py --spread --instances 64 256 1024 --watchers 1

With ``--spread``, experts are spread over the instances (one each, and no fewer than 256), which step in
groups. Five phases: the first group forms; nothing changes but loads; an instance dies, which all others
report; another one joins; the coordinator is killed and started again. For the changes, CPU seconds of the
coordinator and the bytes that it sent are given as well.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[3]))

from coordinator.rpc import keys
from engine.config import SHIPPED_MODEL

HERE = Path(__file__).parent
LIMITS = {"steady": {"coordinator": 0.20, "router": 0.10}, "churn": {"coordinator": 0.60}}
"""Most shares of a core, with 1,024 instances."""
MOST_READY_SECONDS = 10.0
LIMITS_HOLD_FOR = 1024
INSTANCES_PER_PROCESS = 1024
LEAST_EXPERTS = 256
MOST_GROWTH = 1.6
"""Most growth of CPU seconds for each member, from the smallest mesh to the largest."""


class Child:
    """A process of the benchmark, asked by lines."""

    def __init__(self, *command: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.process = psutil.Process(self.popen.pid)

    def ask(self, line: str = "") -> str:
        self.send(line)
        return self.answer()

    def send(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    def answer(self) -> str:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise RuntimeError(f"process {self.popen.pid} ended")
        return line

    def seen(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ask())
        return found

    def busy(self) -> float:
        """CPU seconds of all its threads, in nanoseconds where psutil has hundredths."""
        each = Path(f"/proc/{self.popen.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in each) / 1e9

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()


class Mesh:
    """All processes of the benchmark."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._key = ["--key", f"{folder}/key"] if args.keys else []
        if args.keys:
            keys.write(keys.generate(), Path(folder) / "key")
        self._args = args
        self.coordinator = self._start_coordinator()
        where = ["--coordinator", f"tcp://127.0.0.1:{self.port}", *self._key]
        self.watchers = Child(str(HERE / "watchers.py"), *where, "--watchers", str(args.watchers))
        self.routers = [Child(str(HERE / "watchers.py"), *where) for _ in range(args.routers)]
        common = ["--model", SHIPPED_MODEL, "--of", str(args.instances)]
        if args.spread:
            common += ["--experts", str(max(LEAST_EXPERTS, args.instances + 1))]
        count = -(-args.instances // INSTANCES_PER_PROCESS)
        self.crowds = [
            Child(str(HERE / "members.py"), *where, *common, "--name", str(number)) for number in range(count)
        ]

    def _start_coordinator(self) -> Child:
        key = ["--mesh-key-file", self._key[1]] if self._key else ["--insecure-mesh"]
        return Child("-m", "coordinator", "-dpp", str(self.port), *key, "--log-level", "warning")

    def restart_coordinator(self) -> None:
        self.coordinator.end()
        self.coordinator = self._start_coordinator()

    def command(self, text: Callable[[int], str]) -> None:
        """Give a command to all processes with instances, and wait until all have obeyed."""
        for number, crowd in enumerate(self.crowds):
            crowd.send(text(number))
        for crowd in self.crowds:
            crowd.answer()

    def share(self, number: int) -> int:
        """Instances of one process."""
        total: int = self._args.instances
        count = len(self.crowds)
        return total // count + (number < total % count)

    def wait(self, done: Callable[[dict[str, Any]], bool], timeout: float = 120.0) -> float:
        """Seconds until all routers and watchers see something."""
        began = time.monotonic()
        followers = [*self.routers, self.watchers]
        while not all(done(each.seen()) for each in followers):
            if time.monotonic() - began > timeout:
                raise TimeoutError(f"{[each.seen() for each in followers]} after {timeout:.0f} s")
            time.sleep(0.05)
        return time.monotonic() - began

    def end(self) -> None:
        for child in (*self.crowds, *self.routers, self.watchers, self.coordinator):
            child.end()


class Phase:
    """What the processes used while this was entered."""

    def __init__(self, mesh: Mesh, num_watchers: int) -> None:
        self._mesh = mesh
        self._num_watchers = num_watchers
        self.figures: dict[str, Any] = {}

    def __enter__(self) -> Phase:
        self._began, self._cpu = time.monotonic(), self._cpu_times()
        self._bytes, self._sent = bytes_of(self._mesh), loopback_bytes()
        self._news = self._mesh.watchers.seen()["news"]
        self._busy, self._port_bytes = self._mesh.coordinator.busy(), bytes_sent(self._mesh.port)
        return self

    def __exit__(self, *_: object) -> None:
        took = time.monotonic() - self._began
        busy = self._mesh.coordinator.busy() - self._busy
        sent = bytes_sent(self._mesh.port) - self._port_bytes
        cpu, received = self._cpu_times(), bytes_of(self._mesh)
        sizes = {
            name: max(each.memory_info().rss for each in found) for name, found in self._processes().items()
        }
        watched = received["watchers"] - self._bytes["watchers"]
        shares = {name: (cpu[name] - before) / took for name, before in self._cpu.items()}
        shares["router"] /= len(self._mesh.routers)
        shares["watcher"] = shares.pop("watchers") / self._num_watchers
        news = self._mesh.watchers.seen()["news"] - self._news
        self.figures = {
            "seconds": round(took, 2),
            "cpu_seconds": round(busy, 4),
            "sent_by_coordinator": sent,
            "cpu": {name: round(share, 4) for name, share in shares.items()},
            "rss_mb": {name: round(size / 2**20, 1) for name, size in sizes.items()},
            "bytes_per_second": {
                "loopback": round((loopback_bytes() - self._sent) / took),
                "to_each_watcher": round(watched / took / self._num_watchers),
                "to_each_router": round(
                    (received["router"] - self._bytes["router"]) / took / len(self._mesh.routers)
                ),
            },
            "news_per_second": round(news / took / self._num_watchers, 1),
        }

    def _processes(self) -> dict[str, list[psutil.Process]]:
        mesh = self._mesh
        return {
            "coordinator": [mesh.coordinator.process],
            "router": [each.process for each in mesh.routers],
            "watchers": [mesh.watchers.process],
            "instances": [each.process for each in mesh.crowds],
        }

    def _cpu_times(self) -> dict[str, float]:
        return {
            name: sum(sum(each.cpu_times()[:2]) for each in processes)
            for name, processes in self._processes().items()
        }


def loopback_bytes() -> int:
    return int(psutil.net_io_counters(pernic=True)["lo"].bytes_recv)


def bytes_sent(port: int) -> int:
    """Bytes that a process has sent over the open connections of its port."""
    listed = subprocess.run(
        ["ss", "-tinH", "sport", "=", f":{port}"], capture_output=True, text=True, check=True
    ).stdout
    return sum(map(int, re.findall(r"bytes_sent:(\d+)", listed)))


def bytes_of(mesh: Mesh) -> dict[str, int]:
    """Bytes that the router and the watchers have received from the coordinator's port, by ``ss``."""
    listed = subprocess.run(
        ["ss", "-tinpH", "dport", "=", f":{mesh.port}"], capture_output=True, text=True, check=True
    ).stdout
    found = {"router": 0, "watchers": 0}
    for head, facts in zip(*[iter(listed.splitlines())] * 2, strict=False):
        for name, child in (*(("router", each) for each in mesh.routers), ("watchers", mesh.watchers)):
            if f"pid={child.popen.pid}," in head and (number := re.search(r"bytes_received:(\d+)", facts)):
                found[name] += int(number[1])
    return found


def measure(args: argparse.Namespace, mesh: Mesh) -> dict[str, Any]:
    phases: dict[str, Any] = {}
    total = args.instances

    def all_ready(seen: dict[str, Any]) -> bool:
        return bool(seen["ready"] >= total * 0.999 and seen["complete"])

    with Phase(mesh, args.watchers) as phase:
        began = time.monotonic()
        mesh.command(lambda number: f"join {mesh.share(number)}")
        mesh.wait(lambda seen: seen["members"] == total)
        joined = time.monotonic()
        mesh.command(lambda _: "ready")
        mesh.wait(all_ready)
    phases["join"] = {
        "registered_seconds": round(joined - began, 2), "ready_seconds": round(time.monotonic() - joined, 2),
        **phase.figures,
    }  # fmt: skip
    time.sleep(2)
    with Phase(mesh, args.watchers) as phase:
        time.sleep(args.seconds)
    phases["steady"] = phase.figures
    rate = total * args.churn / len(mesh.crowds)
    mesh.command(lambda _: f"churn {rate}")
    time.sleep(1)
    with Phase(mesh, args.watchers) as phase:
        time.sleep(args.seconds)
    phases["churn"] = phase.figures
    mesh.command(lambda _: "churn 0")
    mesh.wait(all_ready)
    before = {series for each in (*mesh.routers, mesh.watchers) for series in each.seen()["series"]}
    mesh.restart_coordinator()
    with Phase(mesh, args.watchers) as phase:
        mesh.wait(lambda seen: before.isdisjoint(seen["series"]) and all_ready(seen))
    phases["restart"] = phase.figures
    return phases


def measure_groups(args: argparse.Namespace, mesh: Mesh) -> dict[str, Any]:
    """Phases of a mesh whose experts are spread."""
    phases: dict[str, Any] = {}

    def all_ready(seen: dict[str, Any]) -> bool:
        return bool(seen["members"] == seen["ready"] == args.instances and seen["complete"])

    def is_done(*commands: str, name: str) -> None:
        with Phase(mesh, args.watchers) as phase:
            for each in commands:
                mesh.command(partial(_same, each))
        phases[name] = phase.figures

    mesh.command(lambda number: f"join {mesh.share(number)}")
    is_done("ready", "settle", name="form")
    mesh.wait(all_ready)
    time.sleep(2)
    with Phase(mesh, args.watchers) as phase:
        time.sleep(args.seconds)
    phases["steady"] = phase.figures
    is_done("lose", name="loss")
    is_done("join 1", "ready", "settle", name="grow")
    mesh.wait(all_ready)
    before = {series for each in (*mesh.routers, mesh.watchers) for series in each.seen()["series"]}
    mesh.restart_coordinator()
    with Phase(mesh, args.watchers) as phase:
        mesh.wait(lambda seen: before.isdisjoint(seen["series"]) and all_ready(seen))
    phases["restart"] = phase.figures
    return phases


def _same(text: str, _: int) -> str:
    """A command that is the same for each process."""
    return text


def missed_by_groups(results: dict[int, dict[str, Any]]) -> list[str]:
    """Changes of groups whose cost for each member grows with the mesh."""
    smallest, largest = min(results), max(results)
    found = []
    for name in ("form", "loss", "grow"):
        few, many = (results[size][name]["cpu_seconds"] / size for size in (smallest, largest))
        if many > MOST_GROWTH * few:
            found.append(
                f"{name}: {many * 1e6:.0f} us for each of {largest} members, {few * 1e6:.0f} of {smallest}"
            )
    return found


def report(name: str, phase: dict[str, Any]) -> str:
    size, memory = phase["bytes_per_second"], phase["rss_mb"]
    shares = ", ".join(f"{who} {share:.1%}" for who, share in phase["cpu"].items())
    return (
        f"{name:8} {phase['seconds']:6.1f} s  CPU {shares}; coordinator {memory['coordinator']:.0f} MB, "
        f"router {memory['router']:.0f} MB; bytes/s: {size['loopback']:,} in all, "
        f"{size['to_each_watcher']:,} to a watcher; {phase['news_per_second']}/s news"
    )


def missed(phases: dict[str, Any], instances: int) -> list[str]:
    """Limits that were not kept; those of larger meshes are not set."""
    if instances > LIMITS_HOLD_FOR:
        return []
    found = [
        f"{name}: {who} {phases[name]['cpu'][who]:.1%} of a core, at most {most:.0%}"
        for name, limits in LIMITS.items()
        for who, most in limits.items()
        if phases[name]["cpu"][who] > most
    ]
    ready = phases["join"]["ready_seconds"]
    return found + ([f"ready after {ready:.1f} s"] if ready > MOST_READY_SECONDS else [])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Scale of a coordinator.", epilog="Needs `ss` of iproute2.")
    parser.add_argument("--instances", type=int, nargs="+", default=[1024])
    parser.add_argument("--routers", type=int, default=1, help="each with a connection to every instance")
    parser.add_argument(
        "--watchers", type=int, default=7, help="beside the routers, without such connections"
    )
    parser.add_argument("--spread", action="store_true", help="experts over the instances, in groups")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the steady phase, and of churn")
    parser.add_argument("--churn", type=float, default=0.01, help="share of instances that leave each second")
    parser.add_argument("--keys", action=argparse.BooleanOptionalAction, default=True, help="with a mesh key")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args(argv)
    if args.spread and max(args.instances) > INSTANCES_PER_PROCESS:
        parser.error(f"--spread has at most {INSTANCES_PER_PROCESS} instances, those of one process")
    results, problems = {}, []
    for instances in args.instances:
        with tempfile.TemporaryDirectory() as folder:
            one = argparse.Namespace(**{**vars(args), "instances": instances})
            mesh = Mesh(one, folder)
            try:
                results[instances] = (measure_groups if args.spread else measure)(one, mesh)
            finally:
                mesh.end()
        if args.spread:
            print(f"{instances} instances with spread experts")
            for name in ("form", "loss", "grow"):
                phase = results[instances][name]
                sent = phase["sent_by_coordinator"] / 1e6
                print(f"  {name:8} {phase['cpu_seconds']:.3f} s of CPU, {sent:.2f} MB sent")
        else:
            join = results[instances]["join"]
            print(
                f"{instances} instances: registered after {join['registered_seconds']} s, "
                f"ready {join['ready_seconds']} s after that"
            )
        for name, phase in results[instances].items():
            print("  " + report(name, phase), flush=True)
        if not args.spread:
            problems += missed(results[instances], instances)
    if args.spread:
        problems += missed_by_groups(results)
    if args.output_json:
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        args.output_json.write_text(json.dumps(results, indent=2) + "\n")
    for problem in problems:
        print(f"missed: {problem}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
