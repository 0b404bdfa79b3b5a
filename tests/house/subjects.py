"""Subjects of commits: at most 72 characters, so that lists of them read well."""

from __future__ import annotations

import subprocess

from tests.house.measures import ROOT, Found

MOST = 72
"""Characters of a subject, which lists and mails show whole."""
SINCE = "2026-11-28T13:15:00Z"
"""When the rule came; commits before it stay as they are."""


def too_long(log: str) -> list[Found]:
    """Subjects over the limit in lines of a short hash and a subject."""
    lines = (line.partition(" ") for line in log.splitlines())
    return [Found(f"{commit} {subject}", len(subject)) for commit, _, subject in lines if len(subject) > MOST]


def long_subjects() -> list[Found]:
    """Commits since the rule whose subject is too long; none where there is no history."""
    done = subprocess.run(
        ["git", "log", "--no-merges", f"--since={SINCE}", "--format=%h %s"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return too_long(done.stdout)
