"""Asyncio readiness of a ZeroMQ socket: wait for, or be called at, incoming messages.

What ``zmq.asyncio`` does with futures for any number of operations, for the one case of a single receiver and
sends that never wait: a message of a step costs its receiver a fraction of the time. Least where it is dealt
with in the callback of its arrival (:meth:`Arrivals.watch`), as no task is woken for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import zmq

MOST_AT_ONCE = 16
"""Maximum messages received in one go before other tasks run.

So a peer that sends without end does not stop the loop.
"""
MOST_WAITING = 4096
"""Maximum messages received at once from a peer that is gone."""

_POLLIN = int(zmq.POLLIN)  # an enum's operators take longer than all the rest
_EVENTS = int(zmq.EVENTS)


def is_readable(socket: zmq.Socket[Any]) -> bool:
    """Whether the socket has something to receive."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


class Arrivals:
    """Watches one ZeroMQ socket for incoming messages in an event loop.

    The socket belongs to the running loop from the first :meth:`wait` or :meth:`watch` to :meth:`close`.
    """

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._socket = socket
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._some = asyncio.Event()
        self._receive: Callable[[], bool] | None = None
        self._looks_again = False

    def __repr__(self) -> str:
        return f"<Arrivals {'watched' if self._loop is not None else 'unwatched'}>"

    async def wait(self) -> None:
        """Wait until a message has arrived; always yields to other tasks once."""
        if self._loop is None:
            self._begin(self.check)
        await asyncio.sleep(0)
        while not self.are_there():
            self._some.clear()
            await self._some.wait()

    def watch(self, receive: Callable[[], bool]) -> None:
        """Call a receiver from now on whenever a message may have arrived.

        It receives one message; False says that none was there.
        """
        assert self._loop is None, "it has a receiver"
        self._receive = receive
        self._begin(self._on_readable)
        self._look_again()

    def check(self) -> None:
        """Check for arrivals; must be called after each send, connect and :meth:`are_there`.

        ZeroMQ's descriptor tells of a change once, to who uses the socket next: a send may be what takes the
        news of an arrival in.
        """
        if self._loop is None or self._looks_again or not self.are_there():
            return
        if self._receive is None:
            self._some.set()
        else:
            self._look_again()  # not now: a receiver may be what sends

    def take_all(self) -> None:
        """Receive at once all messages that have arrived."""
        for _ in range(MOST_WAITING):
            if self._loop is None or self._receive is None or not self._receive():
                return

    def are_there(self) -> bool:
        """Whether there is something to receive; takes the news of it in, as :meth:`check` says."""
        return is_readable(self._socket)

    def close(self) -> None:
        """Stop watching; call it before the socket is closed."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._descriptor)

    def _begin(self, look: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, look)

    def _on_readable(self) -> None:
        if not self._looks_again:  # else that look finds it
            self._look()

    def _look(self) -> None:
        """Receive until nothing is left, since the descriptor signals each arrival once only."""
        self._looks_again = False
        assert self._receive is not None
        for _ in range(MOST_AT_ONCE):
            if self._loop is None or not self._receive():
                return
        self._look_again()

    def _look_again(self) -> None:
        if self._loop is not None:
            self._looks_again = True
            self._loop.call_soon(self._look)
