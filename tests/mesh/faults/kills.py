"""Kills instances under load, and checks that nothing is lost.

``python -m tests.mesh.faults.kills --case moe --kills 20`` runs it.

32 streams and some requests in one piece run all the time (:mod:`tests.mesh.faults.load`); again and again, at a random
moment, processes of the mesh are killed (SIGKILL), and others come in their place. Every answer is held against
what the same request gets in the same mesh undisturbed. Printed for each kill, in milliseconds from it:

    world       of the coordinator's kill, where it is killed before: until its successor knows all instances
    noticed     all survivors know (the router, where instances are independent of each other)
    stepping    all survivors have done a step of the next group (independent ones never stop)
    back        each request of the dead has a token again, at another instance
    client gap  the longest wait of any stream for its next chunk, of waits that began within a second
    later gap   the same until the next kill, while another instance starts on the same cores and joins
    usual gap   the same in the two seconds before

and where it went, by the log lines of the slower survivor and of the router: ``form`` until the coordinator's word,
``experts`` until the missing ones are read (``read``: how many in each layer), ``group`` until it is formed,
``step`` until the first step; ``told`` until the router has sent the dead one's requests elsewhere, ``first back`` and
``last back`` from then until the first and the last of them have a token again, ``again`` the tokens that had to be
computed for that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from coordinator.messages import State
from engine.config import SHIPPED_MODEL
from engine.model.finding import MODELS_DIRECTORY
from examples.benchmarks.links import netns
from router.launcher.restarts import QUICKLY_STEADY
from tests.mesh.clients.test_clients import assert_idle
from tests.mesh.faults.load import Answer, Load, Verdict, body_of, undisturbed
from tests.mesh.faults.log_times import LogTimes
from tests.mesh.harness import wait_until
from tests.mesh.spread_mesh import SpreadMesh

ROOT = Path(__file__).parents[3]
NUM_BODIES = 64
"""Number of different requests."""
FLAGS = ("--dtype", "float32", "--num-gpu-blocks-override", "3000", "--max-num-seqs", "64")
STRANDED = 60.0
"""Seconds that a recovery may take before it counts as none."""

RECOVERED = re.compile(
    r"recovered in epoch \d+ after (\d+) ms .*form (\d+) ms, (\d+) experts read (\d+) ms, "
    r"group (\d+) ms, first step (\d+) ms"
)
BACK = re.compile(
    r"(\d+) requests of instance \d+ are back after (\d+) to (\d+) ms: (\d+) tokens computed again"
)


def engines(mesh: SpreadMesh, ranks: Sequence[int]) -> list[psutil.Process]:
    """The processes of these instances."""
    return [psutil.Process(member.pid) for member in mesh.view().members if member.rank in ranks]


def workers(mesh: SpreadMesh, ranks: Sequence[int]) -> list[psutil.Process]:
    """The last worker of each of these instances."""
    return [
        max(engine.children(), key=lambda child: " ".join(child.cmdline())) for engine in engines(mesh, ranks)
    ]


@dataclass(frozen=True)
class Case:
    """What is killed, and in which mesh."""

    size: int
    how: tuple[str, ...]
    at_once: int = 1
    """Instances that lose a process at the same moment."""
    victims: Callable[[SpreadMesh, Sequence[int]], list[psutil.Process]] = engines
    dense: bool = False
    coordinator: str = ""
    """When the coordinator is killed, too: ``with`` the instance, or ``before``; empty for never.

    ``before``: its successor is at work when the instance is killed.
    """
    together: bool = False
    """Whether one ``serve`` has all instances, and starts them again itself."""

    @property
    def spread(self) -> bool:
        """Whether survivors depend on the dead."""
        return "-ep" in self.how

    @property
    def has_copies(self) -> bool:
        """Whether each expert is to be on two instances."""
        return "--eplb-survive" in self.how


TWICE = '{"num_redundant_experts": 8}'
"""As many copies of the shipped model's experts as there are experts."""
APART = ("--no-enable-expert-parallel",)
CASES = {
    "moe": Case(3, ("-ep",)),
    "moe-twice": Case(3, ("-ep", "--enable-eplb", "--eplb-survive", "1", "--eplb-config", TWICE)),
    "two-of-four": Case(4, ("-ep",), at_once=2),
    "tp": Case(2, ("-tp", "2", "--no-enable-expert-parallel"), victims=workers),
    "dense": Case(3, ("--no-enable-expert-parallel",), dense=True),
    "inherit": Case(3, (*APART, "--enable-kv-inheritance", "--restart"), dense=True, together=True),
    "no-inherit": Case(3, (*APART, "--restart"), dense=True, together=True),
    "coordinator-then-rank": Case(3, ("-ep",), coordinator="before"),
    "coordinator-and-rank": Case(3, ("-ep",), coordinator="with"),
}
"""Cases by name; ``all`` leaves out coordinators, copies and inheritance.

Each kill of a coordinator takes ten seconds more: one whose deaths follow each other is started ever later.
"""
ALL = ("moe", "two-of-four", "tp", "dense")


class Kills:
    """One mesh, killed again and again."""

    def __init__(self, case: Case, mesh: SpreadMesh, load: Load, logs: LogTimes, seed: int) -> None:
        self._case, self._mesh, self._load, self._logs = case, mesh, load, logs
        self._rng = random.Random(seed)
        self.found: list[dict[str, float]] = []
        self._killed_at = 0.0

    def kill_once(self) -> dict[str, float]:
        """Kill at a random moment; returns milliseconds measured until all requests were back."""
        if (
            self._case.coordinator
        ):  # whose successor is held back after a short life: that is not measured here
            born = self._mesh.command.child("Coordinator").create_time()
            time.sleep(max(0.0, born + QUICKLY_STEADY + 1.0 - time.time()))
        if self._case.has_copies:
            wait_until(self._is_twice, 30, "each expert is on two instances")
        ranks = self._rng.sample(self._mesh.ready(), self._case.at_once)
        wait_until(lambda: min(map(self._mesh.running, ranks)) > 2, 30, "the victims have requests")
        victims = self._case.victims(self._mesh, ranks)
        time.sleep(self._rng.uniform(0.0, 1.0))
        usual = self._load.longest_wait(time.monotonic() - 2.0, time.monotonic())
        found: dict[str, float] = {}
        if self._case.coordinator == "before":
            found["world"] = 1000 * self._replace_coordinator()
        if self._case.coordinator == "with":
            victims.append(self._mesh.command.child("Coordinator"))
        self._killed_at = killed_at = time.monotonic()
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
        survivors = self._case.size - len(ranks)
        stepping = self._wait_for("recovered in epoch", survivors) if self._case.spread else []
        self._wait_for("go on elsewhere", 1)
        time.sleep(max(0.0, killed_at + 1.2 - time.monotonic()))
        told = self._logs.since(killed_at, "go on elsewhere")
        back = self._wait_for("are back after", len(told))
        noticed = (self._logs.since(killed_at, "is broken") if self._case.spread else []) or told

        def since(times: list[tuple[float, str]]) -> float:
            return 1000 * (max(at for at, _ in times) - killed_at)

        found["noticed"] = since(noticed)
        if self._case.spread:
            found["stepping"] = since(stepping)
        found |= {
            "back": since(back),
            "client gap": 1000 * self._load.longest_wait(killed_at, killed_at + 1.0),
            "later gap": 0.0,
            "usual gap": 1000 * usual,
            **_parts(stepping),
            "told": since(told),
            **_back(back),
        }
        self.found.append(found)
        return found

    def _is_twice(self) -> bool:
        balance = self._mesh.view().balance
        return balance is not None and balance.copies > 1

    def _replace_coordinator(self) -> float:
        """Kill the coordinator; returns seconds until its successor knows all instances."""
        before = self._mesh.view().epoch
        began = time.monotonic()
        self._mesh.command.child("Coordinator").kill()

        def is_right() -> bool:
            view = self._mesh.view()
            return len(view.members) == self._case.size and all(
                member.state is State.READY for member in view.members
            )

        wait_until(is_right, STRANDED, "the world is right")
        seconds = time.monotonic() - began
        assert self._mesh.view().epoch == before, "nobody has to form a group for this"
        return seconds

    def heal(self) -> None:
        """Start others in place of the dead, and wait for them."""
        if self._case.together:
            size = self._case.size
            wait_until(lambda: self._mesh.ready() == list(range(size)), 90, "all instances are ready")
        else:
            self._mesh.make_whole()
        self.found[-1]["later gap"] = 1000 * self._load.longest_wait(self._killed_at + 1.0, time.monotonic())

    def _wait_for(self, text: str, count: int) -> list[tuple[float, str]]:
        at = self._killed_at
        wait_until(lambda: len(self._logs.since(at, text)) >= count, STRANDED, f"{count} times {text!r}")
        return self._logs.since(at, text)


def _parts(recovered: list[tuple[float, str]]) -> dict[str, float]:
    found = [match for _, line in recovered if (match := RECOVERED.search(line))]
    return {
        part: max(float(match[number]) for match in found)
        for number, part in enumerate(("form", "read", "experts", "group", "step"), start=2)
        if found
    }


def _back(back: list[tuple[float, str]]) -> dict[str, float]:
    found = [match for _, line in back if (match := BACK.search(line))]
    return {
        "first back": min(float(match[2]) for match in found),
        "last back": max(float(match[3]) for match in found),
        "moved": sum(float(match[1]) for match in found),
        "again": sum(float(match[4]) for match in found),
    }


# ---- what is said of it

COUNTS = ("moved", "again", "read")
"""Measured quantities that are counts, not times."""


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def table(found: Sequence[dict[str, float]]) -> str:
    """A line per quantity: median, 90th percentile, most."""
    lines = ["| ms from the kill | p50 | p90 | max |", "|---|---:|---:|---:|"]
    for name in found[0]:
        values = [each[name] for each in found if name in each]
        shown = {
            "moved": "requests moved",
            "again": "their tokens computed again",
            "read": "experts read in each layer",
        }.get(name, name)
        lines.append(
            f"| {shown} | {statistics.median(values):.0f} | {percentile(values, 0.9):.0f} | {max(values):.0f} |"
        )
    return "\n".join(lines)


def report(page: dict[str, Any]) -> str:
    """The tables of one case."""
    counts = page["counts"]
    return "\n".join(
        (
            f"\n{page['case']}: `{page['mesh']}`{_where(page)}, {page['streams']} streams, {page['tokens_per_second']} tokens/s\n",
            "| " + " | ".join(counts) + " |",
            "|" + "---:|" * len(counts),
            "| " + " | ".join(map(str, counts.values())) + " |\n",
            table(page["kills"]),
        )
    )


def _where(page: dict[str, Any]) -> str:
    """The hosts of a case that ran on two."""
    return f" on two hosts ({page['link']})" if page.get("link") else ""


def merged(files: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One page for each case, from runs that took turns with those of other cases."""
    found: dict[str, dict[str, Any]] = {}
    for page in (page for pages in files for page in pages):
        known = found.setdefault(page["case"], page)
        if known is not page:
            tokens = sum(each["tokens_per_second"] * each["seconds"] for each in (known, page))
            seconds = known["seconds"] + page["seconds"]
            counts = {name: known["counts"][name] + page["counts"][name] for name in page["counts"]}
            found[page["case"]] = known | {
                "seconds": round(seconds, 1),
                "tokens_per_second": round(tokens / seconds, 1),
                "counts": counts,
                "kills": known["kills"] + page["kills"],
            }
    return list(found.values())


def verdicts(load: Load, kills: int) -> dict[str, int]:
    """How the requests ended."""
    return {
        "kills": kills,
        "requests": sum(load.verdicts.values()),
        **{verdict.value: load.verdicts[verdict] for verdict in Verdict if verdict is not Verdict.LEFT},
    }


def make_dense_model(directory: Path) -> Path:
    """A Llama of 9 million random parameters with the tokenizer of the shipped model.

    In a process of its own, which takes torch with it when it ends.
    """
    target = directory / "dense"
    script = (
        "import sys, pathlib; from tests.engine.tiny_models import make_tiny_model; "
        "make_tiny_model(pathlib.Path(sys.argv[1]), 'llama', layers=6, hidden_size=256, intermediate_size=704, "
        "num_attention_heads=8, num_key_value_heads=2, head_dim=32, vocab_size=4096, max_position_embeddings=2048)"
    )
    subprocess.run([sys.executable, "-c", script, str(target)], cwd=ROOT, check=True, capture_output=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS_DIRECTORY / SHIPPED_MODEL / name, target)
    return target


def run(name: str, asked: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], list[str]]:
    """Run one case; returns its report, and what went wrong."""
    case = CASES[name]
    model = SHIPPED_MODEL
    if case.dense:
        model = str(asked.dense_model or make_dense_model(directory))
    with contextlib.ExitStack() as stack:
        hosts = netns.ends_here() if asked.namespaces else None
        mesh = SpreadMesh(
            directory, stack, case.size, apart=not case.together, model=model, how=case.how, flags=FLAGS, hosts=hosts,
            backend=asked.backend,
        )  # fmt: skip
        bodies = [body_of(number, model=model) for number in range(NUM_BODIES)]
        truth = undisturbed(mesh.url, bodies, asked.streams)
        load = Load(mesh.url, truth, bodies, streams=asked.streams, whole=2, seed=asked.seed)
        began = time.monotonic()
        with LogTimes(lambda: mesh.commands) as logs, load:
            kills = Kills(case, mesh, load, logs, asked.seed)
            time.sleep(2.0)
            for number in range(asked.kills):
                found = kills.kill_once()
                kills.heal()
                print(
                    f"{number + 1}: " + ", ".join(f"{key} {value:.0f}" for key, value in found.items()),
                    flush=True,
                )
        seconds = time.monotonic() - began
        assert_idle(mesh)
        problems = load.problems + mesh.tracebacks()
        counts = verdicts(load, asked.kills)
        page = {
            "case": name,
            "link": str(asked.namespaces or ""),
            "mesh": " ".join(("serve", Path(model).name, "-dp", str(case.size), *case.how, *FLAGS)),
            "streams": asked.streams,
            "seed": asked.seed,
            "seconds": round(seconds, 1),
            "tokens_per_second": round(tokens_of(load.answers) / seconds, 1),
            "counts": counts,
            "kills": [{key: round(value, 1) for key, value in each.items()} for each in kills.found],
        }
        print(report(page))
    return page, problems


def tokens_of(answers: Sequence[Answer]) -> int:
    """Number of tokens of all answers."""
    return sum(len(answer.ids) for answer in answers)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--kills", type=int, default=20, help="of each case")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument(
        "--dense-model", type=Path, help="directory (default: one with random weights is made)"
    )
    parser.add_argument("--output-json", type=Path, help="one file with all cases")
    parser.add_argument("--logs", type=Path, help="directory for the logs, kept (default: a temporary one)")
    parser.add_argument(
        "--show", type=Path, nargs="+", help="only print tables: of each case in these files, all its kills"
    )
    parser.add_argument("--backend", default="auto", help="--all2all-backend of the mesh")
    netns.add_flag(parser)
    asked = parser.parse_args()
    if asked.namespaces is not None and (status := netns.rerun_inside(asked.namespaces)) is not None:
        return status
    if asked.show is not None:
        print("\n".join(map(report, merged([json.loads(file.read_text()) for file in asked.show]))))
        return 0
    pages, problems = [], []
    with tempfile.TemporaryDirectory() as temporary:
        for name in ALL if asked.case == "all" else [asked.case]:
            print(f"---- {name}, seed {asked.seed}", flush=True)
            directory = (asked.logs or Path(temporary)) / name
            directory.mkdir(parents=True, exist_ok=True)
            page, of_case = run(name, asked, directory)
            pages.append(page)
            problems += of_case
            if asked.output_json is not None:
                asked.output_json.parent.mkdir(parents=True, exist_ok=True)
                asked.output_json.write_text(json.dumps(pages, indent=1) + "\n")
    for problem in problems[:20]:
        print("PROBLEM:", problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
