"""Coordinator connection of an instance with spread experts: reports, plans, fences.

It holds which experts the instance has, in which group it steps, and what it waits for. It stands between the
membership and :class:`engine.groups.elastic.Elastic`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from coordinator.member_connection import COMPLAINT_INTERVAL, MemberConnection
from coordinator.messages import ExpertLoads, GroupPlan, Lost, Settings, State
from engine.config.expert_balancing import EplbConfig
from engine.executor_contract import SpreadExecutor
from engine.groups.elastic import Elastic
from engine.groups.expert_loads import LoadWindows
from engine.groups.preparation import GroupWeights, Preparations
from engine.groups.rendezvous import Rendezvous
from engine.groups.stepping import NoGroup
from parallel.communicators.base import Communicator

logger = logging.getLogger(__name__)


def first_share(rank: int, settings: Settings) -> tuple[int, int]:
    """Experts to load before the first group is known: (share, number of shares).

    Of the instances that the mesh starts with, those of its first epoch; of a newcomer, about as many as it
    will get.
    """
    size = settings.data_parallel_size
    if rank < size:
        return rank, size
    most = settings.num_experts // settings.tensor_parallel_size
    return rank % most, min(rank + 1, most)


class StepLoop(Protocol):
    """The part of :class:`engine.serving.server.Server` that is used here."""

    @property
    def endpoint(self) -> str:
        """Where routers reach the instance."""
        ...

    def wake(self) -> None:
        """End the loop's sleep; from any thread."""
        ...


class Spread:
    """Reports of a group's events to the coordinator, and its plans for the stepping."""

    def __init__(
        self,
        membership: MemberConnection,
        executor: SpreadExecutor,
        meeting: Rendezvous,
        loop: StepLoop,
        balancing: EplbConfig | None,
        weights: GroupWeights,
        *,
        sharers: int | None = None,
    ) -> None:
        """``meeting``: where groups form. ``balancing``: None if experts keep their places.
        ``weights``: versions that groups step with.

        ``sharers``: instances that compute on its device; None: on the CPU, as all of its host do.
        """
        self._sharers = sharers
        self._membership = membership
        self._executor = executor
        self._endpoint = loop.endpoint
        self._began = self._complained_at = time.monotonic()
        self._was_ready = False
        self.drains = False
        """Whether it drains; it is then no longer reported as ready."""
        self._balances = balancing is not None
        self._meeting = meeting
        self.stepping = Elastic(
            meeting.instance,
            executor,
            self,
            Preparations(meeting.instance, executor, self._connect, self._free_bytes, weights),
            wake_loop=loop.wake,
            keys=meeting.keys,
            windows=None if balancing is None else LoadWindows(balancing.window_size),
        )
        membership.follow(self.stepping.on_form, self.stepping.on_fenced)
        membership.update(
            state=State.LOADED,
            phase="waits for the other instances",
            address=loop.endpoint,
            store=self._meeting.address,
            experts=executor.experts_held(),
            expert_layers=len(executor.expert_loads()) if self._balances else 0,
            max_experts=self._max_experts(),
        )

    def _connect(self, form: GroupPlan, should_stop: Callable[[], bool]) -> Communicator:
        """Form the group of the instances, then the other groups of the workers."""
        group = self._meeting.connect(form, should_stop)
        return self._executor.connect(form, group, should_stop)

    def look(self, startup_timeout: float) -> None:
        """Log the wait for other instances now and then; fail after the start-up timeout.

        Raises:
            NoGroup: they do not.
        """
        now = time.monotonic()
        if self._was_ready or now - self._complained_at < COMPLAINT_INTERVAL:
            return
        self._complained_at = now
        waited = now - self._began
        if waited > startup_timeout:
            raise NoGroup(f"gave up after {waited:.0f} s of waiting for the other instances")
        logger.info("waiting for the other instances of the mesh (%.0f s)", waited)

    def close(self) -> None:
        self.stepping.close()
        self._meeting.close()

    # ---- what the stepping says

    def report(self, lost: Lost) -> None:
        """See :class:`engine.groups.elastic.GroupReporter`."""
        self._membership.report(lost)

    def entered(self, form: GroupPlan) -> None:
        """See :class:`engine.groups.elastic.GroupReporter`."""
        if form.peers[0].instance == self._meeting.instance:
            self._meeting.renew()
        if not self._was_ready:
            self._was_ready = True
            waited = time.monotonic() - self._began
            logger.info("ready on %s after %.1f s of waiting for others", self._endpoint, waited)
        self._membership.enter(form)
        self._membership.update(
            state=None if self.drains else State.READY,
            phase=None if self.drains else "serving",
            store=self._meeting.address,
            experts=self._executor.experts_held(),
            expert_layers=len(self._executor.expert_loads()) if self._balances else 0,
            max_experts=self._max_experts(),
            ready_epoch=self.stepping.ready_epoch,
        )

    def changed(self) -> None:
        """See :class:`engine.groups.elastic.GroupReporter`."""
        self._membership.update(ready_epoch=self.stepping.ready_epoch, max_experts=self._max_experts())

    def waits(self) -> None:
        """See :class:`engine.groups.elastic.GroupReporter`."""
        if self._was_ready:
            self._membership.update(phase="recovering")

    def drained(self) -> None:
        """See :class:`engine.groups.elastic.GroupReporter`."""
        self._membership.update(state=State.DRAINED, phase="drained")

    def counted(self, loads: ExpertLoads) -> None:
        """See :class:`engine.groups.elastic.GroupReporter`."""
        size = self._executor.expert_bytes
        self._membership.update(loads=loads, expert_layers=len(loads.rows), expert_bytes=size)

    # ----

    def _max_experts(self) -> int:
        return self._executor.max_experts(self._free_bytes())

    def _free_bytes(self) -> int:
        """Free bytes for more experts, divided among instances that share memory."""
        sharers = self._membership.neighbours if self._sharers is None else self._sharers
        return self._executor.spare_memory() // max(1, sharers)
