"""The thread that moves KV blocks between one cache and other instances.

It has an end for takers (:mod:`engine.transfers.lending_port`) and one for sources
(:mod:`engine.transfers.fetching_port`). Which blocks may be read and written is for the step loop to decide
(:mod:`engine.transfers.exchange`), over two queues: the step loop never waits for this thread, nor this
thread for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import uvloop
import zmq.asyncio

from coordinator.rpc.keys import MeshKeys
from coordinator.rpc.rpc import with_room
from engine.pieces.kinds import BLOCKS_ONLY, PieceKinds
from engine.pieces.pool import BlockHash
from engine.transfers.block_memory import CacheGone, CacheMemory
from engine.transfers.fetching import TransferEnded, Wanted
from engine.transfers.fetching_port import FetchingPort
from engine.transfers.lending import Key, Lookup, Return
from engine.transfers.lending_port import LendingPort

logger = logging.getLogger(__name__)

Event = Lookup | Return | TransferEnded
"""An event for the step loop."""


class BlockMover:
    """Moves blocks of one cache until it is closed."""

    def __init__(
        self,
        memory: CacheMemory,
        identity: str,
        endpoint: str,
        keys: MeshKeys | None,
        wake: Callable[[], None],
        kinds: PieceKinds = BLOCKS_ONLY,
    ) -> None:
        """``endpoint``: where to listen. ``wake``: called by the thread when there are events to take."""
        self.address = ""
        """Where takers connect, once :meth:`start` has returned."""
        self._memory = memory
        self._endpoint = endpoint
        self._keys = keys
        self._wake = wake
        self._events: deque[Event] = deque()
        self._lending = LendingPort(memory, identity, kinds, tell=self._tell, lose=self._lose)
        self._fetching = FetchingPort(memory, identity, kinds, keys, tell=self._tell, lose=self._lose)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listening, self._ended = threading.Event(), threading.Event()
        self._closing: asyncio.Event | None = None
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kv-mover", daemon=True)

    def __repr__(self) -> str:
        rests = " at rest" if self._lending.is_at_rest and self._fetching.is_at_rest else ""
        return f"<BlockMover at {self.address} {self._lending!r} {self._fetching!r}{rests}>"

    # ---- the step loop's side

    def start(self) -> None:
        """Start the thread, which listens.

        Raises:
            OSError: the address cannot be bound.
        """
        self._thread.start()
        self._listening.wait()
        if self._problem is not None:
            raise self._problem

    def take_events(self) -> list[Event]:
        """Events for the step loop since the last call."""
        found = []
        while self._events:
            found.append(self._events.popleft())
        return found

    def fetch(self, wanted: Wanted) -> None:
        """Begin a transfer; it ends by one :class:`TransferEnded`, whatever happens."""
        self._call(lambda: self._fetching.begin(wanted))

    def cancel(self, number: int) -> None:
        """End a transfer soon."""
        self._call(lambda: self._fetching.cancel(number))

    def found(self, loan: Key, blocks: Sequence[int]) -> None:
        """Answer a :class:`Lookup`; the blocks are held until its :class:`Return`."""
        self._call(lambda: self._lending.found(loan, blocks))

    def handed_over(
        self, loan: Key, names: Sequence[BlockHash], blocks: Sequence[int], *, has_part: bool
    ) -> None:
        """Answer a :class:`Lookup` of a request that is handed over, as :meth:`found`."""
        self._call(lambda: self._lending.handed_over(loan, names, blocks, has_part=has_part))

    def refuse(self, loan: Key, reason: str) -> None:
        """Answer a :class:`Lookup` of a request that is not handed over."""
        self._call(lambda: self._lending.refuse(loan, reason))

    def same(self, one: int, other: int) -> bool:
        """Whether two blocks, which the step loop holds, have the same bytes."""
        try:
            return bool((self._memory.read([one]) == self._memory.read([other])).all())
        except CacheGone:
            return False  # if this instance lives on at all, it computes them again

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended: nothing is read or written any more."""
        return self._ended.is_set()

    def close(self) -> None:
        """End all transfers without events, once takers have read what was sent to them."""
        loop, closing = self._loop, self._closing
        if loop is not None and closing is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(closing.set)
        if self._thread.is_alive():
            self._thread.join()

    def _call(self, work: Callable[[], None]) -> None:
        assert self._loop is not None, "start() comes first"
        with contextlib.suppress(RuntimeError):  # it has ended: nothing is moved any more
            self._loop.call_soon_threadsafe(work)

    # ---- the thread

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except Exception as error:
            self._problem = error
            if self._listening.is_set():
                logger.exception("the thread that moves KV blocks failed: none are fetched or lent any more")
        finally:
            self._ended.set()
            self._listening.set()
            self._wake()

    async def _serve(self) -> None:
        context = with_room(zmq.asyncio.Context())
        try:
            await self._move(context)
        finally:
            context.term()

    async def _move(self, context: zmq.asyncio.Context) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        self.address = self._lending.open(context, self._endpoint, self._keys)
        self._fetching.open(context)
        self._listening.set()
        working: list[Coroutine[Any, Any, None]] = [
            self._lending.receive_all(),
            self._lending.ask_if_held(),
            self._fetching.end_slow_ones(),
            self._until_closed(self._closing),
        ]
        parts = [asyncio.create_task(each) for each in working]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in parts:
                if part.done():
                    part.result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            self._fetching.close()
            self._lending.close()

    async def _until_closed(self, closing: asyncio.Event) -> None:
        """Wait for :meth:`close`, and then until takers have read what was sent to them."""
        await closing.wait()
        await self._lending.await_readers()

    def _lose(self, error: CacheGone) -> None:
        """End all transfers without events: the cache is out of reach.

        That ends the instance soon, too.
        """
        assert self._closing is not None
        logger.info("no KV blocks are fetched or lent any more: %s", error)
        self._lending.is_lost = self._fetching.is_lost = True
        self._closing.set()

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        self._wake()
