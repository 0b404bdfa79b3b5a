"""Executor with worker processes whose experts are spread over the mesh.

Steps go as in :mod:`engine.executor.mp`, each with what the instances agreed on; the workers follow, and
agree on nothing. What belongs to an epoch goes beside the steps (:mod:`engine.executor.group_control`). A
step that a broken group cuts short ends with CollectiveError here; the workers live on and wait for
another epoch.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from coordinator.messages import GroupPlan
from engine.config import EngineConfig
from engine.executor.channel import Channel
from engine.executor.ends import LocalCrew, LocalWorker
from engine.executor.group_control import GroupControl
from engine.executor.group_messages import (
    AbandonGroups,
    AbortGroups,
    ExpertsRead,
    GroupsFormed,
    PrepareGroups,
)
from engine.executor.messages import Computed, Execute, FromWorker, GroupBroken, Join, Joined
from engine.executor.mp import MpExecutor
from engine.executor.worker_channels import LOOK_SECONDS, WorkerChannels
from engine.executor_contract import STARTUP_TIMEOUT, ExpertTimes, Progress, WorkerLost
from engine.host.cores import Share
from engine.host.memory import Untouched, spare_memory
from engine.model.checkpoint import ModelInfo
from engine.step import ModelFacts, Step, StepResult
from parallel.communicators.base import CollectiveError
from parallel.communicators.renewable import RenewableCommunicator
from parallel.links.counts import LinkCount, added
from parallel.links.keys import LinkKey
from parallel.placement import assign_experts, held_by_rank

if TYPE_CHECKING:
    from parallel.communicators.base import Communicator
    from parallel.placement import Placement

ANSWER_GRACE = 30.0
"""Seconds beyond its deadlines after which a silent worker is lost."""
READING_TIMEOUT = 600.0
"""Seconds in which a worker must have read the experts that it gets."""
ASK_SECONDS = 1.0
"""Seconds in a step between two requests for a sign of life of its workers."""


class InstanceGroup(RenewableCommunicator):
    """Group of the instances of an epoch, with those of this instance's workers."""

    def __init__(self, instances: Communicator, groups: StepGroups, form: GroupPlan) -> None:
        super().__init__(instances)
        self.form = form
        self._groups = groups

    def abort(self) -> None:
        self._groups.abort(self.form.epoch)
        super().abort()

    def close(self) -> None:
        self._groups.abandon(self.form.epoch)
        super().close()


class StepGroups:
    """Groups that an instance's steps use: those of one epoch, until they break.

    Orders to abort come from any thread, and wake the one that waits for a step.
    """

    def __init__(self, channels: WorkerChannels, controls: Sequence[Channel]) -> None:
        """``controls``: to the thread of each worker that forms groups."""
        self._channels = channels
        self.control = GroupControl(controls, self._on_silence)
        self.epoch = 0
        """Epoch of the groups that steps use."""
        self._broken: CollectiveError | None = None
        """Why the groups of this epoch are of no use any more."""
        self._group: InstanceGroup | None = None
        """Group of this epoch, once there is one."""

    def enter(self, group: InstanceGroup) -> None:
        """Use this group from the next step on."""
        self.epoch, self._broken, self._group = group.form.epoch, None, group

    def check(self) -> None:
        """Raise the error of a broken group, or of a worker that is silent.

        A worker reports a broken group, or another thread of this process does.
        """
        self.check_silence()
        for worker in self._channels.workers:
            for message in worker.inbox:
                if isinstance(message, GroupBroken) and message.epoch == self.epoch:
                    raise _error(message)
        if self._broken is not None:
            raise self._broken

    def check_silence(self) -> None:
        """Raise WorkerLost if a worker does not answer questions about groups."""
        if self.control.silent is not None:
            self._channels.hangs(self._channels.workers[self.control.silent])

    def abort(self, epoch: int) -> None:
        """Abort the groups of an epoch, in the step thread and in workers."""
        if epoch == self.epoch:
            self._broken = CollectiveError("the group was given up", None, "aborted")
            self._channels.interrupt()
        self.control.tell(AbortGroups(epoch))

    def abandon(self, epoch: int) -> None:
        """Let the workers forget the groups of an epoch, which are not needed any more."""
        self.control.tell(AbandonGroups(epoch))

    def _on_silence(self) -> None:
        """Wake the step thread, whether it waits for workers or for other instances."""
        if self._group is not None:
            self._group.abort()


class SpreadMpExecutor(MpExecutor):
    """Implements :class:`engine.executor_contract.SpreadExecutor` with processes of this host."""

    num_channels = 2
    """Channels to each worker: one for steps, one for the groups of an epoch."""

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        crew: LocalCrew,
        share: Share,
        place: tuple[int, int],
        startup_timeout: float = STARTUP_TIMEOUT,
        key: LinkKey | None = None,
    ) -> None:
        """``place``: (index, count) among the instances, for the experts to load first."""
        super().__init__(config, info, crew, share, startup_timeout, key)
        self._place = place
        self._step_groups: StepGroups | None = None
        self._held: list[list[list[int]]] = []
        self._untouched = Untouched()
        """Unwritten parts of the KV caches of all workers."""
        self._times: ExpertTimes | None = None

    def __repr__(self) -> str:
        return f"Spread{super().__repr__()}"

    @property
    def needs_tokens(self) -> bool:
        """See :class:`.Executor`. When the groups of an epoch end, one rank may have sampled and
        another one not."""
        return True

    def load(self, progress: Progress) -> ModelFacts:
        """See :class:`.Executor`."""
        facts = super().load(progress)
        (here, size), device = self._place or (0, 1), self._config.device
        ranks = device.tensor_parallel_size
        first = assign_experts(self._info.num_experts, size * ranks, device.expert_placement_strategy)
        self._held = held_by_rank(first, ranks, here)
        controls = [worker.more_channels[0] for worker in self._workers if isinstance(worker, LocalWorker)]
        self._step_groups = StepGroups(self._channels, controls)
        return facts

    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        """See :class:`.Executor`."""
        super().allocate(num_blocks, num_states)
        token_bytes = sum(kv.bytes_per_token for kv in self._kv)
        self._untouched = Untouched(num_blocks, self._config.cache.block_size * token_bytes)

    # ---- steps

    @property
    def _step_timeout(self) -> float:
        return self._config.device.lockstep_timeout

    def begin(self, step: Step, sizes: Sequence[int] = ()) -> None:
        """See :class:`.Executor`."""
        self._untouched.note(step)
        self._note_begun()
        self._channels.send_all(Execute(step, tuple(sizes), self._groups.epoch))
        self._groups.control.ask_counts()

    def finish(self) -> StepResult:
        """See :class:`.Executor`."""
        stages, ranks = self._layout
        answering = self._workers[(stages - 1) * ranks]
        began = time.perf_counter()
        look_until = began + LOOK_SECONDS
        hangs_at = began + self._step_timeout
        while True:
            self._channels.drain(answering)
            if answering.inbox and isinstance(answering.inbox[0], Computed):
                computed = answering.inbox.popleft()
                assert isinstance(computed, Computed)
                self._times = computed.times
                self._num_finished = self._sent.popleft()
                return computed.result
            self._groups.check()
            now = time.perf_counter()
            if now < look_until:
                os.sched_yield()
            elif now >= hangs_at:
                self._channels.hangs(answering)
            else:
                self._channels.wait(ASK_SECONDS)
                self._groups.control.ask_counts()  # a step that takes long may be one that hangs

    def check(self) -> None:
        """See :class:`.Executor`."""
        super().check()
        self._groups.check_silence()

    # ---- epochs

    @property
    def _groups(self) -> StepGroups:
        assert self._step_groups is not None, "load() comes first"
        return self._step_groups

    def prepare(self, form: GroupPlan, place: int, free_bytes: int, should_stop: Callable[[], bool]) -> int:
        """See :class:`.SpreadExecutor`. The workers go on to form their groups."""
        self._groups.control.ask_who_lives()
        self._groups.control.tell(PrepareGroups(form, place, max(0, free_bytes) // len(self._workers)))
        read = self._groups.control.collect(form.epoch, ExpertsRead, READING_TIMEOUT, should_stop)
        ranks = self._config.device.tensor_parallel_size
        return sum(each.num_read for each in read[:ranks])

    def connect(self, form: GroupPlan, group: Communicator, should_stop: Callable[[], bool]) -> Communicator:
        """See :class:`.SpreadExecutor`."""
        timeout = self._config.device.forming_timeout + ANSWER_GRACE
        try:
            self._groups.control.collect(form.epoch, GroupsFormed, timeout, should_stop)
        except BaseException:
            group.abort()
            group.close()
            raise
        return InstanceGroup(group, self._groups, form)

    def join(self, group: Communicator, placement: Placement) -> None:
        """See :class:`.SpreadExecutor`. Late messages about earlier steps are dropped."""
        assert isinstance(group, InstanceGroup)
        self._groups.enter(group)
        self._channels.send_all(Join(group.form.epoch))
        deadline = time.monotonic() + self._config.device.collective_timeout + ANSWER_GRACE
        for worker in self._workers:
            self._channels.drain(worker)
            while not _has_joined(worker.inbox, group.form.epoch):
                left = deadline - time.monotonic()
                if left <= 0:
                    self._channels.are_serving = False
                    raise WorkerLost(f"{worker} does not come out of its step")
                self._channels.wait(left)
        self._sent.clear()
        self._num_finished = self._num_begun  # all workers came out of the steps before
        self._held = held_by_rank(placement, group.form.ranks, group.rank)

    # ---- the rest of the contract

    def experts_held(self) -> list[list[list[int]]]:
        """See :class:`.SpreadExecutor`."""
        return self._held

    @property
    def expert_bytes(self) -> int:
        """See :class:`.SpreadExecutor`."""
        return max(self._expert_bytes, default=0)

    def max_experts(self, free_bytes: int) -> int:
        """See :class:`.SpreadExecutor`. As many as fit on the worker that has least room."""
        free = max(0, free_bytes) // max(1, len(self._expert_bytes))
        largest = self.expert_bytes
        held = min((max(map(len, of_rank)) for of_rank in self._held), default=0)
        if not largest:
            return 0
        limit = self._config.device.expert_memory_bytes
        fit = held + free // largest
        return fit if limit is None else min(fit, max(1, limit // largest))

    def spare_memory(self) -> int:
        """See :class:`.SpreadExecutor`."""
        if self._on_cpu:
            return spare_memory(self._untouched)
        counts = self._groups.control.counts
        self._groups.control.ask_counts()
        return min((each.spare_bytes if each else 0 for each in counts), default=0) * len(counts)

    def expert_times(self) -> ExpertTimes | None:
        """See :class:`.Executor`; of the worker that answers."""
        return self._times

    def tokens_per_expert(self) -> dict[int, int]:
        """See :class:`.Executor`; as of a second ago, over all stages."""
        total: dict[int, int] = {}
        for each in self._groups.control.counts:
            for expert, tokens in (each.tokens_per_expert if each else {}).items():
                total[expert] = total.get(expert, 0) + tokens
        return total

    def expert_loads(self) -> list[list[int]]:
        """See :class:`.SpreadExecutor`; as of a second ago, over the ranks of its stage."""
        known = [each.expert_loads for each in self._groups.control.counts if each and each.expert_loads]
        if not known:
            return [[0] * self._info.num_experts for _ in range(self._expert_layers)]
        return [[sum(rows) for rows in zip(*layers, strict=True)] for layers in zip(*known, strict=True)]

    def link_counts(self) -> list[LinkCount]:
        """See :class:`.SpreadExecutor`; as of a second ago."""
        counts = self._groups.control.counts
        return added(
            *(each.links for each in counts if each is not None and each.epoch == self._groups.epoch)
        )

    def close(self) -> None:
        """See :class:`.Executor`."""
        if self._step_groups is not None:
            self._step_groups.control.close()
        super().close()


def _has_joined(inbox: deque[FromWorker], epoch: int) -> bool:
    """Whether a worker has joined the groups of an epoch; earlier messages are dropped."""
    while inbox:
        message = inbox.popleft()
        if isinstance(message, Joined) and message.epoch == epoch:
            return True
    return False


def _error(broken: GroupBroken) -> CollectiveError:
    known = {"exited", "closed", "deadline", "aborted"}
    evidence = broken.evidence if broken.evidence in known else "closed"
    return CollectiveError(broken.text, broken.suspect, evidence)  # type: ignore[arg-type]
