"""Resets of all instances' prefix caches, and the answers to them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping

from engine.messages import ResetCache
from router.dispatch.instance_connection import InstanceConnection


class CacheResets:
    """Cache resets that one router has begun."""

    def __init__(self, connections: Mapping[str, InstanceConnection]) -> None:
        """``connections`` by instance."""
        self._connections = connections
        self._numbers = itertools.count(1)
        self._waiting: dict[tuple[str, int], asyncio.Future[None]] = {}

    def __repr__(self) -> str:
        return f"<CacheResets {len(self._waiting)} waited for>"

    async def reset(self, timeout: float) -> list[str]:
        """Have all instances reset their caches; returns those that did not in time."""
        number, loop = next(self._numbers), asyncio.get_running_loop()
        mine: dict[tuple[str, int], asyncio.Future[None]] = {}
        missing = []
        for name, connection in self._connections.items():
            if connection.send(ResetCache(number)):
                mine[name, number] = loop.create_future()
            else:
                missing.append(name)
        self._waiting |= mine
        try:
            if mine:
                await asyncio.wait(mine.values(), timeout=timeout)
        finally:
            for key in mine:
                del self._waiting[key]
        return missing + [name for (name, _), answer in mine.items() if not answer.done()]

    def done(self, instance: str, number: int) -> None:
        """Record that an instance has reset its cache; late answers are dropped."""
        answer = self._waiting.get((instance, number))
        if answer is not None and not answer.done():
            answer.set_result(None)
