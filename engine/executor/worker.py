"""``python -m engine.executor.worker FD [FD]``: process that computes one shard of a model.

It is at the end of a channel. Where experts are spread, a second channel is for the groups of an epoch
(:mod:`engine.executor.worker_groups`).

Started by :mod:`engine.executor.mp`, never by hand. The worker carries out its messages, in order, and
knows nothing of requests. It ends with its engine: the kernel kills it when the engine dies
(PR_SET_PDEATHSIG), and the channel's end shows it that the engine is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

import msgspec

from coordinator.process import process
from engine.executor.channel import Channel, ChannelClosed
from engine.executor.messages import (
    Allocate,
    Allocated,
    Begin,
    CacheAt,
    Computed,
    DiscardShard,
    DropAdapterFiles,
    EncodeImage,
    Execute,
    FirstRun,
    Free,
    FreeMemory,
    FromWorker,
    GiveBackMemory,
    GroupBroken,
    Hosting,
    ImageEncoded,
    Join,
    Joined,
    Loaded,
    Meet,
    MemoryGivenBack,
    Phase,
    PrepareShard,
    Read,
    ReadAdapterFiles,
    SetThreads,
    Spans,
    SwitchShard,
    TellSpans,
    ToWorker,
    WorkerFailed,
)
from engine.executor.mp_adapters import read_beside_steps
from engine.executor.worker_weights import WorkerWeights
from engine.host import deferred
from engine.host.cores import has_gpu
from engine.model.checkpoint import CheckpointError
from parallel.communicators.base import CollectiveError
from parallel.links.keys import LinkKey

if TYPE_CHECKING:
    from engine.executor.uni import UniExecutor
    from engine.executor.worker_groups import WorkerGroups
    from engine.model.sharding.shard import Shard
    from parallel.communicators.base import Communicator
    from parallel.links.meeting import MeetingHost
    from parallel.links.meeting_contract import Meeting

logger = logging.getLogger("engine.executor.worker")

LOOK_SECONDS = 1e-3
"""Seconds that a worker polls for the next step: about the time between steps."""


class Worker:
    """One worker, from its first message to the end of its engine."""

    def __init__(self, channel: Channel, control: Channel | None = None) -> None:
        self._channel = channel
        self._control = control
        self._spread: WorkerGroups | None = None
        self._sending = threading.Lock()
        self._weights: WorkerWeights | None = None
        self._decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
        self._groups: list[Communicator] = []
        self._hosted: MeetingHost | None = None
        self._num_done = ctypes.c_int64(0)
        """Number of finished steps, which the engine reads from this process's memory."""

    def run(self) -> None:
        """Serve until the engine is gone.

        Raises:
            ChannelClosed: it is.
        """
        begin = self._receive()
        assert isinstance(begin, Begin)
        self._channel.send_timeout = begin.config.device.lockstep_timeout  # the engine may wait for others
        process.set_up(begin.name, logging.getLevelName(begin.log_level), begin.log_format)
        pin(begin.cores)
        try:
            executor = self._load(begin)
            while True:
                self._serve(executor, begin, self._receive())
        except ChannelClosed:
            raise
        except Exception as error:
            self._send(WorkerFailed(type(error).__name__, str(error)))
            if not isinstance(error, CheckpointError | MemoryError | CollectiveError):
                logger.exception("the worker fails")
            raise
        finally:
            for group in self._groups:
                group.abort()
            if self._spread is not None:
                self._spread.close()

    # ---- start

    def _load(self, begin: Begin) -> UniExecutor:
        self._send(Phase("loading libraries"))
        with deferred.no_garbage():
            from engine.executor.uni import UniExecutor

        shard = self._meet(begin)
        executor = UniExecutor(
            begin.config,
            begin.info,
            begin.threads,
            self._place(begin),
            shard=shard,
            before_first_run=self._wait_for_others,
        )
        with deferred.no_garbage(leaves=True):
            facts = executor.load(lambda text: self._send(Phase(text)))
        layers = executor.layers
        if self._spread is not None:
            self._spread.serve(executor)
        expert_layers = len(executor.expert_loads())
        self._send(Loaded(facts, (layers.start, layers.stop), executor.expert_bytes, expert_layers))
        return executor

    def _place(self, begin: Begin) -> tuple[int, int] | None:
        """Index and count of this worker among those of its stage, over all instances."""
        if begin.place is None:
            return None
        (place, size), ranks = begin.place, begin.config.device.tensor_parallel_size
        return place * ranks + begin.rank, size * ranks

    def _meet(self, begin: Begin) -> Shard:
        """Form this worker's two groups: ranks of its stage, stages of its rank."""
        from engine.model.sharding.shard import Shard
        from parallel import groups
        from parallel.links.meeting import MeetingClient, MeetingHost

        device = begin.config.device
        forming = device.forming_timeout  # the others may still load libraries
        meet = self._receive()
        assert isinstance(meet, Meet)
        key = None if begin.key is None else LinkKey(begin.key.secret)
        meeting: Meeting
        if meet.port:
            meeting = MeetingClient(meet.address, meet.port, key, forming)
        else:
            meeting = self._hosted = MeetingHost(meet.address, key=key)  # kept while others may still ask
            self._send(Hosting(meeting.port))
        formed: dict[str, Communicator | None] = {"tp": None, "pp": None}
        tp, pp = device.tensor_parallel_size, device.pipeline_parallel_size
        for axis, rank, size, other, hosts in (
            ("tp", begin.rank, tp, begin.stage, begin.hosts[begin.stage * tp : (begin.stage + 1) * tp]),
            ("pp", begin.stage, pp, begin.rank, begin.hosts[begin.rank :: tp]),
        ):
            if size > 1:
                transport = groups.choose_transport(hosts, device.mesh_transport)
                group = groups.form(
                    meeting, 0, rank, size, transport, device.collective_timeout,
                    group=f"{axis}/{other}", host=begin.address, forming_timeout=forming, key=key,
                    host_name=hosts[rank], between=device.mesh_transport,
                )  # fmt: skip
                if has_gpu(device):
                    group = groups.on_devices(
                        group, meeting, begin.number, device.collective_timeout, f"0/{axis}/{other}"
                    )
                self._groups.append(group)
                formed[axis] = group
        if self._control is not None:
            self._renew(begin, self._control, formed)
        return Shard(
            stage=begin.stage,
            num_stages=device.pipeline_parallel_size,
            rank=begin.rank,
            size=device.tensor_parallel_size,
            split=device.split,
            ranks=formed["tp"],
            stages=formed["pp"],
            device=begin.number,
            neighbours=begin.hosts.count(begin.hosts[begin.stage * tp + begin.rank]),
        )

    def _renew(self, begin: Begin, control: Channel, formed: dict[str, Communicator | None]) -> None:
        """Wrap the groups, which change with every epoch, for layers that keep them."""
        from engine.executor.worker_groups import Axis, WorkerGroups
        from parallel import groups
        from parallel.communicators.renewable import RenewableCommunicator

        axes: tuple[Axis, ...] = ("tp", "pp")
        inside = {
            axis: RenewableCommunicator(group, blames=False)
            for axis in axes
            if (group := formed[axis]) is not None
        }
        for axis, renewable in inside.items():
            formed[axis] = renewable
        self._spread = WorkerGroups(
            control, begin, inside, groups.choose_transport(begin.hosts, begin.config.device.mesh_transport)
        )

    def _wait_for_others(self) -> None:
        """Wait until all workers have read their weights, without a deadline."""
        self._send(Read())
        message = self._receive()
        assert isinstance(message, FirstRun)

    # ---- steps

    def _serve(self, executor: UniExecutor, begin: Begin, message: ToWorker) -> None:
        match message:
            case Execute():
                self._execute(executor, message)
                self._num_done.value += 1
            case Join(epoch):
                assert self._spread is not None
                joined = self._spread.join(epoch)
                self._send(Joined(epoch))
                if not joined:
                    self._send(GroupBroken(epoch, None, "aborted", "the groups of this epoch were given up"))
            case FreeMemory():
                self._send(Free(executor.free_kv_memory()))
            case Allocate(num_blocks, num_states):
                executor.allocate(num_blocks, num_states)
                executor.weights_digest(lambda text: self._send(Phase(text)))  # may take minutes
                (arithmetic,) = executor.arithmetic()
                self._send(Allocated(executor.expert_bytes, arithmetic, self._cache_of(executor)))
            case TellSpans():
                (spans,) = executor.spans().values()
                self._send(Spans(spans))
            case SetThreads(threads, cores):
                pin(cores)
                executor.set_threads(threads)
            case PrepareShard(number, directory):
                self._weights_of(executor).prepare(number, directory)
            case SwitchShard():
                self._weights_of(executor).switch()
            case GiveBackMemory(part):
                self._send(MemoryGivenBack(executor.give_back(part)))
            case DiscardShard():
                self._weights_of(executor).discard()
            case ReadAdapterFiles():
                assert executor.adapters is not None
                read_beside_steps(executor.adapters, message, self._send)
            case DropAdapterFiles(digests):
                assert executor.adapters is not None
                executor.adapters.drop(digests)
            case EncodeImage(number, image, num_rows):
                assert executor.image_encoder is not None
                executor.image_encoder.begin(
                    image, num_rows, lambda *outcome: self._send(ImageEncoded(number, *outcome))
                )
            case _:
                raise AssertionError(f"{begin.name} got {message!r} while it serves")

    def _weights_of(self, executor: UniExecutor) -> WorkerWeights:
        if self._weights is None:
            self._weights = WorkerWeights(executor.new_weights, self._send)
        return self._weights

    def _cache_of(self, executor: UniExecutor) -> CacheAt | None:
        places = [region.places for region in executor.regions]
        return CacheAt(ctypes.addressof(self._num_done), places[0], places[1:]) if places else None

    def _execute(self, executor: UniExecutor, message: Execute) -> None:
        spread = self._spread
        if spread is not None and (spread.is_broken or spread.epoch != message.epoch):
            return  # the engine knows, or is about to: this step comes again
        try:
            executor.begin(message.step, message.sizes)
        except CollectiveError as error:
            if spread is None or not spread.epoch:
                raise
            suspect, evidence = spread.fail(error)
            self._send(GroupBroken(spread.epoch, suspect, evidence, str(error)))
            return
        result = executor.finish()
        if executor.answers:
            self._send(Computed(result, executor.expert_times() if spread is not None else None))

    def _receive(self) -> ToWorker:
        return self._decoder.decode(self._channel.receive(LOOK_SECONDS))

    def _send(self, message: FromWorker) -> None:
        with self._sending:
            self._channel.send(msgspec.msgpack.encode(message))


def pin(cores: tuple[int, ...]) -> None:
    """Keep all threads of this process, later ones included, on these cores.

    Empty: any that it may use.
    """
    wanted = set(cores) or ALL_CORES
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), wanted)


ALL_CORES = os.sched_getaffinity(0)


def main() -> NoReturn:
    status = _work()
    logging.shutdown()
    os._exit(status)  # no destructor of a library may keep a worker whose engine is gone


def _work() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the engine, which may still need its workers
        signal.signal(number, signal.SIG_IGN)
    process.die_with_parent()
    channels = [Channel(socket.socket(fileno=int(descriptor))) for descriptor in sys.argv[1:]]
    try:
        Worker(*channels).run()
    except ChannelClosed:
        return 0
    except Exception:  # noqa: BLE001 (said already, to the engine and in the log)
        return process.EXIT_FAILED
    return 0


if __name__ == "__main__":
    deferred.trim()
    main()
