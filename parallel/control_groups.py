"""Memory and core-time limits that the control groups of this process set (Linux).

This module loads no torch.

A container sees its own group as the root of the tree; a unit of systemd, a job of Slurm or a process of a
container without a namespace of its own lies somewhere below it, and each group above it limits it, too.
Version 2 has one tree, version 1 one for each controller
(https://docs.kernel.org/admin-guide/cgroup-v2.html, .../cgroup-v1/memory.html).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


class MemoryLimit(NamedTuple):
    """Memory limit and use of one control group, in bytes."""

    most: int
    used: int
    files: int
    """Bytes of cached file pages, which the kernel can reclaim.

    These are mapped weights, above all, however lately they were read.
    """


def memory_limits(root: Path = ROOT, own: Path = OWN) -> list[MemoryLimit]:
    """The limits of this process's control group and of those above it, where set."""
    found = []
    for group in _groups(root, own, ""):
        found.append(_limit(group, "memory.max", "memory.current", ""))
    for group in _groups(root / "memory", own, "memory"):
        found.append(_limit(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
    return [limit for limit in found if limit is not None]


def cpu_quota(root: Path = ROOT, own: Path = OWN) -> float | None:
    """CPU quota of this process's control groups, in cores; None: no limit.

    Threads beyond that are stopped by and by.
    """
    quotas = [_quota(_words(group / "cpu.max")) for group in _groups(root, own, "")]
    for group in _groups(root / "cpu", own, "cpu"):
        quotas.append(_quota(_words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")))
    return min((quota for quota in quotas if quota is not None), default=None)


def _groups(tree: Path, own: Path, controller: str) -> Iterator[Path]:
    """Directories of this process's control group and of its ancestors.

    Those that cannot be seen have no files.
    """
    for line in _lines(own):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(",") and (controller or number == "0"):
            below = Path(path.lstrip("/"))
            if ".." not in below.parts:  # else it is outside of what this container sees
                yield from (tree / each for each in (below, *below.parents))
                return
    yield tree


def _limit(group: Path, most: str, used: str, prefix: str) -> MemoryLimit | None:
    limit, now = _number(group / most), _number(group / used)
    if limit is None or now is None:
        return None
    counts = dict(line.split(maxsplit=1) for line in _lines(group / "memory.stat"))
    files = sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    return MemoryLimit(limit, now, files)


def _quota(words: list[str]) -> float | None:
    """CPU quota in cores, from a quota and a period.

    ``max`` or a negative quota means no limit.
    """
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return None
    quota, period = map(int, words)
    return quota / period if quota > 0 and period > 0 else None


def _number(path: Path) -> int | None:
    """Number in a control-group file; None if missing or ``max`` (no limit)."""
    words = _words(path)
    return int(words[0]) if len(words) == 1 and words[0].isdecimal() else None


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
