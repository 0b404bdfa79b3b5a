"""The engine's side of the messages about groups of an epoch (no torch).

Calls come from the threads that prepare, abort and report; one thread of its own takes in the answers.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from engine.executor.channel import Channel, ChannelClosed
from engine.executor.group_messages import (
    AbandonGroups,
    Counts,
    ExpertsRead,
    FromGroups,
    GroupsFormed,
    NotPrepared,
    TellCounts,
    ToGroups,
)
from engine.model.checkpoint import CheckpointError, ReadingStopped
from parallel.communicators.base import CollectiveError

logger = logging.getLogger(__name__)

COUNTS_INTERVAL = 1.0
"""Seconds between two questions for counts, while steps are computed."""
LOOK_INTERVAL = 0.05
"""Seconds between two checks whether a waiting caller should stop."""
SILENCE_TIMEOUT = 20.0
"""Seconds after which a worker without an answer to a plain question is lost.

It is stopped or hangs: workers answer from a thread that does nothing else. During steps they are asked every
``COUNTS_INTERVAL``.
"""
MOST_EPOCHS = 8
"""Number of newest epochs of which answers are kept."""

Answer = TypeVar("Answer", ExpertsRead, GroupsFormed)


class GroupControl:
    """Sends orders to all workers of an instance, and collects answers."""

    def __init__(self, channels: Sequence[Channel], on_silence: Callable[[], None] = lambda: None) -> None:
        """``on_silence`` is called, in a thread of this object, when :attr:`silent` is set."""
        self._channels = list(channels)
        self._on_silence = on_silence
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromGroups] = msgspec.msgpack.Decoder(FromGroups)
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._answers: dict[int, dict[int, list[FromGroups]]] = {}
        """Answers by epoch and worker."""
        self._ended = False
        self._asks = False
        self.counts: list[Counts | None] = [None] * len(self._channels)
        """Newest counts of each worker."""
        self._asked_at = 0.0
        """Time of the oldest question without all answers, or of the newest answered one."""
        self._heard_at = [0.0] * len(self._channels)
        self.silent: int | None = None
        """The number of a worker that does not answer."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="groups", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<GroupControl of {len(self._channels)} workers, epochs {sorted(self._answers)}>"

    def tell(self, message: ToGroups) -> None:
        """Send a message to all workers; a lost one is noticed elsewhere."""
        payload = self._encoder.encode(message)
        with self._sending:
            for channel in self._channels:
                try:
                    channel.send(payload)
                except ChannelClosed as error:
                    logger.debug("a worker does not get %r: %s", message, error)

    def collect(
        self, epoch: int, kind: type[Answer], timeout: float, should_stop: Callable[[], bool]
    ) -> list[Answer]:
        """Wait for one kind of answer from every worker.

        If one worker fails to answer, all are sent the order to abandon the epoch.

        Raises:
            ReadingStopped: ``should_stop`` returned True.
            CheckpointError, ValueError, RuntimeError: a worker says what went wrong.
            CollectiveError: a group could not be formed, or a worker is gone or does not answer.
        """
        try:
            return self._collect(epoch, kind, time.monotonic() + timeout, should_stop)
        except (ReadingStopped, ValueError, RuntimeError):
            self.tell(AbandonGroups(epoch))
            raise

    def ask_counts(self) -> None:
        """Ask workers for new :attr:`counts`."""
        self._asks = True

    def ask_who_lives(self) -> None:
        """Ask for a sign of life; a worker silent for ``SILENCE_TIMEOUT`` is lost."""
        with self._changed:
            if self._who_owes_an_answer() is None:
                self._asked_at = time.monotonic()
        self.tell(TellCounts())

    def close(self) -> None:
        """Close the channels to all workers."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        os.eventfd_write(self._wake, 1)
        self._thread.join(2 * COUNTS_INTERVAL)
        if not self._thread.is_alive():
            os.close(self._wake)
        with self._sending:
            for channel in self._channels:
                channel.close()

    # ----

    def _collect(
        self, epoch: int, kind: type[Answer], deadline: float, should_stop: Callable[[], bool]
    ) -> list[Answer]:
        with self._changed:
            while True:
                if should_stop():
                    raise ReadingStopped
                answers = self._answers.get(epoch, {})
                for failed in _of_kind(answers, NotPrepared).values():
                    raise _error(failed)
                found = _of_kind(answers, kind)
                if len(found) == len(self._channels):
                    return [found[worker] for worker in range(len(self._channels))]
                if self._ended:
                    raise CollectiveError("a worker of this instance is gone", None, "aborted")
                if self.silent is not None or time.monotonic() > deadline:
                    raise CollectiveError("a worker of this instance does not answer", None, "deadline")
                self._changed.wait(LOOK_INTERVAL)

    def _run(self) -> None:
        poll = select.poll()
        numbers = {channel.fileno(): number for number, channel in enumerate(self._channels)}
        for descriptor in numbers:
            poll.register(descriptor, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        asked_at = 0.0
        while not self._ended:
            ready = poll.poll(COUNTS_INTERVAL * 1000)
            try:
                for descriptor, _ in ready:
                    if descriptor in numbers:
                        self._take_in(numbers[descriptor])
            except (ChannelClosed, msgspec.MsgspecError) as error:
                with self._changed:  # the executor notices the worker's end by itself
                    self._ended = True
                    self._changed.notify_all()
                logger.debug("a worker says no more of its groups: %s", error)
                return
            self._look_for_silence()
            now = time.monotonic()
            if self._asks and now - asked_at >= COUNTS_INTERVAL:
                self._asks, asked_at = False, now
                self.ask_who_lives()

    def _look_for_silence(self) -> None:
        """Called when all answers are read: this process may have been stopped itself."""
        with self._changed:
            if self.silent is not None or time.monotonic() - self._asked_at <= SILENCE_TIMEOUT:
                return
            self.silent = self._who_owes_an_answer()
            self._changed.notify_all()
        if self.silent is not None:
            self._on_silence()

    def _who_owes_an_answer(self) -> int | None:
        return next((worker for worker, at in enumerate(self._heard_at) if at < self._asked_at), None)

    def _take_in(self, worker: int) -> None:
        while (payload := self._channels[worker].take()) is not None:
            message = self._decoder.decode(payload)
            with self._changed:
                self._heard_at[worker] = time.monotonic()
                if isinstance(message, Counts):
                    self.counts[worker] = message
                else:
                    self._answers.setdefault(message.epoch, {}).setdefault(worker, []).append(message)
                    for old in sorted(self._answers)[:-MOST_EPOCHS]:
                        del self._answers[old]
                self._changed.notify_all()


Kind = TypeVar("Kind", ExpertsRead, GroupsFormed, NotPrepared)


def _of_kind(answers: dict[int, list[FromGroups]], kind: type[Kind]) -> dict[int, Kind]:
    """Answers of one kind, by worker."""
    return {
        worker: each for worker, of_worker in answers.items() for each in of_worker if isinstance(each, kind)
    }


def _error(failed: NotPrepared) -> Exception:
    """Error of a worker, for the thread that waits for its answer."""
    match failed.kind:
        case "CheckpointError":
            return CheckpointError(failed.text)
        case "ValueError":
            return ValueError(failed.text)
        case "CollectiveError":
            evidence = next(
                (each for each in ("exited", "closed", "deadline", "aborted") if each == failed.evidence),
                "closed",
            )
            return CollectiveError(failed.text, failed.suspect, evidence)  # type: ignore[arg-type]
    return RuntimeError(f"{failed.kind}: {failed.text}")
