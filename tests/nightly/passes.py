"""Record of the commits that parts of the night passed on, and changes since."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.nightly.parts import ROOT, Part

RECORD = Path(__file__).with_name("passed.json")


class Pass(NamedTuple):
    """One part's last pass."""

    commit: str
    date: str
    seconds: int
    machine: str


def read_passes(record: Path = RECORD) -> dict[str, Pass]:
    """Last pass of each part that ever passed."""
    if not record.exists():
        return {}
    return {name: Pass(**each) for name, each in json.loads(record.read_text()).items()}


def write_pass(name: str, passed: Pass, record: Path = RECORD) -> None:
    """Note that a part passed, beside what the record has of others."""
    passes = read_passes(record) | {name: passed}
    record.write_text(json.dumps({each: passes[each]._asdict() for each in sorted(passes)}, indent=2) + "\n")


def git(*arguments: str, root: Path = ROOT) -> str | None:
    """What a git command prints; None if it fails."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def changes_since(commit: str, part: Part, root: Path = ROOT) -> list[str] | None:
    """Commits since that one which touch what a part concerns, newest first.

    None if it is no ancestor of HEAD.
    """
    if git("merge-base", "--is-ancestor", commit, "HEAD", root=root) is None:
        return None
    found = git("log", "--format=%h %s", f"{commit}..HEAD", "--", *part.paths, root=root)
    return found.splitlines() if found else []


def status_line(part: Part, passed: Pass | None, changes: list[str] | None) -> str:
    """One line of ``make nightly-status``."""
    if passed is None:
        return f"{part.name:25} never"
    where = f"{part.name:25} passed {passed.date} on {passed.commit[:8]} in {passed.seconds} s"
    if changes is None:
        return f"{where}; this commit is not in the history"
    if not changes:
        return f"{where}; nothing has changed since"
    number = "1 change" if len(changes) == 1 else f"{len(changes)} changes"
    return f"{where}; {number} since, the newest: {changes[0]}"


def status(parts: Mapping[str, Part], passes: Mapping[str, Pass]) -> list[str]:
    """Lines that tell of each part when it passed, and what has changed since."""
    lines = []
    for name, part in parts.items():
        passed = passes.get(name)
        lines.append(status_line(part, passed, changes_since(passed.commit, part) if passed else None))
    return lines
