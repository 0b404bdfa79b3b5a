"""The KV cache of an instance with workers: shards in the memory of several processes.

A block is the bytes of its shards, by stage, then rank. The engine copies them from and to the workers with
Linux' ``process_vm_readv`` and ``process_vm_writev``. So the workers' caches stay in memory of their own, in
huge pages, which most systems do not give to memory that is shared; and no worker leaves a step for a copy.
The kernel lets a process do that to its children.

The engine hears of the end of a step from one worker. Others may still be filling the last layer then. So
each copy waits until all are done with the steps that have ended. Of later steps none touches the block, as
the step loop sees to.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.executor.messages import CacheAt
from engine.transfers.block_memory import Bytes, CacheGone, CopiedMemory

MOST_PIECES = 1024
"""Pieces of one copy (``IOV_MAX``)."""
SETTLE_INTERVAL = 50e-6
"""Seconds between two looks whether a worker has ended its step."""
SETTLE_TIMEOUT = 10.0
"""Seconds after which such a worker counts as hanging."""


@dataclass(frozen=True)
class WorkerCache:
    """Place of one worker's KV cache: its process, and addresses in it."""

    name: str
    pid: int
    """Process id of the worker, a child of this process."""
    ended: int
    """A descriptor that is readable once it has ended."""
    cache: CacheAt


class _Shard:
    """Reader and writer of the KV cache in one worker's memory."""

    def __init__(self, worker: WorkerCache, kind: int) -> None:
        self._worker = worker
        self._ended = os.dup(worker.ended)  # copies may outlast the executor, which closes the other one
        weakref.finalize(self, os.close, self._ended)
        tensors = [worker.cache.tensors, *worker.cache.further][kind]
        places = np.array(tensors, dtype=np.uint64).reshape(-1, 2)
        self._addresses, self._sizes = places[:, 0], places[:, 1]
        self.layout = tuple(map(int, self._sizes))
        self.num_bytes = sum(self.layout)
        library = ctypes.CDLL(None, use_errno=True)
        self._calls = library.process_vm_readv, library.process_vm_writev
        for call in self._calls:
            call.restype = ctypes.c_ssize_t
            call.argtypes = [
                ctypes.c_int,
                ctypes.c_void_p, ctypes.c_ulong,
                ctypes.c_void_p, ctypes.c_ulong,
                ctypes.c_ulong,
            ]  # fmt: skip

    def __repr__(self) -> str:
        return f"<_Shard of {self._worker.name}: {self.num_bytes} bytes of a block>"

    def copy(self, block: int, here: int, *, writes: bool) -> None:
        """Copy its shard of a block to the address ``here``, or from there.

        Raises:
            CacheGone: that cannot be done.
        """
        there = np.stack([self._addresses + np.uint64(block) * self._sizes, self._sizes], axis=1)
        for first in range(0, len(there), MOST_PIECES):
            pieces = np.ascontiguousarray(there[first : first + MOST_PIECES])
            here += self._copy(pieces, here, writes=writes)

    def settle(self, num_steps: int) -> None:
        """Wait until the worker is done with so many steps.

        Raises:
            CacheGone: it has ended, or hangs.
        """
        until = 0.0
        while (done := self._look()) < num_steps:
            now = time.monotonic()
            until = until or now + SETTLE_TIMEOUT
            if now > until:
                raise CacheGone(f"{self._worker.name} is at step {done}, not {num_steps}")
            time.sleep(SETTLE_INTERVAL)

    def _look(self) -> int:
        place = np.array([[self._worker.cache.steps, ctypes.sizeof(ctypes.c_int64)]], dtype=np.uint64)
        found = ctypes.c_int64(0)
        self._copy(place, ctypes.addressof(found), writes=False)
        return found.value

    def _copy(
        self, there: np.ndarray[tuple[int, int], np.dtype[np.uint64]], here: int, *, writes: bool
    ) -> int:
        watch = select.poll()
        watch.register(self._ended, select.POLLIN)
        if watch.poll(0):  # its number may be another process's by now
            raise CacheGone(f"{self._worker.name} has ended")
        size = int(there[:, 1].sum())
        ours = np.array([[here, size]], dtype=np.uint64)
        call = self._calls[writes]
        copied = call(self._worker.pid, ours.ctypes.data, 1, there.ctypes.data, len(there), 0)
        if copied != size:
            text = os.strerror(ctypes.get_errno()) if copied < 0 else f"only {copied} of {size} bytes"
            raise CacheGone(f"the memory of {self._worker.name} cannot be reached: {text}")
        return size


class ShardMemory(CopiedMemory):
    """Implements :class:`engine.transfers.block_memory.CacheMemory` for workers of this host."""

    def __init__(
        self, workers: Sequence[WorkerCache], num_blocks: int, num_finished: Callable[[], int], kind: int = 0
    ) -> None:
        """``workers``: by stage, then rank. ``num_finished``: steps whose results are here.

        ``kind``: 0 for blocks, then the boundary kinds, of which there are ``num_blocks`` slots.
        """
        self.num_blocks = num_blocks
        self._shards = [_Shard(worker, kind) for worker in workers] if sys.platform == "linux" else []
        self._num_finished = num_finished
        self._settled = 0
        """Steps that all workers are known to be done with."""

    def __repr__(self) -> str:
        return f"<ShardMemory {self.num_blocks} blocks of {self.block_bytes} bytes in {len(self._shards)}>"

    def problem(self) -> str:
        """Why the workers' memory cannot be reached; empty if it can."""
        if not self._shards:
            return "memory of workers is reached on Linux only"
        try:
            for shard in self._shards:
                shard.settle(0)
        except CacheGone as error:
            return f"{error} (process_vm_readv must be allowed, as it is to a parent)"
        return ""

    @property
    def layout(self) -> tuple[int, ...]:
        return tuple(size for shard in self._shards for size in shard.layout)

    @property
    def shards(self) -> tuple[int, ...]:
        return tuple(len(shard.layout) for shard in self._shards)

    def read(self, blocks: Sequence[int]) -> Bytes:
        """See :class:`.CacheMemory`."""
        self._settle()
        found = np.empty((len(blocks), self.block_bytes), dtype=np.uint8)
        for row, block in zip(found, blocks, strict=True):
            self._copy(block, row, writes=False)
        return found

    def write(self, block: int, data: memoryview) -> None:
        """See :class:`.CacheMemory`."""
        row = np.frombuffer(data, dtype=np.uint8)
        assert len(row) == self.block_bytes
        self._settle()
        self._copy(block, row, writes=True)

    def _copy(self, block: int, row: Bytes, *, writes: bool) -> None:
        here = row.ctypes.data
        for shard in self._shards:
            shard.copy(block, here, writes=writes)
            here += shard.num_bytes

    def _settle(self) -> None:
        finished = self._num_finished()
        if finished > self._settled:
            for shard in self._shards:
                shard.settle(finished)
            self._settled = finished
