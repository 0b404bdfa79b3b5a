"""Stream of a device on which KV blocks are copied, beside the steps.

Copies come from threads other than the one that steps. Each waits for the steps that have ended, whose marks
the executor sets, and for no later one: of these none touches a block that is copied, as the step loop sees
to.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch

logger = logging.getLogger(__name__)

COPY_TIMEOUT = 10.0
"""Seconds after which a copy counts as hanging."""
LOOK_INTERVAL = 50e-6
"""Seconds between two looks whether a copy is done."""


class CopyStream(Protocol):
    """Order of copies behind the steps of one device."""

    def mark(self) -> Callable[[], None]:
        """Mark all that was launched so far, by the thread that steps.

        The function returned is called when the step has ended; later copies wait for the mark.
        """
        ...

    def run(self, work: Callable[[], None]) -> None:
        """Launch some work behind the steps that have ended, and wait until it is done.

        Raises:
            RuntimeError: the device failed.
            TimeoutError: it hangs.
        """
        ...

    def locked(self, count: int) -> torch.Tensor:
        """Page-locked host memory of so many bytes.

        Raises:
            RuntimeError: the system gives none.
        """
        ...


class CudaCopyStream:
    """Implements :class:`CopyStream` on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._ended: torch.cuda.Event | None = None
        """Mark of the last step that has ended."""

    def __repr__(self) -> str:
        return f"<CudaCopyStream on {self._device}>"

    def mark(self) -> Callable[[], None]:
        """See :class:`CopyStream`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))

        def end() -> None:
            self._ended = event

        return end

    def run(self, work: Callable[[], None]) -> None:
        """See :class:`CopyStream`."""
        done = torch.cuda.Event()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if (ended := self._ended) is not None:
                self._stream.wait_event(ended)
            work()
            done.record(self._stream)
        until = time.monotonic() + COPY_TIMEOUT
        while not done.query():
            if time.monotonic() > until:
                raise TimeoutError(f"a copy of KV blocks takes more than {COPY_TIMEOUT:.0f} s")
            time.sleep(LOOK_INTERVAL)

    def locked(self, count: int) -> torch.Tensor:
        """See :class:`CopyStream`."""
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)


def host_memory(stream: CopyStream, count: int) -> torch.Tensor:
    """Host memory for copies: page-locked, or else ordinary memory, with the reason logged."""
    try:
        return stream.locked(count)
    except RuntimeError as error:
        reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
        logger.warning(
            "KV blocks are copied through ordinary memory, which is slower: %d bytes cannot be page-locked "
            "(%s)",
            count,
            reason,
        )
        return torch.empty(count, dtype=torch.uint8)
