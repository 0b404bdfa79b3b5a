"""Commands to the coordinator, for ``lockstep`` and the admin API."""

from __future__ import annotations

import asyncio
import errno
import time
from urllib.parse import urlsplit

import zmq.asyncio

from coordinator.member_connection import fetch_view
from coordinator.messages import FromCoordinator, OperatorAnswer, OperatorCommand, State, ToCoordinator, View
from coordinator.rpc.keys import MeshKeys
from coordinator.rpc.rpc import AsyncConnection

ASK_INTERVAL = 0.5
"""Seconds until a command that was sent is repeated."""
RECONNECT_INTERVAL = 0.05
"""Seconds between two tries: when it was asked, and when there is no connection yet."""
REFUSED_PATIENCE = 2.0
"""Seconds for which a host may refuse connections before a command gives up.

A coordinator that died is started again within one second.
"""
KNOCK_INTERVAL = 0.1
"""Seconds between two tries to connect while the host refuses connections."""


async def find_view(endpoint: str, timeout: float, keys: MeshKeys | None = None) -> View:
    """The view, for a command in a terminal; fails soon if nothing listens.

    Raises:
        TimeoutError, KeyRefused: as :func:`coordinator.member_connection.fetch_view`.
    """
    if not await _may_be_there(endpoint, min(timeout, REFUSED_PATIENCE)):
        raise TimeoutError
    return await fetch_view(endpoint, timeout, keys)


async def _may_be_there(endpoint: str, patience: float) -> bool:
    """False if connections are refused for so many seconds, or the address is none.

    Silence may have reasons that pass.
    """
    address, deadline = urlsplit(endpoint), time.monotonic() + patience
    while True:
        try:
            async with asyncio.timeout(patience):
                _, writer = await asyncio.open_connection(address.hostname, address.port)
        except TimeoutError:
            return True
        except (OSError, ValueError) as error:  # ValueError: a host name that can be none
            if getattr(error, "errno", None) != errno.ECONNREFUSED:
                return False
        else:
            writer.close()
            return True
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(KNOCK_INTERVAL)


async def ask(
    endpoint: str, command: OperatorCommand, timeout: float, keys: MeshKeys | None = None
) -> OperatorAnswer:
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


def has_size(view: View, size: int) -> bool:
    """Whether a mesh has come to a number of instances, all ready."""
    return (
        view.complete
        and len(view.members) == size
        and all(member.state is State.READY for member in view.members)
    )


async def _repeat(
    connection: AsyncConnection[FromCoordinator, ToCoordinator], command: OperatorCommand
) -> None:
    while True:
        sent = connection.send(command)
        await asyncio.sleep(ASK_INTERVAL if sent else RECONNECT_INTERVAL)


async def _answer(
    connection: AsyncConnection[FromCoordinator, ToCoordinator], command: str
) -> OperatorAnswer:
    while True:
        message = await connection.receive()
        if isinstance(message, OperatorAnswer) and message.command == command:
            return message
