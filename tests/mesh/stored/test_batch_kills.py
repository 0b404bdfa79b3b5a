"""A batch that outlives kills of everything that makes it: real processes, real kills."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.mesh.harness import Command, Ports, serve, wait_until
from tests.mesh.stored.batch_client import answers_of, batch_lines, begin_batch, finished, num_done

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(800)]

IS_NIGHT = os.environ.get("LOCKSTEP_NIGHTLY") == "1"
NUM_LINES, NUM_TOKENS = (2000, 24) if IS_NIGHT else (64, 120)  # few lines, but each longer than the last one
SERVE = "Serve"
VICTIMS = (
    # The first two routers are both: one of them owns the batch.
    ["Router", "Engine", "Coordinator", SERVE, "Router", "Engine", SERVE, "Coordinator", "Router", "Engine"]
    if IS_NIGHT
    else ["Router", "Engine", "Router"]
)


class Mesh:
    """A ``serve`` that is started again on the same ports and the same store."""

    def __init__(self, folder: Path) -> None:
        self.ports = Ports()
        self._folder = folder
        store = ["--store-path", str(folder / "answers")]
        self._flags = ["lockstep-moe", "-dp", "2", "--api-server-count", "2", *store, *self.ports.head()]
        self._logs: list[Path] = []
        self._killed: Counter[str] = Counter()

    @contextlib.contextmanager
    def lives(self) -> Iterator[Mesh]:
        with contextlib.ExitStack() as self._stack:
            self._begin()
            yield self

    def _begin(self) -> None:
        self._logs.append(self._folder / f"serve-{len(self._logs)}.log")
        self._command: Command = self._stack.enter_context(serve(self._logs[-1], *self._flags))
        self._command.wait_for("2 instances ready")

    def kill(self, what: str) -> None:
        """SIGKILL of one process, in turn where two are alike; ``serve`` is started again."""
        if what != SERVE:
            named = what if what == "Coordinator" else f"{what}_{self._killed[what] % 2}"
            self._killed[what] += 1
            self._command.child(named, 60).kill()
            return
        children = self._command.family()
        self._command.process.kill()
        self._command.process.wait(10)
        _, left = psutil.wait_procs(children, timeout=60)
        assert not left, f"they outlive serve: {left}"
        self._begin()

    @property
    def log(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in self._logs)


def test_a_batch_outlives_kills_of_anything(tmp_path: Path) -> None:
    lines = batch_lines(NUM_LINES, NUM_TOKENS)
    parts = len(VICTIMS) + (2 if IS_NIGHT else 5)  # much is left where the others' tokens are few
    places = [NUM_LINES * number // parts for number in range(1, len(VICTIMS) + 1)]
    with Mesh(tmp_path).lives() as mesh:
        url = mesh.ports.url
        calm = answers_of(finished(url, begin_batch(url, lines)))
        assert [id for id, _ in calm] == [f"line-{number}" for number in range(NUM_LINES)]
        batch = begin_batch(url, lines)
        seen = [0]
        for victim, place in zip(VICTIMS, places, strict=True):
            seen.append(wait_until(lambda place=place: _at_least(url, batch, place), 200, f"{place} lines"))
            mesh.kill(victim)
        assert all(after >= before for before, after in pairwise(seen)), seen
        assert seen[-1] < NUM_LINES, "the last kill came after the batch"
        disturbed = answers_of(finished(url, batch))
        assert f"goes on with batch {batch}" in mesh.log
        print(f"killed {VICTIMS} at {seen[1:]} lines")
    assert disturbed == calm, "each line once, with the answer of the undisturbed run"


def _at_least(url: str, batch: str, place: int) -> int:
    """Number of answered lines, once there are so many."""
    done = num_done(url, batch)
    return done if done >= place else 0
