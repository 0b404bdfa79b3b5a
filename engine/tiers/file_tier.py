"""The tier of KV blocks in files, with the threads that read and write.

Reading and writing have a thread each, so that a slow disk costs no step, and a write no read. The step loop
holds the blocks that they use: those of a transfer until its :class:`.Ended`, those that are written until
the writer has told. Which blocks are written is decided by :mod:`engine.tiers.write_behind`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

from engine.messages import FileCounters
from engine.scheduling.blocks import BlockHash, BlockPool
from engine.tiers.block_files import BlockFiles, WrongBlock
from engine.tiers.write_behind import WriteBehind, Writing
from engine.transfers.block_memory import CacheMemory
from engine.transfers.fetching import Ended, Outcome, Wanted
from engine.transfers.pages_ahead import MOST_AHEAD, blocks_at_once, wanted_blocks

logger = logging.getLogger(__name__)

WINDOW = 8
"""Blocks that are held to be written at once, at most."""
WINDOW_PART = 16
"""Divisor of the cache: blocks that are held to be written, at most, but one."""
MOST_READS = 32
"""Reads that wait for their turn; the blocks of further ones are computed."""
RESCAN = 5.0
"""Seconds between two looks at what other instances have written."""
FIRST_LOOK = 10.0
"""Most seconds before an instance serves, for the list of a directory and for pages."""
PREPARED_BYTES = 512 << 20
"""Most bytes of the cache whose pages are made ready for files."""
READERS = 2
"""Threads that read the blocks of one prompt."""
FEWEST_EACH = 4
"""Blocks for each thread at least; fewer are not worth waking one."""
CLOSING_LOOK = 0.2
"""Seconds between two looks of a reader that waits for another whether the instance leaves."""
FLUSH = 5.0
"""Seconds in which a leaving instance writes what waits."""
LOWER = 10
"""How much lower than that of others the writer's priority is (nice)."""


class _Reading:
    """Blocks that several threads read at once, each the next one that nobody has begun."""

    def __init__(self, wanted: Wanted, until: float) -> None:
        self.wanted = wanted
        self.until = until
        self.numbers = count()
        self.ends: list[tuple[int, Outcome]] = []
        """Blocks that are not there, and why."""
        self.done = threading.Semaphore(0)
        """Released by each helper that reads no more of it."""

    @property
    def is_over(self) -> bool:
        """Whether a block before any further one is lacking."""
        return bool(self.ends)

    def result(self) -> tuple[int, Outcome]:
        """How many of the first blocks are there, and why there are no more."""
        return min(self.ends, default=(len(self.wanted.names), Outcome.WHOLE))


class FileTier:
    """Reads and writes blocks of one cache until it is closed."""

    def __init__(
        self,
        pool: BlockPool,
        memory: CacheMemory,
        files: BlockFiles,
        most_bytes: int,
        wake: Callable[[], None],
    ) -> None:
        """``most_bytes``: of all files of the directory. ``wake``: called by threads when there is news."""
        self._pool = pool
        self._memory = memory
        self._files = files
        self._most_bytes = most_bytes
        self._wake = wake
        self._kept: set[BlockHash] = set()
        window = max(1, min(WINDOW, pool.num_blocks // WINDOW_PART))
        self.policy = WriteBehind(self._kept, window)
        self._reads: queue.SimpleQueue[Wanted | None] = queue.SimpleQueue()
        self._helped: queue.SimpleQueue[_Reading | None] = queue.SimpleQueue()
        self._num_reads = 0
        self._cancelled: set[int] = set()
        self._read: deque[Ended] = deque()
        self._writes: queue.SimpleQueue[Writing | str] = queue.SimpleQueue()
        self._written: deque[tuple[BlockHash, bool]] = deque()
        self._listed = threading.Event()
        self._cleared = threading.Event()
        self._cleared.set()
        self._closing = False
        self._is_abandoned = False
        self._mine: set[BlockHash] = set()
        """Blocks that this instance has written, as far as they are still there."""
        self._told_at = 0.0
        self._totals = dict.fromkeys(FileCounters.__struct_fields__, 0.0)
        self._threads = [
            threading.Thread(target=self._read_all, name="kv-reader", daemon=True),
            threading.Thread(target=self._write_all, name="kv-writer", daemon=True),
            *(
                threading.Thread(target=self._help, name=f"kv-reader-{number}", daemon=True)
                for number in range(1, READERS)
            ),
        ]

    def __repr__(self) -> str:
        return f"<FileTier of {len(self._kept)} blocks, {self.policy!r}>"

    def start(self) -> None:
        """Look what is there, and begin.

        Raises:
            OSError: nothing can be written to the directory.
        """
        self._files.prepare()
        for thread in self._threads:
            thread.start()
        if not self._listed.wait(FIRST_LOOK):
            logger.warning("%r takes long to list: its blocks are used once they are known", self._files)
        self._pool.observe(self.policy)

    # ---- the step loop's side

    def count(self, names: Sequence[BlockHash]) -> int:
        """How many of the first of these blocks have files."""
        found = 0
        if self._num_reads < MOST_READS and self._cleared.is_set() and not self._is_abandoned:
            found = next((at for at, name in enumerate(names) if name not in self._kept), len(names))
        self._add(queried_blocks=len(names), found_blocks=found)
        return found

    def fetch(self, wanted: Wanted) -> None:
        """Begin to read blocks; it ends by one :class:`.Ended`, whatever happens."""
        self._num_reads += 1
        self._reads.put(wanted)

    def cancel(self, number: int) -> None:
        """End a read soon."""
        self._cancelled.add(number)

    def take_events(self) -> list[Ended]:
        """Reads that ended since the last call."""
        found = []
        while self._read:
            end = self._read.popleft()
            self._num_reads -= 1
            self._cancelled.discard(end.number)
            found.append(end)
        return found

    def turn(self, being_filled: Callable[[], set[int]]) -> None:
        """Let go of what is written, and hold what is to be written next."""
        now = time.monotonic()
        while self._written:
            name, is_written = self._written.popleft()
            block = self.policy.ended(name, now, is_written=is_written)
            if block is not None:
                self._pool.release([block])
        if len(self.policy):
            filled: set[int] | None = None

            def computed(name: BlockHash) -> int | None:
                nonlocal filled
                filled = being_filled() if filled is None else filled
                block = self._pool.find_prefix([name])
                return block[0] if block and block[0] not in filled else None

            for each in self.policy.due(now, computed):
                self._pool.hold([each.block])
                self._writes.put(each)

    def forget(self, names: Sequence[BlockHash]) -> None:
        """Delete files whose blocks are not what is computed."""
        self._kept.difference_update(names)
        for name in names:
            self._files.drop(name)

    def clear(self) -> None:
        """Delete all files of this cache; :attr:`is_clear` tells when that is done."""
        self.policy.clear()
        self._kept.clear()
        self._cleared.clear()
        self._writes.put("clear")

    def drop_written(self) -> None:
        """Delete the files that this instance has written, soon."""
        self._writes.put("drop")

    def abandon(self) -> None:
        """Use no files any more: a block of them is not what is computed."""
        logger.error("%r is not used any more: empty it, and see who else can write there", self._files)
        self.policy.stop()
        self._is_abandoned = True

    @property
    def is_clear(self) -> bool:
        return self._cleared.is_set()

    def counters(self) -> FileCounters:
        """Totals so far."""
        totals = {name: type(getattr(FileCounters(), name))(value) for name, value in self._totals.items()}
        totals["skipped_blocks"], totals["write_failures"] = self.policy.num_skipped, self.policy.num_failed
        return FileCounters(**totals)

    def close(self) -> None:
        """Write what waits, for a bounded time; called once there are no steps any more."""
        until = time.monotonic() + FLUSH
        while (len(self.policy) or self.policy.num_held) and time.monotonic() < until:
            self.turn(set)
            if not self.policy.num_held:
                break  # nothing more can be written now
            time.sleep(0.002)
        self._closing = True
        self._reads.put(None)
        self._writes.put("close")
        for _ in range(1, READERS):
            self._helped.put(None)
        for thread in self._threads:
            thread.join(max(0.1, until - time.monotonic()))  # one that hangs in a system call is left behind

    def _add(self, **more: float) -> None:
        for name, amount in more.items():
            self._totals[name] += amount

    # ---- the reader

    def _read_all(self) -> None:
        while (wanted := self._reads.get()) is not None and not self._closing:
            began = time.monotonic()
            try:
                found, outcome = self._read_blocks(wanted, began + wanted.seconds)
            except Exception:
                logger.exception("a block file could not be read")
                found, outcome = 0, Outcome.LOST
            seconds, num_bytes = time.monotonic() - began, found * self._memory.block_bytes
            self._add(read_bytes=num_bytes, read_seconds=seconds)
            self._read.append(Ended(wanted.number, found, outcome, wanted.source, num_bytes, seconds))
            self._wake()

    def _read_blocks(self, wanted: Wanted, until: float) -> tuple[int, Outcome]:
        """Read blocks, with the other readers.

        Returns how many of the first are right, and why there are no more.
        """
        reading = _Reading(wanted, until)
        helpers = min(READERS, len(wanted.names) // FEWEST_EACH) - 1
        for _ in range(helpers):
            self._helped.put(reading)
        self._work(reading)
        for _ in range(helpers):
            while not reading.done.acquire(timeout=CLOSING_LOOK) and not self._closing:
                pass  # a helper that hangs in a system call may still write into a block
        return reading.result()

    def _help(self) -> None:
        while (reading := self._helped.get()) is not None:
            try:
                self._work(reading)
            finally:
                reading.done.release()

    def _work(self, reading: _Reading) -> None:
        """Read one block after the other of those that nobody has begun."""
        for index in reading.numbers:
            if index >= len(reading.wanted.names) or reading.is_over:
                return
            try:
                outcome = self._read_block(reading, index)
            except Exception:
                logger.exception("a block file could not be read")
                outcome = Outcome.LOST
            if outcome is not None:
                reading.ends.append((index, outcome))
                return

    def _read_block(self, reading: _Reading, index: int) -> Outcome | None:
        """Read one block; returns why it is not there."""
        wanted, name = reading.wanted, reading.wanted.names[index]
        if wanted.number in self._cancelled or self._closing:
            return Outcome.CANCELLED
        if time.monotonic() > reading.until:
            return Outcome.SLOW
        try:
            with self._memory.filling(wanted.blocks[index]) as parts:
                self._files.read(name, parts)
        except FileNotFoundError:
            self._kept.discard(name)
            return Outcome.WHOLE if index else Outcome.ABSENT
        except WrongBlock as error:
            logger.error("%s: it is deleted, and the block is computed", error)
            self.forget([name])
            return Outcome.WRONG
        except OSError as error:
            self._kept.discard(name)
            self._add(read_failures=1)
            self._complain(f"a block file cannot be read: {error}")
            return Outcome.LOST
        return None

    def _complain(self, text: str) -> None:
        """Log a trouble, but not each of many."""
        if (now := time.monotonic()) > self._told_at + RESCAN:
            self._told_at = now
            logger.error("%s", text)

    # ---- the writer

    def _write_all(self) -> None:
        self._look(trims=True)
        if self._kept:  # what is not done now, the first request would wait for
            group = blocks_at_once(self._memory)
            wanted = wanted_blocks(len(self._kept), group, self._memory.num_blocks, MOST_AHEAD)
            self._memory.prepare(min(PREPARED_BYTES // self._memory.block_bytes, wanted))
        self._listed.set()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWER)
        looked = time.monotonic()
        while True:
            job: Writing | str = "look"
            with contextlib.suppress(queue.Empty):
                job = self._writes.get(timeout=RESCAN)
            if isinstance(job, Writing):
                self._written.append((job.name, self._write(job)))
                self._wake()
            elif job == "clear":
                logger.info("%d files of KV blocks are deleted", self._files.clear())
                self._kept.clear()
                self._look(trims=True)
                self._cleared.set()
                self._wake()
            elif job == "drop":
                logger.info("%d files of KV blocks that were written here are deleted", len(self._mine))
                self.forget(list(self._mine))
                self._mine.clear()
            elif job == "close":
                return
            if time.monotonic() > looked + RESCAN:
                self._look()
                looked = time.monotonic()

    def _write(self, job: Writing) -> bool:
        began = time.monotonic()
        try:
            self._files.write(job.name, self._memory.parts_of(job.block))
        except OSError as error:
            self._complain(f"KV blocks cannot be written to files: {error}")
            return False
        if self._cleared.is_set():
            self._kept.add(job.name)
        self._mine.add(job.name)
        num_bytes = self._files.file_bytes
        self._add(write_seconds=time.monotonic() - began, written_bytes=num_bytes, directory_bytes=num_bytes)
        if self._totals["directory_bytes"] > self._most_bytes:
            self._look(trims=True)
        return True

    def _look(self, *, trims: bool = False) -> None:
        """Learn which blocks there are, and delete the oldest where they are too many."""
        try:
            if trims:
                dropped, left = self._files.trim(self._most_bytes)
                self._add(dropped_files=dropped)
                self._totals["directory_bytes"] = left
            names = self._files.names()
        except OSError as error:
            self._complain(f"block files cannot be listed: {error}")
            return
        self._mine &= names
        self._kept.intersection_update(names)
        self._kept.update(names)
