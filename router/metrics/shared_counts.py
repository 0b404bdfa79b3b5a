"""Metric counts that routers of one ``serve`` share through files and sum.

A scrape of the shared port reaches one router, by chance. Each writes its counts to a file of its own
whenever they changed, at most every half second and before each scrape. It adds the others' files to its
answer. A router that is started again continues from its file. So counters never fall from one scrape to the
next, whichever router answers and whichever died; at most the last half second, which no scrape has seen, is
lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from coordinator.rpc.complaints import Complaints
from router.faults import Faults

logger = logging.getLogger(__name__)

WRITE_INTERVAL = 0.5
"""Minimum seconds between two writes of shared counts."""


class SeriesTotals(msgspec.Struct, frozen=True, array_like=True):
    """One series of a histogram: observations per bucket, and the sum of their values."""

    counts: list[int]
    total: float


class HttpTotals(msgspec.Struct, frozen=True, array_like=True):
    """Answers to HTTP requests of one method, by one handler."""

    method: str
    handler: str
    statuses: dict[str, int]
    """Counts by group, as "2xx"."""
    seconds: SeriesTotals


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one process since the mesh started."""

    pid: int
    in_flight: int = 0
    histograms: dict[str, dict[str, SeriesTotals]] = {}
    """By name and engine."""
    success: dict[str, dict[str, int]] = {}
    """By engine and finish reason."""
    faults: Faults = msgspec.field(default_factory=Faults)
    choices: dict[str, int] = {}
    """By outcome: see :mod:`router.metrics.label_counts`."""
    numerics_changes: dict[str, int] = {}
    """By whether equal answers were promised."""
    shadow_checks: dict[str, int] = {}
    """By result."""
    shadow_differences: dict[str, int] = {}
    """By rank."""
    store_events: dict[str, int] = {}
    """By event."""
    pooling_cache: dict[str, int] = {}
    """By event."""
    http: list[HttpTotals] = []


class SharedCounts:
    """Directory with one file per process, seen by the process called ``name``."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._file = directory / f"{name}.counts"
        self._written = b""
        self._complaints = Complaints(logger, "the counts of this process cannot be kept")
        self._unread = Complaints(logger, "counts of other processes cannot be read: older ones are reported")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Snapshot)
        self._known: dict[Path, Snapshot] = {}
        """Last values read from each file: no sum may fall while files cannot be opened."""

    def __repr__(self) -> str:
        return f"<SharedCounts {self._file}>"

    def own(self) -> Snapshot | None:
        """Counts left by the last process of this name."""
        return self._read(self._file)

    def others(self) -> list[Snapshot]:
        """Counts of all other processes, dead ones included."""
        found = (self._read(file) for file in self._files() if file != self._file)
        return [snapshot for snapshot in found if snapshot is not None]

    def write(self, snapshot: Snapshot) -> None:
        """Replace this process's file, unless nothing changed."""
        encoded = self._encoder.encode(snapshot)
        if encoded == self._written:
            return
        fresh = self._file.with_suffix(".new")
        try:
            fresh.write_bytes(encoded)
            fresh.replace(self._file)
        except OSError as error:
            self._complaints.add(error)
            return
        self._written = encoded

    async def keep(self, snapshot: Callable[[], Snapshot]) -> None:
        """Write the counts periodically until cancelled, then once more."""
        try:
            while True:
                self.write(snapshot())
                await asyncio.sleep(WRITE_INTERVAL)
        finally:
            self.write(snapshot())

    def _files(self) -> list[Path]:
        try:
            return sorted(self._directory.glob("*.counts"))
        except OSError as error:
            self._unread.add(error)
            return sorted(self._known)

    def _read(self, file: Path) -> Snapshot | None:
        try:
            self._known[file] = self._decoder.decode(file.read_bytes())
        except FileNotFoundError:
            self._known.pop(file, None)
        except (OSError, msgspec.MsgspecError) as error:
            self._unread.add(error)
        return self._known.get(file)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
