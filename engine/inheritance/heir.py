"""Copies pieces of dead instances' caches into this one, in a thread of its own.

The same contract as a fetch from a live one: a :class:`.Wanted` ends by a :class:`.TransferEnded`, whatever
happens. Nobody is asked, and nothing is mapped: what is released meanwhile is a short read, and is computed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.inheritance.shared_cache import is_cache
from engine.inheritance.table import ENTRY_BYTES, HEADER_BYTES, CacheHeader, Table, unpacked
from engine.pieces.kinds import BLOCKS_ONLY, PieceKinds
from engine.pieces.pool import BlockHash
from engine.transfers.block_memory import CacheMemory
from engine.transfers.fetching import DEAD, Source, TransferEnded, TransferOutcome, Wanted

logger = logging.getLogger(__name__)

LIVING = 0.25
"""Seconds to wait for a dying owner's exit.

Memory of one that lives is not read.
"""
LOOK_INTERVAL = 0.001
"""Polling interval for the owner's exit, in seconds."""


class OwnerLives(OSError):
    """Error: the memory's owner still lives and may write to it."""


class _Estate:
    """The memory of one dead instance, open."""

    def __init__(self, source: Source, identity: str, patience: float) -> None:
        """``patience``: seconds to wait for its owner's death. Raises OSError if it cannot be read."""
        path, _, owner = source.removeprefix(DEAD).partition("#")
        if not is_cache(path):
            raise FileNotFoundError(f"{path} is gone")
        self.source = source
        self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _wait_for_death(self.file, patience)
            header = unpacked(os.pread(self.file, HEADER_BYTES, 0))
            if header is None or header.owner != owner:
                raise FileNotFoundError(f"{path} is another instance's, or empty")
            if header.identity != identity:
                raise FileNotFoundError(f"{path} is of another cache")
            table = bytearray(os.pread(self.file, header.num_slots * ENTRY_BYTES, HEADER_BYTES))
        except BaseException:
            os.close(self.file)
            raise
        self._header: CacheHeader = header
        self.slots: dict[BlockHash, int] = Table(memoryview(table), owner).read()
        """Where each whole piece is, by name."""

    def copy(self, slot: int, parts: list[memoryview]) -> bool:
        """Copy one piece; False if it is not there any more."""
        for (begin, size), part in zip(self._header.parts_of(slot), parts, strict=True):
            if os.preadv(self.file, [part], begin) != size:
                return False
        return True


class Heir:
    """Reads blocks of dead instances into one cache until it is closed."""

    def __init__(
        self,
        memory: CacheMemory,
        identity: str,
        wake: Callable[[], None],
        kinds: PieceKinds = BLOCKS_ONLY,
    ) -> None:
        """``wake``: called by the thread when there are events to take."""
        self._kinds = kinds
        self._memory = memory
        self._identity = identity
        self._wake = wake
        self._asked: queue.SimpleQueue[Wanted | None] = queue.SimpleQueue()
        self._ended: deque[TransferEnded] = deque()
        self._cancelled: set[int] = set()
        self._estate: _Estate | None = None
        self._living: Source | None = None
        """Whose owner lived when it was looked at last: nobody waits for its death again."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-heir", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Heir of {self._estate.source if self._estate else 'nobody'}>"

    def fetch(self, wanted: Wanted) -> None:
        """Begin to copy blocks."""
        self._asked.put(wanted)

    def cancel(self, number: int) -> None:
        """End a copy soon."""
        self._cancelled.add(number)

    def take_events(self) -> list[TransferEnded]:
        """Copies that ended since the last call."""
        found = []
        while self._ended:
            end = self._ended.popleft()
            self._cancelled.discard(end.number)
            found.append(end)
        return found

    def close(self) -> None:
        self._closing = True
        self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (wanted := self._asked.get()) is not None and not self._closing:
            began = time.monotonic()
            count, outcome = 0, TransferOutcome.LOST
            names: Sequence[BlockHash] = ()
            slots: Sequence[int] = ()
            try:
                names, slots = self._open(wanted)
                count, outcome = self._copy(wanted, names, slots, began + wanted.seconds)
            except OSError as error:
                logger.info("no KV blocks are inherited: %s", error)
            except Exception:
                logger.exception("KV blocks of a dead instance could not be copied")
            seconds, num_bytes = time.monotonic() - began, sum(map(self._memory.bytes_of, slots[:count]))
            end = TransferEnded(wanted.number, count, outcome, wanted.source, num_bytes, seconds)
            self._ended.append(replace(end, names=names, slots=slots) if wanted.boundary else end)
            self._wake()
            if self._asked.empty():
                self._leave()  # else the memory would be kept from the system
        self._leave()

    def _open(self, wanted: Wanted) -> tuple[list[BlockHash], list[int]]:
        """Open the memory of a dead instance; returns names and slots of pieces to copy."""
        if self._estate is None or self._estate.source != wanted.source:
            self._leave()
            patience = 0.0 if wanted.source == self._living else LIVING
            try:
                self._estate = _Estate(wanted.source, self._identity, patience)
            except OwnerLives:
                self._living = wanted.source
                raise
        usable = self._kinds.usable(wanted.names, self._estate.slots.__contains__)
        return self._kinds.placed(wanted.names[:usable], wanted.blocks, wanted.boundary)

    def _copy(
        self, wanted: Wanted, names: Sequence[BlockHash], slots: Sequence[int], until: float
    ) -> tuple[int, TransferOutcome]:
        """Copy the pieces of one request from a dead instance's memory.

        Returns how many of the first are there, and why there are no more.
        """
        estate = self._estate
        assert estate is not None
        for index, (name, to) in enumerate(zip(names, slots, strict=True)):
            if wanted.number in self._cancelled or self._closing:
                return index, TransferOutcome.CANCELLED
            if time.monotonic() > until:
                return index, TransferOutcome.SLOW
            with self._memory.filling(to) as parts:
                if not estate.copy(estate.slots[name], parts):
                    return index, TransferOutcome.LOST
        return len(names), TransferOutcome.WHOLE if names else TransferOutcome.ABSENT

    def _leave(self) -> None:
        if self._estate is not None:
            os.close(self._estate.file)
            self._estate = None


def _wait_for_death(file: int, patience: float) -> None:
    """Return once the owner's last thread is gone.

    Raises:
        OwnerLives: it lives on.
    """
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > until:
                raise OwnerLives("the instance lives") from error
            time.sleep(LOOK_INTERVAL)
