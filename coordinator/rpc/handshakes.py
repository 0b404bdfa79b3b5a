"""State of a connecting socket's connections: made, broken, or refused for their keys.

ZeroMQ reconnects by itself without a word to the code that sends and receives; its monitor reports it. It
gives up where the other end breaks its rules: after a failed handshake, after a message too large.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from coordinator.rpc.greeting import mechanism_at

REFUSED_INTERVAL = 1.0
"""Seconds until a new connect where ZeroMQ itself has given up."""
GREETING_TIMEOUT = 1.0
"""Timeout in seconds for reading a listener's greeting after it hung up."""
ENOUGH_FAILURES = 3
"""Failed handshakes in a row, with keys on both sides, that prove a wrong key.

A single one may fail because the listener ends in the middle of it.
"""
FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class KeyRefused(ConnectionError):
    """A listener and this process do not agree on the mesh's key.

    Says in what, and what to do.
    """


class Handshakes:
    """Watches one socket from before it connects until :meth:`close`."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        socket: zmq.Socket[Any],
        endpoint: str,
        *,
        has_keys: bool,
        connect_again: Callable[[], None],
    ) -> None:
        """``connect_again``: unless there is a connection by then."""
        self._socket = socket
        self._endpoint = endpoint
        self._has_keys = has_keys
        self._connect_again = connect_again
        self._failed = 0
        """Number of failed handshakes in a row."""
        self._again: asyncio.TimerHandle | None = None
        """Timer of the next check that a connection exists."""
        events = f"inproc://events-of-{id(self)}"
        socket.monitor(events, zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILED)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.connect(events)

    def __repr__(self) -> str:
        return f"<Handshakes with {self._endpoint}, {self._failed} failed>"

    async def broken(self) -> None:
        """Wait until a connection breaks; it is retried in any case.

        The listener's process ended, the network failed, the listener broke the protocol, or it refused
        (:meth:`refusal`).
        """
        while True:
            event = int((await recv_monitor_message(self._monitor))["event"])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._failed = 0
                continue
            if self._again is None:  # ZeroMQ may have given up
                self._again = asyncio.get_running_loop().call_later(REFUSED_INTERVAL, self._look_again)
            if event & FAILED:
                self._failed += 1
            else:
                return

    def _look_again(self) -> None:
        self._again = None
        self._connect_again()

    def close(self) -> None:
        """Stop monitoring; call it before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    async def refusal(self) -> KeyRefused | None:
        """The error if the last break was caused by keys; else None."""
        if not self._failed:
            return None
        match await mechanism_at(self._endpoint, GREETING_TIMEOUT), self._has_keys:
            case "CURVE", False:
                return KeyRefused(
                    "it takes only peers with the key of its mesh: give --mesh-key-file here, too, or, if it "
                    "was given none, run this as the same user"
                )
            case "NULL", True:
                return KeyRefused(
                    "it was started without a mesh key: give it --mesh-key-file, too (or, if you know who "
                    "started it, --insecure-mesh here)"
                )
            case "CURVE", True if self._failed >= ENOUGH_FAILURES:
                return KeyRefused(
                    "it has another mesh key: give the same --mesh-key-file everywhere, or, on one host, "
                    "none and the same -dpa and -dpp to processes of the same user"
                )
        return None
