"""Questions of a router to all instances at once, and the answers to them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping

from engine.messages import EndRequests, ResetCache
from router.dispatch.instance_connection import InstanceConnection


class Broadcasts:
    """Questions that one router has sent to all instances."""

    def __init__(self, connections: Mapping[str, InstanceConnection]) -> None:
        """``connections`` by instance."""
        self._connections = connections
        self._numbers = itertools.count(1)
        self._waiting: dict[tuple[str, int], asyncio.Future[None]] = {}

    def __repr__(self) -> str:
        return f"<Broadcasts {len(self._waiting)} waited for>"

    async def ask(self, question: Callable[[int], ResetCache | EndRequests], timeout: float) -> list[str]:
        """Send all instances a numbered message; returns those that did not answer."""
        number, loop = next(self._numbers), asyncio.get_running_loop()
        mine: dict[tuple[str, int], asyncio.Future[None]] = {}
        missing = []
        for name, connection in self._connections.items():
            if connection.send(question(number)):
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
        """Record that an instance has done what was asked; late answers are dropped."""
        answer = self._waiting.get((instance, number))
        if answer is not None and not answer.done():
            answer.set_result(None)
