"""Reports for routers: an instance's load, totals, capacity, and changes of its prefix cache."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from engine.core.admission import Admission
from engine.core.cache_sharing import CacheSharing
from engine.core.step_pipeline import StepPipeline
from engine.messages import AdapterUse, BlockEvents, Capacity, InstanceReport, WeightsInUse
from engine.pieces.block_log import BlockLog
from engine.pieces.pool import PiecePool
from engine.scheduling.report_policy import LoadSnapshot
from engine.scheduling.request import Status
from engine.scheduling.scheduler import Scheduler


class Reporting:
    """Sums up the parts of an engine core for routers and logs."""

    def __init__(
        self,
        config: EngineConfig,
        at_once: float | None,
        scheduler: Scheduler,
        pool: PiecePool,
        admission: Admission,
        sharing: CacheSharing,
        steps: StepPipeline,
    ) -> None:
        """``at_once``: instances of this host that compute at the same time; None: unknown."""
        self._config = config
        self._at_once = at_once
        self._scheduler = scheduler
        self._pool = pool
        self._blocks = BlockLog()
        pool.observe(self._blocks)
        self._admission = admission
        self._sharing = sharing
        self._steps = steps
        self.in_use = WeightsInUse()
        """Weights of all further steps, as routers learn of them."""
        self.lacks_adapters: tuple[str, ...] = ()
        """Digests of retired adapters that other instances may have, and this one does not."""

    def __repr__(self) -> str:
        return f"<Reporting {self.snapshot}>"

    @property
    def snapshot(self) -> LoadSnapshot:
        """Load after the last step, in short."""
        queues, totals = self._scheduler.queues, self._scheduler.totals
        waiting_tokens, uncached_tokens = queues.num_tokens_ahead
        running, waiting = len(queues.running), len(queues.waiting) + len(self._admission.grammars)
        if encoding := self._admission.images:
            waiting += len(encoding)
            waiting_tokens += encoding.num_tokens
            uncached_tokens += encoding.num_tokens
        blocks_used = self._pool.num_used
        exchange, checked, wrong = self._sharing.exchange, 0, 0
        if exchange is not None:
            checked, wrong = exchange.num_checked
            spot_checks = exchange.spot_checks
            if spot_checks is not None and (check := spot_checks.request) is not None:  # it is nobody's
                is_running = check.status is Status.RUNNING
                running, waiting = running - is_running, waiting - (not is_running)
                waiting_tokens -= check.num_uncomputed
                uncached_tokens -= check.num_uncomputed if is_running else check.num_expected
            blocks_used -= 0 if spot_checks is None else spot_checks.num_blocks
        if exchange is not None and (fetching := exchange.waiting):
            waiting += len(fetching)
            waiting_tokens += fetching.num_tokens
            uncached_tokens += fetching.num_uncached
        return LoadSnapshot(
            running=running,
            waiting=waiting,
            waiting_tokens=waiting_tokens,
            uncached_tokens=uncached_tokens,
            queued=queues.num_queued,
            blocks_used=blocks_used,
            generation_tokens=totals.generation_tokens,
            steps=totals.steps,
            cache_checked=checked,
            cache_wrong=wrong,
        )

    def report(self, last_dispatch: int, bad_messages: int) -> InstanceReport:
        """Full report of the instance, for one router."""
        snapshot, fetched = self.snapshot, self._scheduler.totals.fetched_tokens
        exchange, tier = self._sharing.exchange, self._sharing.tier
        return InstanceReport(
            last_dispatch=last_dispatch,
            running=snapshot.running,
            waiting=snapshot.waiting,
            waiting_tokens=snapshot.waiting_tokens,
            blocks_used=snapshot.blocks_used,
            blocks_total=self._pool.num_blocks,
            counters=msgspec.structs.replace(self._scheduler.counters(), bad_messages=bad_messages),
            lockstep=self._steps.lockstep_counters(),
            uncached_tokens=snapshot.uncached_tokens,
            queued=snapshot.queued,
            fetch_price=1.0 if exchange is None else round(exchange.sources.price_now(), 2),
            transfers=None if exchange is None else exchange.counters(fetched),
            files=None if tier is None else tier.counters(),
            adapters=self._adapters(),
            images=self._admission.images.counters,
        )

    def _adapters(self) -> AdapterUse | None:
        """Adapters of running and waiting requests; None where there are none."""
        lora, queues = self._config.lora, self._scheduler.queues
        if not lora.enable_lora:
            return None
        names = self._admission.adapters
        waiting = {request.adapter for request in queues.waiting if request.adapter}
        running = queues.adapters.running
        return AdapterUse(
            most=lora.max_loras,
            running=sorted({names[each] for each in running}),
            waiting=sorted({names[each] for each in waiting}),
            active=sorted(waiting.union(running)),
            laid_out=queues.adapters.laid_out,
        )

    @property
    def capacity(self) -> Capacity:
        """Size of the instance, by which routers choose one."""
        limits = self._config.scheduler
        return Capacity(
            block_size=self._config.cache.block_size,
            num_blocks=self._pool.num_blocks,
            max_num_seqs=limits.most_requests(),
            max_num_batched_tokens=limits.token_budget(),
            max_num_queued_reqs=limits.max_num_queued_reqs,
            max_num_queued_tokens=limits.max_num_queued_tokens,
            at_once=self._at_once,
            caches_prefixes=self._pool.is_caching,
            blocks_at=self._sharing.blocks_at,
            cache_identity=self._sharing.cache_identity,
            inherited_at=self._sharing.inherited_at,
            weights=self._sharing.weights,
            in_use=self.in_use,
            lacks_adapters=self.lacks_adapters,
        )

    @property
    def num_block_changes(self) -> int:
        """Number of the next change of the prefix cache."""
        return self._blocks.next

    def block_events(self, number: int | None) -> BlockEvents | None:
        """Changes of the prefix cache from ``number`` on, for a router that has those before."""
        return self._blocks.since(number, self._pool.known)
