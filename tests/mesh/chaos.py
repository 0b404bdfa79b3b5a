"""``python -m tests.mesh.chaos --seed 1 --seconds 120``: everything happens to a mesh with spread experts.

While streams run, instances are killed, stopped for a while, drained and started, one or two at a time, and the
coordinator is killed; some clients leave in the middle. Each stream that is not given up must have the token ids
that it has in an undisturbed mesh, without any error; at the end the mesh must come to rest, and hold nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import openai
import psutil

from coordinator.messages import Member, State
from tests.mesh.harness import wait_until
from tests.mesh.spread_mesh import SpreadMesh
from tests.mesh.test_clients import assert_idle
from tests.mesh.test_loss import crowd, stream

NUM_PROMPTS = 24
CANCELLED = 0.15
"""Share of the streams whose client leaves."""
PATIENCE = 90.0
"""Seconds within which any stream ends, whatever happens."""


class Clients:
    """Streams, one after another, held against the truth."""

    def __init__(self, mesh: SpreadMesh, truth: list[list[int]], count: int, seed: int) -> None:
        self._mesh, self._truth, self._count = mesh, truth, count
        self._rng = random.Random(seed)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(2 * PATIENCE)
        if self._thread.is_alive():
            self.problems.append("streams did not end")

    async def _run(self) -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{self._mesh.url}/v1", api_key="none", max_retries=0
        ) as client:
            await asyncio.gather(*(self._client(client) for _ in range(self._count)))

    async def _client(self, client: openai.AsyncOpenAI) -> None:
        while not self._stopped.is_set():
            index = self._rng.randrange(len(self._truth))
            leaves = self._rng.random() < CANCELLED
            patience = self._rng.uniform(0.05, 1.5) if leaves else PATIENCE
            try:
                ids = await asyncio.wait_for(stream(client, index), patience)
            except TimeoutError:
                self.outcomes["cancelled" if leaves else "late"] += 1
                if not leaves:
                    self.problems.append(f"stream {index} took more than {PATIENCE:.0f} s")
            except openai.OpenAIError as error:
                self.outcomes["failed"] += 1
                self.problems.append(f"stream {index}: {error!r}")
            else:
                right = ids == self._truth[index]
                self.outcomes["right" if right else "wrong"] += 1
                if not right:
                    self.problems.append(f"stream {index}: {ids} instead of {self._truth[index]}")


class Chaos:
    """What happens to the instances."""

    def __init__(self, mesh: SpreadMesh, seed: int) -> None:
        self._mesh = mesh
        self._rng = random.Random(seed)
        self._began = time.monotonic()
        self._stopped: dict[int, float] = {}
        """Until when which process is stopped."""
        self.events: collections.Counter[str] = collections.Counter()

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(self._rng.uniform(0.2, 3.0))
            self._resume()
            self._something()
        self._resume(everything=True)

    def _something(self) -> None:
        members = self._mesh.view().members
        ready = [m for m in members if m.state is State.READY and m.pid not in self._stopped]
        rank = self._rng.choice([m.rank for m in ready]) if ready else None
        if len(members) < self._mesh.size + (self._rng.random() < 0.3) and self._rng.random() < 0.7:
            self._say("join")
            self._mesh.join_one()
        elif self._rng.random() < 0.1:
            self._say("kill the coordinator")
            self._mesh.command.child("Coordinator").send_signal(signal.SIGKILL)
        elif len(ready) > 1 and rank is not None:
            self._harm(ready, rank)

    def _harm(self, ready: list[Member], rank: int) -> None:
        victim = next(m for m in ready if m.rank == rank)
        match self._rng.choice(["kill", "kill", "kill two", "stop", "drain"]):
            case "kill two" if len(ready) > 2:
                other = next(m for m in ready if m.rank != rank)
                self._say(f"kill {rank} and {other.rank}")
                self._signal(victim, signal.SIGKILL)
                self._signal(other, signal.SIGKILL)
            case "stop":
                pause = self._rng.choice([0.1, 1.0, 4.0, 8.0])
                self._say(f"stop {rank} for {pause} s")
                self._signal(victim, signal.SIGSTOP)
                self._stopped[victim.pid] = time.monotonic() + pause
            case "drain":
                self._say(f"drain {rank}")
                self._signal(victim, signal.SIGTERM)
            case _:
                self._say(f"kill {rank}")
                self._signal(victim, signal.SIGKILL)

    def _resume(self, everything: bool = False) -> None:
        for pid, until in list(self._stopped.items()):
            if everything or time.monotonic() >= until:
                del self._stopped[pid]
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).resume()

    def _signal(self, member: Member, number: signal.Signals) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(member.pid).send_signal(number)

    def _say(self, event: str) -> None:
        self.events[event if "coordinator" in event else event.split()[0]] += 1
        print(f"{time.monotonic() - self._began:6.1f} s  {event}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--instances", type=int, default=3)
    parser.add_argument("--backend", default="auto", help="--all2all-backend of the mesh")
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--logs", type=Path, help="directory for the logs, kept (default: a temporary one)")
    asked = parser.parse_args()
    print(f"seed {asked.seed}")
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        directory = asked.logs or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        mesh = SpreadMesh(directory, stack, asked.instances, apart=True, backend=asked.backend)
        truth = asyncio.run(crowd(mesh, count=NUM_PROMPTS))
        clients, chaos = Clients(mesh, truth, asked.streams, asked.seed), Chaos(mesh, asked.seed)
        clients.start()
        chaos.run(asked.seconds)
        for _ in range(asked.instances - len(mesh.view().members)):
            mesh.join_one()
        wait_until(lambda: len(mesh.ready()) >= asked.instances, 90, "the mesh settles")
        clients.stop()
        assert_idle(mesh)
        problems = clients.problems + [
            f"{command.log_file.name}: {line}"
            for command in mesh.commands
            for line in command.log.splitlines()
            if "Traceback" in line
        ]
        print(dict(chaos.events), dict(clients.outcomes), f"epoch {mesh.view().epoch}")
    for problem in problems[:20]:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
