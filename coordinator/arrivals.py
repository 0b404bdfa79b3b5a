"""When a ZeroMQ socket has something to receive, for asyncio.

What ``zmq.asyncio`` does with futures for any number of operations, for the one case of a single receiver and
sends that never wait: a message of a step costs its receiver a fraction of the time.
"""

from __future__ import annotations

import asyncio
from typing import Any

import zmq

_POLLIN = int(zmq.POLLIN)  # an enum's operators take longer than all the rest


class Arrivals:
    """Of one socket, which belongs to the running loop from the first :meth:`wait` to :meth:`close`."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._socket = socket
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._some = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Arrivals {'watched' if self._loop is not None else 'unwatched'}>"

    async def wait(self) -> None:
        """Returns when there is something to receive. Others get their turn in any case, so that a peer that
        sends without end does not stop the loop."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._descriptor, self.check)
        is_readable = self._is_readable()
        if is_readable:
            await asyncio.sleep(0)
            is_readable = self._is_readable()
        while not is_readable:
            self._some.clear()
            await self._some.wait()
            is_readable = self._is_readable()

    def check(self) -> None:
        """To be called after each send or connect, too. ZeroMQ's descriptor tells of a change once, to who
        uses the socket next: a send may be what takes the news of an arrival in."""
        if self._loop is not None and self._is_readable():
            self._some.set()

    def close(self) -> None:
        """Before the socket is closed."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._descriptor)

    def _is_readable(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN)
