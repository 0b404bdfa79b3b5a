"""Asking the coordinator to do something, once: for ``lockstep`` commands and the admin API."""

from __future__ import annotations

import asyncio

import zmq.asyncio

from coordinator.keys import MeshKeys
from coordinator.messages import Answer, Drain, FromCoordinator, Scale, ToCoordinator
from coordinator.rpc import AsyncConnection

ASK_INTERVAL = 0.5
RECONNECT_INTERVAL = 0.05
"""Seconds between two tries: when it was asked, and when there is no connection yet."""


async def ask(endpoint: str, command: Drain | Scale, timeout: float, keys: MeshKeys | None = None) -> Answer:
    """The answer to a command, which is repeated until it comes.

    Raises:
        TimeoutError: none came within ``timeout`` seconds.
    """
    context = zmq.asyncio.Context()
    connection: AsyncConnection[FromCoordinator, ToCoordinator] = AsyncConnection(
        context, endpoint, FromCoordinator, name="coordinator", keys=keys
    )
    asking = asyncio.create_task(_repeat(connection, command))
    try:
        return await asyncio.wait_for(_answer(connection, command.command), timeout)
    finally:
        asking.cancel()
        connection.close(linger_ms=0)
        context.term()


async def _repeat(
    connection: AsyncConnection[FromCoordinator, ToCoordinator], command: Drain | Scale
) -> None:
    while True:
        sent = connection.send(command)
        await asyncio.sleep(ASK_INTERVAL if sent else RECONNECT_INTERVAL)


async def _answer(connection: AsyncConnection[FromCoordinator, ToCoordinator], command: str) -> Answer:
    while True:
        message = await connection.receive()
        if isinstance(message, Answer) and message.command == command:
            return message
