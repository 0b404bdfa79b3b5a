"""A recording of a terminal: an animated SVG, or an asciinema file (version 2).

Used by ``kill_a_rank.py``. Only what changes from picture to picture is written.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path

from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.terminal_theme import MONOKAI

SHOW_END = 4.0
"""Seconds that the last picture stays before the SVG begins again."""
CHAR_WIDTH, LINE_HEIGHT, FONT_SIZE, MARGIN = 8.43, 19, 14, 14

Line = tuple[Segment, ...]


class Recording:
    """Pictures, and when they were shown."""

    def __init__(self, width: int) -> None:
        """``width``: characters of a line."""
        self._width = width
        self._console = Console(
            width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor"
        )
        self._began: float | None = None
        self._frames: list[tuple[float, list[Line]]] = []

    def add(self, picture: RenderableType) -> None:
        """What is shown from now on."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        lines = [tuple(line) for line in self._console.render_lines(picture, pad=False)]
        if not self._frames or self._frames[-1][1] != lines:
            self._frames.append((now - self._began, lines))

    def write(self, file: Path) -> None:
        """As the suffix says: ``.svg`` or ``.cast``."""
        file.write_text(self.svg() if file.suffix == ".svg" else self.cast(), encoding="utf-8")

    # ---- SVG

    def svg(self) -> str:
        """Each line of each picture is there for its time.

        Browsers, and GitHub, play it again and again.
        """
        seconds = self._frames[-1][0] + SHOW_END
        height = max(len(lines) for _, lines in self._frames) * LINE_HEIGHT + 2 * MARGIN
        width = self._width * CHAR_WIDTH + 2 * MARGIN
        styles, texts = [], []
        for number, (row, begin, end, line) in enumerate(self._spans(seconds)):
            first, last = (100 * at / seconds for at in (begin, end))
            name = f"l{number}"
            if last - first < 100:
                styles.append(
                    f"@keyframes {name}{{0%{{opacity:0}}{first:.2f}%{{opacity:1}}{last:.2f}%{{opacity:0}}}}"
                    f"#{name}{{animation-name:{name}}}"
                )
            y = MARGIN + (row + 0.75) * LINE_HEIGHT
            texts.append(f'<text id="{name}" x="{MARGIN}" y="{y:.1f}">{"".join(map(_tspan, line))}</text>')
        font = f"font:{FONT_SIZE}px monospace;fill:#d9d9d9;white-space:pre"
        return "\n".join(
            (
                '<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve"',
                f'width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}">',
                f"<style>text{{{font};animation:{seconds:.2f}s step-end infinite}}",
                *styles,
                '</style><rect width="100%" height="100%" rx="8" fill="#0c0c0c"/>',
                *texts,
                "</svg>\n",
            )
        )

    def _spans(self, seconds: float) -> Iterator[tuple[int, float, float, Line]]:
        """(row, begin, end, line): how long each line stood there."""
        for row in range(max(len(lines) for _, lines in self._frames)):
            shown: Line = ()
            begin = 0.0
            for at, lines in [*self._frames, (seconds, [])]:
                line = lines[row] if row < len(lines) else ()
                if line != shown:
                    if any(segment.text.strip() for segment in shown):
                        yield row, begin, at, shown
                    shown, begin = line, at

    # ---- asciinema

    def cast(self) -> str:
        """One event per picture, each drawn from the top."""
        height = max(len(lines) for _, lines in self._frames)
        events = [json.dumps({"version": 2, "width": self._width, "height": height + 1})]
        for at, lines in self._frames:
            rows = ["".join(map(self._ansi, line)) + "\x1b[K" for line in lines]
            events.append(json.dumps([round(at, 3), "o", "\x1b[H" + "\r\n".join(rows) + "\x1b[J"]))
        return "\n".join(events) + "\n"

    def _ansi(self, segment: Segment) -> str:
        return segment.style.render(segment.text) if segment.style else segment.text


def _tspan(segment: Segment) -> str:
    style, text = segment.style, escape(segment.text)
    if style is None or not style:
        return text
    marks = []
    if style.color is not None:
        marks.append(f'fill="{style.color.get_truecolor(MONOKAI).hex}"')
    marks += [mark for has, mark in (
        (style.bold, 'font-weight="bold"'), (style.dim, 'opacity="0.6"'),
        (style.strike, 'text-decoration="line-through"'),
    ) if has]  # fmt: skip
    return f"<tspan {' '.join(marks)}>{text}</tspan>" if marks else text
