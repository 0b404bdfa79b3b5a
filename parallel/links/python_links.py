"""Links between members in Python: what ``native/tcp_links.cpp`` does, over the same sockets.

This module loads no torch.

Both ends of a pipe cut it into the same stripes, so members with native links and members with these may be
in one group. See ``native/links.hpp`` for what the calls promise.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Mapping, Sequence

from parallel.links.native_links import STRIPE_BYTES, BrokenLink, NativeLinks, load, make_tcp_links

_AHEAD_BYTES = 16 << 10  # received beyond what is asked for, so that small messages share a call
_MOST_PARTS = 64  # of one call into the system
_LONGEST_SLEEP = 3600.0
_WRITABLE = 0x200

_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class _Stream:
    """One of a pipe's sockets."""

    def __init__(self, connection: socket.socket, at: int) -> None:
        self.connection = connection
        self.descriptor = connection.fileno()
        self.unsent: deque[memoryview] = deque()
        self.at = at
        """Position in the incoming pipe of the next byte that this stream brings."""
        self.ahead = memoryview(bytearray(_AHEAD_BYTES))
        self.low = self.high = 0
        """Bounds of the bytes in ``ahead`` that have not been asked for."""

    def send(self) -> int:
        """Send what goes without waiting; returns how many bytes went."""
        total = 0
        while self.unsent:
            parts = [self.unsent[number] for number in range(min(len(self.unsent), _MOST_PARTS))]
            try:
                count = self.connection.sendmsg(parts, (), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            total += count
            while self.unsent and count >= len(self.unsent[0]):
                count -= len(self.unsent.popleft())
            if self.unsent and count:
                self.unsent[0] = self.unsent[0][count:]
        return total


class _Pipe:
    """Both directions of the link to one peer."""

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self.streams = [
            _Stream(connection, number * STRIPE_BYTES) for number, connection in enumerate(connections)
        ]
        self.posted = self.taken = 0
        """Bytes of the outgoing and of the incoming pipe."""
        self.waits_for = 0
        """Bytes of a take that is not over."""
        self.is_broken = False

    def stretch(self, position: int) -> int:
        """Bytes from this position on that go over the same stream."""
        return (1 << 62) if len(self.streams) == 1 else STRIPE_BYTES - position % STRIPE_BYTES

    def stream_at(self, position: int) -> _Stream:
        return self.streams[position // STRIPE_BYTES % len(self.streams)]

    def advance(self, at: int, num_bytes: int) -> int:
        """Position of a stream's byte so many bytes after the one at ``at``."""
        if len(self.streams) == 1:
            return at + num_bytes
        while num_bytes > 0:
            rest = self.stretch(at)
            step = min(num_bytes, rest)
            num_bytes -= step
            at += step
            if step == rest:
                at += (len(self.streams) - 1) * STRIPE_BYTES
        return at

    def queue(self, data: memoryview) -> None:
        while data:
            step = min(len(data), self.stretch(self.posted))
            self.stream_at(self.posted).unsent.append(data[:step])
            self.posted += step
            data = data[step:]


class PythonLinks:
    """One member's links over connected sockets, which belong to it.

    Calls come from one thread; only :meth:`abort` may come from another. Memory is given by its address.
    """

    address = 0
    """Native code cannot call these links."""

    def __init__(self, rank: int, size: int, data: Mapping[int, Sequence[socket.socket]]) -> None:
        """``data``: equally many sockets to each other rank, in the peer's order.

        Raises:
            OSError: there are no file descriptors left.
        """
        self.rank, self.size = rank, size
        self.broken: BrokenLink | None = None
        """What broke the links first, as far as calls have noticed."""
        self.bytes_sent, self.bytes_received = [0] * size, [0] * size
        self.seconds_waited = [0.0] * size
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pipes = {peer: _Pipe(connections) for peer, connections in data.items() if peer != rank}
        self._is_aborted = self._is_closed = False
        self._lock = threading.RLock()  # abort may come from a signal handler

    def __repr__(self) -> str:
        standing = "closed" if self._is_closed else "broken" if self.broken else "open"
        return f"<PythonLinks rank {self.rank} of {self.size}, {standing}>"

    def post(self, peer: int, parts: Sequence[tuple[int, int]]) -> int:
        """Queue memory (address, bytes) for a peer, and send what goes; 0, or -1: broken."""
        pipe = self._open_pipe(peer)
        if pipe is None:
            return -1
        for address, num_bytes in parts:
            if num_bytes:
                pipe.queue(_memory_at(address, num_bytes, _WRITABLE))
        return min(0, self._flush(peer, pipe))

    def take(self, peer: int, address: int, num_bytes: int) -> int:
        """Receive exactly so many bytes from a peer.

        1: they are there; 0: not yet; -1: broken.
        """
        pipe = self._open_pipe(peer)
        if pipe is None:
            return -1
        try:
            target = memoryview(b"") if not num_bytes else _memory_at(address, num_bytes, _WRITABLE)
            came = [self._receive(peer, pipe, stream, target) for stream in pipe.streams]
        except OSError as error:
            return self._fail(peer, error.errno or 0)
        if not all(came):
            pipe.waits_for = num_bytes
            return 0
        pipe.waits_for = 0
        pipe.taken += num_bytes
        return 1

    def flush(self, peer: int = -1) -> int:
        """Send what is queued for a peer, or for all.

        1: all is sent; 0: not yet; -1: broken.
        """
        if self._is_aborted:
            return self._fail(None, errno.ECANCELED)
        if peer >= 0:
            only = self._open_pipe(peer)
            return -1 if only is None else self._flush(peer, only)
        done = 1
        for each, pipe in self._pipes.items():
            if any(stream.unsent for stream in pipe.streams):
                done = min(done, -1 if pipe.is_broken else self._flush(each, pipe))
        return done

    def sleep(self, seconds: float) -> int:
        """Sleep until a link can go on.

        1: one can; 0: the time is over; -1: broken.
        """
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for pipe in self._pipes.values():
            for stream in pipe.streams:
                events = select.POLLOUT if stream.unsent else 0
                if stream.at < pipe.taken + pipe.waits_for and pipe.waits_for:
                    events |= select.POLLIN
                if events and pipe.is_broken:
                    return -1
                if events:
                    poll.register(stream.descriptor, events)
        ready = poll.poll(1000 * min(max(seconds, 0.0), _LONGEST_SLEEP))
        if self._is_aborted:
            return self._fail(None, errno.ECANCELED)
        return int(bool(ready))

    def add_wait(self, peer: int, seconds: float) -> None:
        """Count seconds for which a call has waited for a peer."""
        self.seconds_waited[peer] += seconds

    def abort(self) -> None:
        """Make this and every later call fail; safe from any thread, and when called twice."""
        with self._lock:
            if not self._is_closed and not self._is_aborted:
                self._is_aborted = True
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the sockets, after the last call; what is queued is dropped."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = self._is_aborted = True
            os.close(self._wake)
        for pipe in self._pipes.values():
            for stream in pipe.streams:
                stream.unsent.clear()
                stream.connection.close()

    def _open_pipe(self, peer: int) -> _Pipe | None:
        """The pipe to a peer; None if calls for it cannot succeed."""
        if self._is_aborted:
            self._fail(None, errno.ECANCELED)
            return None
        pipe = self._pipes.get(peer)
        if pipe is None:
            self._fail(peer, errno.EINVAL)
        return None if pipe is None or pipe.is_broken else pipe

    def _fail(self, peer: int | None, error: int) -> int:
        if self.broken is None:
            self.broken = BrokenLink(peer, error)
        if peer in self._pipes:
            self._pipes[peer].is_broken = True
        return -1

    def _flush(self, peer: int, pipe: _Pipe) -> int:
        try:
            for stream in pipe.streams:
                if stream.unsent:
                    self.bytes_sent[peer] += stream.send()
        except OSError as error:
            return self._fail(peer, error.errno or errno.EIO)
        return int(not any(stream.unsent for stream in pipe.streams))

    def _receive(self, peer: int, pipe: _Pipe, stream: _Stream, target: memoryview) -> bool:
        """Receive what one stream brings of a take; True when that is all there.

        Raises:
            OSError: the connection is broken; its number is 0 if the peer has closed its end.
        """
        end = pipe.taken + len(target)
        while stream.at < end:
            if stream.low < stream.high:
                low = stream.at - pipe.taken
                count = min(stream.high - stream.low, end - stream.at, pipe.stretch(stream.at))
                target[low : low + count] = stream.ahead[stream.low : stream.low + count]
                stream.low += count
                stream.at = pipe.advance(stream.at, count)
                continue
            places: list[memoryview] = []
            at = stream.at
            while at < end and len(places) < _MOST_PARTS:
                length = min(end - at, pipe.stretch(at))
                places.append(target[at - pipe.taken : at - pipe.taken + length])
                at = pipe.advance(at, length)
            room = sum(map(len, places))
            try:
                count, _, _, _ = stream.connection.recvmsg_into(
                    [*places, stream.ahead], 0, socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return False
            if not count:
                raise OSError(0, "the peer has closed its end")
            self.bytes_received[peer] += count
            stream.low, stream.high = 0, max(0, count - room)
            stream.at = pipe.advance(stream.at, min(count, room))
            if count < room:
                return False
        return True


def links_over(
    data: Mapping[int, Sequence[socket.socket]], rank: int, size: int, *, native: bool = True
) -> NativeLinks | PythonLinks:
    """Links over connected sockets: native, if that is asked for and can be compiled.

    Arguments and errors are those of :func:`parallel.links.native_links.make_tcp_links`.
    """
    library = load() if native else None
    return PythonLinks(rank, size, data) if library is None else make_tcp_links(library, rank, size, data)
