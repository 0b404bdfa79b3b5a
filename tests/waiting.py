"""Waiting for a condition, with a deadline that a busy machine does not miss."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE = 60.0
"""Seconds; a test that passes waits for a small part of it."""


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


async def until_async(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait for a condition that this event loop brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.02)
