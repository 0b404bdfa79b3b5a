"""Executor with worker processes, here and elsewhere; the engine keeps the scheduler.

Every worker gets every step, as the same bytes and in the same order, so they cannot disagree; activations
go between the workers without passing here. One worker of the last stage answers. A worker that ends takes
the instance down: what it held is gone (:mod:`engine.executor.worker_channels`). Where workers run and how
they are reached is the part of a :class:`engine.executor.ends.Crew`. (No torch: the engine's own process
loads none.)
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from coordinator.messages import MemoryPart
from coordinator.numerics import Arithmetic
from coordinator.process import process
from engine.config import EngineConfig
from engine.executor.ends import Crew, LocalWorker, WorkerEnd
from engine.executor.messages import (
    Allocate,
    Allocated,
    Begin,
    CacheAt,
    Computed,
    Execute,
    FirstRun,
    Free,
    FreeMemory,
    GiveBackMemory,
    GroupKey,
    Hosting,
    Loaded,
    Meet,
    MemoryGivenBack,
    Read,
    SetThreads,
    Spans,
    TellSpans,
)
from engine.executor.mp_adapters import MpAdapters
from engine.executor.mp_images import MpImages
from engine.executor.mp_weights import MpWeights
from engine.executor.shard_memory import ShardMemory, WorkerCache
from engine.executor.worker_channels import WorkerChannels
from engine.executor_contract import STARTUP_TIMEOUT, CannotStart, ExpertTimes, Progress
from engine.host.cores import Share
from engine.model.checkpoint import ModelInfo
from engine.pieces.kinds import BoundaryKind
from engine.step import KVSpec, ModelFacts, Span, Step, StepResult
from engine.transfers.block_memory import CacheMemory
from engine.transfers.piece_memory import PieceMemory
from parallel.links.keys import LinkKey
from parallel.topology import cores_of_worker

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class MpExecutor:
    """Implements :class:`engine.executor_contract.Executor` with the workers of a crew."""

    computes_apart = True
    runs_ahead = False
    has_workers = True

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        crew: Crew,
        share: Share,
        startup_timeout: float = STARTUP_TIMEOUT,
        key: LinkKey | None = None,
    ) -> None:
        """Prepares the executor; :meth:`load` starts its workers.

        ``share``: threads of each worker on this host, and cores that this instance has for itself.
        ``startup_timeout``: seconds without a message from any worker after which loading is taken to hang.
        ``key``: what the members of its workers' groups prove to each other.
        """
        self._config = config
        self._info = info
        self._crew = crew
        self._share = share
        self._channels = WorkerChannels(self._step_timeout, startup_timeout)
        self._key = None if key is None else GroupKey(key.secret)
        self._place: tuple[int, int] | None = None
        """(index, count) among the instances over which experts are spread at first, if any."""
        self._kv: list[KVSpec] = []
        self._expert_bytes: list[int] = []
        self._expert_layers = 0
        self._arithmetic: list[Arithmetic] = []
        self.new_weights = MpWeights(0, self._on_weights)
        """Preparation and switch of other weights, once there is a cache."""
        self.adapters: MpAdapters | None = None
        """Low-rank adapters in the workers' memory, once there is a cache; None: there are none."""
        self.image_encoder: MpImages | None = None
        """See :class:`.Executor`."""
        self._caches: list[CacheAt | None] = []
        self._num_slots: list[int] = []
        """Slots of each kind of piece, blocks first."""
        self._num_begun = self._num_finished = 0
        """Steps that were sent, and the first of them whose results are here."""
        self._sent: deque[int] = deque()
        """Numbers of the steps under way."""
        self._on_cpu = True
        device = config.device
        self._layout = device.pipeline_parallel_size, device.tensor_parallel_size
        self.in_flight = device.micro_batches

    def __repr__(self) -> str:
        stages, ranks = self._layout
        return (
            f"MpExecutor({self._info.architecture}, pp={stages}, tp={ranks}, threads={self._share.threads})"
        )

    @property
    def _step_timeout(self) -> float:
        """Seconds that a worker may send nothing in a step, or take no message."""
        return self._config.device.step_timeout

    @property
    def _workers(self) -> list[WorkerEnd]:
        return self._channels.workers

    @property
    def needs_tokens(self) -> bool:
        """See :class:`.Executor`. All ranks sample, but not all stages; and other hosts may round
        otherwise."""
        stages, _ = self._layout
        return stages > 1 or len({worker.host for worker in self._workers}) > 1

    # ---- start

    def load(self, progress: Progress) -> ModelFacts:
        """See :class:`.Executor`. Workers start, find each other, and read their shares at once."""
        try:
            self._start(progress)
        except CannotStart as error:
            self._channels.problem = str(error)
            raise
        first, *others = self._workers
        self._channels.send(first, Meet(first.address, 0))
        (hosting,) = self._channels.await_each([first], Hosting, progress)
        for worker in others:
            self._channels.send(worker, Meet(first.address, hosting.port))
        self._channels.await_each(self._workers, Read, progress)
        self._channels.send_all(FirstRun())
        loaded = self._channels.await_each(self._workers, Loaded, progress)
        for worker, each in zip(self._workers, loaded, strict=True):
            facts = each.facts
            logger.info(
                "%s: layers %d to %d, %.1f MiB of weights, %d bytes of KV cache per token",
                worker.name, each.layers[0], each.layers[1] - 1, facts.weight_bytes / 2**20,
                facts.kv.bytes_per_token,
            )  # fmt: skip
        self._kv = [each.facts.kv for each in loaded]
        self._expert_bytes = [each.expert_bytes for each in loaded]
        self._expert_layers = max(each.expert_layers for each in loaded)
        self._on_cpu = loaded[0].facts.device == "cpu"
        self._channels.are_serving = True
        return _combined([each.facts for each in loaded])

    def _start(self, progress: Progress) -> None:
        self._crew.start(self._workers, progress)
        stages, ranks = self._layout
        places = [(stage, rank) for stage in range(stages) for rank in range(ranks)]
        self._channels.register()
        hosts = tuple(worker.host for worker in self._workers)
        for worker, (stage, rank) in zip(self._workers, places, strict=True):
            self._channels.send(
                worker,
                Begin(
                    name=worker.name,
                    log_level=logging.getLogger().getEffectiveLevel(),
                    log_format=process.log_format(),
                    config=self._config,
                    info=self._info,
                    stage=stage,
                    rank=rank,
                    threads=self._crew.threads_of(worker) or self._share.threads,
                    cores=self._cores_of(worker),
                    address=worker.address,
                    hosts=hosts,
                    number=worker.number,
                    place=self._place,
                    key=self._key,
                ),
            )

    def _cores_of(self, worker: WorkerEnd) -> tuple[int, ...]:
        if self._crew.threads_of(worker) is not None:
            return ()
        neighbours = sum(other.host == worker.host for other in self._workers)
        return cores_of_worker(self._share.cores, worker.number, neighbours, self._share.threads)

    # ---- the cache

    def free_kv_memory(self) -> int:
        """See :class:`.Executor`. As if all had the room of the one that has the least."""
        self._channels.send_all(FreeMemory())
        free = [each.num_bytes for each in self._channels.await_each(self._workers, Free)]
        if self._on_cpu:
            sharers = Counter(worker.host for worker in self._workers)  # all of a host see the same memory
            free = [each // sharers[worker.host] for each, worker in zip(free, self._workers, strict=True)]
        largest = max(kv.bytes_per_token for kv in self._kv)
        return min(
            each * largest // max(kv.bytes_per_token, 1) for each, kv in zip(free, self._kv, strict=True)
        )

    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        """See :class:`.Executor`."""
        self._channels.send_all(Allocate(num_blocks, num_states))
        allocated = self._channels.await_each(self._workers, Allocated)
        self._expert_bytes = [each.expert_bytes for each in allocated]
        self._arithmetic = [each.arithmetic for each in allocated if each.arithmetic is not None]
        self.new_weights = MpWeights(len(self._workers), self._on_weights)
        self._channels.on_weights = self.new_weights.take_in
        if self._config.lora.enable_lora:
            self.adapters = MpAdapters(len(self._workers))
            self._channels.on_adapter = self.adapters.take_in
        if self._info.image_token is not None:
            self.image_encoder = MpImages(self._channels, self._workers[: self._layout[1]])
            self._channels.on_image = self.image_encoder.take_in
        self._caches = [each.cache for each in allocated]
        self._num_slots = [num_blocks, num_states][: 1 + bool(num_states)]

    def block_memory(self) -> CacheMemory | None:
        """See :class:`.Executor`. None where a worker is on another host, or on a device."""
        caches = [
            WorkerCache(worker.name, worker.child.pid, worker.ended, cache)
            for worker, cache in zip(self._workers, self._caches, strict=True)
            if isinstance(worker, LocalWorker) and cache is not None
        ]
        if len(caches) < len(self._workers):
            logger.info("KV blocks are not shared: workers are on other hosts, or their caches on devices")
            return None
        regions = [
            ShardMemory(caches, count, lambda: self._num_finished, kind)
            for kind, count in enumerate(self._num_slots)
        ]
        if problem := regions[0].problem():
            logger.warning("KV blocks are not shared with other instances: %s", problem)
            return None
        return PieceMemory(regions) if len(regions) > 1 else regions[0]

    def arithmetic(self) -> list[Arithmetic]:
        """See :class:`.Executor`."""
        return self._arithmetic

    def give_back(self, part: MemoryPart) -> bool:
        """See :class:`.ChangingExecutor`. True if any worker has: its weights must be read again."""
        self._send_orders()  # an earlier switch or discard comes first
        self._channels.send_all(GiveBackMemory(part))
        patience = self._step_timeout
        answers = [self._channels.await_one(worker, MemoryGivenBack, patience) for worker in self._workers]
        return any(answer.is_given for answer in answers)

    def _on_weights(self, digest: str) -> None:
        self._send_orders()
        self._arithmetic = [msgspec.structs.replace(each, weights=digest) for each in self._arithmetic]

    def _send_orders(self) -> None:
        for order in self.new_weights.take_orders():
            self._channels.send_all(order)
        for order in () if self.adapters is None else self.adapters.take_orders():
            self._channels.send_all(order)

    # ---- steps

    def begin(self, step: Step, sizes: Sequence[int] = ()) -> None:
        """See :class:`.Executor`."""
        self._note_begun()
        self._channels.send_all(Execute(step))

    def finish(self) -> StepResult:
        """See :class:`.Executor`.

        Ranks of a stage wait for each other, and each stage for the one before; for the worker that answers,
        once it has all that it needs of others, only the engine does.
        """
        stages, ranks = self._layout
        answering = self._workers[(stages - 1) * ranks]
        result = self._channels.await_one(answering, Computed, self._step_timeout).result
        self._num_finished = self._sent.popleft()
        return result

    def _note_begun(self) -> None:
        self._num_begun += 1
        self._sent.append(self._num_begun)

    def check(self) -> None:
        """See :class:`.Executor`."""
        self._send_orders()
        self._channels.wait(0)

    # ---- the rest of the contract

    def expert_times(self) -> ExpertTimes | None:
        """See :class:`.Executor`."""
        return None

    def tokens_per_expert(self) -> dict[int, int]:
        """See :class:`.Executor`."""
        return {}

    def set_threads(self, threads: int, cores: Sequence[int] = ()) -> None:
        """See :class:`.Executor`."""
        self._share = Share(threads, tuple(cores))
        for worker in self._workers:
            if self._crew.threads_of(worker) is None:
                self._channels.send(worker, SetThreads(threads, self._cores_of(worker)))

    def spans(self) -> dict[str, list[Span]]:
        """See :class:`.Executor`."""
        self._channels.send_all(TellSpans())
        patience = self._step_timeout
        return {
            worker.name: self._channels.await_one(worker, Spans, patience).spans for worker in self._workers
        }

    def close(self) -> None:
        """See :class:`.Executor`."""
        self._channels.close()
        self._crew.close(self._channels.problem)


def _combined(facts: Sequence[ModelFacts]) -> ModelFacts:
    """Facts of the whole instance: summed weights, KV bytes of the largest worker."""
    most = max((each.kv for each in facts), key=lambda kv: kv.bytes_per_token)
    return msgspec.structs.replace(
        facts[-1],
        num_parameters=sum(each.num_parameters for each in facts),
        weight_bytes=sum(each.weight_bytes for each in facts),
        boundaries=_largest_of_each_kind(facts),
        kv=KVSpec(num_layers=most.num_layers, bytes_per_token=most.bytes_per_token),
    )


def _largest_of_each_kind(facts: Sequence[ModelFacts]) -> list[BoundaryKind]:
    """Kinds of boundary state, with the largest size and the forms of all workers."""
    kinds: dict[str, BoundaryKind] = {}
    for kind in (kind for each in facts for kind in each.boundaries):
        known = kinds.setdefault(kind.label, msgspec.structs.replace(kind, form=""))
        largest, form = max(known.num_bytes, kind.num_bytes), f"{known.form}/{kind.form}"
        kinds[kind.label] = msgspec.structs.replace(known, num_bytes=largest, form=form)
    return list(kinds.values())
