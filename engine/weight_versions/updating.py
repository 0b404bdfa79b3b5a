"""The thread that prepares new weights of an instance, and the switch between two steps.

:class:`engine.weight_versions.following.Following` decides, and
:class:`engine.weight_versions.contract.WeightVersions` does it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from coordinator.messages import StandingOrders, WeightsReport, WeightUpdate, WeightVersion
from engine.host.background import Chores
from engine.weight_versions.contract import WeightsRefused, WeightsSuperseded, WeightVersions
from engine.weight_versions.following import DiscardWeights, Following, PrepareWeights, SwitchWeights

logger = logging.getLogger(__name__)


class WeightsLost(RuntimeError):
    """Error: this instance cannot follow the mesh to its current weights; the message says why."""


class WeightsUpdating:
    """Follows the weight versions of the standing orders, asked in each turn."""

    def __init__(self, versions: WeightVersions, wake_loop: Callable[[], None]) -> None:
        """``wake_loop``: ends the step loop's sleep; called from any thread."""
        self._versions = versions
        self._wake_loop = wake_loop
        self._following = Following()
        self._lock = threading.Lock()
        self._stops = threading.Event()
        """Set when what is being prepared is not wanted any more."""
        self._is_discarding = False
        self._chores = Chores("weights")

    def __repr__(self) -> str:
        return f"<WeightsUpdating {self._following!r}>"

    def follow(
        self,
        orders: StandingOrders,
        may_switch: Callable[[], bool],
        may_prepare: Callable[[WeightUpdate], bool] = lambda update: True,
    ) -> bool:
        """Do what the orders ask for now; returns whether the version in use is theirs.

        Called in the step thread, between two turns. ``may_switch`` returns whether no step is under way, and
        keeps others from beginning; it is called only when there is something to switch to. ``may_prepare``
        returns False while something else is to be read first.

        Raises:
            WeightsLost: the current version cannot be prepared here.
        """
        with self._lock:
            if self._following.stops(orders):
                self._stops.set()
            problem = self._following.problem(orders)
            action = self._following.next(orders)
        if problem is not None:
            raise WeightsLost(f"weights {orders.weights.number} cannot be used here: {problem}")
        match action:
            case PrepareWeights(update):
                if may_prepare(update):
                    self._begin(update)
            case DiscardWeights(name):
                self._following.discarded()
                self._is_discarding = True
                self._chores.put(lambda: self._discard(name))
            case SwitchWeights(update, in_flight):
                if may_switch():
                    self._versions.switch(update, in_flight)
                    self._following.switched(update.version.number)
        return self._following.is_in_effect(orders)

    @property
    def is_idle(self) -> bool:
        """Whether no version is prepared, and none is about to be prepared or discarded."""
        with self._lock:
            return self._following.is_idle and not self._is_discarding

    def has(self, version: WeightVersion) -> bool:
        """Whether a version is in use, or prepared; from any thread."""
        with self._lock:
            return self._following.has(version)

    def enter(self, orders: StandingOrders, number: int) -> None:
        """Go over to the weights of a group that this instance enters.

        Called in the step thread, between two turns.

        Raises:
            WeightsLost: they are not those of the orders, or not prepared.
        """
        if number == self._following.number:
            return
        if number != orders.weights.number or not self.has(orders.weights):
            raise WeightsLost(f"a group steps with weights {number}, which are not prepared here")
        self._versions.switch(WeightUpdate(orders.weights, orders.in_flight), orders.in_flight)
        with self._lock:
            self._following.switched(number)

    def report(self) -> WeightsReport:
        """How far this instance is, for the coordinator."""
        with self._lock:
            return self._following.report()

    def close(self) -> None:
        """Stop preparing."""
        self._stops.set()
        self._chores.close()

    def _begin(self, update: WeightUpdate) -> None:
        self._stops.clear()
        self._following.begun(update.version.update)
        logger.info("preparing weights %d from %s", update.version.number, update.version.source)
        self._chores.put(lambda: self._prepare(update))

    def _discard(self, name: str) -> None:
        """Give back what was prepared, in the thread."""
        self._versions.discard(name)
        with self._lock:
            self._is_discarding = False
        self._wake_loop()

    def _prepare(self, update: WeightUpdate) -> None:
        """Prepare a version, in the thread."""
        digest = reason = ""
        try:
            digest = self._versions.prepare(update, self._stops.is_set)
        except WeightsSuperseded:
            pass
        except WeightsRefused as error:
            reason = str(error)
        except Exception as error:
            logger.exception("weights %d could not be prepared", update.version.number)
            reason = str(error) or type(error).__name__
        if reason:
            logger.warning("weights %d cannot be used: %s", update.version.number, reason)
        with self._lock:
            if digest:
                self._following.prepared(digest)
            else:
                self._following.failed(reason)
        self._wake_loop()
