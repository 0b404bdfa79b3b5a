"""KV cache tier in files, with its reader threads and its writer thread.

Reading and writing have threads of their own, so that a slow disk costs no step, and a write no read. The
step loop holds the blocks that they use: those of a transfer until its :class:`.TransferEnded`, those that
are written until the writer has told, and those that a thread may fill beyond the end of its transfer. Which
blocks are written is decided by :mod:`engine.tiers.write_behind`, what is read by :mod:`engine.tiers.reads`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from engine.messages import FileCounters
from engine.pieces.pool import BlockHash, PiecePool
from engine.tiers.block_files import BlockFiles, WrongBlock, file_bytes
from engine.tiers.reads import FileJob, Reads
from engine.tiers.write_behind import WriteBehind, Writing
from engine.transfers.block_memory import CacheMemory
from engine.transfers.fetching import TransferEnded, TransferOutcome, Wanted
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
"""Maximum seconds at start for listing the directory and preparing pages."""
PREPARED_BYTES = 512 << 20
"""Most bytes of the cache whose pages are made ready for files."""
READERS = 2
"""Threads that read the blocks of one prompt."""
FEWEST_EACH = 4
"""Blocks for each thread at least; fewer are not worth waking one."""
WRITE_HANGS = 10.0
"""Most seconds for writing one block, or for making the directory ready.

After that the disk hangs.
"""
FLUSH = 5.0
"""Seconds in which a leaving instance writes what waits."""
LOWER = 10
"""How much lower than that of others the writer's priority is (nice)."""


class _DiskHealth:
    """Record of how long the disk of some files has not answered."""

    def __init__(self, files: BlockFiles) -> None:
        self._files = files
        self.hung_for = 0.0
        """Seconds for which it has not answered, when it was looked at last."""

    def note(self, hangs_for: float) -> None:
        """Note what was seen; log when a hang begins and ends."""
        if hangs_for and not self.hung_for:
            logger.error("the disk of %r hangs: prompts are computed until it answers", self._files)
        elif self.hung_for and not hangs_for:
            logger.warning("the disk of %r answers again after %.0f s", self._files, self.hung_for)
        self.hung_for = hangs_for


class FileTier:
    """Reads and writes blocks of one cache until it is closed."""

    def __init__(
        self,
        pool: PiecePool,
        memory: CacheMemory,
        files: BlockFiles,
        most_bytes: int,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``most_bytes``: of all files of the directory. ``wake``: called by threads when there is news."""
        self._clock = clock
        self._pool = pool
        self._memory = memory
        self._files = files
        self._most_bytes = most_bytes
        self._wake = wake
        self._kept: set[BlockHash] = set()
        window = max(1, min(WINDOW, pool.num_blocks // WINDOW_PART))
        self.policy = WriteBehind(self._kept, window)
        self._reads = Reads(memory.bytes_of)
        self._work = threading.Condition()
        """Guards the reads, and wakes threads that wait for a block to read."""
        self._disk = _DiskHealth(files)
        self._problem: OSError | None = None
        """Why nothing can be written to the directory."""
        self._call_began: float | None = None
        """When the writer began to write a block, or to make the directory ready.

        None: it does neither.
        """
        self._writes: queue.SimpleQueue[Writing | Sequence[BlockHash] | str] = queue.SimpleQueue()
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
            threading.Thread(target=self._write_all, name="kv-writer", daemon=True),
            *(
                threading.Thread(target=self._read_all, name=f"kv-reader-{number}", daemon=True)
                for number in range(READERS)
            ),
        ]

    def __repr__(self) -> str:
        return f"<FileTier of {len(self._kept)} blocks, {self.policy!r}>"

    def start(self) -> None:
        """List the directory, then start the threads.

        Raises:
            OSError: nothing can be written to the directory.
        """
        for thread in self._threads:
            thread.start()
        if not self._listed.wait(FIRST_LOOK):
            logger.warning("%r takes long to list: its blocks are used once they are known", self._files)
        elif self._problem is not None:
            self.close()
            raise self._problem
        self._pool.observe(self.policy, every_kind=True)

    # ---- the step loop's side

    def count(self, names: Sequence[BlockHash]) -> int:
        """Number of leading blocks of a prompt that a request can go on behind.

        They have files, and so have the boundary pieces behind them.
        """
        found = 0
        with self._work:
            is_open = len(self._reads) < MOST_READS and not self._reads.is_overdue(self._clock())
        if is_open and not self._disk.hung_for and self._cleared.is_set() and not self._is_abandoned:
            found = self.usable(names)
        self._add(queried_blocks=len(names), found_blocks=found)
        return found

    def usable(self, names: Sequence[BlockHash]) -> int:
        """Number of leading blocks as :meth:`count` has it, whether reads are possible or not."""
        return self._pool.kinds.usable(names, self._kept.__contains__)

    def fetch(self, wanted: Wanted) -> None:
        """Begin to read blocks; it ends by one :class:`.TransferEnded`, whatever happens."""
        names, slots = self._pool.kinds.placed(wanted.names, wanted.blocks, wanted.boundary)
        wanted = replace(wanted, names=names, blocks=slots)
        with self._work:
            self._reads.ask(wanted, self._clock())
            self._work.notify(max(1, len(wanted.names) // FEWEST_EACH))

    def cancel(self, number: int) -> None:
        """End a read soon."""
        with self._work:
            self._reads.cancel(number, self._clock())

    def take_events(self) -> list[TransferEnded]:
        """Reads that ended since the last call."""
        with self._work:
            found = self._reads.take_ended()
        for end in found:
            self._add(read_bytes=end.num_bytes, read_seconds=end.seconds)
        return found

    def turn(self, being_filled: Callable[[], set[int]]) -> None:
        """Once per turn: release written blocks, hold the next ones, end hanging calls."""
        now = self._clock()
        with self._work:
            held, returned = self._reads.look(now), self._reads.take_returned()
            hangs_for = self._reads.hangs_for(now)
        self._pool.hold(held)
        self._pool.release(returned)
        if (began := self._call_began) is not None and now > began + WRITE_HANGS:
            hangs_for = max(hangs_for, now - began)
        self._disk.note(hangs_for)
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
                slot = self._pool.slot_of(name)
                return slot if slot not in filled else None

            for each in self.policy.due(now, computed):
                self._pool.hold([each.block])
                self._writes.put(each)

    def forget(self, names: Sequence[BlockHash]) -> None:
        """Have files deleted whose blocks are not what is computed."""
        self._kept.difference_update(names)
        self._writes.put(list(names))  # deleting may hang

    def clear(self) -> None:
        """Delete all files of this cache; :attr:`is_clear` tells when that is done."""
        self.policy.clear()
        self._kept.clear()
        if self._cleared.is_set():
            self._cleared.clear()
            self._writes.put("clear")

    def drop_written(self) -> None:
        """Delete the files that this instance has written, soon."""
        self._writes.put("drop")

    def abandon(self) -> None:
        """Stop using files, since one held a wrong block."""
        logger.error("%r is not used any more: empty it, and see who else can write there", self._files)
        self.policy.stop()
        self._is_abandoned = True

    @property
    def is_clear(self) -> bool:
        return self._cleared.is_set()

    def counters(self) -> FileCounters:
        """Counters of the file tier since its start."""
        totals = {name: type(getattr(FileCounters(), name))(value) for name, value in self._totals.items()}
        totals["skipped_blocks"], totals["write_failures"] = self.policy.num_skipped, self.policy.num_failed
        totals["hung_seconds"] = round(self._disk.hung_for, 1)
        return FileCounters(**totals)

    def close(self) -> None:
        """Write what waits, for a bounded time; called once there are no steps any more."""
        until = time.monotonic() + FLUSH
        while (len(self.policy) or self.policy.num_held) and time.monotonic() < until:
            self.turn(set)
            if not self.policy.num_held:
                break  # nothing more can be written now
            time.sleep(0.002)
        with self._work:
            self._closing = True
            self._work.notify_all()
        self._writes.put("close")
        for thread in self._threads:
            thread.join(max(0.1, until - time.monotonic()))  # one that hangs in a system call is left behind

    def _add(self, **more: float) -> None:
        for name, amount in more.items():
            self._totals[name] += amount

    # ---- the readers

    def _read_all(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                lacks = self._read_block(job)
            except Exception:
                logger.exception("a block file could not be read")
                lacks = TransferOutcome.LOST
            with self._work:
                if is_news := self._reads.done(job, lacks, self._clock()):
                    self._work.notify_all()  # nothing was begun while this one was overdue
            if is_news:
                self._wake()

    def _next_job(self) -> FileJob | None:
        """Wait for a block to read; None once the instance leaves."""
        with self._work:
            while not self._closing:
                if (job := self._reads.take(self._clock())) is not None:
                    return job
                self._work.wait()
        return None

    def _read_block(self, job: FileJob) -> TransferOutcome | None:
        """Read one block; returns why it is not there."""
        name, index = job.name, job.index
        try:
            with self._memory.filling(job.block) as parts:
                self._files.read(name, parts)
        except FileNotFoundError:
            self._kept.discard(name)
            return TransferOutcome.WHOLE if index else TransferOutcome.ABSENT
        except WrongBlock as error:
            logger.error("%s: it is deleted, and the block is computed", error)
            self._kept.discard(name)
            self._files.drop(name)
            return TransferOutcome.WRONG
        except OSError as error:
            self._kept.discard(name)
            self._add(read_failures=1)
            self._complain(f"a block file cannot be read: {error}")
            return TransferOutcome.LOST
        return None

    def _complain(self, text: str) -> None:
        """Log a trouble, but not each of many."""
        if (now := time.monotonic()) > self._told_at + RESCAN:
            self._told_at = now
            logger.error("%s", text)

    # ---- the writer

    def _write_all(self) -> None:
        try:
            with self._timed():
                self._files.prepare()
        except OSError as error:
            self._problem = error
        else:
            self._look(trims=True)
        if self._kept:  # what is not done now, the first request would wait for
            group = blocks_at_once(self._memory)
            wanted = wanted_blocks(len(self._kept), group, self._memory.num_blocks, MOST_AHEAD)
            self._memory.prepare(min(PREPARED_BYTES // max(1, self._memory.block_bytes), wanted))
        self._listed.set()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWER)
        looked = time.monotonic()
        while True:
            job: Writing | Sequence[BlockHash] | str = "look"
            with contextlib.suppress(queue.Empty):
                job = self._writes.get(timeout=RESCAN)
            if isinstance(job, Writing):
                self._written.append((job.name, self._write(job)))
                self._wake()
            elif job == "clear":
                num_files = self._files.clear()
                logger.info("%d files of KV blocks are deleted in %s", num_files, self._files.folder)
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
            elif not isinstance(job, str):
                self._kept.difference_update(job)
                for name in job:
                    self._files.drop(name)
                logger.info("%d wrong files of KV blocks are deleted in %s", len(job), self._files.folder)
            if time.monotonic() > looked + RESCAN:
                self._look()
                looked = time.monotonic()

    def _write(self, job: Writing) -> bool:
        began = time.monotonic()
        try:
            with self._timed():
                self._files.write(job.name, self._memory.parts_of(job.block))
        except OSError as error:
            self._complain(f"KV blocks cannot be written to files: {error}")
            return False
        if self._cleared.is_set():
            self._kept.add(job.name)
        self._mine.add(job.name)
        num_bytes = file_bytes(self._memory.bytes_of(job.block))
        self._add(write_seconds=time.monotonic() - began, written_bytes=num_bytes, directory_bytes=num_bytes)
        if self._totals["directory_bytes"] > self._most_bytes:
            self._look(trims=True)
        return True

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Context around a writer's disk call, timed so that a hanging disk is noticed."""
        self._call_began = self._clock()
        try:
            yield
        finally:
            self._call_began = None

    def _look(self, *, trims: bool = False) -> None:
        """Learn which blocks there are, and delete the oldest where they are too many."""
        try:
            if trims:
                dropped, left = self._files.trim(self._most_bytes)
                if dropped:
                    self._add(dropped_files=dropped)
                    text = "%d files of KV blocks, used least lately, are deleted below %s"
                    logger.info(text, dropped, self._files.root)
                self._totals["directory_bytes"] = left
            names = self._files.names()
        except OSError as error:
            self._complain(f"block files cannot be listed: {error}")
            return
        self._mine &= names
        self._kept.intersection_update(names)
        self._kept.update(names)
