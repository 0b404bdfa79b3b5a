"""``python -m tests.mesh.chaos --seed 1 --seconds 120``: everything happens to a mesh with spread experts.

While streams run (:mod:`tests.mesh.load`), instances are killed, stopped for a while, drained and started, one or
two at a time, and the coordinator is killed, alone or with an instance; some clients leave in the middle. Each
stream that is not given up must have the token ids that it has in an undisturbed mesh, without any error. At the
end the mesh must come to rest, and hold nothing; no process may have grown (:mod:`tests.mesh.rest`).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from coordinator.messages import Member, State
from tests.mesh.harness import wait_until
from tests.mesh.load import LONGEST, Load, body_of, undisturbed
from tests.mesh.rest import Growth, assert_at_rest
from tests.mesh.spread_mesh import SpreadMesh

NUM_BODIES = 32
CANCELLED = 0.15
"""Share of the streams whose client leaves."""
WARM_UP = 60.0
"""Seconds of service after which a process should not grow any more; a third of a short run."""
FLAGS = ("--dtype", "float32", "--num-gpu-blocks-override", "2000", "--max-num-seqs", "64")


class Chaos:
    """What happens to the instances."""

    def __init__(self, mesh: SpreadMesh, seed: int) -> None:
        self._mesh = mesh
        self._rng = random.Random(seed)
        self._began = time.monotonic()
        self._stopped: dict[int, float] = {}
        """Until when which process is stopped."""
        self.events: collections.Counter[str] = collections.Counter()

    def run(self, seconds: float, look: Callable[[], None]) -> None:
        """``look`` is called in between."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(self._rng.uniform(0.2, 3.0))
            look()
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
            self._kill_coordinator(ready)
        elif len(ready) > 1 and rank is not None:
            self._harm(ready, rank)

    def _kill_coordinator(self, ready: list[Member]) -> None:
        """Half the time together with an instance."""
        victim = self._rng.choice(ready) if len(ready) > 1 and self._rng.random() < 0.5 else None
        self._say("kill the coordinator" + (f" and {victim.rank}" if victim else ""))
        self._mesh.command.child("Coordinator").send_signal(signal.SIGKILL)
        if victim is not None:
            self._signal(victim, signal.SIGKILL)

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
        self.events["kill the coordinator" if "coordinator" in event else event.split()[0]] += 1
        print(f"{time.monotonic() - self._began:6.1f} s  {event}", flush=True)


def settle(mesh: SpreadMesh, size: int) -> None:
    """Let so many instances be ready. Who is a member now may be about to go, so it is looked at again."""
    for _ in range(3):
        for _ in range(size - len(mesh.view().members)):
            mesh.join_one()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: len(mesh.ready()) >= size, 10)
            return
    wait_until(lambda: len(mesh.ready()) >= size, 30, "the mesh settles")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--instances", type=int, default=3)
    parser.add_argument("--backend", default="auto", help="--all2all-backend of the mesh")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of a prompt at most")
    parser.add_argument("--logs", type=Path, help="directory for the logs, kept (default: a temporary one)")
    asked = parser.parse_args()
    print(f"seed {asked.seed}")
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        directory = asked.logs or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        mesh = SpreadMesh(directory, stack, asked.instances, apart=True, backend=asked.backend, flags=FLAGS)
        bodies = [body_of(number, longest=asked.longest) for number in range(NUM_BODIES)]
        truth = undisturbed(mesh.url, bodies, asked.streams)
        load = Load(mesh.url, truth, bodies, streams=asked.streams, leaves=CANCELLED, seed=asked.seed)
        chaos, growth = Chaos(mesh, asked.seed), Growth(min(WARM_UP, asked.seconds / 3))
        with load:
            chaos.run(asked.seconds, lambda: growth.look(mesh))
            settle(mesh, asked.instances)
        problems = load.problems + mesh.tracebacks()
        try:
            assert_at_rest(mesh)
        except AssertionError as error:
            problems.append(f"not at rest: {error}; {mesh.view()}")
        problems += growth.problems()
        print(dict(chaos.events), {str(verdict): count for verdict, count in load.verdicts.items()})
        print(f"epoch {mesh.view().epoch}; grown: {growth}")
    for problem in problems[:20]:
        print("PROBLEM:", problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
