"""The executor with one process per worker: the engine keeps the scheduler, workers compute its steps.

Every worker gets every step, as the same bytes and in the same order, so they cannot disagree; activations
go between the workers without passing here. One worker of the last stage answers. A worker that ends is
noticed by its pidfd and by the end of its channel, whichever is first, and takes the instance down: what it
held is gone. (No torch: the engine's own process loads none.)
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec

from coordinator import process
from engine.checkpoint import CheckpointError, ModelInfo
from engine.config import EngineConfig
from engine.executor.base import ExpertTimes, Progress, WorkerLost
from engine.executor.channel import Channel, ChannelClosed
from engine.executor.messages import (
    Allocate,
    Allocated,
    Begin,
    Computed,
    Execute,
    Failed,
    FirstRun,
    Free,
    FreeMemory,
    FromWorker,
    Hosting,
    Loaded,
    Meet,
    Phase,
    Read,
    SetThreads,
    Spans,
    TellSpans,
    ToWorker,
)
from engine.step import KVSpec, ModelFacts, Step, StepResult
from engine.trace import Span
from parallel.topology import cores_of_worker

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

LOOK_SECONDS = 1e-4
"""How long the engine looks for a result before it sleeps: its workers need the cores."""
BLAME_SECONDS = 0.5
"""When a worker fails in a collective, how long to wait for news of the one whose end was the cause."""
END_TIMEOUT = 5.0
"""Seconds that a worker may take to end by itself."""


class _Process:
    """A worker process and this end of its channels."""

    def __init__(self, name: str, threads: int, num_channels: int = 1) -> None:
        self.name = name
        pairs = [socket.socketpair() for _ in range(num_channels)]
        descriptors = [theirs.fileno() for _, theirs in pairs]
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.worker", *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            env=_environment(threads),
            start_new_session=True,
        )
        for _, theirs in pairs:
            theirs.close()
        self.channel, *self.more_channels = [Channel(ours) for ours, _ in pairs]
        self.inbox: deque[FromWorker] = deque()
        """What it has said and nobody has asked for yet."""
        self.pidfd = os.pidfd_open(self.child.pid)

    def __str__(self) -> str:
        return f"{self.name} (pid {self.child.pid})"

    def how_it_ended(self) -> str:
        """For messages; the process has ended or closed its channel."""
        try:
            status = self.child.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            return "closed its channel"
        if status >= 0:
            return f"ended with status {status}"
        hint = ": out of memory?" if -status == signal.SIGKILL else ""
        return f"was killed by signal {-status} ({signal.Signals(-status).name}{hint})"

    def end(self, deadline: float) -> None:
        """Its channel is closed, so it ends by itself; it gets a moment for it."""
        try:
            self.child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger.warning("%s does not end: killed", self)
            self.child.kill()
            self.child.wait()
        os.close(self.pidfd)


def _environment(threads: int) -> dict[str, str]:
    return {
        **os.environ,
        process.PARENT_VARIABLE: str(os.getpid()),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }


class MpExecutor:
    """Implements ``executor.base.Executor`` with processes of this host."""

    needs_tokens = True
    num_channels = 1
    """To each worker."""

    def __init__(
        self, config: EngineConfig, info: ModelInfo, threads: int, cores: Sequence[int] = (), rank: int = 0
    ) -> None:
        """``rank``: of the instance, for the workers' names."""
        self._config = config
        self._info = info
        self._rank = rank
        self._threads = threads
        self._cores = tuple(cores)
        self._place: tuple[int, int] | None = None
        """(place, of how many) among the instances over which experts are spread at first, if they are."""
        self._workers: list[_Process] = []
        self._kv: list[KVSpec] = []
        self._expert_bytes: list[int] = []
        self._on_cpu = True
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
        self._poll = select.poll()
        device = config.device
        self._serves = False
        """Whether all workers wait for steps, so that they end as soon as they are told to."""
        self._layout = device.pipeline_parallel_size, device.tensor_parallel_size
        self.in_flight = device.micro_batches

    def __repr__(self) -> str:
        stages, ranks = self._layout
        return f"MpExecutor({self._info.architecture}, pp={stages}, tp={ranks}, threads={self._threads})"

    # ---- start

    def load(self, progress: Progress) -> ModelFacts:
        """See ``executor.base.Executor``. Workers start, find each other, and read their shares at once."""
        progress("starting workers")
        self._start()
        first, *others = self._workers
        self._send(first, Meet(0))
        port = self._await(first, Hosting, progress).port
        for worker in others:
            self._send(worker, Meet(port))
        for worker in self._workers:
            self._await(worker, Read, progress)
        self._send_all(FirstRun())
        loaded = [self._await(worker, Loaded, progress) for worker in self._workers]
        for worker, each in zip(self._workers, loaded, strict=True):
            facts = each.facts
            logger.info(
                "%s: layers %d to %d, %.1f MiB of weights, %d bytes of KV cache per token",
                worker.name, each.layers[0], each.layers[1] - 1, facts.weight_bytes / 2**20,
                facts.kv.bytes_per_token,
            )  # fmt: skip
        self._kv = [each.facts.kv for each in loaded]
        self._expert_bytes = [each.expert_bytes for each in loaded]
        self._on_cpu = loaded[0].facts.device == "cpu"
        self._serves = True
        return _combined([each.facts for each in loaded])

    def _start(self) -> None:
        stages, ranks = self._layout
        places = [(stage, rank) for stage in range(stages) for rank in range(ranks)]
        for stage, rank in places:  # all first, since they spend seconds on imports
            worker = _Process(f"Worker_{self._rank}_PP{stage}_TP{rank}", self._threads, self.num_channels)
            self._workers.append(worker)
            self._poll.register(worker.channel, select.POLLIN)
            self._poll.register(worker.pidfd, select.POLLIN)
        for number, (worker, (stage, rank)) in enumerate(zip(self._workers, places, strict=True)):
            self._send(
                worker,
                Begin(
                    name=worker.name,
                    log_level=logging.getLogger().getEffectiveLevel(),
                    config=self._config,
                    info=self._info,
                    stage=stage,
                    rank=rank,
                    threads=self._threads,
                    cores=self._cores_of(number),
                    place=self._place,
                ),
            )

    def _cores_of(self, worker: int) -> tuple[int, ...]:
        return cores_of_worker(self._cores, worker, len(self._workers), self._threads)

    # ---- the cache

    def free_kv_memory(self) -> int:
        """See ``executor.base.Executor``. As if all had the room of the one that has the least."""
        self._send_all(FreeMemory())
        free = [self._await(worker, Free).num_bytes for worker in self._workers]
        if self._on_cpu:
            free = [each // len(free) for each in free]  # all of them see the same memory
        largest = max(kv.bytes_per_token for kv in self._kv)
        return min(
            each * largest // max(kv.bytes_per_token, 1) for each, kv in zip(free, self._kv, strict=True)
        )

    def allocate(self, num_blocks: int) -> None:
        """See ``executor.base.Executor``."""
        self._send_all(Allocate(num_blocks))
        for worker in self._workers:
            self._await(worker, Allocated)

    # ---- steps

    def execute(self, step: Step, sizes: Sequence[int] = ()) -> StepResult:
        """See ``executor.base.Executor``."""
        self.begin(step, sizes)
        return self.finish()

    def begin(self, step: Step, sizes: Sequence[int] = ()) -> None:
        """See ``executor.base.Executor``."""
        self._send_all(Execute(step))

    def finish(self) -> StepResult:
        """See ``executor.base.Executor``."""
        stages, ranks = self._layout
        return self._await(self._workers[(stages - 1) * ranks], Computed).result

    def check(self) -> None:
        """See ``executor.base.Executor``."""
        ready = self._poll.poll(0)
        if ready:
            self._take_in(ready)

    # ---- the rest of the contract

    def expert_times(self) -> ExpertTimes | None:
        """See ``executor.base.Executor``."""
        return None

    def tokens_per_expert(self) -> dict[int, int]:
        """See ``executor.base.Executor``."""
        return {}

    def set_threads(self, threads: int, cores: Sequence[int] = ()) -> None:
        """See ``executor.base.Executor``."""
        self._threads, self._cores = threads, tuple(cores)
        for number, worker in enumerate(self._workers):
            self._send(worker, SetThreads(threads, self._cores_of(number)))

    def spans(self) -> dict[str, list[Span]]:
        """See ``executor.base.Executor``."""
        self._send_all(TellSpans())
        return {worker.name: self._await(worker, Spans).spans for worker in self._workers}

    def close(self) -> None:
        """End the workers. While they load, and when one is lost, they hold nothing worth waiting for."""
        for worker in self._workers:
            if not self._serves:
                worker.child.kill()
            worker.channel.close()
        deadline = time.monotonic() + END_TIMEOUT
        for worker in self._workers:
            worker.end(deadline)
        self._workers.clear()

    # ---- talking

    def _send_all(self, message: ToWorker) -> None:
        payload = self._encoder.encode(message)
        for worker in self._workers:
            self._send_bytes(worker, payload)

    def _send(self, worker: _Process, message: ToWorker) -> None:
        self._send_bytes(worker, self._encoder.encode(message))

    def _send_bytes(self, worker: _Process, payload: bytes) -> None:
        try:
            worker.channel.send(payload)
        except ChannelClosed:
            self._lost(worker)

    def _await(self, worker: _Process, kind: type[Answer], progress: Progress | None = None) -> Answer:
        """The next answer of a worker, which must be of this kind.

        Raises:
            WorkerLost: some worker has ended.
            CheckpointError, MemoryError: what a worker says went wrong.
        """
        look_until = time.perf_counter() + LOOK_SECONDS
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
                self._take_in(self._poll.poll())

    def _take_in(self, ready: Sequence[tuple[int, int]]) -> None:
        """What these descriptors have to say, the ends of workers last: a last word explains more."""
        descriptors = {descriptor for descriptor, _ in ready}
        for worker in self._workers:
            if worker.channel.fileno() in descriptors:
                self._drain(worker)
        for worker in self._workers:
            if worker.pidfd in descriptors:
                self._lost(worker)

    def _drain(self, worker: _Process) -> None:
        """Put all that a worker has said into its inbox.

        Raises:
            WorkerLost, CheckpointError, MemoryError: it has failed or ended.
        """
        try:
            while (payload := worker.channel.take()) is not None:
                message = self._decoder.decode(payload)
                if isinstance(message, Failed):
                    self._failed(worker, message)
                worker.inbox.append(message)
        except ChannelClosed:
            self._lost(worker)

    def _failed(self, worker: _Process, failure: Failed) -> NoReturn:
        if failure.kind == "CheckpointError":
            raise CheckpointError(failure.text)
        if failure.kind == "MemoryError":
            raise MemoryError(failure.text)
        if failure.kind == "CollectiveError":  # most likely the end of another worker is behind it
            self._look_for_deaths(worker)
        self._serves = False
        raise WorkerLost(f"{worker} failed: {failure.kind}: {failure.text}")

    def _look_for_deaths(self, complains: _Process) -> None:
        deaths = select.poll()
        for worker in self._workers:
            if worker is not complains:
                deaths.register(worker.pidfd, select.POLLIN)
        ended = {descriptor for descriptor, _ in deaths.poll(BLAME_SECONDS * 1000)}
        killed = [worker for worker in self._workers if worker.pidfd in ended and worker.child.poll() != 0]
        # One that failed itself ends with status 1; who was killed is the cause.
        for worker in sorted(killed, key=lambda worker: worker.child.returncode):
            self._lost(worker)

    def _lost(self, worker: _Process) -> NoReturn:
        self._serves = False
        raise WorkerLost(f"{worker} {worker.how_it_ended()}")


def _combined(facts: Sequence[ModelFacts]) -> ModelFacts:
    """Of the whole instance: sums of the workers' weights, and the KV bytes of the worker that has most."""
    most = max((each.kv for each in facts), key=lambda kv: kv.bytes_per_token)
    return msgspec.structs.replace(
        facts[-1],
        num_parameters=sum(each.num_parameters for each in facts),
        weight_bytes=sum(each.weight_bytes for each in facts),
        kv=KVSpec(num_layers=most.num_layers, bytes_per_token=most.bytes_per_token),
    )
