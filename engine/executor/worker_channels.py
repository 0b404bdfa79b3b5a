"""Message channels of an engine to all workers of its instance (no torch).

One thread sends and waits. While it waits it takes in what any worker sends, and notices the end of each by
its pidfd or by the end of its channel, whichever is first. What steps are is the part of
:mod:`engine.executor.mp`.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import msgspec

from engine.executor.channel import ChannelClosed
from engine.executor.ends import END_TIMEOUT, WorkerEnd
from engine.executor.messages import (
    AdapterFilesRead,
    FromWorker,
    ImageEncoded,
    Phase,
    ShardPrepared,
    ToWorker,
    WorkerFailed,
)
from engine.executor_contract import Progress, WorkerLost
from engine.model.errors import CheckpointError

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

LOOK_SECONDS = 1e-4
"""Seconds that the engine polls for a result before it sleeps, freeing the core."""
BLAME_SECONDS = 0.5
"""Seconds to wait for the end of another worker that explains a failed collective."""


class WorkerChannels:
    """Sends messages to workers, and waits for their answers or their ends."""

    def __init__(self, step_timeout: float, startup_timeout: float) -> None:
        """``step_timeout``: seconds that a worker may send nothing in a step, or take no message.

        ``startup_timeout``: seconds without a message from any worker after which loading is taken to hang.
        """
        self.step_timeout = step_timeout
        self._startup_timeout = startup_timeout
        self.workers: list[WorkerEnd] = []
        """All workers by stage, then rank."""
        self.problem = ""
        """Why the instance cannot go on."""
        self.on_weights: Callable[[ShardPrepared], None] = lambda prepared: None
        """Called with each report on new weights."""
        self.on_adapter: Callable[[AdapterFilesRead], None] = lambda read: None
        """Called with each report on an adapter."""
        self.on_image: Callable[[ImageEncoded], None] = lambda encoded: None
        """Called with each report on an image."""
        self.are_serving = False
        """Whether all workers wait for steps, so that they end as soon as asked."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
        self._interrupt = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._interrupt, select.POLLIN)

    def __repr__(self) -> str:
        return f"<WorkerChannels to {len(self.workers)} workers>"

    def register(self) -> None:
        """Begin to wait for :attr:`workers`, which have been started."""
        for worker in self.workers:
            self._poll.register(worker.channel, select.POLLIN)
            self._poll.register(worker.ended, select.POLLIN)

    def interrupt(self) -> None:
        """End the wait of :meth:`wait`, from another thread."""
        os.eventfd_write(self._interrupt, 1)

    def wait(self, seconds: float) -> None:
        """Take in what comes first, for at most so many seconds.

        Raises:
            WorkerLost, CheckpointError, MemoryError: a worker has failed or ended.
        """
        ready = self._poll.poll(seconds * 1000)
        if ready:
            self._take_in(ready)

    def close(self) -> None:
        """End the workers.

        While they load, and when one is lost, they hold nothing worth waiting for.
        """
        for worker in self.workers:
            if not self.are_serving:
                worker.kill()
            worker.channel.close()
        deadline = time.monotonic() + END_TIMEOUT
        for worker in self.workers:
            worker.end(deadline)
        self.workers.clear()
        if self._interrupt >= 0:
            os.close(self._interrupt)
            self._interrupt = -1

    def send_all(self, message: ToWorker) -> None:
        payload = self._encoder.encode(message)
        for worker in self.workers:
            self._send_bytes(worker, payload)

    def send(self, worker: WorkerEnd, message: ToWorker) -> None:
        self._send_bytes(worker, self._encoder.encode(message))

    def _send_bytes(self, worker: WorkerEnd, payload: bytes) -> None:
        """Send bytes to a worker.

        While it has no room, messages of all workers are taken in. A worker that waits to send takes nothing,
        and lets no other worker continue.
        """
        try:
            left = worker.channel.offer(payload)
            if not left:
                return
            self._poll.modify(worker.channel, select.POLLIN | select.POLLOUT)
            deadline = time.monotonic() + self.step_timeout
            while rest := worker.channel.flush():
                now = time.monotonic()
                if rest < left:
                    left, deadline = rest, now + self.step_timeout
                if now >= deadline:
                    self.hangs(worker)
                self.wait(deadline - now)
            self._poll.modify(worker.channel, select.POLLIN)
        except ChannelClosed:
            self._lost(worker)

    def await_each(
        self, workers: Sequence[WorkerEnd], kind: type[Answer], progress: Progress | None = None
    ) -> list[Answer]:
        """The next answer of each of these workers, before they serve.

        They may take any time, if one that owes an answer reports its progress.
        """
        return [
            self.await_one(worker, kind, self._startup_timeout, progress, workers[place:])
            for place, worker in enumerate(workers)
        ]

    def await_one(
        self,
        worker: WorkerEnd,
        kind: type[Answer],
        patience: float,
        progress: Progress | None = None,
        owing: Sequence[WorkerEnd] = (),
    ) -> Answer:
        """The next answer of one worker, which must be of this kind.

        Raises:
            WorkerLost: some worker has ended, or this one, and all that are ``owing``, send nothing for
                ``patience`` seconds.
            CheckpointError, MemoryError: a worker reports it.
        """
        look_until = time.perf_counter() + LOOK_SECONDS
        since = time.monotonic()
        while True:
            if not worker.inbox:
                self.drain(worker)
            if worker.inbox:
                message = worker.inbox.popleft()
                if isinstance(message, kind):
                    return message
                assert isinstance(message, Phase), f"{worker} sent {message!r}, not {kind.__name__}"
                if progress is not None:
                    progress(message.text)
            elif time.perf_counter() < look_until:
                os.sched_yield()
            else:
                spoke_at = max((each.spoke_at for each in owing), default=since)
                left = max(since, spoke_at) + patience - time.monotonic()
                if left <= 0:
                    hint = "; if it only reads slowly, raise --startup-timeout" if owing else ""
                    self.hangs(_most_silent(owing, kind) or worker, hint)
                self.wait(left)

    def _take_in(self, ready: Sequence[tuple[int, int]]) -> None:
        """Read ready descriptors, the ends of workers last.

        A worker's last message explains more than its end.

        Raises:
            WorkerLost, CheckpointError, MemoryError: a worker has failed or ended.
        """
        descriptors = {descriptor for descriptor, _ in ready}
        if self._interrupt in descriptors:
            os.eventfd_read(self._interrupt)
        for worker in self.workers:
            if worker.channel.fileno() in descriptors:
                self.drain(worker)
        for worker in self.workers:
            if worker.ended in descriptors:
                self._lost(worker)

    def drain(self, worker: WorkerEnd) -> None:
        """Put all messages of a worker into its inbox.

        Raises:
            WorkerLost, CheckpointError, MemoryError: it has failed or ended.
        """
        try:
            while (payload := worker.channel.take()) is not None:
                message = self._decoder.decode(payload)
                if isinstance(message, WorkerFailed):
                    self._failed(worker, message)
                if isinstance(message, ShardPrepared):
                    self.on_weights(message)  # it comes at any time, and no step waits for it
                    continue
                if isinstance(message, AdapterFilesRead):
                    self.on_adapter(message)
                    continue
                if isinstance(message, ImageEncoded):
                    self.on_image(message)
                    continue
                worker.inbox.append(message)
                worker.spoke_at = time.monotonic()
        except ChannelClosed:
            self._lost(worker)

    def _failed(self, worker: WorkerEnd, failure: WorkerFailed) -> NoReturn:
        self.are_serving = False
        self.problem = f"{worker} failed: {failure.kind}: {failure.text}"
        if failure.kind == "CheckpointError":
            raise CheckpointError(failure.text)
        if failure.kind == "MemoryError":
            raise MemoryError(failure.text)
        if failure.kind == "CollectiveError":  # most likely the end of another worker is behind it
            self._look_for_deaths(worker)
        raise WorkerLost(self.problem)

    def _look_for_deaths(self, complains: WorkerEnd) -> None:
        deaths = select.poll()
        for worker in self.workers:
            if worker is not complains:
                deaths.register(worker.ended, select.POLLIN)
        ended = {descriptor for descriptor, _ in deaths.poll(BLAME_SECONDS * 1000)}
        killed = [worker for worker in self.workers if worker.ended in ended and worker.status != 0]
        # One that failed itself ends with status 1; who was killed, or went with its host, is the cause.
        for worker in sorted(killed, key=lambda worker: worker.status or 0):
            self._lost(worker)

    def hangs(self, worker: WorkerEnd, hint: str = "") -> NoReturn:
        """Raise WorkerLost for a worker that does not answer."""
        self.are_serving = False
        self.problem = f"{worker} does not answer: it is stopped, or hangs{hint}"
        raise WorkerLost(self.problem)

    def _lost(self, worker: WorkerEnd) -> NoReturn:
        self.are_serving = False
        self.problem = f"{worker} {worker.how_it_ended()}"
        raise WorkerLost(self.problem)


def _most_silent(workers: Sequence[WorkerEnd], kind: type[Answer]) -> WorkerEnd | None:
    """The worker that has been silent longest, of those that have not answered.

    The others may only wait for it.
    """
    owing = [each for each in workers if not any(isinstance(message, kind) for message in each.inbox)]
    return min(owing, key=lambda worker: worker.spoke_at, default=None)
