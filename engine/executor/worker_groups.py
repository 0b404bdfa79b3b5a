"""A worker's groups in each epoch: across instances, and inside its own instance.

Experts are spread over the workers of the former.

All groups of an epoch are formed anew, those inside the instance, too: when a step is cut short, its workers
are at different places of it, and what they exchange then would not belong together any more. They are
prepared in the background and aborted from there, so that a step that waits for a lost peer comes out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from coordinator.messages import GroupPlan
from coordinator.process import process
from engine.executor.channel import Channel, ChannelClosed
from engine.executor.group_messages import (
    AbandonGroups,
    AbortGroups,
    Counts,
    ExpertsRead,
    FromGroups,
    GroupsFormed,
    NotPrepared,
    PrepareGroups,
    TellCounts,
    ToGroups,
)
from engine.groups.preparation import Preparation
from engine.host.background import Chores
from engine.host.cores import has_gpu
from parallel import groups
from parallel.communicators import Backend
from parallel.communicators.base import CollectiveError, Communicator
from parallel.communicators.renewable import RenewableCommunicator
from parallel.links.counts import LinkCount, added, link_counts
from parallel.links.keys import LinkKey
from parallel.links.meeting import join_meeting

if TYPE_CHECKING:
    from engine.executor.messages import Begin
    from engine.executor.uni import UniExecutor

logger = logging.getLogger(__name__)

Axis = Literal["tp", "pp"]


class EpochGroups:
    """One worker's ends of the groups of one epoch."""

    def __init__(self, form: GroupPlan | None, place: int) -> None:
        self.form = form
        self.place = place
        """Index of this instance in the plan of the epoch."""
        self.experts: Communicator | None = None
        """The workers of all instances in this pipeline stage."""
        self.inside: dict[Axis, Communicator] = {}

    def __repr__(self) -> str:
        return f"<EpochGroups {self.form.epoch if self.form else 0}>"

    @property
    def all(self) -> list[Communicator]:
        return [*self.inside.values(), *([self.experts] if self.experts is not None else [])]

    def abort(self) -> None:
        for group in self.all:
            group.abort()

    def close(self) -> None:
        for group in self.all:
            group.close()


class WorkerGroups:
    """Prepares, enters and aborts the groups of a worker whose experts are spread."""

    def __init__(
        self,
        control: Channel,
        begin: Begin,
        inside: dict[Axis, RenewableCommunicator],
        backend_inside: Backend,
    ) -> None:
        """``inside``: what the model's layers use, with the groups that were formed for loading."""
        self._control = control
        self._begin = begin
        self._inside = inside
        self._backend_inside = backend_inside
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToGroups] = msgspec.msgpack.Decoder(ToGroups)
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._preparations: dict[int, Preparation[EpochGroups]] = {}
        self._current = EpochGroups(None, 0)
        self._current.inside = {axis: group.group for axis, group in inside.items()}
        self.is_broken = False
        """Whether the current groups are broken."""
        self._executor: UniExecutor | None = None
        self._chores = Chores("chores")

    def __repr__(self) -> str:
        return f"<WorkerGroups {self._current!r}{' broken' * self.is_broken}>"

    @property
    def epoch(self) -> int:
        """Epoch of the groups that steps use; 0: none yet."""
        return self._current.form.epoch if self._current.form is not None else 0

    def serve(self, executor: UniExecutor) -> None:
        """Carry out the engine's orders in a thread of its own from now on."""
        self._executor = executor
        threading.Thread(target=self._run, name="groups", daemon=True).start()

    # ---- in the thread of the steps

    def join(self, epoch: int) -> bool:
        """Use the groups of this epoch from now on; False if they were given up."""
        assert self._executor is not None
        with self._lock:
            preparation = self._preparations.pop(epoch, None)
            prepared = preparation.group if preparation is not None else None
            if preparation is None or prepared is None:
                self._current.abort()
                self.is_broken = True
                return False
            before, self._current = self._current, prepared
            self.is_broken = False
        for axis, group in prepared.inside.items():
            self._inside[axis].renew(group)
        self._chores.put(threading.Thread(target=before.close, name="closing", daemon=True).start)
        form, experts = preparation.form, prepared.experts
        assert experts is not None
        self._executor.join(experts, form.placement)
        return True

    def fail(self, error: CollectiveError) -> tuple[int | None, str]:
        """Handle the error of a step.

        The place of the instance to blame, if any, and how that is known. Makes the other workers of this
        instance come out, too.
        """
        self.is_broken = True
        self._current.abort()
        return self._suspect(error, self._current.form, self._current.place), error.evidence

    def close(self) -> None:
        with self._lock:
            for preparation in self._preparations.values():
                preparation.abandon()
            self._current.abort()
        self._chores.close()

    # ---- in the thread of the channel

    def _run(self) -> None:
        try:
            while True:
                self._do(self._decoder.decode(self._control.receive(0.0)))
        except ChannelClosed:
            self.close()  # the engine is gone, and the steps have nothing to wait for
        except Exception:
            logger.exception("the worker fails: it cannot follow its instance any more")
            logging.shutdown()
            os._exit(process.EXIT_FAILED)  # noticed by the engine, whatever the thread of the steps does

    def _do(self, message: ToGroups) -> None:
        match message:
            case PrepareGroups():
                self._prepare(message)
            case AbandonGroups(epoch):
                self._abandon(epoch)
            case AbortGroups(epoch):
                with self._lock:
                    if self.epoch == epoch:
                        self._current.abort()
            case TellCounts():
                assert self._executor is not None
                executor = self._executor
                loads = executor.expert_loads() if self._begin.config.device.enable_eplb else []
                counted = executor.tokens_per_expert(), executor.spare_memory()
                self._tell(Counts(*counted, *self._links(), loads))

    def _prepare(self, message: PrepareGroups) -> None:
        preparation: Preparation[EpochGroups] = Preparation(
            message.form,
            lambda form, should_stop: self._read(form, message.place, message.free_bytes, should_stop),
            lambda form, should_stop: self._form(form, message.place, should_stop),
            lambda ended: self._prepared(ended, message.place),
            is_urgent=self.is_broken or self.epoch == 0,
        )
        with self._lock:
            self._preparations[message.form.epoch] = preparation
        preparation.start()

    def _abandon(self, epoch: int) -> None:
        with self._lock:
            abandoned = self._preparations.pop(epoch, None)
        if abandoned is not None:
            abandoned.abandon()

    def _links(self) -> tuple[int, list[LinkCount]]:
        """Epoch of the current groups, and what their links have carried, by instance."""
        with self._lock:
            current = self._current
        epoch, ranks = (current.form.epoch, current.form.ranks) if current.form is not None else (0, 1)
        counts = link_counts(current.experts)
        by_instance = [
            added(*([each] for each in counts[at : at + ranks])) for at in range(0, len(counts), ranks)
        ]
        return epoch, [total for (total,) in by_instance]

    # ---- in the thread of a preparation

    def _read(self, form: GroupPlan, place: int, free_bytes: int, should_stop: Callable[[], bool]) -> int:
        assert self._executor is not None
        num_read = self._executor.prepare(form, place, free_bytes, should_stop)
        self._tell(ExpertsRead(form.epoch, num_read))
        return num_read

    def _form(self, form: GroupPlan, place: int, should_stop: Callable[[], bool]) -> EpochGroups:
        """Form the groups of an epoch in the same order at all workers."""
        begin, device = self._begin, self._begin.config.device
        key = None if begin.key is None else LinkKey(begin.key.secret)
        meeting = join_meeting(form.store, key)
        hosts = [peer.host for peer in form.peers for _ in range(form.ranks)]
        backend = groups.choose_backend(device.all2all_backend, hosts, device.mesh_transport)
        stages, ranks = device.pipeline_parallel_size, device.tensor_parallel_size

        def connect(name: str, rank: int, size: int, backend: Backend, on_device: bool) -> Communicator:
            group = groups.form(
                meeting, form.epoch, rank, size, backend, device.collective_timeout,
                group=f"{name}/{form.token}", host=_host_of(form.peers[place].address),
                should_stop=should_stop, forming_timeout=device.forming_timeout, key=key,
                host_name=form.peers[place].host, between=device.mesh_transport,
            )  # fmt: skip
            if not on_device:
                return group
            label = f"{form.epoch}/{name}/{form.token}"
            return groups.on_devices(group, meeting, begin.number, device.collective_timeout, label)

        def connect_inside(name: str, rank: int, size: int) -> Communicator:
            try:
                return connect(name, rank, size, self._backend_inside, has_gpu(device))
            except CollectiveError as error:
                error.rank = None  # a member of it means nothing to others
                raise

        formed = EpochGroups(form, place)
        try:
            if ranks > 1:
                formed.inside["tp"] = connect_inside(f"{place}/tp/{begin.stage}", begin.rank, ranks)
            if stages > 1:
                formed.inside["pp"] = connect_inside(f"{place}/pp/{begin.rank}", begin.stage, stages)
            rank, size = place * ranks + begin.rank, len(form.peers) * ranks
            by_nccl = device.all2all_backend == "nccl"
            formed.experts = connect(f"experts/{begin.stage}", rank, size, backend, by_nccl)
            assert self._executor is not None
            self._executor.exchange(form, formed.experts, should_stop)
        except BaseException:
            formed.abort()
            formed.close()
            raise
        return formed

    def _prepared(self, preparation: Preparation[EpochGroups], place: int) -> None:
        form, error = preparation.form, preparation.error
        if error is None:
            self._tell(GroupsFormed(form.epoch))
            return
        with self._lock:
            self._preparations.pop(form.epoch, None)
        suspect, evidence = None, "closed"
        if isinstance(error, CollectiveError):
            suspect, evidence = self._suspect(error, form, place), error.evidence
        self._tell(NotPrepared(form.epoch, type(error).__name__, str(error), suspect, evidence))

    # ----

    def _suspect(self, error: CollectiveError, form: GroupPlan | None, place: int) -> int | None:
        """Index of the instance whose worker is at fault, if it is another one."""
        if form is None or error.rank is None:
            return None
        suspect = error.rank // form.ranks
        return suspect if suspect != place else None

    def _tell(self, message: FromGroups) -> None:
        with self._sending, contextlib.suppress(ChannelClosed):  # then this process ends, too
            self._control.send(self._encoder.encode(message))


def _host_of(address: str) -> str:
    """Host of an address like tcp://host:port."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
