"""The deltas of one request, from the connection that brings them to the HTTP handler that reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

from engine.messages import Delta
from router.ledger import Entry
from router.mesh import MeshError


class Owner(Protocol):
    """The mesh client, as a stream needs it."""

    def rank_of(self, entry: Entry) -> int | None: ...
    def forget(self, entry: Entry) -> None: ...


class Stream:
    """A :class:`router.mesh.Generation`. What is unread is bounded by the tokens that were asked for."""

    def __init__(self, owner: Owner, entry: Entry) -> None:
        self._owner = owner
        self._entry = entry
        self._deltas: deque[Delta] = deque()
        self._arrived = asyncio.Event()
        self._error: MeshError | None = None

    def __repr__(self) -> str:
        return f"<Stream of {self._entry.prompt.request_id}, {len(self._deltas)} deltas unread>"

    @property
    def rank(self) -> int | None:
        """The instance that it runs on now, None while it has none."""
        return self._owner.rank_of(self._entry)

    def push(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._arrived.set()

    def fail(self, error: MeshError) -> None:
        self._error = error
        self._arrived.set()

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
            await self._arrived.wait()

    def close(self) -> None:
        """Abort the request unless it has ended."""
        self._owner.forget(self._entry)
