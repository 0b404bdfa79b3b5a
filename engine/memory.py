"""How much memory this process may still take: of the machine, or of its container (no torch)."""

from __future__ import annotations

import errno
from pathlib import Path

import psutil

from engine.step import Step

CGROUP = Path("/sys/fs/cgroup")

MARGIN = 0.1
"""Of the memory that is free, what is left alone when more experts are loaded."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is short: Python's own, the system's (ulimit -v, vm.overcommit), or
    torch's, which are RuntimeErrors."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    is_torchs = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return isinstance(error, RuntimeError) and is_torchs


def available_memory(cgroup: Path = CGROUP) -> int:
    """Bytes that can be taken without swapping: what the machine has, or what the container's limit leaves.
    File pages that can be dropped count as free."""
    available = int(psutil.virtual_memory().available)
    limit = _number(cgroup / "memory.max")
    used = _number(cgroup / "memory.current")
    if limit is None or used is None:
        return available
    return max(0, min(available, limit - used + _files(cgroup / "memory.stat")))


class Untouched:
    """The part of a KV cache on a CPU that was never written to: its pages take no memory yet, but will. A
    new cache is used in the order of its blocks' numbers (:class:`engine.blocks.BlockPool`)."""

    def __init__(self, num_blocks: int = 0, block_bytes: int = 0) -> None:
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._num_used = 0
        """Blocks that were ever given out."""

    def __repr__(self) -> str:
        return f"<Untouched {self._num_blocks - self._num_used} of {self._num_blocks} blocks>"

    def note(self, step: Step) -> None:
        """A step is computed."""
        for blocks in step.new_blocks.values():
            self._num_used = max(self._num_used, max(blocks, default=-1) + 1)

    @property
    def num_bytes(self) -> int:
        return (self._num_blocks - self._num_used) * self._block_bytes


def spare_memory(cache: Untouched) -> int:
    """Bytes that more experts may take. What a KV cache will still take counts as taken."""
    return int((available_memory() - cache.num_bytes) * (1 - MARGIN))


def most_memory(cgroup: Path = CGROUP) -> int:
    """Bytes that there are in all, free or not."""
    total = int(psutil.virtual_memory().total)
    limit = _number(cgroup / "memory.max")
    return total if limit is None else min(total, limit)


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no such file, or no number (``max``: no limit)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _files(path: Path) -> int:
    """Bytes of file pages, which can be dropped: weights that are mapped, above all, however lately they were
    read."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split() for line in lines)
    return int(counts.get("inactive_file", 0)) + int(counts.get("active_file", 0))
