"""The engine's end of a worker, wherever that runs (no torch).

To the executor a worker is the other end of a channel, and a descriptor that becomes readable when the
worker has ended. A worker on this host is a child process at a socket pair. One elsewhere has a socket
pair, too, inside this process: a relay (:mod:`engine.executor.nodes.driver`,
:mod:`engine.executor.cluster.crew`) holds its other end, and passes messages on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from coordinator.process import process
from engine.executor.channel import Channel, ChannelClosed
from engine.executor.messages import FromWorker
from engine.executor_contract import Progress
from engine.host import forked
from engine.host.forked import Forked, Unforked

logger = logging.getLogger(__name__)

END_TIMEOUT = 5.0
"""Seconds that a worker may take to end by itself."""
LOOPBACK = "127.0.0.1"


class WorkerEnd(ABC):
    """One worker, seen from its engine."""

    channel: Channel
    ended: int
    """A descriptor that is readable once the worker has ended."""

    def __init__(self, name: str, host: str = "", address: str = LOOPBACK, number: int = 0) -> None:
        """``host``: equal for workers that can share memory. ``address``: where others reach its torch
        groups. ``number``: of the worker among those of its host."""
        self.name = name
        self.host = host
        self.address = address
        self.number = number
        self.inbox: deque[FromWorker] = deque()
        """Messages received and not taken yet."""
        self.spoke_at = time.monotonic()
        """Time of the worker's last message, or of its start."""

    @property
    @abstractmethod
    def status(self) -> int | None:
        """Exit status as subprocess has it; None: it runs, or that is unknown."""

    @abstractmethod
    def how_it_ended(self) -> str:
        """Text for messages on how the worker ended or closed its channel."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once."""

    @abstractmethod
    def end(self, deadline: float) -> None:
        """Wait for the end of a worker whose channel is closed, until a deadline (monotonic)."""


class Crew(Protocol):
    """Starts the workers of an instance."""

    def start(self, workers: list[WorkerEnd], progress: Progress) -> None:
        """Start all workers, and append them to ``workers`` by stage, then rank.

        Raises:
            engine.executor_contract.CannotStart: they could not be had; the message says what is missing.
        """
        ...

    def threads_of(self, worker: WorkerEnd) -> int | None:
        """Compute threads that the worker keeps, whatever the engine's host has; None: the engine decides."""
        ...

    def close(self, problem: str) -> None:
        """Release what was needed to reach the workers, which have been ended.

        ``problem``: why the instance ends; empty where it was asked to end.
        """
        ...


class LocalWorker(WorkerEnd):
    """Worker that is a child process of the engine.

    The kernel kills it when this one dies.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        host: str = "",
        address: str = LOOPBACK,
        number: int = 0,
        num_channels: int = 1,
    ) -> None:
        super().__init__(name, host, address, number)
        pairs = [socket.socketpair() for _ in range(num_channels)]
        descriptors = [theirs.fileno() for _, theirs in pairs]
        self.child = _start(descriptors, _environment(threads))
        for _, theirs in pairs:
            theirs.close()
        self.channel, *self.more_channels = [Channel(ours) for ours, _ in pairs]
        self.ended = os.pidfd_open(self.child.pid)

    def __str__(self) -> str:
        return f"{self.name} (pid {self.child.pid})"

    @property
    def status(self) -> int | None:
        return self.child.poll()

    def how_it_ended(self) -> str:
        try:
            return process.how_it_ended(self.child.wait(END_TIMEOUT))
        except subprocess.TimeoutExpired:
            return "closed its channel"

    def kill(self) -> None:
        self.child.kill()

    def end(self, deadline: float) -> None:
        try:
            self.child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger.warning("%s does not end: killed", self)
            self.child.kill()
            self.child.wait()
        os.close(self.ended)


def _environment(threads: int) -> dict[str, str]:
    return {
        **os.environ,
        **forked.thread_environment(threads),
        process.PARENT_VARIABLE: str(os.getpid()),
    }


def _start(descriptors: Sequence[int], environment: Mapping[str, str]) -> subprocess.Popen[bytes] | Forked:
    """Start a worker that inherits these; forked, where this process can."""
    arguments = [str(descriptor) for descriptor in descriptors]
    if forked.inherited is not None:
        try:
            return forked.inherited.fork("engine.executor.worker:main", arguments, environment, descriptors)
        except Unforked as problem:
            logger.warning("%s; falling back to a normal process start", problem)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "engine.executor.worker", *arguments],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )


class RelayedWorker(WorkerEnd):
    """Worker on another host or in an actor, reached through a relay.

    Its relay uses :meth:`forward`, :meth:`deliver` and :meth:`gone`, from another thread.
    """

    def __init__(self, name: str, where: str, host: str, address: str, number: int) -> None:
        """``where``: of the worker, for people, like ``pid 12 on alpha``."""
        super().__init__(name, host, address, number)
        ours, theirs = socket.socketpair()
        self.channel, self.relay = Channel(ours), Channel(theirs)
        self.where = where
        self.ended = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._how: str | None = None
        self._status: int | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.where})"

    @property
    def status(self) -> int | None:
        return self._status

    def gone(self, how: str, status: int | None = None) -> None:
        """Called by the relay when the worker has ended; only the first call counts."""
        if self._how is None:
            self._how, self._status = how, status
            os.eventfd_write(self.ended, 1)

    def how_it_ended(self) -> str:
        return self._how or "closed its channel"

    def kill(self) -> None:
        """Does nothing: the crew ends the worker by ending the relay."""

    def end(self, deadline: float) -> None:
        """Does nothing: the crew ends the worker."""

    def forward(self, loop: asyncio.AbstractEventLoop, send: Callable[[bytes], bool]) -> None:
        """Pass the executor's messages to ``send``, in the loop's thread, until it hangs up.

        ``send`` returns whether it took the message. After one that it did not take, no more are passed.
        """
        loop.add_reader(self.relay.fileno(), self._forward, loop, send)

    def _forward(self, loop: asyncio.AbstractEventLoop, send: Callable[[bytes], bool]) -> None:
        try:
            while (payload := self.relay.take()) is not None:
                if not send(payload):
                    break
            else:
                return
        except ChannelClosed:
            pass
        loop.remove_reader(self.relay.fileno())

    def deliver(self, payload: bytes) -> bool:
        """Pass a worker's message to the executor; False once that has hung up."""
        try:
            self.relay.send(payload)
        except ChannelClosed:
            return False
        return True

    def forget(self) -> None:
        """Close the relay, which is not used any more."""
        self.relay.close()
        os.close(self.ended)


class LocalCrew:
    """Crew whose workers are processes of this host."""

    def __init__(self, names: list[str], threads: int, num_channels: int = 1) -> None:
        """``num_channels``: to each worker."""
        self._names = names
        self._threads = threads
        self._num_channels = num_channels

    def start(self, workers: list[WorkerEnd], progress: Progress) -> None:
        """See ``Crew``."""
        progress("starting workers")
        for number, name in enumerate(self._names):  # all first, since they spend seconds on imports
            worker = LocalWorker(name, self._threads, number=number, num_channels=self._num_channels)
            workers.append(worker)

    def threads_of(self, worker: WorkerEnd) -> int | None:
        """See ``Crew``."""
        return None

    def close(self, problem: str) -> None:
        """Does nothing: there is nothing beside the workers."""
