"""Deltas of one request on their way from an instance's connection to the HTTP handler.

A handler can hand a sink over (:meth:`Stream.hand_over`): while it waits, deltas go to the sink at once, and
no task is woken for them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from coordinator.numerics import Numerics
from engine.messages import Delta
from router.dispatch.ledger import Entry
from router.mesh import NumericsSwitch, TokenSink, WeightSpan


class Owner(Protocol):
    """The part of :class:`router.dispatch.dispatcher.RequestDispatcher` that a stream needs."""

    def rank_of(self, entry: Entry) -> int | None: ...
    def forget(self, entry: Entry) -> None: ...


class Stream:
    """A :class:`router.mesh.Generation`. What is unread is bounded by the tokens that were asked for."""

    def __init__(self, owner: Owner, entry: Entry) -> None:
        self._owner = owner
        self._entry = entry
        self._deltas: deque[Delta] = deque()
        self._arrived = asyncio.Event()
        self._error: Exception | None = None
        self._sink: TokenSink | None = None
        self._is_reader_idle = False
        """The reader has dealt with all that came, and waits.

        Only then may the sink take what comes.
        """

    def __repr__(self) -> str:
        return f"<Stream of {self._entry.prompt.request_id}, {len(self._deltas)} deltas unread>"

    @property
    def rank(self) -> int | None:
        """The instance that it runs on now, None while it has none."""
        return self._owner.rank_of(self._entry)

    @property
    def fingerprint(self) -> str | None:
        """See :class:`router.mesh.Generation`."""
        return self._entry.fingerprint

    @property
    def first_class(self) -> Numerics | None:
        """See :class:`router.mesh.Generation`."""
        return self._entry.first_class

    @property
    def numerics_changes(self) -> Sequence[NumericsSwitch]:
        """See :class:`router.mesh.Generation`."""
        return self._entry.numerics_changes

    @property
    def weight_spans(self) -> Sequence[WeightSpan]:
        """See :class:`router.mesh.Generation`."""
        return self._entry.weight_spans

    def hand_over(self, sink: TokenSink) -> None:
        """See :class:`router.mesh.Generation`."""
        self._sink = sink

    def push(self, delta: Delta) -> None:
        if (
            self._error is not None
        ):  # the reader has not raised it yet; the delta would hide that one is missing
            return
        if self._is_reader_idle and self._sink is not None:
            try:
                if self._sink.take(delta):
                    self._entry.sink = self._sink
                    return
            except Exception as error:  # noqa: BLE001 (is the reader's to raise: others go on)
                self._wake(error)
                return
        self._deltas.append(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        self._wake(error)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            while self._deltas:
                delta = self._deltas.popleft()
                yield delta
                if delta.finish_reason is not None:
                    return
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            self._is_reader_idle = True
            self._entry.sink = self._sink
            try:
                await self._arrived.wait()
            finally:
                self._is_reader_idle = False
                self._entry.sink = None

    def close(self) -> None:
        """Abort the request unless it has ended."""
        # The sink refers to this stream: without it, both are freed without the garbage collector.
        self._sink = self._entry.sink = None
        self._owner.forget(self._entry)

    def _wake(self, error: Exception | None = None) -> None:
        self._is_reader_idle = False
        self._entry.sink = None
        self._error = self._error or error
        self._arrived.set()
