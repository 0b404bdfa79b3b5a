"""Runner of the planted bugs: each must fail its tests, else the run fails.

``python -m tests.mutations [--area balance] [--only PART] [--list]``. The project is copied into a temporary folder, so the
checkout stays as it is. The named tests must pass there first. Then one bug after the other is planted, its
tests run, and the file is restored. The table of scores goes to ``build/mutations.md``.
"""

from __future__ import annotations

import argparse
import enum
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutations.planted import ROOT, PlantedBug, areas

TEST_LIMIT = 60
"""Seconds that one test may take; a test that hangs has found the bug."""
RUN_LIMIT = 300.0
"""Seconds that all tests of one bug may take."""
FIRST_LIMIT = 1800.0
"""Seconds that all named tests may take without a bug."""
RAN = re.compile(r"\d (passed|failed|error)")
"""Part of pytest's last line if a test ran.

A kernel that does not compile in time skips its tests.
"""
TABLE = ROOT / "build" / "mutations.md"


class Verdict(enum.StrEnum):
    """What became of a planted bug. All but the first fail the run."""

    KILLED = "killed"
    SURVIVED = "survived"
    STALE = "not applicable"
    """Its file has another text by now: the page is to be mended."""
    CRUDE = "no test ran"
    """No module could be loaded, all tests were skipped, or time ran out."""


class Run(NamedTuple):
    """Outcome of some tests."""

    status: int | None
    """Exit status of pytest; None if it took too long."""
    output: str

    def failed(self, test: str) -> bool:
        """Whether a test failed, with whichever parameters."""
        lines = self.output.splitlines()
        return any(
            line.startswith(f"{kind} {test}{end}") or line == f"{kind} {test}"
            for line in lines
            for kind in ("FAILED", "ERROR")
            for end in ("[", " ")
        )


def verdict_on(run: Run, tests: Iterable[str]) -> Verdict:
    """Whether all of the tests that were named have found the bug."""
    if run.status not in (0, 1) or (" skipped" in run.output and not RAN.search(run.output)):
        return Verdict.CRUDE
    return Verdict.KILLED if all(map(run.failed, tests)) else Verdict.SURVIVED


def copy_of_project(to: Path) -> None:
    """Copy what git tracks, or would track, as it lies in the checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def run_tests(tree: Path, tests: Sequence[str], limit: float) -> Run:
    """Run tests of a copy of the project."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-m", "not mesh"]
    command += ["-p", "pytest_timeout", "-p", "no:cacheprovider", f"--timeout={TEST_LIMIT}", *tests]
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env={**os.environ, **alone},
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return Run(None, "")
    return Run(done.returncode, done.stdout + done.stderr)


def plant(tree: Path, bug: PlantedBug) -> tuple[Verdict, Run | None]:
    """Plant a bug in a copy of the project and run its tests."""
    path = tree / bug.file
    text = path.read_text() if path.exists() else ""
    if bug.problem_in(text) is not None:
        return Verdict.STALE, None
    compiled = Path(importlib.util.cache_from_source(str(path)))
    try:
        path.write_text(bug.planted_in(text))
        compiled.unlink(missing_ok=True)  # a change within a second, of the same size, would go unnoticed
        run = run_tests(tree, bug.tests, RUN_LIMIT)
    finally:
        path.write_text(text)
        compiled.unlink(missing_ok=True)
    return verdict_on(run, bug.tests), run


def table_of(scores: Mapping[str, Counter[Verdict]]) -> str:
    """The scores as a table in Markdown."""
    lines = ["| area | killed | of |", "|---|---|---|"]
    lines += [f"| {area} | {found[Verdict.KILLED]} | {found.total()} |" for area, found in scores.items()]
    total: Counter[Verdict] = sum(scores.values(), Counter())
    return "\n".join([*lines, f"| all | {total[Verdict.KILLED]} | {total.total()} |"]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Plant the bugs; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.split("\n")[0])
    known = areas()
    parser.add_argument("--area", choices=sorted(known), action="append", help="only bugs of this area")
    parser.add_argument("--only", default="", help="only bugs whose description has this part")
    parser.add_argument("--list", action="store_true", help="print the bugs, and plant none")
    chosen = parser.parse_args(argv)
    bugs = {
        area: [bug for bug in each if chosen.only in bug.breaks]
        for area, each in known.items()
        if not chosen.area or area in chosen.area
    }
    if chosen.list:
        for area, each in bugs.items():
            print(f"{area}:", *(f"  {bug.breaks} ({bug.file})" for bug in each), sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="lockstep-mutations-") as folder:
        tree = Path(folder)
        copy_of_project(tree)
        tests = sorted({test for each in bugs.values() for bug in each for test in bug.tests})
        before = run_tests(tree, tests, FIRST_LIMIT)
        if before.status != 0:
            print(f"the named tests do not pass without a bug:\n{before.output}")
            return 1
        scores = {area: _score(tree, area, each) for area, each in bugs.items()}
    table = table_of(scores)
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table)
    print(f"\n{table}")
    return int(any(set(found) - {Verdict.KILLED} for found in scores.values()))


def _score(tree: Path, area: str, bugs: Sequence[PlantedBug]) -> Counter[Verdict]:
    scores: Counter[Verdict] = Counter()
    for bug in bugs:
        began = time.monotonic()
        verdict, run = plant(tree, bug)
        scores[verdict] += 1
        print(f"{verdict:8} {time.monotonic() - began:4.1f} s  {area}: {bug.breaks}", flush=True)
        if verdict is not Verdict.KILLED:
            print(f"  {bug.file}: {bug.old!r} -> {bug.new!r}\n  {' '.join(bug.tests)}")
            print(
                f"  {run.output[-2000:]}" if run is not None else "  the text is not there once", flush=True
            )
    return scores


if __name__ == "__main__":
    sys.exit(main())
