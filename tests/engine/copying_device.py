"""A pretended device with two streams, for steps and for copies of KV blocks.

Steps have a thread. Its memory is the host's. What is asked of it is done some time later, as on a device: a step that is begun
has written nothing yet, and a copy may come before it unless it waits for the step's mark.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from engine.executor.cache_staging import CacheStaging
from engine.executor.uni import UniExecutor
from engine.gpu import block_copies
from engine.gpu.block_copies import BlockCopies
from engine.model.checkpoint import read_model_info
from engine.step import Step, StepResult
from engine.transfers.staged_memory import StagedMemory
from tests.engine.invariance.answers import Instance, settings

ONE_AT_A_TIME = threading.Lock()
"""Triton's interpreter is for one thread at a time."""
PATIENCE = 60.0
GARBAGE = 0xA5
"""Byte of which fresh page-locked memory is full."""


class CopyingDevice:
    """Implements :class:`engine.gpu.copy_stream.CopyStream`, and computes steps."""

    def __init__(self, most_locked: int = 1 << 30) -> None:
        """``most_locked``: bytes that can be page-locked at once."""
        self.steps = ThreadPoolExecutor(1)
        self._copies = threading.Lock()
        self._ended: threading.Event | None = None
        self._may_copy = threading.Event()
        self._may_copy.set()
        self.is_waited_for = threading.Event()
        """Whether a copy is held up by a test."""
        self.lost = ""
        """Why each copy fails; empty: none does."""
        self.num_copies = 0
        self.most_locked = most_locked

    def mark(self) -> Callable[[], None]:
        reached = threading.Event()
        self.steps.submit(reached.set)

        def end() -> None:
            self._ended = reached

        return end

    def run(self, work: Callable[[], None]) -> None:
        with self._copies:
            self._copy(work)

    def _copy(self, work: Callable[[], None]) -> None:
        if not self._may_copy.is_set():
            self.is_waited_for.set()
            assert self._may_copy.wait(PATIENCE)
        if self._ended is not None:
            assert self._ended.wait(PATIENCE)
        if self.lost:
            raise RuntimeError(self.lost)
        with ONE_AT_A_TIME:
            work()
        self.num_copies += 1

    def locked(self, count: int) -> torch.Tensor:
        if count > self.most_locked:
            raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")
        return torch.full((count,), GARBAGE, dtype=torch.uint8)

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """While it lasts, copies are staged and not made."""
        self.is_waited_for.clear()
        self._may_copy.clear()
        try:
            yield
        finally:
            self._may_copy.set()


class OnDevice(UniExecutor):
    """An executor whose steps and KV cache are on a pretended device."""

    device: CopyingDevice

    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        super().allocate(num_blocks, num_states)
        self.device = CopyingDevice()
        parts = [each.view(torch.uint8).view(num_blocks, -1) for each in self._stored]
        with patch.object(block_copies, "has_triton", return_value=False):  # an interpreter is too slow here
            self._staging = CacheStaging(self.device, parts)
        self._launched: deque[Future[None]] = deque()
        self.computes_apart = True

    def begin(self, step: Step, sizes: Sequence[int] = ()) -> None:
        self._launched.append(self.device.steps.submit(super().begin, step, sizes))

    def finish(self) -> StepResult:
        self._launched.popleft().result()
        return super().finish()


def load_on_device(directory: Path, block_size: int = 16, dtype: Any = "bfloat16") -> Instance:
    """An instance of one worker on a pretended device."""
    executor = OnDevice(settings(directory, block_size, dtype), read_model_info(directory), 1)
    facts = executor.load(lambda _phase: None)
    executor.allocate(8)
    return Instance(directory, executor, block_size, facts)


def staged(parts: Sequence[np.ndarray[Any, Any]], device: CopyingDevice | None = None) -> StagedMemory:
    """Parts [blocks, bytes] of a cache as they are reached on a device."""
    tensors = [torch.from_numpy(part) for part in parts]
    return StagedMemory(BlockCopies(tensors, device or CopyingDevice()))
