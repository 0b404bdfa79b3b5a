"""Queue of block reads for reader threads, with deadlines and hang detection (pure).

Threads take one block after the other, those of the oldest read first. A read ends once its blocks are there
or one is lacking, once it is cancelled, or once its time is over. A thread in a system call cannot be called
back. So what it fills is kept until it returns, whatever has become of the read; all other room is given back
at once. While a call is overdue the disk hangs: nothing is begun. The caller has a lock around all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.pieces.pool import BlockHash
from engine.transfers.fetching import TransferEnded, TransferOutcome, Wanted

HANGS = 1.0
"""Seconds beyond the time of its read after which a system call counts as hanging."""


@dataclass(frozen=True)
class FileJob:
    """One block for a thread to read."""

    number: int
    """Number of the read that the job belongs to."""
    index: int
    name: BlockHash
    block: int
    """Number of the cache block that the file's content fills."""


@dataclass
class _Read:
    wanted: Wanted
    until: float
    """Deadline of the read."""
    began_at: float | None = None
    """When its first block was begun; None: it waits for its turn."""
    next: int = 0
    """Index of the next block to begin."""
    busy: dict[int, FileJob] = field(default_factory=dict)
    """Blocks that threads fill now, by index."""
    lacking: list[tuple[int, TransferOutcome]] = field(default_factory=list)
    """Reason by index of each block that could not be read."""

    @property
    def goes_on(self) -> bool:
        """Whether a further block of it can be begun."""
        return not self.lacking and self.next < len(self.wanted.names)


class Reads:
    """All reads of one cache from its files."""

    def __init__(self, bytes_of: Callable[[int], int]) -> None:
        """``bytes_of``: bytes of the piece in a slot."""
        self._bytes_of = bytes_of
        self._reads: dict[int, _Read] = {}
        """Those that have not ended, oldest first."""
        self._calls: dict[FileJob, float] = {}
        """What threads read now, and when the time of its read is over."""
        self._kept: set[FileJob] = set()
        """Those of reads that have ended."""
        self._ended: list[TransferEnded] = []
        self._returned: list[int] = []

    def __repr__(self) -> str:
        return f"<Reads: {len(self._reads)} wait or are under way, {len(self._kept)} blocks kept>"

    def __len__(self) -> int:
        """Reads that have not ended."""
        return len(self._reads)

    # ---- events

    def ask(self, wanted: Wanted, now: float) -> None:
        """Take up a read, which waits for its turn."""
        self._reads[wanted.number] = _Read(wanted, now + wanted.seconds)

    def take(self, now: float) -> FileJob | None:
        """A block for a thread that is free; None: there is none.

        The thread calls :meth:`done` afterwards.
        """
        if self.is_overdue(now):
            return None
        for read in self._reads.values():
            if read.goes_on and now <= read.until:
                wanted, index = read.wanted, read.next
                job = FileJob(wanted.number, index, wanted.names[index], wanted.blocks[index])
                read.began_at = now if read.began_at is None else read.began_at
                read.busy[index] = job
                read.next += 1
                self._calls[job] = read.until
                return job
        return None

    def done(self, job: FileJob, lacks: TransferOutcome | None, now: float) -> bool:
        """Record that a thread has finished a block.

        ``lacks``: why the block is not there, None if it is. Returns whether a read has ended, or a kept
        block is returned.
        """
        del self._calls[job]
        if job in self._kept:
            self._kept.remove(job)
            self._returned.append(job.block)
            return True
        read = self._reads[job.number]
        del read.busy[job.index]
        if lacks is not None:
            read.lacking.append((job.index, lacks))
        elif read.goes_on and now > read.until:
            read.lacking.append((read.next, TransferOutcome.SLOW))
        self._end_if_over(read, now)
        return job.number not in self._reads

    def cancel(self, number: int, now: float) -> None:
        """Cancel a read; harmless if it has ended."""
        read = self._reads.get(number)
        if read is not None:
            read.lacking.append((read.next, TransferOutcome.CANCELLED))
            self._end_if_over(read, now)

    def look(self, now: float) -> list[int]:
        """End reads whose time is over.

        Returns blocks of theirs that threads may still fill: they are to be held beyond the ends of the
        reads, until :meth:`take_returned` has them.
        """
        held: list[int] = []
        for read in [each for each in self._reads.values() if now > each.until]:
            held += [job.block for job in read.busy.values()]
            self._kept.update(read.busy.values())
            outcome = TransferOutcome.CANCELLED if read.began_at is None else TransferOutcome.SLOW
            read.lacking.append((min(read.busy, default=read.next), outcome))
            read.busy.clear()
            self._end_if_over(read, now)
        return held

    # ---- what follows

    def take_ended(self) -> list[TransferEnded]:
        """Reads that ended since the last call."""
        found, self._ended = self._ended, []
        return found

    def take_returned(self) -> list[int]:
        """Held blocks that no thread fills any more, since the last call."""
        found, self._returned = self._returned, []
        return found

    def is_overdue(self, now: float) -> bool:
        """Whether a system call lasts longer than its read may."""
        return any(now > until for until in self._calls.values())

    def hangs_for(self, now: float) -> float:
        """Seconds since a system call should have returned; 0 if none hangs."""
        late = max((now - until for until in self._calls.values()), default=0.0)
        return late if late > HANGS else 0.0

    def _end_if_over(self, read: _Read, now: float) -> None:
        wanted = read.wanted
        if read.busy or read.goes_on:
            return
        count, outcome = min(read.lacking, default=(len(wanted.names), TransferOutcome.WHOLE))
        del self._reads[wanted.number]
        seconds = 0.0 if read.began_at is None else now - read.began_at
        num_bytes = sum(map(self._bytes_of, wanted.blocks[:count]))
        self._ended.append(TransferEnded(wanted.number, count, outcome, wanted.source, num_bytes, seconds))
