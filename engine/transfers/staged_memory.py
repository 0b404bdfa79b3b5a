"""The KV cache of a device: blocks are copied through a stage in host memory.

The stage has a fixed size, and one copy at a time. What is read is a copy in ordinary memory, so checksums
are computed on the host, and a block that is read or filled keeps nobody from the stage.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from engine.transfers.block_memory import Bytes, CacheGone, CopiedMemory

TURN_TIMEOUT = 30.0
"""Seconds that a thread waits for the stage: several copies that hang."""


class DeviceCopies(Protocol):
    """Copies between a cache on a device and a stage in host memory.

    There is one at a time. All raise RuntimeError if the device fails, and TimeoutError if it hangs.
    """

    num_blocks: int
    layout: tuple[int, ...]
    """Bytes of a block in each tensor."""
    room: Bytes
    """The stage: [most blocks of a copy, bytes of a block]."""

    def gather(self, blocks: Sequence[int]) -> None:
        """Copy blocks to the first rows of the stage."""
        ...

    def scatter(self, blocks: Sequence[int]) -> None:
        """Copy the first rows of the stage to blocks."""
        ...


class StagedMemory(CopiedMemory):
    """Implements :class:`.CacheMemory` for a cache on a device."""

    shards: tuple[int, ...] = ()

    def __init__(self, copies: DeviceCopies) -> None:
        self.num_blocks = copies.num_blocks
        self._copies = copies
        self._stage = threading.Lock()
        self._problem = ""
        """Why the device is out of reach; empty: it is not."""

    def __repr__(self) -> str:
        return f"<StagedMemory {self.num_blocks} blocks of {self.block_bytes} bytes, {self._copies!r}>"

    @property
    def layout(self) -> tuple[int, ...]:
        return self._copies.layout

    def read(self, blocks: Sequence[int]) -> Bytes:
        """See :class:`.CacheMemory`."""
        found = np.empty((len(blocks), self.block_bytes), dtype=np.uint8)
        most = len(self._copies.room)
        for first in range(0, len(blocks), most):
            some = blocks[first : first + most]
            with self._turn() as room:
                self._copies.gather(some)
                found[first : first + len(some)] = room[: len(some)]
        return found

    def write(self, block: int, data: memoryview) -> None:
        """See :class:`.CacheMemory`."""
        row = np.frombuffer(data, dtype=np.uint8)
        assert len(row) == self.block_bytes
        with self._turn() as room:
            room[0] = row
            self._copies.scatter([block])

    @contextlib.contextmanager
    def _turn(self) -> Iterator[Bytes]:
        """The stage, for one copy.

        Raises:
            CacheGone: the device failed or hangs. It may still write to the stage, so no copy follows.
        """
        if not self._stage.acquire(timeout=TURN_TIMEOUT):
            raise CacheGone("copies of KV blocks from and to the device hang")
        try:
            if self._problem:
                raise CacheGone(self._problem)
            yield self._copies.room
        except (RuntimeError, TimeoutError) as error:
            text = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
            self._problem = f"KV blocks on the device are out of reach: {text}"
            raise CacheGone(self._problem) from error
        finally:
            self._stage.release()
