"""``python -m tests.mesh.faults.joins``: a third and a fourth instance join under load, then two leave.

32 streams and some requests in one piece run all the time (:mod:`tests.mesh.faults.load`) on a mesh with spread experts, each
held against what it says undisturbed. Told of each part: tokens per second, and the longest wait of any stream for
its next chunk; of each change, the longest wait around the moment at which all switch, and while a newcomer loads on
the same cores. ``--plot`` draws the throughput as an SVG (``pip install matplotlib``).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.mesh.faults.load import Load, Verdict, body_of, undisturbed
from tests.mesh.faults.log_times import LogTimes
from tests.mesh.faults.rest import assert_at_rest
from tests.mesh.harness import wait_until
from tests.mesh.spread_mesh import SpreadMesh

NUM_BODIES = 64
FLAGS = (
    "--dtype", "float32", "--num-gpu-blocks-override", "3000", "--max-num-seqs", "64", "--max-num-batched-tokens", "512",
)  # fmt: skip
"""Flags for short steps: a pause by a switch exceeds the waits for long prompts."""
AROUND = 1.0
"""Seconds before and after a switch that count for its pause."""
SIZES = (2, 3, 4, 3, 2)


class Story:
    """What happened when, in seconds from the beginning."""

    def __init__(self, mesh: SpreadMesh, load: Load, logs: LogTimes) -> None:
        self._mesh, self._load, self._logs = mesh, load, logs
        self.began = time.monotonic()
        self.parts: list[dict[str, Any]] = []
        self.changes: list[dict[str, Any]] = []

    def stay(self, seconds: float) -> None:
        """Record throughput and waits while nothing happens to the mesh."""
        begin = time.monotonic()
        time.sleep(seconds)
        end = time.monotonic()
        self.parts.append(
            {
                "instances": len(self._mesh.ready()),
                "begin": begin - self.began,
                "end": end - self.began,
                "tokens_per_second": self._load.tokens_between(begin, end) / (end - begin),
                "longest_wait": self._load.longest_wait(begin, end, begun=begin),
            }
        )

    def change(self, name: str, act: Callable[[], object], size: int) -> None:
        """Let an instance join or leave, and record the pause."""
        asked = time.monotonic()
        act()
        wait_until(lambda: self._logs.since(asked, "has begun"), 120, name)
        switched = self._logs.since(asked, "has begun")[0][0]
        wait_until(lambda: len(self._mesh.ready()) == size, 60, name)
        time.sleep(AROUND)
        self.changes.append(
            {
                "name": name,
                "asked": asked - self.began,
                "switched": switched - self.began,
                "pause": self._load.longest_wait(switched - AROUND, switched + AROUND),
                "longest_wait_until_then": self._load.longest_wait(asked, switched),
            }
        )


def measure(asked: argparse.Namespace, directory: Path) -> list[str]:
    """Run and report as asked; return what went wrong."""
    with contextlib.ExitStack() as stack:
        mesh = SpreadMesh(directory, stack, SIZES[0], apart=True, flags=FLAGS)
        bodies = [body_of(number) for number in range(NUM_BODIES)]
        truth = undisturbed(mesh.url, bodies, asked.streams)
        load = Load(mesh.url, truth, bodies, streams=asked.streams, whole=2, seed=asked.seed)
        with LogTimes(lambda: mesh.commands) as logs, load:
            time.sleep(2.0)
            story = Story(mesh, load, logs)
            story.stay(asked.seconds)
            for before, size in itertools.pairwise(SIZES):
                if size > before:
                    story.change(f"instance {before} joins", mesh.join_one, size)
                else:
                    story.change(f"instance {size} leaves", mesh.engine(size).terminate, size)
                story.stay(asked.seconds)
        assert_at_rest(mesh)
        usual = max(part["longest_wait"] for part in story.parts)
        seconds = int(story.parts[-1]["end"])
        page = {
            "mesh": " ".join(("serve lockstep-moe -ep", *FLAGS)),
            "streams": asked.streams,
            "seed": asked.seed,
            "requests": sum(load.verdicts.values()),
            **{verdict.value: load.verdicts[verdict] for verdict in Verdict if verdict is not Verdict.LEFT},
            "usual_longest_wait": usual,
            "longest_pause": max(change["pause"] for change in story.changes),
            "parts": story.parts,
            "changes": story.changes,
            "tokens_of_second": [
                load.tokens_between(story.began + second, story.began + second + 1)
                for second in range(seconds)
            ],
        }
        tell(page, asked)
        return load.problems + mesh.tracebacks()


def tell(page: dict[str, Any], asked: argparse.Namespace) -> None:
    """Print the report, and write the files that were asked for."""
    print(table(page), flush=True)
    for file in filter(None, (asked.output_json, asked.plot)):
        file.parent.mkdir(parents=True, exist_ok=True)
    if asked.output_json is not None:
        asked.output_json.write_text(json.dumps(page, indent=1) + "\n")
    if asked.plot is not None:
        plot(page, asked.plot)


def table(page: dict[str, Any]) -> str:
    """Parts and changes in the order of time."""
    lines = ["| from s | what | tokens/s | longest wait, ms |", "|---:|---|---:|---:|"]
    rows = [
        (
            part["begin"],
            f"{part['instances']} instances",
            f"{part['tokens_per_second']:.0f}",
            part["longest_wait"],
        )
        for part in page["parts"]
    ]
    for change in page["changes"]:
        rows.append(
            (change["asked"], f"{change['name']}: until all switch", "", change["longest_wait_until_then"])
        )
        rows.append((change["switched"], f"{change['name']}: within 1 s of the switch", "", change["pause"]))
    lines += [f"| {at:.0f} | {what} | {rate} | {1000 * wait:.0f} |" for at, what, rate, wait in sorted(rows)]
    more = page["longest_pause"] - page["usual_longest_wait"]
    lines.append(
        f"\n{page['requests']} requests, {page['right']} right, {page['errors']} errors; the longest wait around a switch "
        f"is {1000 * page['longest_pause']:.0f} ms, {1000 * more:+.0f} ms against the longest while nothing happens"
    )
    return "\n".join(lines)


def plot(page: dict[str, Any], file: Path) -> None:
    """Throughput over time, with the changes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "lockstep"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3.2), layout="constrained")
    tokens = page["tokens_of_second"]
    axes.bar(range(len(tokens)), tokens, width=1.0, align="edge", color="#9ecae1")
    for part in page["parts"]:
        axes.hlines(part["tokens_per_second"], part["begin"], part["end"], color="#08519c", linewidth=2)
        middle = (part["begin"] + part["end"]) / 2
        axes.annotate(
            f"{part['instances']} instances", (middle, 0.93), xycoords=("data", "axes fraction"), ha="center"
        )
    for change in page["changes"]:
        axes.axvline(change["asked"], color="#e6550d", linestyle=":")
        axes.axvline(change["switched"], color="#e6550d")
    axes.set(xlabel="seconds (dotted: asked to join or leave; line: all switch)", ylabel="tokens/s")
    axes.set_ylim(0, 1.15 * max(tokens))
    axes.margins(x=0)
    figure.savefig(file, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="of each part in which nothing happens")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--logs", type=Path, help="directory for the logs, kept (default: a temporary one)")
    asked = parser.parse_args()
    if asked.plot is not None:
        import matplotlib  # noqa: F401  before minutes of measuring, not after
    with tempfile.TemporaryDirectory() as temporary:
        directory = asked.logs or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        problems = measure(asked, directory)
    for problem in problems[:20]:
        print("PROBLEM:", problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
