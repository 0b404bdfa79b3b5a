"""What the doctor finds (pure)."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec


class Level(enum.StrEnum):
    """How bad it is, from nothing at all to what keeps Lockstep from working."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    BROKEN = "broken"


class Finding(msgspec.Struct, frozen=True):
    """One line of the report."""

    area: str
    check: str
    level: Level
    text: str
    fix: str = ""
    """What to do about it; empty when there is nothing to do."""


def ok(area: str, check: str, text: str) -> Finding:
    return Finding(area, check, Level.OK, text)


def note(area: str, check: str, text: str, fix: str = "") -> Finding:
    return Finding(area, check, Level.NOTE, text, fix)


def warning(area: str, check: str, text: str, fix: str) -> Finding:
    return Finding(area, check, Level.WARNING, text, fix)


def broken(area: str, check: str, text: str, fix: str) -> Finding:
    return Finding(area, check, Level.BROKEN, text, fix)


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level of all; OK of none."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)
