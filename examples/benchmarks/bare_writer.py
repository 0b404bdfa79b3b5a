"""A server that only writes streams of events: the floor of a router's costs.

``python examples/benchmarks/bare_writer.py PORT STEP_MS`` answers every POST with as many events as its
``max_tokens`` asks for: each the same bytes, one system call each, all streams in step, as an engine would
give them. One thread, no event loop, nothing is parsed but that number.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
CHUNK = {
    "id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion", "created": 1700000000,
    "model": "lockstep-moe", "choices": [
        {"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "stop_reason": None}
    ],
}  # fmt: skip


def chunked(part: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(part), part)


EVENT = chunked(b"data: " + json.dumps(CHUNK, separators=(",", ":")).encode() + b"\n\n")
END = chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Streams:
    """Connections, each with the number of events that it still gets."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._poll = select.epoll()
        self._poll.register(listener, select.EPOLLIN)
        self._connections: dict[int, socket.socket] = {}
        self._left: dict[int, int] = {}

    def read(self, seconds: float) -> None:
        """Read what comes in this time: connections, requests, closings."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for number, _ in self._poll.poll(left):
                if number == self._listener.fileno():
                    self._accept()
                else:
                    self._take(number, self._connections[number].recv(65536))

    def step(self) -> None:
        """Write one event to each stream."""
        for number, left in list(self._left.items()):
            self._connections[number].send(EVENT)
            if left > 1:
                self._left[number] = left - 1
            else:
                del self._left[number]
                self._connections[number].send(END)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[connection.fileno()] = connection
        self._poll.register(connection, select.EPOLLIN)

    def _take(self, number: int, request: bytes) -> None:
        """Take a request, which clients of benchmarks send in one piece."""
        if not request:
            self._left.pop(number, None)
            self._poll.unregister(number)
            self._connections.pop(number).close()
            return
        self._left[number] = int(json.loads(request.partition(b"\r\n\r\n")[2])["max_tokens"])
        self._connections[number].send(HEAD)


def main(port: int, step_ms: float) -> None:
    streams = Streams(socket.create_server(("127.0.0.1", port), backlog=1024))
    print("writes", flush=True)
    while True:
        streams.read(step_ms / 1000)
        streams.step()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} PORT STEP_MS")
    main(int(sys.argv[1]), float(sys.argv[2]))
