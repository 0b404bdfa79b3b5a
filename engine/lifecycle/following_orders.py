"""Standing orders that an instance follows: pauses, versions of its weights, adapters."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from coordinator.member_connection import MemberConnection
from coordinator.messages import (
    AdapterSource,
    InFlight,
    PauseMode,
    StandingOrders,
    WeightUpdate,
    WeightVersion,
)
from engine.adapters.loading import AdapterLoading
from engine.core import EngineCore
from engine.executor_contract import AdapterMemory, Executor
from engine.groups.stepping import NoGroup
from engine.lifecycle.sleeping import SleepFollowing, keep_memory
from engine.model.checkpoint import ReadingStopped
from engine.serving.server import Server
from engine.weight_versions.contract import WeightsRefused
from engine.weight_versions.instance_weights import InstanceWeights
from engine.weight_versions.updating import WeightsLost, WeightsUpdating

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 0.005
"""Seconds between two looks whether weights that a group needs are prepared."""


class FixedWeights:
    """Weights of an instance that cannot change them."""

    def prepare(self, update: WeightUpdate, should_stop: Callable[[], bool]) -> str:
        """See :class:`.WeightVersions`."""
        raise WeightsRefused(
            "an instance of several workers (-tp, -pp) cannot change its weights yet: start the mesh anew"
        )

    def switch(self, update: WeightUpdate, in_flight: InFlight) -> None:
        """See :class:`.WeightVersions`."""
        raise AssertionError("nothing was prepared")

    def discard(self, update: str) -> None:
        """See :class:`.WeightVersions`."""

    def read_again(self, should_stop: Callable[[], bool]) -> None:
        """See :class:`.ReadsAgain`."""
        raise AssertionError("nothing was given back")

    def use_again(self) -> None:
        """See :class:`.ReadsAgain`."""
        raise AssertionError("nothing was given back")


class OrdersFollowing:
    """Follows standing orders between two turns of the step loop."""

    def __init__(
        self,
        membership: MemberConnection,
        server: Server,
        core: EngineCore,
        executor: Executor,
        on_new_weights: Callable[[WeightVersion], None],
        adapters: Sequence[AdapterSource] = (),
        *,
        in_groups: bool = False,
    ) -> None:
        """``on_new_weights`` is called with each version that comes into use.

        ``adapters`` are in memory. ``in_groups``: weights change where the instance enters a group, and at no
        other time.
        """
        self._in_groups = in_groups
        self._is_finishing = False
        """Whether requests end on the weights in use before others take their place."""
        self._membership = membership
        self._server = server
        self._core = core
        self._on_new_weights = on_new_weights
        versions = self._versions(executor)
        self._updating = WeightsUpdating(versions, server.wake)
        give_back = getattr(executor, "give_back", keep_memory)
        self._sleeping = SleepFollowing(core, give_back, versions, server.wake)
        memory: AdapterMemory | None = getattr(executor, "adapters", None)
        self._adapters: AdapterLoading | None = None
        """None: this instance has no room for adapters."""
        if memory is not None:
            self._adapters = AdapterLoading(memory, adapters, server.wake)
        self._adapters_seen: tuple[StandingOrders, int] | None = None
        """Orders and changes of adapters at the last look."""
        membership.follow_orders(server.wake)

    def __repr__(self) -> str:
        return f"<OrdersFollowing {self._membership.orders.revision}, {self._updating!r}>"

    def follow(self) -> bool:
        """Do what the newest orders ask for; returns whether they are in effect.

        Raises:
            engine.weight_versions.updating.WeightsLost: the mesh's weights cannot be used here.
            engine.adapters.loading.AdaptersLost: one of its adapters cannot be served here.
        """
        orders, sleeping = self._membership.orders, self._sleeping
        has_adapters = self._adapters is None or self._follow_adapters(self._adapters, orders)
        sleeping.look()
        self._is_finishing = False
        has_weights = self._updating.follow(
            orders, self._may_switch, lambda update: sleeping.may_prepare(update, orders)
        )
        self._membership.report_weights(self._updating.report())
        if has_weights:
            self._core.hold_steps(False)
        if self._membership.follows_orders:
            return True
        if self._is_finishing and not has_weights:
            return False  # new requests are held back until those of the old weights have ended
        is_alone = self._updating.is_idle
        goes_on = orders.standstill is None and not sleeping.is_whole
        if goes_on and not (has_weights and sleeping.follow(orders, is_alone=is_alone)):
            return False  # what was given back comes before the first step
        stands_still = self._server.set_pause(orders.standstill)
        if not (has_weights and has_adapters and stands_still):
            return False
        if not sleeping.follow(orders, is_alone=is_alone):
            return False
        self._membership.in_effect(orders)
        what = "not paused" if orders.standstill is None else f"paused ({orders.standstill})"
        logger.info("standing orders %d are in effect here: %s", orders.revision, what)
        return True

    @property
    def may_be_ready(self) -> bool:
        """Whether the mesh's weights are in use here, or prepared for the first group."""
        orders = self._membership.orders
        return self._membership.follows_orders or (self._in_groups and self._updating.has(orders.weights))

    @property
    def lacks_adapters_of_peers(self) -> bool:
        """Whether rows of a group may have adapters that are not in memory here.

        That is also those that only requests in flight have. They go soon, or are read.
        """
        if self._adapters is None or not self._in_groups:
            return False
        return not self._adapters.has_all(self._membership.orders)

    # ---- groups of spread experts

    def await_weights(self, number: int, should_stop: Callable[[], bool]) -> None:
        """Wait until the weights of a group are here, in a background thread.

        They are prepared or in use, and not given back for a sleep.

        Raises:
            ReadingStopped: ``should_stop`` returned True.
            RuntimeError: later ones are in use here.
        """
        while not self._has(number):
            if should_stop():
                raise ReadingStopped
            time.sleep(LOOK_INTERVAL)

    def enter(self, number: int) -> None:
        """Go over to the weights of a group, between two steps.

        Raises:
            NoGroup: they are not here.
        """
        try:
            self._updating.enter(self._membership.orders, number)
        except WeightsLost as error:
            raise NoGroup(str(error)) from error
        self._membership.report_weights(self._updating.report())

    def _has(self, number: int) -> bool:
        if number < (in_use := self._updating.report().number):
            raise RuntimeError(f"its weights {number} are older than those in use, {in_use}")
        weights = self._membership.orders.weights
        if number == in_use:
            return self._sleeping.has_weights
        return number == weights.number and self._updating.has(weights)

    def _may_switch(self) -> bool:
        return not self._in_groups and self._have_finished() and self._core.hold_steps(True)

    def _have_finished(self) -> bool:
        """Whether requests that end on the weights in use have ended.

        New ones are held back meanwhile.
        """
        orders = self._membership.orders
        if orders.in_flight is not InFlight.FINISH:
            return True
        if orders.standstill in (PauseMode.KEEP, PauseMode.ABORT):
            return self._core.is_empty  # none can end before the mesh goes on
        self._is_finishing = True
        return self._server.set_pause(PauseMode.WAIT)

    def close(self) -> None:
        """Stop preparing weights, and reading adapters."""
        self._updating.close()
        self._sleeping.close()
        if self._adapters is not None:
            self._adapters.close()

    def _follow_adapters(self, adapters: AdapterLoading, orders: StandingOrders) -> bool:
        """Read and drop adapters as ordered; returns whether all listed ones are here."""
        has_all = adapters.follow(orders, lambda: self._core.admission.adapters_in_use)
        news = orders, adapters.num_changes
        if news == self._adapters_seen:
            return has_all
        self._adapters_seen = news
        self._core.admission.set_adapters(adapters.names)
        reports = self._core.reports
        if (lacks := adapters.lacking(orders)) != reports.lacks_adapters:
            reports.lacks_adapters = lacks
            self._server.tell_capacity()
        self._membership.report_adapters(adapters.report(orders))
        return has_all

    def _versions(self, executor: Executor) -> FixedWeights | InstanceWeights:
        workers = getattr(executor, "new_weights", None)
        if workers is None:
            return FixedWeights()
        return InstanceWeights(
            workers,
            self._core,
            self._server.end_requests,
            self._changed,
            lambda: next((each.weights for each in executor.arithmetic()), ""),
            in_groups=self._in_groups,
        )

    def _changed(self, version: WeightVersion) -> None:
        """Tell the coordinator and routers that the weights are others now."""
        self._sleeping.has_new_weights()
        self._on_new_weights(version)
        self._server.tell_capacity()
