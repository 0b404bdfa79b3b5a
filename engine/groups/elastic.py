"""Lockstep stepping with spread experts across group changes: join, loss, replacement.

:class:`engine.groups.recovery.Recovery` decides; this class is the threads around it. The step loop calls it
as its :class:`engine.groups.stepping.Stepping`. The membership's thread brings plans of groups, background
threads prepare them (:mod:`engine.groups.preparation`), one more watches the processes of the others. Each
thread that finds the group broken aborts it, so that the step loop comes out of a collective at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from coordinator.messages import Evidence, ExpertLoads, GroupPlan, Lost
from coordinator.rpc.keys import MeshKeys
from engine.groups.expert_loads import LoadWindows
from engine.groups.group_watch import GroupWatch
from engine.groups.link_totals import LinkTotals
from engine.groups.preparation import Preparation, Preparations
from engine.groups.recovery import (
    Abandon,
    AbortGroup,
    AwaitGroup,
    DropRequests,
    Enter,
    Instruction,
    Prepare,
    Recovery,
    ReportLost,
    Turn,
)
from engine.groups.recovery_times import GroupChange, RecoveryTimes
from engine.groups.stepping import Agreement, InLockstep, NoGroup
from engine.host.background import Chores
from parallel.communicators.base import CollectiveError
from parallel.communicators.renewable import RenewableCommunicator
from parallel.links.counts import LinkCount, added, link_counts
from parallel.lockstep import Wake

if TYPE_CHECKING:
    from engine.executor_contract import SpreadExecutor
    from parallel.communicators.base import Communicator

logger = logging.getLogger(__name__)

PENDING_PAUSE = 0.003
"""Seconds between two steps without tokens, while not all are ready for a change."""


class GroupReporter(Protocol):
    """Interface for reporting group events to the coordinator."""

    def report(self, lost: Lost) -> None: ...

    def entered(self, form: GroupPlan) -> None:
        """Report that this instance now steps in the group of this plan."""
        ...

    def changed(self) -> None:
        """Report a new ``ready_epoch`` or a new capacity for experts."""
        ...

    def waits(self) -> None:
        """Report that there is no group to step in."""
        ...

    def drained(self) -> None: ...

    def counted(self, loads: ExpertLoads) -> None:
        """Report the loads of the experts here, at the end of each window of steps."""
        ...


class Elastic:
    """Stepping of an instance with spread experts, from group to group."""

    def __init__(
        self,
        instance: str,
        executor: SpreadExecutor,
        mesh: GroupReporter,
        preparations: Preparations[Communicator],
        *,
        wake_loop: Callable[[], None],
        keys: MeshKeys | None = None,
        windows: LoadWindows | None = None,
    ) -> None:
        """
        Args:
            wake_loop: ends the step loop's sleep; called from any thread.
            windows: for the loads of experts, if they are balanced.
        """
        self._instance = instance
        self._executor = executor
        self._mesh = mesh
        self._preparations = preparations
        self._wake_loop = wake_loop
        self._keys = keys
        self._windows = windows
        self._lock = threading.RLock()
        self._recovery = Recovery(instance)
        self._form_at: dict[int, float] = {}
        self._current: Preparation[Communicator] | None = None
        self._stepping: InLockstep | None = None
        self._problem: str | None = None
        self._fenced = False
        self._drained = False
        self._waits = False
        self.times = RecoveryTimes()
        self._chores = Chores("chores")
        self._links = LinkTotals()
        self._group: Communicator | None = None
        """The group whose links are counted."""

    def __repr__(self) -> str:
        return f"<Elastic {self._recovery!r} {self._stepping!r}>"

    # ---- for headers and heartbeats

    @property
    def ready_epoch(self) -> int:
        with self._lock:
            return self._recovery.ready_epoch

    # ---- in the membership's thread

    def on_form(self, form: GroupPlan) -> None:
        """Handle the coordinator's plan of a new epoch."""
        with self._lock:
            instructions = self._recovery.on_form(form)
            if any(isinstance(each, AbortGroup) for each in instructions):
                self._notice("the coordinator")
            if self._recovery.target is form:
                self._form_at = {form.epoch: time.monotonic()}
                logger.info("epoch %d comes: %s", form.epoch, _what_for(form, self._recovery))
            self._carry_out(instructions)
        self._mesh.changed()
        self._wake_loop()

    def on_fenced(self) -> None:
        """Handle the coordinator's decision to continue without this instance."""
        with self._lock:
            self._carry_out(self._recovery.on_fenced())
        self._wake_loop()

    # ---- in the step loop

    def turn(self) -> Turn:
        if self._problem is not None:
            raise NoGroup(self._problem)
        with self._lock:
            turn = self._recovery.turn(time.monotonic())
            if isinstance(turn, Enter):
                self._current = self._preparations.take(turn.form.epoch)
        match turn:
            case Enter(form):
                self._enter(form)
            case AwaitGroup():
                self._wait()
        if self._recovery.switch_pending:
            self.notice_work()
        return turn

    @property
    def must_step(self) -> bool:
        return self._stepping is not None and self._stepping.must_step

    def notice_work(self) -> None:
        if self._stepping is not None:
            self._stepping.notice_work()

    def on_wake(self, wake: Wake) -> None:
        if self._stepping is not None:
            self._stepping.on_wake(wake)

    def agree(self, num_tokens: int, queued_prefill: int, longest: int, in_flight: int = 0) -> Agreement:
        assert self._stepping is not None, "turn() says whether there is a group"
        agreement = self._stepping.agree(num_tokens, queued_prefill, longest, in_flight, self.ready_epoch)
        pauses = not agreement.runs and not agreement.switches_to
        self.times.stepped(time.monotonic(), runs=agreement.runs, pauses=pauses)
        if agreement.runs and self._windows is not None:
            loads = self._windows.stepped(self._executor.expert_loads)
            if loads is not None:
                self._mesh.counted(loads)
        if agreement.switches_to:
            with self._lock:
                self._carry_out(self._recovery.switched(agreement.switches_to))
        elif agreement.waits_for_change:
            time.sleep(PENDING_PAUSE)
        return agreement

    def link_totals(self) -> dict[int, LinkCount]:
        if self._group is not None:
            self._links.counted(added(link_counts(self._group), self._executor.link_counts()))
        return self._links.totals

    def failed(self, error: CollectiveError) -> None:
        with self._lock:
            current = self._current
            if current is not None:
                self._lose(current.form, [error.rank], error.evidence, "a collective", str(error))

    def drained(self) -> bool:
        with self._lock:
            self._recovery.drained(time.monotonic())
        if not self._drained:
            self._drained = True
            self._chores.put(self._mesh.drained)
        return False

    def is_fenced(self) -> bool:
        fenced, self._fenced = self._fenced, False
        return fenced

    def close(self) -> None:
        with self._lock:
            self._preparations.close()
            self._current = None
        self._chores.close()
        if self._stepping is not None:
            self._stepping.close()
            self._stepping = None

    # ---- helpers of the step loop

    def _enter(self, form: GroupPlan) -> None:
        preparation = self._current
        assert preparation is not None
        group = preparation.group
        if group is None:  # broken again in this very moment
            return
        before = self._stepping
        self.link_totals()  # a last time, of the group before
        self._preparations.weights.enter(form.weights)
        self._executor.join(group, form.placement)
        others = [peer.address for peer in form.peers if peer.instance != self._instance]
        self._stepping = InLockstep(group, form.epoch, others, self._keys)
        self._waits = False
        if self._windows is not None:
            self._windows.entered(form.epoch, self._executor.expert_loads())
        self._links.entered([peer.rank for peer in form.peers])
        self._group = group
        self.times.entered(
            GroupChange(
                form.epoch,
                self._form_at.get(form.epoch, 0.0),
                num_read=preparation.num_read,
                read_at=preparation.read_at,
                formed_at=preparation.formed_at,
            )
        )
        watch = GroupWatch(group, partial(self._lost, preparation), lambda: self._current is preparation)
        for chore in (partial(self._entered, form, group), watch.start, self._stepping.start):
            self._chores.put(chore)
        self._retire(before)

    def _entered(self, form: GroupPlan, group: Communicator) -> None:
        self._mesh.entered(form)
        logger.info("epoch %d: %d instances in lockstep over %s", form.epoch, group.size, _transport(group))

    def _wait(self) -> None:
        before, self._stepping = self._stepping, None
        self._retire(before)
        if not self._waits:
            self._waits = True
            self._chores.put(self._mesh.waits)

    def _retire(self, stepping: InLockstep | None) -> None:
        """Close a group that was left, in another thread: saying farewell takes a while."""
        if stepping is not None:
            self._chores.put(threading.Thread(target=stepping.close, name="closing", daemon=True).start)

    # ---- losses

    def _lost(
        self,
        preparation: Preparation[Communicator],
        ranks: Iterable[int | None],
        evidence: str,
        by: str,
        reason: str,
    ) -> None:
        with self._lock:
            if self._current is preparation:
                self._lose(preparation.form, ranks, evidence, by, reason)
        self._wake_loop()

    def _lose(
        self, form: GroupPlan, ranks: Iterable[int | None], evidence: str, by: str, reason: str
    ) -> None:
        """Take in that members of a group are lost; the lock is held.

        ``ranks``: places in the group, None where nobody is known.
        """
        suspects = [form.peers[rank] for rank in ranks if rank is not None]
        instructions = self._recovery.group_failed(
            form.epoch, [peer.instance for peer in suspects], _EVIDENCE[evidence]
        )
        if instructions:
            self._notice(by)
            told = "".join(f" (instance {peer.rank})" for peer in suspects)
            logger.warning("the group of epoch %d is broken: %s%s", form.epoch, reason, told)
        self._carry_out(instructions)

    def _notice(self, by: str) -> None:
        self.times.noticed(by, time.monotonic())

    # ---- instructions, with the lock held

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Prepare(form):
                    is_urgent = self._recovery.epoch == 0
                    self._preparations.start(form, self._on_prepared, is_urgent=is_urgent)
                case Abandon(epoch):
                    self._preparations.abandon(epoch)
                case AbortGroup(epoch):
                    current = self._current
                    if current is not None and current.form.epoch == epoch and current.group is not None:
                        current.group.abort()
                case ReportLost(lost):
                    self._mesh.report(lost)
                case DropRequests():
                    self._fenced = True

    # ---- in the background

    def _on_prepared(self, preparation: Preparation[Communicator]) -> None:
        epoch, error = preparation.form.epoch, preparation.error
        if error is None:
            with self._lock:
                self._carry_out(self._recovery.prepared(epoch))
        else:
            self._on_not_prepared(preparation, error)
        self._mesh.changed()
        self._wake_loop()

    def _on_not_prepared(self, preparation: Preparation[Communicator], error: Exception) -> None:
        """Report a loss to the coordinator.

        An instance that has no group yet ends if it can be in none; the others try again, as often as the
        coordinator says.
        """
        form = preparation.form
        rank = error.rank if isinstance(error, CollectiveError) and error.evidence != "deadline" else None
        suspects = [] if rank is None else [form.peers[rank].instance]
        why = str(error) or type(error).__name__  # a MemoryError says nothing
        logger.warning("the group of epoch %d cannot form: %s", form.epoch, why)
        if isinstance(error, ValueError) and self._current is None:
            self._problem = f"the group of epoch {form.epoch} cannot form: {error}"
            return
        with self._lock:
            self._carry_out(self._recovery.failed(form.epoch, suspects))


_EVIDENCE = {
    "exited": Evidence.EXITED,
    "closed": Evidence.CLOSED,
    "deadline": Evidence.DEADLINE,
    "aborted": Evidence.CLOSED,
}


def _what_for(form: GroupPlan, recovery: Recovery) -> str:
    """Log text for a new group: its members, and the reason for the change."""
    who = f"{len(form.peers)} instances, ranks {', '.join(str(peer.rank) for peer in form.peers)}"
    current = recovery.current
    if current is None or not form.peers:
        return who if form.peers else "nobody is left"
    if recovery.broken:
        return f"{who}, after a loss in epoch {current.epoch}"
    before = {peer.instance for peer in current.peers}
    if form.weights != current.weights:
        return f"{who}, with weights {form.weights}"
    come, leave = len({peer.instance for peer in form.peers} - before), len(form.leavers)
    return f"{who}; {come} come, {leave} leave" if come or leave else f"{who}; experts move"


def _transport(group: Communicator) -> str:
    if isinstance(group, RenewableCommunicator):
        group = group.group
    return _TRANSPORTS.get(type(group).__name__, type(group).__name__)


_TRANSPORTS = {
    "GlooCommunicator": "gloo",
    "SharedMemoryCommunicator": "shared_memory",
    "NetworkCommunicator": "tcp",
    "MixedCommunicator": "shared_memory and tcp",
}
"""Transport names for the log by communicator class name, without loading torch."""
