"""Findings of ``lockstep doctor`` (pure)."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec


class Level(enum.StrEnum):
    """Severity of a finding, up to what keeps Lockstep from working."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    BROKEN = "broken"


class Finding(msgspec.Struct, frozen=True):
    """Finding: one line of the report."""

    area: str
    check: str
    level: Level
    text: str
    fix: str = ""
    """Advice on what to do; empty when there is nothing to do."""


def ok(area: str, check: str, text: str) -> Finding:
    return Finding(area, check, Level.OK, text)


def note(area: str, check: str, text: str, fix: str = "") -> Finding:
    return Finding(area, check, Level.NOTE, text, fix)


def warning(area: str, check: str, text: str, fix: str) -> Finding:
    return Finding(area, check, Level.WARNING, text, fix)


def broken(area: str, check: str, text: str, fix: str) -> Finding:
    return Finding(area, check, Level.BROKEN, text, fix)


def worst(findings: Iterable[Finding]) -> Level:
    """Worst level of some findings; OK without any."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)
