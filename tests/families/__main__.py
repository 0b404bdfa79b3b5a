"""Writes the tables of docs/use/families*.md: ``python -m tests.families [FAMILY ...]``.

Each family is tried in a process of its own, so that one that hangs or dies costs its own row only. Rows are
kept in ``--rows`` as they come; ``--keep`` leaves out families that have one there already.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

import msgspec

from tests.families.configs import families
from tests.families.measure import EXACT, NONE, REFUSED, Row, measure, quieten

SECONDS = 180.0
"""Seconds for one family in all its layouts; most take five."""
PAGE = Path("docs/use/families.md")
"""Page of the families that are served."""
REFUSED_PAGE = Path("docs/use/families-refused.md")
MARK = "<!-- made by python -m tests.families -->"
"""Line of both pages after which this writes."""
SHARED_BY = 2
"""Families that share a remark, from which on it stands once, in a numbered list."""
OF_LAYER = re.compile(r"^[\w.]+\.\d+\.[\w.]+ ")
"""What a remark on one layer begins with."""
LAYOUT = re.compile(r"(?:(?:dp|ep|tp|pp): )?")
"""What a remark on one layout begins with."""

DETAILS = re.compile(r"(?<=has )[\w, ]+(?= beside its layers)|(?<=cannot be checked: use -tp 1 -pp 1)\. .*")
"""What remarks on stages differ by: names of modules, and errors."""


def _measure(family: str, results: multiprocessing.queues.SimpleQueue[Row]) -> None:  # type: ignore[name-defined]
    quieten()
    with tempfile.TemporaryDirectory() as directory:
        results.put(measure(family, Path(directory)))


def _row_of(family: str, seconds: float) -> Row:
    """The row of a family, from a process that is ended after so many seconds."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_measure, args=(family, results))
    child.start()
    child.join(seconds)
    if not results.empty():
        row: Row = results.get()
        child.kill()
        child.join()
        return row
    hung = child.is_alive()
    child.kill()
    child.join()
    why = f"no verdict within {seconds:.0f} s" if hung else f"its process ended with status {child.exitcode}"
    return Row(family, notes=[why])


def table(rows: Iterable[Row]) -> str:
    """Families that are served in Markdown, those with equal verdicts together, with totals over all."""
    rows = sorted(rows, key=lambda row: row.family.lower())
    served = [row for row in rows if row.dp not in ("", REFUSED)]
    without = ", ".join(f"{row.family}" for row in rows if not row.dp)
    shared = _shared(served)
    lines = [
        f"Made with transformers {version('transformers')} and torch {version('torch')}.",
        "",
        _totals(rows),
        *([f"No verdict: {without}."] if without else []),
        "",
        *(f"{number}. {remark}" for remark, number in shared.items()),
        *([""] if shared else []),
        "| families and their classes | dp | ep | tp | pp | kernels | remarks |",
        "|---|---|---|---|---|---|---|",
    ]
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in served:
        verdicts = row.dp, row.ep, row.tp, row.pp, row.kernels, _remarks(row, shared)
        alike.setdefault(verdicts, []).append(f"{row.family} ({row.model_class})")
    often = sorted(alike, key=lambda verdicts: -len(alike[verdicts]))
    lines += [_line(", ".join(alike[verdicts]), *verdicts) for verdicts in often]
    return "\n".join(lines) + "\n"


def refused_table(rows: Iterable[Row]) -> str:
    """The reasons for which families are refused in every layout, and these families."""
    by_reason: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row.family.lower()):
        if row.dp == REFUSED:
            by_reason.setdefault(_reason(row), []).append(f"{row.family} ({row.model_class})")
    often = sorted(by_reason, key=lambda reason: (-len(by_reason[reason]), reason))
    lines = ["| reason | families and their classes |", "|---|---|"]
    lines += [_line(reason, ", ".join(by_reason[reason])) for reason in often]
    return "\n".join(lines) + "\n"


def _reason(row: Row) -> str:
    """The notes of a refused row without names of its layers."""
    found = []
    for layout, remark in _remarks_of(row):
        text = OF_LAYER.sub("a layer ", remark.removeprefix(f"{row.model_class}: "))
        found.append(text if layout == "dp: " else f"{layout}{text}")
    return "; ".join(found)


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _shared(rows: Iterable[Row]) -> dict[str, int]:
    """Numbers of the remarks that several rows have, the most frequent first."""
    counts = Counter(remark for row in rows for _, remark in _remarks_of(row))
    often = [remark for remark, count in counts.most_common() if count >= SHARED_BY]
    return {remark: number for number, remark in enumerate(often, 1)}


def _remarks(row: Row, shared: Mapping[str, int] = MappingProxyType({})) -> str:
    """The notes of a row; ``(1)`` stands for the first of the shared ones."""
    notes = []
    for layout, remark in _remarks_of(row):
        notes.append(f"{layout}({shared[remark]})" if remark in shared else f"{layout}{remark}")
    return "; ".join(notes)


def _remarks_of(row: Row) -> Iterator[tuple[str, str]]:
    """Layout and remark of each note, without the row's class, which has a column."""
    for note in row.notes:
        text = note.replace(f"{row.model_class} ", "") if row.model_class else note
        layout = LAYOUT.match(text)
        end = layout.end() if layout else 0
        remark = DETAILS.sub(lambda found: "" if found[0][0] == "." else "modules", text[end:])
        yield text[:end], remark.removeprefix(": ").replace(f" of {row.family} ", " ")


def write_below_mark(page: Path, text: str) -> None:
    """Replaces what stands below the mark of a page."""
    before = page.read_text()
    page.write_text(f"{before[: before.index(MARK)]}{MARK}\n\n{text}")


def _totals(rows: list[Row]) -> str:
    def count(layout: str, verdict: str) -> int:
        return sum(getattr(row, layout) == verdict for row in rows)

    exact = ", ".join(f"{count(layout, EXACT)} with {layout}" for layout in ("dp", "ep", "tp", "pp"))
    native = sum(row.kernels == "native" for row in rows)
    return (
        f"{len(rows)} of {len(families())} families: exact are {exact}; {native} run on the native kernels, "
        f"{count('dp', REFUSED)} are refused, {count('ep', NONE)} of those served are dense."
    )


def wrong(rows: Iterable[Row]) -> list[str]:
    """Families that are served and give other tokens than transformers."""
    layouts = ("dp", "ep", "tp", "pp")
    return [
        f"{row.family}, {layout}: {getattr(row, layout)}"
        for row in rows
        for layout in layouts
        if "differ" in getattr(row, layout)
    ]


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 if a family is served wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.families", description=__doc__)
    parser.add_argument("families", nargs="*", help="names as in the table; all, if there is none")
    parser.add_argument("--rows", type=Path, default=Path("build/families.json"), help="where rows are kept")
    parser.add_argument("--keep", action="store_true", help="leave out families that have a row there")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for one family")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page of the families that are served")
    parser.add_argument("--refused-page", type=Path, default=REFUSED_PAGE, help="the page of all others")
    options = parser.parse_args(argv)
    rows: dict[str, Row] = {}
    if options.rows.is_file():
        rows = {row.family: row for row in msgspec.json.decode(options.rows.read_bytes(), type=list[Row])}
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    for family in options.families or families():
        if options.keep and family in rows:
            continue
        row = rows[family] = _row_of(family, options.seconds)
        print(msgspec.json.encode(row).decode(), flush=True)
        options.rows.write_bytes(msgspec.json.encode(list(rows.values())))
    write_below_mark(options.page, table(rows.values()))
    write_below_mark(options.refused_page, refused_table(rows.values()))
    problems = wrong(rows.values())
    for problem in problems:
        print(f"WRONG: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
