"""Pauses of streams whose instance is killed, and what each millisecond goes to.

    python3 -m examples.benchmarks.gpu.death_pauses --output build/deaths.json
    python3 -m examples.benchmarks.gpu.death_pauses --device cpu --flags=-ep --output build/deaths.json

Starts ``serve`` on the shipped model and runs the same requests twice. The second time one instance gets
SIGKILL while they stream. Beside each stream's pause stand the time until the kernel was done with the killed
process, and the times that the instances logged. Each fact is written when it is known.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from examples.benchmarks.gpu.whole_files import write_whole

ROOT = Path(__file__).parents[3]

KILL_AT = 50
"""Tokens that each stream of the victim has when it is killed."""
LOOK_INTERVAL = 0.02
"""Seconds between two looks at the streams."""
END_TIMEOUT = 20.0
"""Seconds after which processes that should end are killed."""
LOGGED = (
    "recovered in epoch",
    "are back after",
    "began in a step",
    "numerics class",
    "CUDA graphs:",
    "attention:",
)
"""Lines of the log that are kept."""


@dataclass
class Stream:
    """One request, read in a thread of its own."""

    number: int
    name: str
    tokens: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each token came."""
    problem: str = ""

    def run(self, port: int) -> None:
        body = {
            "prompt": f"{self.number} times in May, she", "max_tokens": self.tokens, "logprobs": 0,
            "temperature": 0.7 * (self.number % 2), "seed": self.number, "stream": True, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            headers = {"Content-Type": "application/json", "X-Request-Id": self.name}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:])["choices"][0])
        except (OSError, http.client.HTTPException, KeyError, ValueError) as error:
            self.problem = repr(error)
        finally:
            connection.close()
        if not self.problem and len(self.ids) != self.tokens:
            self.problem = f"ended after {len(self.ids)} of {self.tokens} tokens"

    def _take(self, choice: dict[str, Any]) -> None:
        found = choice["token_ids"]
        self.ids += found
        self.times += [time.monotonic()] * len(found)
        self.logprobs += map(float.hex, (choice["logprobs"] or {}).get("token_logprobs") or ())

    def longest_pause(self, since: float) -> dict[str, float]:
        """Milliseconds of the longest pause that ended after a time, and when it ended."""
        pauses = [(after - before, after) for before, after in zip(self.times, self.times[1:], strict=False)]
        pause, end = max((each for each in pauses if each[1] > since), default=(0.0, since))
        return {"pause_ms": 1000 * pause, "until_ms": 1000 * (end - since)}


class Mesh:
    """``serve`` with its log and its admin API."""

    def __init__(self, flags: list[str], log: Path) -> None:
        self.port, self.admin, rpc = (free_port() for _ in range(3))
        ports = ["--port", self.port, "--admin-port", self.admin, "-dpp", rpc]
        command = [sys.executable, "-P", "-m", "router.launcher.serve", *flags, *map(str, ports)]
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": paths}
            )

    def wait(self, size: int, deadline: float) -> None:
        """Until all instances serve.

        Raises:
            ValueError: they do not.
        """
        while f"{size} instances ready" not in (log := self._log.read_text(errors="replace")):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise ValueError(f"serve did not start: {log[-2000:]}")
            time.sleep(0.1)

    def ask(self, path: str) -> Any:
        """``GET /admin/PATH``."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/admin/{path}", timeout=10) as answer:
            return json.load(answer)

    def lines(self) -> list[str]:
        found = self._log.read_text(errors="replace").splitlines()
        return [line[:400] for line in found if any(each in line for each in LOGGED)]

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def milliseconds_of_end(descriptor: int, seconds: float) -> float | None:
    """Milliseconds until a killed process has ended, by its pidfd; None: longer than ``seconds``."""
    began = time.monotonic()
    ready, _, _ = select.select([descriptor], [], [], seconds)
    os.close(descriptor)
    return 1000 * (time.monotonic() - began) if ready else None


def generate(
    mesh: Mesh, turn: str, tokens: int, count: int, kills: bool
) -> tuple[list[Stream], dict[str, Any]]:
    """All streams, to their ends; ``kills``: the instance with most of them dies."""
    streams = [Stream(number, f"{turn}-{number}", tokens) for number in range(count)]
    threads = [threading.Thread(target=each.run, args=(mesh.port,)) for each in streams]
    for thread in threads:
        thread.start()
    killed: dict[str, Any] = {}
    while any(thread.is_alive() for thread in threads):
        if kills and not killed and min(len(each.ids) for each in streams) >= KILL_AT:
            ranks = {each["request_id"]: each["rank"] for each in mesh.ask("requests")["requests"]}
            pids = {each["rank"]: each["pid"] for each in mesh.ask("world")["instances"]}
            killed["ranks"] = [ranks.get(f"cmpl-{each.name}") for each in streams]
            running = [rank for rank in killed["ranks"] if rank is not None]
            killed["victim"] = victim = max(pids, key=running.count)
            descriptor = os.pidfd_open(pids[victim])
            killed["at"] = time.monotonic()
            os.kill(pids[victim], signal.SIGKILL)
            killed["process_ended_ms"] = milliseconds_of_end(descriptor, END_TIMEOUT)
        time.sleep(LOOK_INTERVAL)
    return streams, killed


def compare(expected: list[Stream], found: list[Stream], killed: dict[str, Any]) -> list[dict[str, Any]]:
    """Result of each stream: its instance, its pause, the first token that differs."""
    rows = []
    for before, after, rank in zip(expected, found, killed["ranks"], strict=True):
        pairs = zip(before.ids, after.ids, strict=False)
        first = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
        equal_logprobs = before.logprobs == after.logprobs
        rows.append(
            {
                "rank": rank,
                "first_other_token": first,
                "equal_logprobs": equal_logprobs,
                "problem": after.problem,
            }
            | after.longest_pause(killed["at"])
        )
    return rows


def measure(options: argparse.Namespace) -> int:
    facts: dict[str, Any] = {}

    def add(**found: Any) -> None:
        facts.update(found)
        write_whole(options.output, json.dumps(facts, indent=1))

    flags = [
        "-dp",
        str(options.instances),
        "--dtype",
        options.dtype,
        "--device",
        options.device,
        *options.flags,
    ]
    add(flags=flags)
    began = time.monotonic()
    mesh = Mesh(flags, options.output.with_suffix(".serve.log"))
    try:
        mesh.wait(options.instances, began + options.seconds)
        add(ready_s=time.monotonic() - began)
        expected, _ = generate(mesh, "undisturbed", options.tokens, options.streams, kills=False)
        usual = [each.longest_pause(0.0)["pause_ms"] for each in expected]
        add(undisturbed_pauses_ms=usual, problems=[each.problem for each in expected if each.problem])
        found, killed = generate(mesh, "killed", options.tokens, options.streams, kills=True)
        add(lines=mesh.lines())
        if not killed:
            add(problems=["all streams ended before an instance was killed"])
            return 1
        add(
            victim=killed["victim"],
            process_ended_ms=killed["process_ended_ms"],
            streams=compare(expected, found, killed),
        )
    finally:
        mesh.stop()
        add(lines=mesh.lines())
    problems = [*facts["problems"], *(each["problem"] for each in facts["streams"] if each["problem"])]
    pauses = [each["pause_ms"] for each in facts["streams"] if each["rank"] == facts["victim"]]
    others = [each["pause_ms"] for each in facts["streams"] if each["rank"] != facts["victim"]]
    print(f"the killed process ended after {facts['process_ended_ms']} ms")
    print(f"pauses in ms: its streams {[*map(round, pauses)]}, others {[*map(round, others)]}")
    print(f"first other tokens: {[each['first_other_token'] for each in facts['streams']]}")
    print("\n".join([*problems, *facts["lines"]]))
    return 1 if problems else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--instances", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="(default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--flags", action="append", default=[], help="one more of serve, as --flags=-ep")
    parser.add_argument("--streams", type=int, default=6, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1000, help="of each answer (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="until all instances serve, at most")
    parser.add_argument("--output", type=Path, required=True)
    return measure(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
