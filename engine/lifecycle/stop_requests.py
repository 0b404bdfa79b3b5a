"""Requests to stop an instance: signals of its host, and an operator's drain."""

from __future__ import annotations

import math
import os
import signal

from coordinator.process import process
from engine.lifecycle.ended import InstanceEnded
from engine.serving.server import Server

BEFORE_READY = "asked to stop before it was ready"


class StopRequests:
    """Turns requests to stop into a drain, or while the model loads into the end."""

    def __init__(self, drain_timeout: float) -> None:
        self._drain_timeout = drain_timeout
        self._server: Server | None = None
        """Server that runs; None: the instance still loads."""
        self._num_signals = 0
        self._told_to_drain = False
        """Whether an operator asked to drain, rather than a signal."""

    def __repr__(self) -> str:
        return f"<StopRequests {self._num_signals} signals, {'' if self._told_to_drain else 'not '}drained>"

    @property
    def drains(self) -> bool:
        """Whether the instance was asked to stop."""
        return self._told_to_drain or self._num_signals > 0

    def listen(self) -> None:
        """Take SIGTERM and SIGINT from now on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def serve(self, server: Server) -> None:
        """From now on requests drain this server.

        Raises:
            InstanceEnded: one has come already.
        """
        self._server = server
        self.check()

    def check(self) -> None:
        """End an instance that is not ready if a signal has come.

        Raises:
            InstanceEnded: one has.
        """
        if self._num_signals:
            raise InstanceEnded(0, BEFORE_READY)

    def drain(self, timeout: float | None) -> None:
        """Drain on an operator's request; called by the membership thread."""
        if self._server is None:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if not self._num_signals:
            self._server.drain(self._drain_timeout if timeout is None else timeout)
        self._told_to_drain = True

    def _on_signal(self, number: int, _frame: object) -> None:
        """First signal: drain, which an operator's wish may have begun.

        Second: drop what is left. While loading: end at once.
        """
        self._num_signals += 1
        if self._server is None:
            raise InstanceEnded(process.EXIT_INTERRUPTED if number == signal.SIGINT else 0, BEFORE_READY)
        if self._num_signals > 1:
            self._server.leave()
        else:
            left = self._server.drain_time_left if self._told_to_drain else math.inf
            self._server.drain(min(self._drain_timeout, left))
