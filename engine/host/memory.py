"""Memory that this process may still take, of machine or container (no torch)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import psutil

from engine.step import Step
from parallel.caches import own_directory
from parallel.control_groups import memory_limits

logger = logging.getLogger(__name__)

TURN_TIMEOUT = 120.0
"""Seconds that a process waits for the lock, while others lay out weights."""
READING_TURN_TIMEOUT = 600.0
"""Seconds that an instance waits while others of its host read weights."""
DEVICE_TURN_TIMEOUT = 600.0
"""Seconds to wait for a device's lock, while others compile and capture graphs."""

MARGIN = 0.1
"""Share of free memory that is left alone when more experts are loaded."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory is short.

    Python's own, the system's (ulimit -v, vm.overcommit), or torch's, which are RuntimeErrors.
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    is_torchs = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return isinstance(error, RuntimeError) and is_torchs


def available_memory() -> int:
    """Bytes that can be taken without swapping.

    What the machine has, or what the limits of its container leave. File pages that can be dropped count as
    free.
    """
    available = int(psutil.virtual_memory().available)
    left = [limit.most - limit.used + limit.files for limit in memory_limits()]
    return max(0, min([available, *left]))


def return_freed_memory() -> None:
    """Return freed pages of all arenas of the allocator to the system."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def turn(
    patience: float = TURN_TIMEOUT,
    devices: Sequence[str] = (),
    while_waiting: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Lock for measuring free memory and taking it, one process a time.

    It is of this host's memory, or of that of ``devices``. Instances that start together would see the same
    memory. After ``patience`` seconds a process goes on without the lock. ``while_waiting`` is called time
    and again, and may raise.
    """
    with contextlib.ExitStack() as held:
        until = time.monotonic() + patience
        for path in _lock_files(devices):
            file = held.enter_context(path.open("rb"))  # the kernel lets go of it with the process
            while not _locks(file):
                if time.monotonic() > until:
                    logger.warning("another instance has taken memory for %.0f s; going on", patience)
                    break
                while_waiting()
                time.sleep(0.02)
        yield


def _lock_files(devices: Sequence[str]) -> list[Path]:
    """Lock files of this installation: one for the host, or one per device."""
    if not devices:
        return [Path(__file__)]
    try:
        directory = own_directory("devices")
        files = [directory / re.sub(r"[^\w.-]", "_", name) for name in sorted(devices)]
        for each in files:
            each.touch()
    except OSError:  # without a home all devices are one
        return [Path(__file__)]
    return files


def _locks(file: BinaryIO) -> bool:
    """Whether this process got the lock, or the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


class Untouched:
    """The part of a KV cache on a CPU that was never written to.

    Its pages take no memory yet, but will. A new cache is used in the order of its blocks' numbers
    (:class:`engine.pieces.pool.PiecePool`).
    """

    def __init__(self, num_blocks: int = 0, block_bytes: int = 0) -> None:
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._num_used = 0
        """Number of blocks that were ever written to."""

    def __repr__(self) -> str:
        return f"<Untouched {self._num_blocks - self._num_used} of {self._num_blocks} blocks>"

    def note(self, step: Step) -> None:
        """Note which blocks a step writes to."""
        for blocks in step.new_blocks.values():
            self._num_used = max(self._num_used, max(blocks, default=-1) + 1)

    @property
    def num_bytes(self) -> int:
        return (self._num_blocks - self._num_used) * self._block_bytes


def spare_memory(cache: Untouched) -> int:
    """Bytes of memory that further experts may take.

    What a KV cache will still take counts as taken.
    """
    return int((available_memory() - cache.num_bytes) * (1 - MARGIN))


def most_memory() -> int:
    """Total bytes of memory, free or not."""
    return min([int(psutil.virtual_memory().total), *(limit.most for limit in memory_limits())])
