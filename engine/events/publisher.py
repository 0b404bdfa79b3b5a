"""The thread that publishes KV events, and replays what subscribers missed.

The step loop only puts a batch into a bounded queue. Batches have their numbers there, so a subscriber sees a
gap for each one that is dropped, by this queue or by its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque

import msgspec
import zmq

from engine.config.kv_events import KvEventsConfig, endpoint_of, is_bound
from engine.events.messages import EventBatch, KvEvent

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
"""Number of the message that ends a replay."""
FLUSH = 1.0
"""Seconds for a leaving instance to send queued events."""
COMPLAINT_INTERVAL = 30.0
"""Seconds between two lines about dropped batches."""
AT_ONCE = 256
"""Batches sent between two looks for replay requests."""
NUMBER_BYTES = 8


class EventPublisher:
    """PUB and ROUTER sockets of one instance, and their thread, until it is closed."""

    def __init__(self, config: KvEventsConfig, rank: int) -> None:
        """
        Raises:
            ValueError: a socket cannot be had at its endpoint.
        """
        self._config = config
        self._rank = rank
        self._topic = config.topic.encode()
        self._queue: deque[tuple[int, EventBatch]] = deque()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._dropped = 0
        self._told_at = -COMPLAINT_INTERVAL
        self._closing = False
        self._encoder = msgspec.msgpack.Encoder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._replay: zmq.Socket[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        try:
            self._pub = self._socket(zmq.PUB, "endpoint", config.endpoint, config.hwm)
            if config.replay_endpoint is not None:
                most = config.buffer_steps + 1  # so that a whole replay finds room
                self._replay = self._socket(zmq.ROUTER, "replay_endpoint", config.replay_endpoint, most)
        except ValueError:
            self._context.destroy(linger=0)
            os.close(self._wake)
            raise

    def __repr__(self) -> str:
        return f"<EventPublisher of instance {self._rank}: {self._next} batches, {self._dropped} dropped>"

    @property
    def num_dropped(self) -> int:
        """Batches that found no room in the queue."""
        return self._dropped

    def start(self) -> None:
        self._thread.start()

    def publish(self, events: list[KvEvent]) -> None:
        """Queue one batch; never waits."""
        number, self._next = self._next, self._next + 1
        if len(self._queue) >= self._config.max_queue_size:
            self._drop()
            return
        self._queue.append((number, EventBatch(time.time(), events, self._rank)))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send queued batches within a bounded time, then close the sockets."""
        self._closing = True
        if self._thread.is_alive():
            os.eventfd_write(self._wake, 1)
            self._thread.join(FLUSH)
        if not self._thread.is_alive():
            self._context.destroy(linger=round(1000 * FLUSH))
            os.close(self._wake)

    def _drop(self) -> None:
        self._dropped += 1
        if (now := time.monotonic()) > self._told_at + COMPLAINT_INTERVAL:
            self._told_at = now
            logger.warning(
                "KV events: %d batches dropped by now: more than max_queue_size (%d) wait to be sent",
                self._dropped,
                self._config.max_queue_size,
            )

    def _socket(self, kind: int, name: str, given: str, most: int) -> zmq.Socket[bytes]:
        try:
            endpoint = endpoint_of(given, self._rank)
            socket = self._context.socket(kind)
            socket.setsockopt(zmq.SNDHWM, most)
            socket.setsockopt(zmq.IPV6, int("[" in endpoint or "::" in endpoint))
            if kind == zmq.ROUTER or is_bound(endpoint):
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except (ValueError, zmq.ZMQError) as error:
            raise ValueError(f"--kv-events-config: {name} {given}, instance {self._rank}: {error}") from error
        return socket

    # ---- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not (self._closing and not self._queue):
            if not self._queue:
                poller.poll()
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            for _ in range(min(AT_ONCE, len(self._queue))):
                number, batch = self._queue.popleft()
                self._send(number, batch)
            if self._replay is not None:
                self._answer(self._replay)

    def _send(self, number: int, batch: EventBatch) -> None:
        payload = self._encoder.encode(batch)
        self._sent.append((number, payload))
        with contextlib.suppress(zmq.Again):  # PUB drops for those who are slow, and never waits
            frames = (self._topic, number.to_bytes(NUMBER_BYTES, "big"), payload)
            self._pub.send_multipart(frames, zmq.DONTWAIT)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Replay from the asked number on, for one subscriber."""
        try:
            peer, *rest = replay.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
        if len(rest) != 2 or rest[0] or len(rest[1]) != NUMBER_BYTES:
            logger.warning("KV events: a wish to replay is an empty frame and a number of 8 bytes")
            return
        first = int.from_bytes(rest[1], "big")
        with contextlib.suppress(zmq.ZMQError):  # it has hung up
            for number, payload in self._sent:
                if number >= first:
                    frames = (peer, b"", self._topic, number.to_bytes(NUMBER_BYTES, "big"), payload)
                    replay.send_multipart(frames, zmq.DONTWAIT)
            replay.send_multipart((peer, b"", b"", END, b""), zmq.DONTWAIT)
