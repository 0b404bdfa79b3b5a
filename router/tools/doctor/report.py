"""The doctor's findings as tables, or as JSON."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.probe.facts import LinkFacts, Timing
from router.tools.doctor.findings import Finding, Level, worst
from router.tools.doctor.links import name_of

MIN_WIDTH = 120
"""Columns that the tables need; a pipe reports 80."""
STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.BROKEN: "bold red"}


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """All findings and measurements of one run."""

    level: Level
    """The worst of all findings."""
    findings: list[Finding]
    links: LinkFacts | None
    """What the hosts measured, if they were asked to."""


def report_of(findings: list[Finding], links: LinkFacts | None) -> DoctorReport:
    return DoctorReport(level=worst(findings), findings=findings, links=links)


def print_report(report: DoctorReport) -> None:
    """Print tables, then what to fix, worst first."""
    console = Console(width=max(Console().width, MIN_WIDTH))
    console.print(_findings_table(report.findings))
    if report.links is not None:
        console.print(_links_table(report.links))
    for level in (Level.BROKEN, Level.WARNING, Level.NOTE):
        for each in report.findings:
            if each.level is level and each.fix:
                line = Text(f"{each.check}: {each.fix}")  # as it is: brackets are no markup
                console.print(Text(level, STYLES[level]), line, highlight=False, soft_wrap=True)
    bad = sum(each.level is Level.BROKEN for each in report.findings)
    verdict = f"{bad} broken" if bad else "nothing is broken"
    console.print(f"{len(report.findings)} checks, {verdict}", highlight=False)


def _findings_table(findings: list[Finding]) -> Table:
    table = Table(title="lockstep doctor")
    for name in ("", "check", "level", "found"):
        table.add_column(name, overflow="fold")
    area = ""
    for each in findings:
        if area and each.area != area:
            table.add_section()
        shown_area = each.area if each.area != area else ""
        table.add_row(shown_area, each.check, Text(each.level, STYLES[each.level]), Text(each.text))
        area = each.area
    return table


def _links_table(links: LinkFacts) -> Table:
    """A table with a row per group and size and a column per collective.

    Each cell has the median time and the bytes sent in it.
    """
    collectives = list(dict.fromkeys(each.collective for each in links.timings))
    table = Table(title="between hosts, over TCP links: median time, MB/s that each sends")
    table.add_column("hosts")
    table.add_column("bytes", justify="right")
    for name in collectives:
        table.add_column(name.replace("_", "-"), justify="right")
    cells = {(tuple(each.ranks), each.num_bytes, each.collective): each for each in links.timings}
    before: tuple[int, ...] = ()
    for ranks, num_bytes in dict.fromkeys((ranks, num_bytes) for ranks, num_bytes, _ in cells):
        if before and ranks != before:
            table.add_section()
        who = " - ".join(name_of(links.hosts[rank]) for rank in ranks) if len(ranks) == 2 else "all"
        row = [_cell(cells[ranks, num_bytes, name]) for name in collectives]
        table.add_row(Text(who if ranks != before else ""), f"{num_bytes:,}", *row)
        before = ranks
    return table


def _cell(timing: Timing) -> str:
    rate = timing.bytes_per_second / 1e6
    time = f"{timing.seconds * 1e6:.0f} us" if timing.seconds < 10e-3 else f"{timing.seconds * 1e3:.1f} ms"
    return f"{time}, {rate:.1f} MB/s" if rate < 10 else f"{time}, {rate:.0f} MB/s"
