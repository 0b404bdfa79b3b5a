"""The mover's end for sources: connections, over which blocks come to one cache.

Which pieces are right, and when a transfer ends, is decided by :mod:`engine.transfers.fetching`. All calls
are made in the mover's thread (:mod:`engine.transfers.mover`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import zmq
import zmq.asyncio

from coordinator.rpc.codec import OtherProtocol
from coordinator.rpc.complaints import Complaints
from coordinator.rpc.keys import MeshKeys
from coordinator.rpc.rpc import AsyncConnection
from engine.pieces.kinds import PieceKinds
from engine.transfers import fetching
from engine.transfers.block_memory import CacheGone, CacheMemory
from engine.transfers.fetching import Fetcher, Source, TransferEnded, Wanted
from engine.transfers.messages import ToSource, ToTaker

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 0.05
"""Seconds between two looks at transfers that may take too long, while there are any."""
ASK_INTERVAL = 0.002
"""Seconds between two tries to ask a source that is being connected to."""
MOST_SOURCES = 64
"""Connections to sources that are kept open, those used last."""
PEER_TIMEOUT_MS = 10_000
"""Milliseconds without a sign of a taker after which its connection counts as broken."""


class FetchingPort:
    """Fetches blocks from sources into one cache."""

    def __init__(
        self,
        memory: CacheMemory,
        identity: str,
        kinds: PieceKinds,
        keys: MeshKeys | None,
        *,
        tell: Callable[[TransferEnded], None],
        lose: Callable[[CacheGone], None],
    ) -> None:
        """``tell`` gets each transfer that has ended; ``lose``: the cache is out of reach."""
        self.fetcher = Fetcher(identity, memory.bytes_of, kinds)
        self._memory = memory
        self._keys = keys
        self._tell, self._lose = tell, lose
        self.is_lost = False
        """Whether the cache is out of reach: no transfer ends well from then on."""
        self._context: zmq.asyncio.Context | None = None
        self._links: dict[Source, _Link] = {}
        """Connections to sources, the one used last at the end."""
        self._asks = False
        """Whether another try to ask sources is due."""
        self._may_fetch = asyncio.Event()
        """Whether there may be fetches to look at: a thread without any sleeps."""
        self._troubles = Complaints(logger, "a source of KV blocks could not be connected to")

    def __repr__(self) -> str:
        return repr(self.fetcher)

    @property
    def is_at_rest(self) -> bool:
        """Whether no fetch is looked at."""
        return not self._may_fetch.is_set()

    def open(self, context: zmq.asyncio.Context) -> None:
        """Make connections in this context from now on."""
        self._context = context

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def begin(self, wanted: Wanted) -> None:
        """Begin a transfer once its source is connected."""
        self.fetcher.begin(wanted, time.monotonic())
        self._may_fetch.set()
        try:
            self._link(wanted.source)
        except (zmq.ZMQError, OSError) as error:
            self._troubles.add(f"{wanted.source}: {error}")
        self._ask()

    def cancel(self, number: int) -> None:
        """End a transfer."""
        self._carry_out(self.fetcher.cancel(number, time.monotonic()))

    async def end_slow_ones(self) -> None:
        """End transfers that take too long, until cancelled."""
        while True:
            await self._may_fetch.wait()
            while self.fetcher:
                await asyncio.sleep(LOOK_INTERVAL)
                self._carry_out(self.fetcher.look(time.monotonic()))
            self._may_fetch.clear()

    def _link(self, source: Source) -> _Link:
        assert self._context is not None
        link = self._links.pop(source, None)
        if link is None:
            while len(self._links) >= MOST_SOURCES:
                self._drop(next(iter(self._links)))
            link = _Link(
                self._context,
                source,
                self._keys,
                receive=partial(self._received, source),
                broke=partial(self._broke, source),
                failed=partial(self._drop, source),
            )
        self._links[source] = link
        return link

    def _ask(self) -> None:
        """Ask the sources that are connected by now; look again soon if some are not."""
        waits = False
        for number, source in self.fetcher.due(time.monotonic()):
            link = self._links.get(source)
            if link is not None and link.send(self.fetcher.ask(number)):
                self.fetcher.asked(number)
            else:
                waits = True
        if waits and not self._asks:
            self._asks = True
            asyncio.get_running_loop().call_later(ASK_INTERVAL, self._ask_again)

    def _ask_again(self) -> None:
        self._asks = False
        self._ask()

    def _received(self, source: Source, message: ToTaker) -> None:
        self._carry_out(self.fetcher.received(source, message, time.monotonic()))

    def _broke(self, source: Source) -> None:
        self._carry_out(self.fetcher.broke(source, time.monotonic()))

    def _drop(self, source: Source) -> None:
        """Close the connection to a source; the next transfer opens another one."""
        link = self._links.pop(source, None)
        if link is not None:
            link.close()
        self._broke(source)

    def _carry_out(self, actions: Sequence[fetching.Action]) -> None:
        if self.is_lost:
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
            logger.exception(
                "the connection to a source of KV blocks failed; the next transfer opens it again"
            )
            self._failed()

    async def _watch(self) -> None:
        while True:
            await self._connection.broken()
            self._broke()
