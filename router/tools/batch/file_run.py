"""Requests of a local file, answered once each, also over several starts of the command.

Answers are kept in a file beside the output as they come. Started again on the same input, the command runs
the requests that have none.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from router.batches.line_runner import LineRunner
from router.batches.lines import BatchLine, LineProblem, read_line

MOST_NAMED = 5
"""Wrong lines that an error names."""


class WrongFile(Exception):
    """The input is no file of requests."""


class _Kept(msgspec.Struct):
    custom_id: str


class _HasStatus(msgspec.Struct):
    status_code: int


class _Outcome(msgspec.Struct):
    response: _HasStatus | None = None


_custom_id_of = msgspec.json.Decoder(_Kept).decode
_read_outcome = msgspec.json.Decoder(_Outcome).decode


class FileRun:
    """Run of one input file, and what is kept of it."""

    def __init__(self, source: Path, output: Path) -> None:
        """Read and check the input.

        Raises:
            WrongFile: some lines are no requests; nothing is run then.
            OSError: the input cannot be read.
        """
        self._source = source
        self._output = output
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._name = f"batch_{digest[:32]}"
        """Equal for equal inputs: so are the seeds of its lines."""
        self._part = output.with_name(f"{output.name}.{digest[:8]}.part")
        self._order = self._checked()
        self._places = self._kept_places()

    def __repr__(self) -> str:
        return f"<FileRun of {self._source}: {self.num_kept} of {self.total} answered>"

    @property
    def total(self) -> int:
        return len(self._order)

    @property
    def num_kept(self) -> int:
        """Requests that have an answer."""
        return len(self._places)

    async def answer(self, runner: LineRunner, most: int, on_answer: Callable[[bool], None]) -> int:
        """Answer all requests that have no answer; write the output.

        At most so many run at once. ``on_answer`` gets whether an answer is an error. Returns how many are.
        """
        waiting, created = self._unanswered(), int(time.time())
        with self._part.open("ab") as part:

            async def work() -> None:
                for number, line in waiting:  # shared: a worker that is free takes the next
                    found = await runner.answer(self._name, created, number, line)
                    self._keep(part, line.custom_id, found.text)
                    on_answer(found.is_error)

            async with asyncio.TaskGroup() as group:
                for _ in range(max(1, min(most, self.total - self.num_kept))):
                    group.create_task(work())
            os.fsync(part.fileno())
        return self._write_output()

    # ---- the input

    def _lines(self) -> Iterator[bytes]:
        with self._source.open("rb") as file:
            yield from filter(bytes.strip, file)

    def _checked(self) -> list[str]:
        """Ids of all lines, in order."""
        found: dict[str, None] = {}
        wrong: list[str] = []
        for number, text in enumerate(self._lines(), 1):
            try:
                id = read_line(text).custom_id
                if id in found:
                    raise LineProblem("duplicate_custom_id", f"the custom_id {id[:80]!r} stands before")
                found[id] = None
            except LineProblem as problem:
                wrong.append(f"line {number}: {problem}")
        if wrong:
            more = f" and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
            raise WrongFile(f"{self._source}: {'; '.join(wrong[:MOST_NAMED])}{more}")
        if not found:
            raise WrongFile(f"{self._source} has no requests")
        return list(found)

    def _unanswered(self) -> Iterator[tuple[int, BatchLine]]:
        for number, text in enumerate(self._lines()):
            line = read_line(text)
            if line.custom_id not in self._places:
                yield number, line

    # ---- what is kept

    def _kept_places(self) -> dict[str, int]:
        """Offsets of answers that are kept; one that was cut short is removed."""
        places: dict[str, int] = {}
        if not self._part.exists():
            return places
        with self._part.open("rb+") as part:
            end = 0
            for text in part:
                if not text.endswith(b"\n"):
                    break
                places[_custom_id_of(text).custom_id] = end
                end += len(text)
            part.truncate(end)
        return places

    def _keep(self, part: BinaryIO, custom_id: str, text: bytes) -> None:
        self._places[custom_id] = part.seek(0, os.SEEK_END)
        part.write(text + b"\n")
        part.flush()

    def _write_output(self) -> int:
        """Write the answers in the order of the requests; returns how many are errors."""
        failed = 0
        unfinished = self._output.with_name(f"{self._output.name}.unfinished")
        with self._part.open("rb") as part, unfinished.open("wb") as output:
            for id in self._order:
                part.seek(self._places[id])
                text = part.readline()
                response = _read_outcome(text).response
                failed += response is None or response.status_code >= 400
                output.write(text)
        unfinished.replace(self._output)
        self._part.unlink()
        return failed
