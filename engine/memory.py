"""How much memory this process may still take: of the machine, or of its container (no torch)."""

from __future__ import annotations

import errno
from pathlib import Path

import psutil

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


def spare_memory(kv_bytes: int) -> int:
    """Bytes that more experts may take. A KV cache of so many counts as filled, for it will be."""
    return int(available_memory() * (1 - MARGIN)) - kv_bytes


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
