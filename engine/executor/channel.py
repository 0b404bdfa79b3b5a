"""Message channel between an engine and a worker over connected sockets (no torch).

A round trip takes 16 us here, where one of ZeroMQ takes 160. On a busy host a sleeper is woken late, so a
receiver looks again and again for a moment before it sleeps, offering its core to others between two looks.
The end of the other process is the end of the stream: noticed at once, on both sides.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time

HEADER = struct.Struct("<I")
"""Length of the message that follows, in bytes."""
MAX_BYTES = 1 << 28
"""Bytes of one message; a channel that announces more counts as closed."""
CHUNK = 1 << 20
SEND_TIMEOUT = 60.0
"""Default seconds in which the other side must make room for more of a message."""


class ChannelClosed(ConnectionError):
    """Raised when the other side is gone."""


class Channel:
    """One end of a channel.

    Used from one thread, or from one that sends and one that receives.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._unsent = bytearray()
        self._received = bytearray()
        self.send_timeout = SEND_TIMEOUT
        """Seconds in which the other side must make room for more of a message."""
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, payload: bytes) -> None:
        """Send one message.

        Nothing is received meanwhile: if both sides do this, neither may get on.

        Raises:
            ChannelClosed: the other side is gone, or takes nothing for ``send_timeout``.
        """
        if not self.offer(payload):
            return
        writable = select.poll()
        writable.register(self._end, select.POLLOUT)
        while self.flush():
            if not writable.poll(self.send_timeout * 1000):
                raise ChannelClosed(f"the other side took nothing for {self.send_timeout:g} s")

    def offer(self, payload: bytes) -> int:
        """Send one message as far as there is room; returns the bytes left for :meth:`flush`.

        Raises:
            ChannelClosed: the other side is gone.
        """
        assert len(payload) <= MAX_BYTES, "a message is a step, not a model"
        self._unsent += HEADER.pack(len(payload)) + payload
        return self.flush()

    def flush(self) -> int:
        """Send offered messages as far as there is room now.

        Returns the bytes left.

        Raises:
            ChannelClosed: the other side is gone.
        """
        try:
            while self._unsent:
                del self._unsent[: self._end.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        return len(self._unsent)

    def take(self) -> bytes | None:
        """Take the next message if it has arrived; None otherwise.

        Raises:
            ChannelClosed: the other side is gone and all that it sent was taken.
        """
        message = self._next()
        if message is not None:
            return message
        try:
            chunk = self._end.recv(CHUNK)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not chunk:
            raise ChannelClosed("the other side has closed its end")
        self._received += chunk
        return self._next()

    def receive(self, look: float) -> bytes:
        """Wait for the next message: poll for ``look`` seconds, then sleep until it comes.

        Raises:
            ChannelClosed: the other side is gone.
        """
        deadline = time.perf_counter() + look
        while True:
            message = self.take()
            if message is not None:
                return message
            if time.perf_counter() < deadline:
                os.sched_yield()
            else:
                self._poll.poll()

    def wait(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for something to take."""
        return bool(self._received) or bool(self._poll.poll(timeout * 1000))

    def close(self) -> None:
        self._end.close()

    def _next(self) -> bytes | None:
        if len(self._received) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(self._received)
        if size > MAX_BYTES:
            raise ChannelClosed(f"the other side announces a message of {size} bytes")
        end = HEADER.size + size
        if len(self._received) < end:
            return None
        message = bytes(self._received[HEADER.size : end])
        del self._received[:end]
        return message
