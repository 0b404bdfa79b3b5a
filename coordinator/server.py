"""The coordinator's socket loop: receives, asks :mod:`coordinator.membership`, sends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

import zmq.asyncio

from coordinator.membership import Instruction, Membership, Note, Rules, Send
from coordinator.messages import FromCoordinator, Refused, ToCoordinator
from coordinator.rpc import PROTOCOL, AsyncListener, OtherProtocol

logger = logging.getLogger(__name__)

TICK = 0.25
"""Seconds between two looks at who has fallen silent."""

MAX_CONTROL_BYTES = 1024**2
"""Control messages are small; a larger frame is not one of ours."""


class Coordinator:
    """One process's worth of coordinator. Binds at once; :meth:`run` serves until cancelled."""

    def __init__(self, endpoint: str, rules: Rules) -> None:
        self._context = zmq.asyncio.Context()
        self._listener: AsyncListener[ToCoordinator, FromCoordinator] = AsyncListener(
            self._context, endpoint, ToCoordinator, name="coordinator", max_bytes=MAX_CONTROL_BYTES
        )
        self._membership = Membership(rules)

    @property
    def endpoint(self) -> str:
        """Where it listens, with the real port."""
        return self._listener.endpoint

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._serve())
                tasks.create_task(self._watch_the_clock())
        finally:
            self._listener.close()
            self._context.term()

    async def _serve(self) -> None:
        while True:
            peer, message = await self._listener.receive()
            if isinstance(message, OtherProtocol):
                reason = f"this instance speaks protocol {message.version}, the coordinator {PROTOCOL}"
                self._listener.send(peer, Refused(reason + ": install the same version everywhere"))
            else:
                self._carry_out(self._membership.handle(peer, message, time.monotonic()))

    async def _watch_the_clock(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self._carry_out(self._membership.tick(time.monotonic()))

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(peer, message):
                    self._listener.send(peer, message)
                case Note(text, warning):
                    logger.log(logging.WARNING if warning else logging.INFO, "%s", text)
