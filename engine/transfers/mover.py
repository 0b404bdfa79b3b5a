"""The thread that moves KV blocks: its sockets, and the bytes of the cache.

One for each cache. It lends blocks of this cache to other instances, and fetches blocks of theirs. What it
does is decided by :mod:`engine.transfers.lending` and :mod:`engine.transfers.fetching`. Which blocks may be
read and written is the step loop's to say (:mod:`engine.transfers.exchange`), over two queues: the step loop
never waits for this thread, nor this thread for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import uvloop
import zmq
import zmq.asyncio

from coordinator.rpc.codec import OtherProtocol
from coordinator.rpc.complaints import Complaints
from coordinator.rpc.keys import MeshKeys
from coordinator.rpc.rpc import MAX_MESSAGE_BYTES, AsyncConnection, AsyncListener, Peer, with_room
from engine.scheduling.blocks import BlockHash
from engine.transfers import fetching, lending
from engine.transfers.block_memory import CacheGone, CacheMemory
from engine.transfers.fetching import Fetcher, Source, TransferEnded, Wanted
from engine.transfers.lending import Key, Lender, Lookup, Return
from engine.transfers.messages import BlockPiece, ToSource, ToTaker, digest_of

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 18
"""Bytes of a piece, if more than one block fits into it."""
LARGEST_BLOCK = MAX_MESSAGE_BYTES // 2
"""Bytes of a block above which nothing is moved."""
LARGEST_QUESTION = 2 << 20
"""Bytes of a message of a taker; a larger one costs it the connection."""
LOOK_INTERVAL = 0.05
"""Seconds between two looks at transfers that may take too long, while there are any."""
ASK_INTERVAL = 0.002
"""Seconds between two tries to ask a source that is being connected to."""
HELD_INTERVAL = 0.25
"""Seconds between two questions whether takers that keep a loan waiting are there."""
FAREWELL, FAREWELL_INTERVAL = 1.0, 0.01
"""Most seconds that a closing mover waits for its takers, and between two questions."""
MOST_SOURCES = 64
"""Connections to sources that are kept open, those used last."""
PEER_TIMEOUT_MS = 10_000
"""Milliseconds without a sign of a taker after which its connection counts as broken."""

Event = Lookup | Return | TransferEnded
"""What the step loop is to know."""


class BlockMover:
    """Moves blocks of one cache until it is closed."""

    def __init__(
        self,
        memory: CacheMemory,
        identity: str,
        endpoint: str,
        keys: MeshKeys | None,
        wake: Callable[[], None],
    ) -> None:
        """``endpoint``: where to listen. ``wake``: called by the thread when there are events to take."""
        self.identity = identity
        self.block_bytes = memory.block_bytes
        self.address = ""
        """Where takers connect, once :meth:`start` has returned."""
        self._memory = memory
        self._endpoint = endpoint
        self._keys = keys
        self._wake = wake
        self._events: deque[Event] = deque()
        self._lender = Lender(identity, max(1, PIECE_BYTES // memory.block_bytes))
        self._fetcher = Fetcher(identity, memory.block_bytes)
        self._links: dict[Source, _Link] = {}
        """Connections to sources, the one used last at the end."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: AsyncListener[ToSource, ToTaker] | None = None
        self._listening, self._ended = threading.Event(), threading.Event()
        self._asks = False
        """Whether another try to ask sources is due."""
        self._closing: asyncio.Event | None = None
        self._fetches, self._lends = asyncio.Event(), asyncio.Event()
        """Whether there may be fetches and loans to look at: a thread without any sleeps."""
        self._problem: Exception | None = None
        self._is_lost = False
        """Whether the cache cannot be reached any more: no transfer ends well from now on."""
        self._troubles = Complaints(logger, "a message of a transfer of KV blocks could not be acted on")
        self._thread = threading.Thread(target=self._run, name="kv-mover", daemon=True)
        self.lent_blocks = 0
        """Blocks sent to others so far."""

    def __repr__(self) -> str:
        rests = "" if self._fetches.is_set() or self._lends.is_set() else " at rest"
        return f"<BlockMover at {self.address} {self._lender!r} {self._fetcher!r}{rests}>"

    # ---- the step loop's side

    def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be bound.
        """
        self._thread.start()
        self._listening.wait()
        if self._problem is not None:
            raise self._problem

    def take_events(self) -> list[Event]:
        """What happened since the last call."""
        found = []
        while self._events:
            found.append(self._events.popleft())
        return found

    def fetch(self, wanted: Wanted) -> None:
        """Begin a transfer; it ends by one :class:`TransferEnded`, whatever happens."""
        self._call(lambda: self._begin(wanted))

    def cancel(self, number: int) -> None:
        """End a transfer soon."""
        self._call(lambda: self._carry_out(self._fetcher.cancel(number, time.monotonic())))

    def found(self, loan: Key, blocks: Sequence[int]) -> None:
        """The answer to a :class:`Lookup`; the blocks are held until its :class:`Return`."""
        self._call(lambda: self._lend(self._lender.found(loan, blocks)))

    def handed_over(
        self, loan: Key, names: Sequence[BlockHash], blocks: Sequence[int], *, has_part: bool
    ) -> None:
        """An answer to a :class:`Lookup` for a request to hand over, as :meth:`found`."""
        self._call(lambda: self._lend(self._lender.handed_over(loan, names, blocks, has_part=has_part)))

    def refuse(self, loan: Key, reason: str) -> None:
        """The other answer to it."""
        self._call(lambda: self._lend(self._lender.refused(loan, reason)))

    def same(self, one: int, other: int) -> bool:
        """Whether two blocks, which the step loop holds, have the same bytes."""
        try:
            return bool((self._memory.read([one]) == self._memory.read([other])).all())
        except CacheGone:
            return False  # if this instance lives on at all, it computes them again

    @property
    def has_ended(self) -> bool:
        """Whether nothing is read or written any more, nor will be."""
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
                logger.exception("no KV blocks are moved any more")
        finally:
            self._ended.set()
            self._listening.set()
            self._wake()

    async def _serve(self) -> None:
        context = self._context = with_room(zmq.asyncio.Context())
        try:
            await self._move(context)
        finally:
            context.term()

    async def _move(self, context: zmq.asyncio.Context) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        listener: AsyncListener[ToSource, ToTaker] = AsyncListener(
            context,
            self._endpoint,
            ToSource,
            name="kv blocks",
            max_bytes=LARGEST_QUESTION,
            keys=self._keys,
        )
        self._listener, self.address = listener, listener.endpoint
        self._listening.set()
        working: list[Coroutine[Any, Any, None]] = [
            listener.receive_all(self._received),
            self._look_again(),
            self._ask_if_held(),
            self._until_closed(),
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
            for link in self._links.values():
                link.close()
            self._links.clear()
            listener.close()

    async def _until_closed(self) -> None:
        """Wait for :meth:`close`, and then until takers have read what was sent to them."""
        assert self._closing is not None
        assert self._loop is not None
        await self._closing.wait()
        until = self._loop.time() + FAREWELL
        while not self._is_lost and self._loop.time() < until and (questions := self._lender.farewell()):
            self._lend(questions)
            await asyncio.sleep(FAREWELL_INTERVAL)

    def _lose(self, error: CacheGone) -> None:
        """End all transfers without a word: the cache is out of reach.

        That ends the instance soon, too.
        """
        assert self._closing is not None
        logger.info("no KV blocks are moved any more: %s", error)
        self._is_lost = True
        self._closing.set()

    def _tell(self, action: object) -> None:
        if isinstance(action, Lookup | Return | TransferEnded):
            self._events.append(action)
            self._wake()

    # ---- lending

    def _received(self, peer: Peer, message: ToSource | OtherProtocol) -> None:
        if not isinstance(message, OtherProtocol):  # of another version of Lockstep: its caches differ
            self._lend(self._lender.received(peer, message))

    def _lend(self, actions: Sequence[lending.Action]) -> None:
        assert self._listener is not None
        if self._lender:
            self._lends.set()
        waiting = deque(() if self._is_lost else actions)
        while waiting:
            match action := waiting.popleft():
                case lending.SendToTaker(peer, message):
                    if not self._listener.send(peer, message):
                        waiting.extend(self._lender.gone(peer))
                case lending.SendPiece():
                    try:
                        piece = self._piece(action)
                    except CacheGone as error:
                        self._lose(error)
                        return
                    if not self._listener.send(action.peer, piece):
                        waiting.extend(self._lender.gone(action.peer))
                case _:
                    self._tell(action)

    def _piece(self, action: lending.SendPiece) -> BlockPiece:
        data = self._memory.read(action.blocks)
        self.lent_blocks += len(action.blocks)
        digests = [
            digest_of(self.identity, name, row.data) for name, row in zip(action.names, data, strict=True)
        ]
        return BlockPiece(action.number, action.first, b"".join(digests), data.tobytes())

    async def _ask_if_held(self) -> None:
        while True:
            await self._lends.wait()
            while self._lender:
                await asyncio.sleep(HELD_INTERVAL)
                self._lend(self._lender.waiting())
            self._lends.clear()

    # ---- fetching

    def _begin(self, wanted: Wanted) -> None:
        self._fetcher.begin(wanted, time.monotonic())
        self._fetches.set()
        try:
            self._link(wanted.source)
        except (zmq.ZMQError, OSError) as error:
            self._troubles.add(f"cannot connect to {wanted.source}: {error}")
        self._ask()

    def _link(self, source: Source) -> _Link:
        link = self._links.pop(source, None)
        if link is None:
            while len(self._links) >= MOST_SOURCES:
                self._drop(next(iter(self._links)))
            link = _Link(
                self._context,
                source,
                self._keys,
                receive=partial(self._taken, source),
                broke=partial(self._broke, source),
                failed=partial(self._drop, source),
            )
        self._links[source] = link
        return link

    def _ask(self) -> None:
        """Ask the sources that are connected by now; look again soon if some are not."""
        waits = False
        for number, source in self._fetcher.due(time.monotonic()):
            link = self._links.get(source)
            if link is not None and link.send(self._fetcher.ask(number)):
                self._fetcher.asked(number)
            else:
                waits = True
        if waits and not self._asks:
            assert self._loop is not None
            self._asks = True
            self._loop.call_later(ASK_INTERVAL, self._ask_again)

    def _ask_again(self) -> None:
        self._asks = False
        self._ask()

    def _taken(self, source: Source, message: ToTaker) -> None:
        self._carry_out(self._fetcher.received(source, message, time.monotonic()))

    def _broke(self, source: Source) -> None:
        self._carry_out(self._fetcher.broke(source, time.monotonic()))

    def _drop(self, source: Source) -> None:
        """Close the connection to a source; the next transfer opens another one."""
        link = self._links.pop(source, None)
        if link is not None:
            link.close()
        self._broke(source)

    def _carry_out(self, actions: Sequence[fetching.Action]) -> None:
        if self._is_lost:
            return
        for action in actions:
            match action:
                case fetching.Write(block, data):
                    try:
                        self._memory.write(block, data)
                    except CacheGone as error:
                        self._lose(error)
                        return
                case fetching.SendToSource(source, message):
                    if source in self._links:
                        self._links[source].send(message)
                case TransferEnded():
                    self._tell(action)
        if any(isinstance(action, TransferEnded) for action in actions):
            self._ask()  # it is another one's turn

    async def _look_again(self) -> None:
        while True:
            await self._fetches.wait()
            while self._fetcher:
                await asyncio.sleep(LOOK_INTERVAL)
                self._carry_out(self._fetcher.look(time.monotonic()))
            self._fetches.clear()


class _Link:
    """Connection to one source."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        source: Source,
        keys: MeshKeys | None,
        *,
        receive: Callable[[ToTaker], None],
        broke: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        """``broke`` is called when the connection has ended, ``failed`` if it is no use."""
        self._connection: AsyncConnection[ToTaker, ToSource] = AsyncConnection(
            context,
            source,
            ToTaker,
            name=f"kv blocks of {source}",
            keys=keys,
            peer_timeout_ms=PEER_TIMEOUT_MS,
        )
        self._broke, self._failed = broke, failed
        self._tasks = [
            asyncio.create_task(self._receive(receive)),
            asyncio.create_task(self._watch()),
        ]

    def send(self, message: ToSource) -> bool:
        """Send a message at once or not at all."""
        return self._connection.send(message)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._connection.close(linger_ms=0)

    async def _receive(self, receive: Callable[[ToTaker], None]) -> None:
        try:
            await self._connection.receive_all(receive)
        except OtherProtocol:  # its cache differs, too
            self._failed()
        except Exception:
            logger.exception("a transfer of KV blocks failed")
            self._failed()

    async def _watch(self) -> None:
        while True:
            await self._connection.broken()
            self._broke()
