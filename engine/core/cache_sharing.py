"""KV cache beyond the instance: blocks lent, fetched, published, recorded and reset."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.events.recording import EventRecorder
from engine.inheritance.table import Publisher, Table
from engine.messages import CacheReset, HandedOver, Prefetch, Prefetched
from engine.pieces.pool import BlockHash, PiecePool, hash_block, rooted
from engine.prompt_images import names_between
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Scheduler
from engine.tiers.file_tier import FileTier
from engine.transfers.cache_checks import CacheChecks
from engine.transfers.checking import Filled
from engine.transfers.exchange import BlockExchange
from engine.transfers.messages import Holder
from engine.transfers.price import FetchPrice
from engine.transfers.sources import LocalCarrier, Mover, Sources
from engine.transfers.spot_checks import SpotChecks


class CacheSharing:
    """Exchange of KV blocks with other instances, files, dead instances and event readers."""

    def __init__(self, pool: PiecePool, scheduler: Scheduler, block_size: int, in_flight: int) -> None:
        """``in_flight``: most steps under way at once while something is checked."""
        self._pool = pool
        self._scheduler = scheduler
        self._block_size = block_size
        self._in_flight = in_flight
        self.queue: Callable[[Request], None] = scheduler.add
        """Called with each request whose blocks have come."""
        self.exchange: BlockExchange | None = None
        """Transfers of KV blocks; None: no block moves."""
        self.tier: FileTier | None = None
        """KV blocks in files; None: none are kept there."""
        self.blocks_at = ""
        """Address where other instances ask for blocks."""
        self.cache_identity = ""
        """Digest that caches must share for blocks to move between them."""
        self.weights = ""
        """Version of the weights that names of blocks begin with; empty: those that were loaded."""
        self.inherited_at = ""
        """Address of the memory whose blocks outlive this process."""
        self._publisher: Publisher | None = None
        self._recorder: EventRecorder | None = None
        self._resets: list[tuple[bytes, int]] = []
        """Requests of routers to reset the prefix cache that are not answered yet."""

    def __repr__(self) -> str:
        return f"<CacheSharing {self.exchange!r} {self.tier!r}>"

    @property
    def lends(self) -> bool:
        """Whether other instances can fetch KV blocks from here."""
        return self.exchange is not None and self.exchange.is_open

    @property
    def is_lending(self) -> bool:
        """Whether blocks are held for a transfer, in either direction."""
        return self.exchange is not None and not self.exchange.is_idle

    def exchange_blocks(
        self,
        mover: Mover,
        *,
        address: str,
        identity: str,
        token_bytes: float,
        end_bytes: int = 0,
        checks: bool = False,
        check_interval: int = 0,
        tier: FileTier | None = None,
        heir: LocalCarrier | None = None,
    ) -> None:
        """Fetch KV blocks from other instances from now on, and lend them blocks.

        ``address`` is where they ask for them; ``token_bytes`` those of one token in the cache, and
        ``end_bytes`` those of the boundary pieces at the end of a context. ``checks``: bits do not depend on
        the batch, so some fetched blocks are computed as well, and compared. So is one of ``check_interval``
        pieces that requests find. ``tier``: blocks in files.
        ``heir``: those of dead instances.
        """
        self.exchange = BlockExchange(
            self._pool,
            Sources(mover, FetchPrice(token_bytes, end_bytes), tier=tier, heir=heir),
            self._block_size,
            checks=checks and self._in_flight == 1,
            check_interval=check_interval,
            in_flight=self._scheduler.blocks_in_flight,
        )
        self._scheduler.prefixes.hits = self.exchange.spot_checks
        self.tier = tier
        self.blocks_at, self.cache_identity = address, identity

    def publish_blocks(self, address: str, table: Table) -> None:
        """List whole blocks in memory that outlives this process, found at ``address``."""
        self.inherited_at = address
        self._publisher = Publisher(self._pool, table)
        self._pool.observe(self._publisher, every_kind=True)

    def record_events(self, adapters: Mapping[str, str]) -> EventRecorder:
        """Record changes of the prefix cache from now on, before any request has come.

        ``adapters``: names of low-rank adapters by their digest.
        """
        recorder = EventRecorder(self._block_size, adapters)
        self._recorder = self._scheduler.prefixes.contents = recorder
        self._pool.observe(recorder)
        return recorder

    def fetch(self, peer: bytes, wish: Prefetch, holder: Holder | None) -> None:
        """Fetch the blocks of a request that is to move here; :meth:`take_fetched` has the answer.

        ``holder``: the instance hands the request over as well.
        """
        if self.exchange is None:
            return
        names: list[BlockHash] = []
        size, ids, root = self._block_size, wish.token_ids, rooted(wish.cache_salt, wish.adapter)
        for start in range(0, (len(ids) - 1) // size * size, size):
            parent = names[-1] if names else None
            images = names_between(wish.images, start, start + size)
            names.append(hash_block(parent, ids[start : start + size], root, self.weights, images))
        if holder is None:
            self.exchange.copy((peer, wish.number), names, wish.blocks_at)
        else:
            self.exchange.take_over((peer, wish.number), names, wish.blocks_at, holder)

    def take_fetched(
        self, find: Callable[[Holder], Request | None]
    ) -> list[tuple[bytes, Prefetched | HandedOver]]:
        """Act on what transfers of KV blocks did, and queue requests whose blocks have come.

        Returns answers to :class:`engine.messages.Prefetch`, and requests that were handed over. All tokens
        of these are to be sent first. ``find``: the request of a router by its name there.
        """
        if self.exchange is None:
            return []
        if self._publisher is not None:
            self._publisher.turn(self._scheduler.blocks_being_filled)
        for request in self.exchange.turn(self._scheduler.blocks_being_filled, find):
            self.queue(request)
        if self.checks is not None:
            self.checks.drop_ended_spot_check(nothing_runs=not self._scheduler.queues.running)
            self._forget_checks()
        found: list[tuple[bytes, Prefetched | HandedOver]] = []
        for key in self.exchange.take_handed_over():
            self._scheduler.abort(key)
            found.append((key[0], HandedOver(key[1])))
        for (peer, number), size, is_taken in self.exchange.take_copied():
            found.append((peer, Prefetched(number, size, is_taken)))
        return found

    @property
    def wants_check(self) -> bool:
        """Whether a spot check of the cache waits for a step."""
        return self._spot_checks is not None and self._spot_checks.wants_step

    @property
    def checks(self) -> CacheChecks | None:
        """Checks of the cache; None: there are none."""
        return None if self.exchange is None else self.exchange.checks

    @property
    def _spot_checks(self) -> SpotChecks | None:
        return None if self.exchange is None else self.exchange.spot_checks

    def begin_check(self) -> None:
        """Queue a spot check of the cache, if one is due and nothing else waits."""
        checks, queues = self._spot_checks, self._scheduler.queues
        if checks is None or (queues.waiting and not checks.is_looking):
            return
        request = checks.begin(is_busy=bool(queues.running))
        if request is not None:
            self._scheduler.add(request)

    @property
    def is_checking(self) -> bool:
        """Whether something is compared at the end of a step, which no other may follow."""
        return self.checks is not None and self.checks.is_busy

    def check(self, filled: Filled) -> None:
        """Compare what the last step has computed for checks, before its tokens are taken in.

        ``filled``: finds the boundary pieces that it has filled.
        """
        if self.checks is not None:
            for request in self.checks.wrong_requests(self._scheduler.queues.running, filled):
                self._scheduler.set_back(request)
            self._forget_checks()

    def _forget_checks(self) -> None:
        """End requests of finished spot checks."""
        for key in self._spot_checks.take_over() if self._spot_checks is not None else ():
            self._scheduler.abort(key)

    def forget_copies(self, peer: bytes) -> None:
        """Stop fetching blocks for a router that is gone."""
        if self.exchange is not None:
            self.exchange.forget_copies(peer)

    def change_weights(self, weights: str) -> None:
        """Forget all that other weights computed; names begin with these from now on.

        Files keep what they have: nobody asks for it by its names, unless that version is used again.
        """
        self._forget_names()
        if self.exchange is not None and self.exchange.checks is not None:
            self.exchange.checks.forget()
            self._forget_checks()
        self.weights = weights

    def _forget_names(self) -> None:
        if self._recorder is not None:
            self._recorder.clear()
        if self.exchange is not None:
            self.exchange.reset()
        else:
            self._pool.unname()

    def reset(self, peer: bytes, number: int) -> None:
        """Forget all cached prefixes; :meth:`take_resets` has the answer."""
        self._forget_names()
        if self.tier is not None:
            self.tier.clear()
        self._resets.append((peer, number))

    def take_resets(self) -> list[tuple[bytes, CacheReset]]:
        """Answers to the resets that are complete."""
        if not self._resets or (self.tier is not None and not self.tier.is_clear):
            return []
        found, self._resets = self._resets, []
        return [(peer, CacheReset(number)) for peer, number in found]
