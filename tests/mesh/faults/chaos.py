"""``python -m tests.mesh.faults.chaos --seed 1 --seconds 120``: everything happens to a mesh with spread experts.

While streams run (:mod:`tests.mesh.faults.load`), instances are killed, stopped for a while, drained and started, one or
two at a time, and the coordinator is killed, alone or with an instance; some clients leave in the middle. Each
stream that is not given up must have the token ids and log-probabilities that it has in an undisturbed mesh, to
the bit, without any error. At the end the mesh must come to rest, and hold nothing; no process may have grown
(:mod:`tests.mesh.faults.rest`).

With ``--transfers`` instances share no experts, so KV blocks travel: drained instances hand their requests over at once,
and prompts recur.

With ``--eplb`` a further load shifts from experts to experts, and experts are wished to move all the time.

At least one instance is always left alone, as nobody can promise anything where all die at once.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from coordinator.messages import Member, State, View
from engine.config import SHIPPED_MODEL
from examples.benchmarks.links import netns
from tests.mesh.faults.load import LONGEST, Load, Verdict, body_of, undisturbed
from tests.mesh.faults.rest import Growth, assert_at_rest
from tests.mesh.faults.skewed import COPIES, Changes, flags_of, moving
from tests.mesh.harness import free_port, wait_until
from tests.mesh.spread_mesh import SpreadMesh

NUM_BODIES = 32
HARMS = ("kill", "kill", "kill two", "stop", "drain", "kill the coordinator")
"""What is done to instances, each before any is repeated.

The order is drawn anew each time, so a short run has every kind, too.
"""
KINDS = {"join", "kill", "stop", "drain", "kill the coordinator"}
"""What is counted of all that happens."""
CANCELLED = 0.15
"""Share of the streams whose client leaves."""
WARM_UP = 60.0
"""Seconds of service after which a process should not grow any more.

A third of a short run.
"""
FLAGS = ("--dtype", "float32", "--num-gpu-blocks-override", "2000", "--max-num-seqs", "64")
ENGINE_FILLS = 200 * 2**20
"""Bytes by which an instance may grow after its warm-up.

Pages of the KV cache (94 MiB with these flags) count from their first use on. An instance takes over the experts of
dead ones (42 MiB, kernels' copies included). Buffers grow with the largest step. Seen on a busy machine: 172 MiB.
"""
SHARES = 64
"""Requests in a row that may share cached prompts, with ``--transfers``."""
BACK = re.compile(
    r"(\d+) requests of instance \d+ are back after .*: (\d+) tokens computed again, (\d+) were"
)
SAY_INTERVAL = 60.0
"""Seconds between two lines on how the streams fare."""


class Chaos:
    """What happens to the instances."""

    def __init__(self, mesh: SpreadMesh, seed: int) -> None:
        self._mesh = mesh
        self._rng = random.Random(seed)
        self.began = time.monotonic()
        self._deck: list[str] = []
        self._stopped: dict[str, tuple[int, float]] = {}
        """Which instances are stopped: the process, and until when."""
        self._doomed: set[str] = set()
        """Instances that were killed or sent away.

        The view may still show them, for a while on a busy machine.
        """
        self.events: collections.Counter[str] = collections.Counter()
        self.story: list[str] = []
        """All that happened, and when."""
        self.problems: list[str] = []

    def run(self, seconds: float, look: Callable[[View], None]) -> None:
        """Do harm for ``seconds``, and call ``look`` in between.

        Until everything has been done once it goes on, for as long again.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until + seconds * (self.events.keys() < KINDS):
            time.sleep(self._rng.uniform(0.2, 3.0))
            self._resume()
            try:
                view = self._mesh.view()
                look(view)
                self._something(view)
            except (
                TimeoutError,
                AssertionError,
            ) as error:  # no coordinator; what was looked for is not there
                self.problems.append(f"{self._now()}  {error!r}")
        self._resume(everything=True)

    def _something(self, view: View) -> None:
        members = [member for member in view.members if member.instance not in self._doomed]
        ready = [m for m in members if m.state is State.READY and m.instance not in self._stopped]
        rank = self._rng.choice([m.rank for m in ready]) if ready else None
        if len(members) < self._mesh.size + (self._rng.random() < 0.3) and self._rng.random() < 0.7:
            self._say("join")
            self._mesh.join_one()
        elif len(ready) > 1 and rank is not None:
            self._harm(ready, rank)
        elif self._rng.random() < 0.1:
            self._kill_coordinator(ready)

    def _kill_coordinator(self, ready: list[Member]) -> None:
        """Kill the coordinator, half the time together with an instance."""
        victim = self._rng.choice(ready) if len(ready) > 1 and self._rng.random() < 0.5 else None
        self._say("kill the coordinator" + (f" and {victim.rank}" if victim else ""))
        self._mesh.command.child("Coordinator").send_signal(signal.SIGKILL)
        if victim is not None:
            self._end(victim, signal.SIGKILL)

    def _next_harm(self) -> str:
        self._deck = self._deck or self._rng.sample(HARMS, len(HARMS))
        return self._deck.pop()

    def _harm(self, ready: list[Member], rank: int) -> None:
        victim = next(m for m in ready if m.rank == rank)
        match self._next_harm():
            case "kill the coordinator":
                self._kill_coordinator(ready)
            case "kill two" if len(ready) > 2:
                other = next(m for m in ready if m.rank != rank)
                self._say(f"kill {rank} and {other.rank}")
                self._end(victim, signal.SIGKILL)
                self._end(other, signal.SIGKILL)
            case "stop":
                pause = self._rng.choice([0.1, 1.0, 4.0, 8.0])
                self._say(f"stop {rank} for {pause} s")
                self._signal(victim, signal.SIGSTOP)
                self._stopped[victim.instance] = victim.pid, time.monotonic() + pause
            case "drain":
                self._say(f"drain {rank}")
                self._end(victim, signal.SIGTERM)
            case _:
                self._say(f"kill {rank}")
                self._end(victim, signal.SIGKILL)

    def _resume(self, everything: bool = False) -> None:
        for instance, (pid, until) in list(self._stopped.items()):
            if everything or time.monotonic() >= until:
                del self._stopped[instance]
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).resume()

    def _end(self, member: Member, number: signal.Signals) -> None:
        self._doomed.add(member.instance)
        self._signal(member, number)

    def _signal(self, member: Member, number: signal.Signals) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(member.pid).send_signal(number)

    def _now(self) -> str:
        return f"{time.monotonic() - self.began:6.1f} s"

    def _say(self, event: str) -> None:
        self.events["kill the coordinator" if "coordinator" in event else event.split()[0]] += 1
        self.story.append(f"{self._now()}  {event}")
        print(self.story[-1], flush=True)


class Watch:
    """Looks at the mesh between two events."""

    def __init__(self, mesh: SpreadMesh, load: Load, growth: Growth) -> None:
        self._mesh, self._load, self._growth = mesh, load, growth
        self._began = self._said_at = time.monotonic()
        self.changes = Changes()
        self.minutes: list[dict[str, Any]] = []
        """State of the mesh and the streams every ``SAY_INTERVAL``."""

    def look(self, view: View) -> None:
        self._mesh.forget_ended()
        self._growth.look(self._mesh, view)
        if view.balance is not None:
            self.changes.look(msgspec.structs.asdict(view.balance))
        if time.monotonic() - self._said_at > SAY_INTERVAL:
            self._said_at = time.monotonic()
            gap = max(self._load.gaps, default=(0.0, 0.0))[0]
            print(f"          {counts(self._load)}, longest gap {gap:.1f} s, epoch {view.epoch}", flush=True)
            self.minutes.append(
                {
                    "at": round(self._said_at - self._began, 1),
                    "requests": counts(self._load),
                    "epoch": view.epoch,
                    "mebibytes": self._growth.memory(),
                }
            )


def counts(load: Load) -> dict[str, int]:
    """How the requests ended, all ways included."""
    return {verdict.value: load.verdicts[verdict] for verdict in Verdict}


def moved(log: str) -> dict[str, int]:
    """Requests that had to go on at another instance, by their router's log."""
    found = [map(int, each) for each in BACK.findall(log)]
    sums = [sum(each) for each in zip(*found, strict=True)] or [0, 0, 0]
    return dict(zip(("requests", "computed_again", "cached"), sums, strict=True))


def settle(mesh: SpreadMesh, size: int) -> None:
    """Wait until ``size`` instances are ready.

    A member now may be about to leave, so the mesh is looked at again.
    """
    for _ in range(3):
        for _ in range(size - len(mesh.view().members)):
            mesh.join_one()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: len(mesh.ready()) >= size, 10)
            return
    wait_until(lambda: len(mesh.ready()) >= size, 30, "the mesh settles")


def run(asked: argparse.Namespace, directory: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Run chaos as asked, and return the report."""
    hosts = netns.ends_here() if asked.namespaces else None
    admin = free_port()
    flags = (*FLAGS, *(flags_of(admin) if asked.eplb else ()))
    mesh = SpreadMesh(
        directory,
        stack,
        asked.instances,
        apart=True,
        backend=asked.backend,
        model=asked.model,
        how=(
            "--no-enable-expert-parallel" if asked.transfers else "-ep",
            "--served-model-name",
            SHIPPED_MODEL,
        ),
        flags=("--dtype", "bfloat16", *flags[2:]) if asked.transfers else flags,
        each=("--drain-timeout", "0") if asked.transfers else (),
        hosts=hosts,
    )
    bodies = [body_of(number, longest=asked.longest, logprobs=True) for number in range(NUM_BODIES)]
    truth = undisturbed(mesh.url, bodies, asked.streams)
    load = Load(
        mesh.url,
        truth,
        bodies,
        streams=asked.streams,
        leaves=CANCELLED,
        seed=asked.seed,
        keeps=False,
        shares=SHARES if asked.transfers else 1,
    )
    growth = Growth(min(WARM_UP, asked.seconds / 3), fills={"Engine": ENGINE_FILLS})
    watch, chaos = Watch(mesh, load, growth), Chaos(mesh, asked.seed)
    problems = chaos.problems
    moves = moving(mesh.url, admin, shaken=True) if asked.eplb else contextlib.nullcontext()
    with load, moves:
        chaos.run(asked.seconds, watch.look)
        try:
            settle(mesh, asked.instances)
        except (AssertionError, TimeoutError) as error:
            problems.append(f"the mesh does not settle: {error}")
    problems += [*mesh.tracebacks(), *load.problems]  # there may be many of the last kind, of one cause
    try:
        assert_at_rest(mesh, COPIES if asked.eplb else None, shares_experts=not asked.transfers)
    except (AssertionError, OSError) as error:
        problems.append(f"not at rest: {error}; {mesh.view()}")
    problems += growth.problems()
    return {
        "seed": asked.seed,
        "seconds": round(time.monotonic() - chaos.began, 1),
        "instances": asked.instances,
        "model": asked.model,
        "link": str(asked.namespaces or ""),
        "streams": asked.streams,
        "events": dict(chaos.events),
        "requests": counts(load),
        "moved": moved(mesh.log),
        "rebalancings": watch.changes.totals,
        "tokens": load.tokens,
        "longest_client_gaps": [
            {"seconds": round(gap, 2), "until": round(at - chaos.began, 1)}
            for gap, at in sorted(load.gaps, reverse=True)
        ],
        "epoch": mesh.view().epoch,
        "processes": growth.table(),
        "problems": problems,
        "minutes": watch.minutes,
        "story": chaos.story,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--instances", type=int, default=3)
    parser.add_argument("--model", default=SHIPPED_MODEL)
    parser.add_argument("--backend", default="auto", help="--all2all-backend of the mesh")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of a prompt at most")
    parser.add_argument("--logs", type=Path, help="directory for the logs, kept (default: a temporary one)")
    parser.add_argument(
        "--output-json", type=Path, help="what happened, counted, and what the processes hold"
    )
    parser.add_argument("--eplb", action="store_true", help="experts move all the time")
    parser.add_argument("--transfers", action="store_true", help="KV blocks travel; log-probabilities count")
    netns.add_flag(parser)
    asked = parser.parse_args()
    if asked.namespaces is not None and (status := netns.rerun_inside(asked.namespaces)) is not None:
        return status
    print(f"seed {asked.seed}", flush=True)
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        directory = asked.logs or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        page = run(asked, directory, stack)
    if asked.output_json is not None:
        asked.output_json.parent.mkdir(parents=True, exist_ok=True)
        asked.output_json.write_text(json.dumps(page, indent=1) + "\n")
    print(page["events"], page["requests"], page["rebalancings"] if asked.eplb else "")
    print(page["moved"])
    print(f"epoch {page['epoch']}; longest gaps of clients {page['longest_client_gaps'][:3]}")
    for process in page["processes"]:
        print(f"{process['name']}: {process['before']} -> {process['after']}")
    for problem in page["problems"][:20]:
        print("PROBLEM:", problem)
    return 1 if page["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
