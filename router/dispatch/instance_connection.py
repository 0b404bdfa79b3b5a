"""Connection to one instance, kept alive and reopened while the instance is in the world.

What comes over it is handed to a :class:`Receiver`, which is
:class:`router.dispatch.receiver.MessageReceiver`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec
import zmq.asyncio

from coordinator.rpc.codec import OtherProtocol
from coordinator.rpc.keys import MeshKeys
from coordinator.rpc.rpc import AsyncConnection
from engine.messages import Attach, ToInstance, ToRouter
from router.dispatch.pool import PooledInstance

logger = logging.getLogger(__name__)

ATTACH_INTERVAL = 1.0
"""Least seconds between two signs of life to an instance."""
LONGEST_ATTACH_INTERVAL = 4.0
"""Most seconds between two, however many instances there are.

An instance forgets a router that was silent for more than twice as long.
"""
ATTACHES = 1024.0
"""Signs of life per second to all instances together, above which they come less often."""
RECONNECT_INTERVAL = 0.05
"""Seconds between two tries while there is no connection."""


def attach_interval(count: int) -> float:
    """Seconds between two signs of life to each of so many instances."""
    return max(ATTACH_INTERVAL, min(count / ATTACHES, LONGEST_ATTACH_INTERVAL))


class Receiver(Protocol):
    def received(self, instance: PooledInstance, message: ToRouter) -> None: ...
    def connection_broke(self, instance: PooledInstance) -> None: ...
    def connection_failed(self, instance: PooledInstance) -> None:
        """A task of the connection ended by an error: another connection is needed."""
        ...


class InstanceConnection:
    """Sends at once or not at all; receives until it is closed."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        instance: PooledInstance,
        receiver: Receiver,
        keys: MeshKeys | None,
        *,
        router: str,
        wants_blocks: bool,
        count: Callable[[], int] = lambda: 1,
    ) -> None:
        """``count``: instances to which this router has such connections."""
        self._instance = instance
        self._receiver = receiver
        self._attach = Attach(router, wants_blocks)
        self._count = count
        self._connection: AsyncConnection[ToRouter, ToInstance] = AsyncConnection(
            context, instance.member.address, ToRouter, name=f"instance {instance.rank}", keys=keys
        )
        self._is_closed = False
        self._tasks = [
            asyncio.create_task(work()) for work in (self._receive, self._attach_again, self._watch)
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_end)

    def __repr__(self) -> str:
        return f"<InstanceConnection to instance {self._instance.rank} at {self._connection.endpoint}>"

    def send(self, message: ToInstance, growth: int = 0) -> bool:
        """Send a message at once or not at all.

        ``growth``: bytes more that it may have when it is sent again. Returns False if there is no
        connection, or the instance does not read what was sent before.

        Raises:
            TooLarge: no message holds it, or none will.
        """
        return self._connection.send(message, growth)

    def serves(self, instance: PooledInstance) -> bool:
        """Whether it is the connection to this registration of an instance."""
        return self._instance is instance

    def take_waiting(self) -> None:
        """Hand the messages that have arrived to the receiver.

        Above all these are the last tokens of an instance that has left.
        """
        self._connection.take_waiting()

    def ask_for_blocks(self) -> None:
        """Ask for all block events again, as some of the instance's were missed."""
        self.send(Attach(self._attach.router, True, True))

    def close(self) -> None:
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        self._connection.close(linger_ms=0)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Report a connection task that ended with an internal error.

        It may be one in acting on a message. Half a connection would be worse than none: nothing would show
        that it no longer receives.
        """
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        logger.error("reconnecting to instance %d after an error", self._instance.rank, exc_info=error)
        if not self._is_closed:
            self._receiver.connection_failed(self._instance)

    async def _attach_again(self) -> None:
        while True:
            sent = self.send(msgspec.structs.replace(self._attach, unanswered=not self._instance.attached))
            interval = attach_interval(self._count()) if self._instance.attached else ATTACH_INTERVAL
            await asyncio.sleep(interval if sent else RECONNECT_INTERVAL)

    async def _watch(self) -> None:
        """A broken connection is the first sign of a dead instance.

        Should it live, it is used again once it answers on a new connection.
        """
        complained = False
        while True:
            await self._connection.broken()
            self._receiver.connection_broke(self._instance)
            refused = await self._connection.refusal()
            if refused is not None and not complained:
                complained = True
                rank, endpoint = self._instance.rank, self._connection.endpoint
                logger.error("instance %d at %s refused this router: %s", rank, endpoint, refused)

    async def _receive(self) -> None:
        try:
            await self._connection.receive_all(partial(self._receiver.received, self._instance))
        except OtherProtocol as error:
            logger.error("instance %d cannot be used: %s", self._instance.rank, error)
