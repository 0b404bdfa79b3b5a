"""The coordinator's socket loop: receives, calls :mod:`coordinator.membership.registry`, sends."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable

import msgspec
import zmq.asyncio

from coordinator.membership.records import Instruction, Note, Peer, Publish, Rules, Send
from coordinator.membership.registry import Registry
from coordinator.messages import AdmissionRefused, FromCoordinator, ToCoordinator
from coordinator.process.own_time import OwnTime
from coordinator.rpc.codec import PROTOCOL, OtherProtocol
from coordinator.rpc.keys import MeshKeys
from coordinator.rpc.rpc import AsyncListener

logger = logging.getLogger(__name__)

TICK = 0.05
"""Seconds between two checks for silent instances.

A probe waits only 0.3 s for its answer.
"""

MAX_CONTROL_BYTES = 1024**2
"""Control messages are small; a larger frame is not one of ours."""


class Coordinator:
    """The coordinator of a mesh: it binds at once; :meth:`run` serves until cancelled."""

    def __init__(
        self, endpoint: str, rules: Rules, keys: MeshKeys | None = None, listen_fd: int | None = None
    ) -> None:
        self._context = zmq.asyncio.Context()
        self._listener: AsyncListener[ToCoordinator, FromCoordinator] = AsyncListener(
            self._context,
            endpoint,
            ToCoordinator,
            name="coordinator",
            max_bytes=MAX_CONTROL_BYTES,
            keys=keys,
            listen_fd=listen_fd,
        )
        self._registry = Registry(msgspec.structs.replace(rules, token=uuid.uuid4().hex[:8]))
        self._time = OwnTime()
        self._pushing: asyncio.TimerHandle | None = None

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
            if self._pushing is not None:
                self._pushing.cancel()
            self._listener.close()
            self._context.term()

    async def _serve(self) -> None:
        await self._listener.receive_all(self._take)

    def _take(self, peer: Peer, message: ToCoordinator | OtherProtocol) -> None:
        if isinstance(message, OtherProtocol):
            reason = f"this instance speaks protocol {message.version}, the coordinator {PROTOCOL}"
            self._listener.send(peer, AdmissionRefused(reason + ": install the same version everywhere"))
        else:
            self._carry_out(self._registry.handle(peer, message, self._now()))

    async def _watch_the_clock(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self._registry.refused(self._listener.refused_peers)
            self._carry_out(self._registry.tick(self._now()))

    def _push(self) -> None:
        self._pushing = None
        self._carry_out(self._registry.push(self._now()))

    def _now(self) -> float:
        return self._time.at(time.monotonic())

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(peer, message):
                    self._listener.send(peer, message)
                case Publish(peers, message):
                    self._listener.send_all(peers, message)
                case Note(text, warning):
                    logger.log(logging.WARNING if warning else logging.INFO, "%s", text)
        due = self._registry.push_due()
        if due is not None and self._pushing is None:
            delay = max(0.0, due - self._now())
            self._pushing = asyncio.get_running_loop().call_later(delay, self._push)
