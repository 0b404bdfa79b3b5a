"""Executor with worker processes, here and elsewhere; the engine keeps the scheduler.

Every worker gets every step, as the same bytes and in the same order, so they cannot disagree; activations
go between the workers without passing here. One worker of the last stage answers. A worker that ends is
noticed by its pidfd and by the end of its channel, whichever is first, and takes the instance down: what it
held is gone. Where workers run and how they are reached is the part of a :class:`engine.executor.ends.Crew`.
(No torch: the engine's own process loads none.)
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import NoReturn, TypeVar

import msgspec

from coordinator.numerics import Arithmetic
from coordinator.process import process
from engine.config import EngineConfig
from engine.executor.channel import ChannelClosed
from engine.executor.ends import END_TIMEOUT, Crew, LocalWorker, WorkerEnd
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
    FromWorker,
    GroupKey,
    Hosting,
    Loaded,
    Meet,
    Phase,
    Read,
    SetThreads,
    Spans,
    TellSpans,
    ToWorker,
    WorkerFailed,
)
from engine.executor.shard_memory import ShardMemory, WorkerCache
from engine.executor_contract import STARTUP_TIMEOUT, CannotStart, ExpertTimes, Progress, WorkerLost
from engine.model.checkpoint import CheckpointError, ModelInfo
from engine.step import KVSpec, ModelFacts, Span, Step, StepResult
from parallel.links.keys import LinkKey
from parallel.topology import cores_of_worker

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

LOOK_SECONDS = 1e-4
"""Seconds that the engine polls for a result before it sleeps, freeing the core."""
BLAME_SECONDS = 0.5
"""Seconds to wait for the end of another worker that explains a failed collective."""


class MpExecutor:
    """Implements :class:`engine.executor_contract.Executor` with the workers of a crew."""

    computes_apart = True
    has_workers = True

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        crew: Crew,
        threads: int,
        cores: Sequence[int] = (),
        startup_timeout: float = STARTUP_TIMEOUT,
        key: LinkKey | None = None,
    ) -> None:
        """Prepares the executor; :meth:`load` starts its workers.

        ``threads``: of each worker on this host. ``cores``: those that this instance has for itself.
        ``startup_timeout``: seconds without a message from any worker after which loading is taken to hang.
        ``key``: what the members of its workers' groups prove to each other.
        """
        self._config = config
        self._info = info
        self._crew = crew
        self._threads = threads
        self._cores = tuple(cores)
        self._startup_timeout = startup_timeout
        self._key = None if key is None else GroupKey(key.secret)
        self._place: tuple[int, int] | None = None
        """(index, count) among the instances over which experts are spread at first, if any."""
        self._workers: list[WorkerEnd] = []
        self._kv: list[KVSpec] = []
        self._expert_bytes: list[int] = []
        self._expert_layers = 0
        self._arithmetic: list[Arithmetic] = []
        self._caches: list[CacheAt | None] = []
        self._num_blocks = 0
        self._num_begun = self._num_finished = 0
        """Steps that were sent, and the first of them whose results are here."""
        self._sent: deque[int] = deque()
        """Numbers of the steps under way."""
        self._on_cpu = True
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
        self._poll = select.poll()
        device = config.device
        self._problem = ""
        """Why the instance cannot go on."""
        self._serves = False
        """Whether all workers wait for steps, so that they end as soon as asked."""
        self._layout = device.pipeline_parallel_size, device.tensor_parallel_size
        self.in_flight = device.micro_batches

    def __repr__(self) -> str:
        stages, ranks = self._layout
        return f"MpExecutor({self._info.architecture}, pp={stages}, tp={ranks}, threads={self._threads})"

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
            self._problem = str(error)
            raise
        first, *others = self._workers
        self._send(first, Meet(first.address, 0))
        (hosting,) = self._await_each([first], Hosting, progress)
        for worker in others:
            self._send(worker, Meet(first.address, hosting.port))
        self._await_each(self._workers, Read, progress)
        self._send_all(FirstRun())
        loaded = self._await_each(self._workers, Loaded, progress)
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
        self._serves = True
        return _combined([each.facts for each in loaded])

    def _start(self, progress: Progress) -> None:
        self._crew.start(self._workers, progress)
        stages, ranks = self._layout
        places = [(stage, rank) for stage in range(stages) for rank in range(ranks)]
        for worker in self._workers:
            self._poll.register(worker.channel, select.POLLIN)
            self._poll.register(worker.ended, select.POLLIN)
        hosts = tuple(worker.host for worker in self._workers)
        for worker, (stage, rank) in zip(self._workers, places, strict=True):
            self._send(
                worker,
                Begin(
                    name=worker.name,
                    log_level=logging.getLogger().getEffectiveLevel(),
                    log_format=process.log_format(),
                    config=self._config,
                    info=self._info,
                    stage=stage,
                    rank=rank,
                    threads=self._crew.threads_of(worker) or self._threads,
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
        return cores_of_worker(self._cores, worker.number, neighbours, self._threads)

    # ---- the cache

    def free_kv_memory(self) -> int:
        """See :class:`.Executor`. As if all had the room of the one that has the least."""
        self._send_all(FreeMemory())
        free = [each.num_bytes for each in self._await_each(self._workers, Free)]
        if self._on_cpu:
            sharers = Counter(worker.host for worker in self._workers)  # all of a host see the same memory
            free = [each // sharers[worker.host] for each, worker in zip(free, self._workers, strict=True)]
        largest = max(kv.bytes_per_token for kv in self._kv)
        return min(
            each * largest // max(kv.bytes_per_token, 1) for each, kv in zip(free, self._kv, strict=True)
        )

    def allocate(self, num_blocks: int) -> None:
        """See :class:`.Executor`."""
        self._send_all(Allocate(num_blocks))
        allocated = self._await_each(self._workers, Allocated)
        self._expert_bytes = [each.expert_bytes for each in allocated]
        self._arithmetic = [each.arithmetic for each in allocated if each.arithmetic is not None]
        self._caches, self._num_blocks = [each.cache for each in allocated], num_blocks

    def block_memory(self) -> ShardMemory | None:
        """See :class:`.Executor`. None where a worker is on another host."""
        caches = [
            WorkerCache(worker.name, worker.child.pid, worker.ended, cache)
            for worker, cache in zip(self._workers, self._caches, strict=True)
            if isinstance(worker, LocalWorker) and cache is not None
        ]
        if len(caches) < len(self._workers):
            return None
        memory = ShardMemory(caches, self._num_blocks, lambda: self._num_finished)
        problem = memory.problem()
        if problem:
            logger.warning("KV blocks stay where they are: %s", problem)
        return None if problem else memory

    def arithmetic(self) -> list[Arithmetic]:
        """See :class:`.Executor`."""
        return self._arithmetic

    # ---- steps

    def begin(self, step: Step, sizes: Sequence[int] = ()) -> None:
        """See :class:`.Executor`."""
        self._note_begun()
        self._send_all(Execute(step))

    def finish(self) -> StepResult:
        """See :class:`.Executor`.

        Ranks of a stage wait for each other, and each stage for the one before; for the worker that answers,
        once it has all that it needs of others, only the engine does.
        """
        stages, ranks = self._layout
        answering = self._workers[(stages - 1) * ranks]
        result = self._await(answering, Computed, self._step_timeout).result
        self._num_finished = self._sent.popleft()
        return result

    def _note_begun(self) -> None:
        self._num_begun += 1
        self._sent.append(self._num_begun)

    def check(self) -> None:
        """See :class:`.Executor`."""
        ready = self._poll.poll(0)
        if ready:
            self._take_in(ready)

    # ---- the rest of the contract

    def expert_times(self) -> ExpertTimes | None:
        """See :class:`.Executor`."""
        return None

    def tokens_per_expert(self) -> dict[int, int]:
        """See :class:`.Executor`."""
        return {}

    def set_threads(self, threads: int, cores: Sequence[int] = ()) -> None:
        """See :class:`.Executor`."""
        self._threads, self._cores = threads, tuple(cores)
        for worker in self._workers:
            if self._crew.threads_of(worker) is None:
                self._send(worker, SetThreads(threads, self._cores_of(worker)))

    def spans(self) -> dict[str, list[Span]]:
        """See :class:`.Executor`."""
        self._send_all(TellSpans())
        patience = self._step_timeout
        return {worker.name: self._await(worker, Spans, patience).spans for worker in self._workers}

    def close(self) -> None:
        """End the workers.

        While they load, and when one is lost, they hold nothing worth waiting for.
        """
        for worker in self._workers:
            if not self._serves:
                worker.kill()
            worker.channel.close()
        deadline = time.monotonic() + END_TIMEOUT
        for worker in self._workers:
            worker.end(deadline)
        self._workers.clear()
        self._crew.close(self._problem)

    # ---- talking

    @property
    def _step_timeout(self) -> float:
        """Seconds that a worker may send nothing in a step, or take no message."""
        return self._config.device.step_timeout

    def _send_all(self, message: ToWorker) -> None:
        payload = self._encoder.encode(message)
        for worker in self._workers:
            self._send_bytes(worker, payload)

    def _send(self, worker: WorkerEnd, message: ToWorker) -> None:
        self._send_bytes(worker, self._encoder.encode(message))

    def _send_bytes(self, worker: WorkerEnd, payload: bytes) -> None:
        """Send bytes to a worker.

        While it has no room, messages of all workers are taken in. A worker that waits to send takes nothing,
        and lets no other worker continue.
        """
        try:
            left = worker.channel.offer(payload)
            if not left:
                return
            self._poll.modify(worker.channel, select.POLLIN | select.POLLOUT)
            deadline = time.monotonic() + self._step_timeout
            while rest := worker.channel.flush():
                now = time.monotonic()
                if rest < left:
                    left, deadline = rest, now + self._step_timeout
                if now >= deadline:
                    self._hangs(worker)
                self._take_in(self._poll.poll((deadline - now) * 1000))
            self._poll.modify(worker.channel, select.POLLIN)
        except ChannelClosed:
            self._lost(worker)

    def _await_each(
        self, workers: Sequence[WorkerEnd], kind: type[Answer], progress: Progress | None = None
    ) -> list[Answer]:
        """The next answer of each of these, before they serve.

        They may take any time, if one that owes one says how far it is.
        """
        return [
            self._await(worker, kind, self._startup_timeout, progress, workers[place:])
            for place, worker in enumerate(workers)
        ]

    def _await(
        self,
        worker: WorkerEnd,
        kind: type[Answer],
        patience: float,
        progress: Progress | None = None,
        owing: Sequence[WorkerEnd] = (),
    ) -> Answer:
        """The next answer of a worker, which must be of this kind.

        Raises:
            WorkerLost: some worker has ended, or this one, and all that are ``owing``, say nothing for
                ``patience`` seconds.
            CheckpointError, MemoryError: what a worker says went wrong.
        """
        look_until = time.perf_counter() + LOOK_SECONDS
        since = time.monotonic()
        while True:
            if not worker.inbox:
                self._drain(worker)
            if worker.inbox:
                message = worker.inbox.popleft()
                if isinstance(message, kind):
                    return message
                assert isinstance(message, Phase), f"{worker} says {message!r}, not {kind.__name__}"
                if progress is not None:
                    progress(message.text)
            elif time.perf_counter() < look_until:
                os.sched_yield()
            else:
                spoke_at = max((each.spoke_at for each in owing), default=since)
                left = max(since, spoke_at) + patience - time.monotonic()
                if left <= 0:
                    hint = "; if it only reads slowly, raise --startup-timeout" if owing else ""
                    self._hangs(_most_silent(owing, kind) or worker, hint)
                self._take_in(self._poll.poll(left * 1000))

    def _take_in(self, ready: Sequence[tuple[int, int]]) -> None:
        """Read these descriptors, the ends of workers last.

        A worker's last message explains more than its end.
        """
        descriptors = {descriptor for descriptor, _ in ready}
        for worker in self._workers:
            if worker.channel.fileno() in descriptors:
                self._drain(worker)
        for worker in self._workers:
            if worker.ended in descriptors:
                self._lost(worker)

    def _drain(self, worker: WorkerEnd) -> None:
        """Put all messages of a worker into its inbox.

        Raises:
            WorkerLost, CheckpointError, MemoryError: it has failed or ended.
        """
        try:
            while (payload := worker.channel.take()) is not None:
                message = self._decoder.decode(payload)
                if isinstance(message, WorkerFailed):
                    self._failed(worker, message)
                worker.inbox.append(message)
                worker.spoke_at = time.monotonic()
        except ChannelClosed:
            self._lost(worker)

    def _failed(self, worker: WorkerEnd, failure: WorkerFailed) -> NoReturn:
        self._serves = False
        self._problem = f"{worker} failed: {failure.kind}: {failure.text}"
        if failure.kind == "CheckpointError":
            raise CheckpointError(failure.text)
        if failure.kind == "MemoryError":
            raise MemoryError(failure.text)
        if failure.kind == "CollectiveError":  # most likely the end of another worker is behind it
            self._look_for_deaths(worker)
        raise WorkerLost(self._problem)

    def _look_for_deaths(self, complains: WorkerEnd) -> None:
        deaths = select.poll()
        for worker in self._workers:
            if worker is not complains:
                deaths.register(worker.ended, select.POLLIN)
        ended = {descriptor for descriptor, _ in deaths.poll(BLAME_SECONDS * 1000)}
        killed = [worker for worker in self._workers if worker.ended in ended and worker.status != 0]
        # One that failed itself ends with status 1; who was killed, or went with its host, is the cause.
        for worker in sorted(killed, key=lambda worker: worker.status or 0):
            self._lost(worker)

    def _hangs(self, worker: WorkerEnd, hint: str = "") -> NoReturn:
        self._serves = False
        self._problem = f"{worker} does not answer: it is stopped, or hangs{hint}"
        raise WorkerLost(self._problem)

    def _lost(self, worker: WorkerEnd) -> NoReturn:
        self._serves = False
        self._problem = f"{worker} {worker.how_it_ended()}"
        raise WorkerLost(self._problem)


def _most_silent(workers: Sequence[WorkerEnd], kind: type[Answer]) -> WorkerEnd | None:
    """The worker that has been silent longest, of those that have not answered.

    The others may only wait for it.
    """
    owing = [each for each in workers if not any(isinstance(message, kind) for message in each.inbox)]
    return min(owing, key=lambda worker: worker.spoke_at, default=None)


def _combined(facts: Sequence[ModelFacts]) -> ModelFacts:
    """Facts of the whole instance: summed weights, KV bytes of the largest worker."""
    most = max((each.kv for each in facts), key=lambda kv: kv.bytes_per_token)
    return msgspec.structs.replace(
        facts[-1],
        num_parameters=sum(each.num_parameters for each in facts),
        weight_bytes=sum(each.weight_bytes for each in facts),
        kv=KVSpec(num_layers=most.num_layers, bytes_per_token=most.bytes_per_token),
    )
