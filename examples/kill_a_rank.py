#!/usr/bin/env python3
"""Kill an instance of a mesh while it streams, and see every stream go on.

    python examples/kill_a_rank.py
    python examples/kill_a_rank.py --record docs/images/kill_a_rank.svg
    sudo .venv/bin/python examples/kill_a_rank.py --namespaces

Starts ``serve -dp 3 -ep`` on the shipped model: its experts are spread over three instances, so that none can
compute a step alone. A few requests run twice, greedy ones and seeded samples: first undisturbed, then one of
the instances is killed (SIGKILL) in the middle. The token ids of both must be the same. ``--record`` writes
what the terminal showed as an animated SVG, or as an asciinema recording (.cast). With ``--namespaces`` the
last instance is on another host: two network namespaces with a link between them, a mesh key, and experts
over TCP.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from terminal_recording import Recording

sys.path.insert(0, str(Path(__file__).parents[1]))  # where this is not installed

from coordinator.rpc import keys
from examples.benchmarks.links import netns

OPENINGS = ["It is a truth universally acknowledged, that", "Elizabeth", "Mr. Darcy was", "My dear sister",
            "Lady Catherine", "The ball at Netherfield"]  # fmt: skip
NUM_TOKENS = 160
KILL_AT = 50
"""Tokens that each stream of the victim has when it is killed."""
FRAMES_PER_SECOND = 8
START_TIMEOUT = 120.0
WIDTH, TEXT_WIDTH = 100, 58


@dataclass
class Stream:
    """One request, read in a thread of its own."""

    opening: str
    seed: int
    name: str = ""
    ids: list[int] = field(default_factory=list)
    text: str = ""
    ranks: list[int] = field(default_factory=list)
    """Instances that it ran on, in order."""
    last_at: float = 0.0
    longest_pause: float = 0.0
    """Seconds."""
    problem: str = ""

    def run(self, port: int) -> None:
        body = {
            "prompt": self.opening, "max_tokens": NUM_TOKENS, "temperature": 0.7 * (self.seed % 2),
            "seed": self.seed, "stream": True, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        headers = {"Content-Type": "application/json", "X-Request-Id": self.name}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))
            if len(self.ids) != NUM_TOKENS:
                self.problem = f"ended after {len(self.ids)} of {NUM_TOKENS} tokens"
        except (OSError, http.client.HTTPException, KeyError) as error:
            self.problem = repr(error)
        finally:
            connection.close()

    def _take(self, chunk: dict[str, Any]) -> None:
        choice, now = chunk["choices"][0], time.monotonic()
        self.ids += choice["token_ids"]
        self.text += choice["text"]
        if self.last_at:
            self.longest_pause = max(self.longest_pause, now - self.last_at)
        self.last_at = now


class Mesh:
    """``serve``, with its admin API."""

    def __init__(self, log: Path, size: int, hosts: Sequence[netns.Namespace] = ()) -> None:
        """With two ``hosts``, the last instance is on the second one."""
        self.port, self.admin, rpc = (free_port() for _ in range(3))
        mesh = ["-dp", str(size), "-ep", "--dtype", "float32", "-dpp", str(rpc), "--restart"]
        self.command = f"serve -dp {size} -ep --dtype float32 --restart"
        self._log = log
        self._processes: list[subprocess.Popen[bytes]] = []
        if hosts:
            key = log.with_name("mesh.key")
            keys.write(keys.generate(), key)
            mesh += ["-dpa", hosts[0].address, "--mesh-key-file", str(key)]
            last = ["--headless", "-dpl", "1", "-dpr", str(size - 1)]
            self._start([*mesh, *last], log.with_name("other.log"), hosts[1].prefix)
            mesh += ["-dpl", str(size - 1)]
        self._start([*mesh, "--port", str(self.port), "--admin-port", str(self.admin)], log)
        self.size = size

    def _start(self, argv: list[str], log: Path, prefix: Sequence[str] = ()) -> None:
        command = [*prefix, sys.executable, "-P", "-m", "router.launcher.serve", *argv]
        with log.open("wb") as file:
            self._processes.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT))

    def wait(self) -> None:
        """Until all instances serve."""
        deadline = time.monotonic() + START_TIMEOUT
        while f"{self.size} instances ready" not in self._log.read_text():
            ended = any(process.poll() is not None for process in self._processes)
            if ended or time.monotonic() > deadline:
                sys.exit(f"serve did not start:\n{self._log.read_text()}")
            time.sleep(0.1)

    def ask(self, path: str) -> Any:
        """``GET /admin/PATH``."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/admin/{path}", timeout=10) as answer:
            return json.load(answer)

    def said(self, text: str) -> str:
        """The newest line of the log with this text."""
        found = [line for line in self._log.read_text().splitlines() if text in line]
        return found[-1] if found else ""

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def picture(streams: list[Stream], dead: int | None, lines: list[Text]) -> Group:
    """What the terminal shows: a line per stream, and what happened."""
    table = Table(box=None, padding=(0, 1), header_style="dim", width=WIDTH)
    for title, width in (("instance", 10), ("tokens", 7), ("pause", 8), ("text", TEXT_WIDTH)):
        table.add_column(title, width=width, no_wrap=True)
    for stream in streams:
        where = Text()
        for rank in stream.ranks:
            where += Text(" → " if where else "")
            where += Text(str(rank), style="strike red" if rank == dead else "bold green")
        tail = (stream.opening + stream.text).replace("\n", " ")[-TEXT_WIDTH:]
        waits = bool(stream.ranks) and stream.ranks[-1] == dead and len(stream.ids) < NUM_TOKENS
        pause = f"{1000 * stream.longest_pause:.0f} ms"
        table.add_row(where, str(len(stream.ids)), pause, Text(tail, style="yellow" if waits else ""))
    return Group(table, Text(), *lines)


def generate(mesh: Mesh, turn: str, act: Callable[[list[Stream]], None]) -> list[Stream]:
    """All streams, to their ends; ``act`` is called again and again meanwhile."""
    streams = [Stream(opening, seed, f"{turn}-{seed}") for seed, opening in enumerate(OPENINGS)]
    threads = [threading.Thread(target=stream.run, args=(mesh.port,)) for stream in streams]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        ranks = {request["request_id"]: request["rank"] for request in mesh.ask("requests")["requests"]}
        for stream in streams:
            rank = ranks.get(f"cmpl-{stream.name}")
            if rank is not None and stream.ranks[-1:] != [rank]:
                stream.ranks.append(rank)
        act(streams)
        time.sleep(1 / FRAMES_PER_SECOND)
    return streams


def run(mesh: Mesh, victim: int, live: Live, recording: Recording) -> int:
    """Both turns, of which the second is recorded; the exit status."""

    def show(streams: list[Stream]) -> None:
        live.update(group := picture(streams, dead, said), refresh=True)
        if turn == "killed":
            recording.add(group)

    dead: int | None = None
    said = [Text(f"$ {mesh.command}", style="bold"), Text("First, nothing happens to them.")]
    expected = generate(mesh, turn := "undisturbed", show)
    said[1] = Text("Once more. Now watch.")

    def kill_when_busy(streams: list[Stream]) -> None:
        nonlocal dead
        mine = [stream for stream in streams if stream.ranks == [victim]]
        if dead is None and mine and min(len(stream.ids) for stream in mine) >= KILL_AT:
            instances = {each["rank"]: each["pid"] for each in mesh.ask("world")["instances"]}
            os.kill(instances[victim], signal.SIGKILL)
            dead = victim
            said.append(Text(f"$ kill -9 {instances[victim]}   # instance {victim}", style="bold red"))
        if dead is not None and len(said) == 3 and (line := mesh.said("recovered in epoch")):
            said.append(Text("the others " + line[line.index("recovered in") :].partition(":")[0]))
        if dead is not None and len(said) == 4 and (line := mesh.said("are back after")):
            said.append(Text(line[line.index("] ") + 2 :].partition(":")[0]))
        show(streams)

    found = generate(mesh, turn := "killed", kill_when_busy)
    problems = [stream.problem for stream in found if stream.problem]
    same = [stream.ids for stream in found] == [stream.ids for stream in expected]
    if dead is None or problems or not same:
        said.append(
            Text(f"NOT all right: {problems or 'other tokens' if dead is not None else 'nobody died'}")
        )
    else:
        moved = sum(len(stream.ranks) > 1 for stream in found)
        said.append(
            Text(
                f"{moved} of {len(found)} streams moved; all {len(found) * NUM_TOKENS} token ids are those "
                "of the undisturbed run.",
                style="bold green",
            )
        )
    show(found)
    return 0 if said[-1].style else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--victim", type=int, default=1, help="rank to kill (default: %(default)s)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write a recording: .svg or .cast")
    netns.add_flag(parser)
    args = parser.parse_args()
    if not 0 <= args.victim < args.instances or args.instances < 2:
        parser.error("--victim must be one of at least two instances")
    if args.record is not None and args.record.suffix not in (".svg", ".cast"):
        parser.error("--record writes .svg or .cast")
    if args.namespaces is not None and (status := netns.rerun_inside(args.namespaces)) is not None:
        return status
    console = Console(width=WIDTH)
    recording = Recording(WIDTH)
    with tempfile.TemporaryDirectory() as directory:
        hosts = netns.ends_here() if args.namespaces is not None else ()
        mesh = Mesh(Path(directory) / "serve.log", args.instances, hosts)
        try:
            with console.status(f"{mesh.command} starts"):
                mesh.wait()
            with Live(console=console, auto_refresh=False) as live:
                status = run(mesh, args.victim, live, recording)
        finally:
            mesh.stop()
    if args.record is not None:
        recording.write(args.record)
        console.print(f"recorded in {args.record}")
    return status


if __name__ == "__main__":
    sys.exit(main())
