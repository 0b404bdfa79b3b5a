"""What one instance does about the weight versions of its standing orders (pure)."""

from __future__ import annotations

import msgspec

from coordinator.messages import InFlight, StandingOrders, WeightsReport, WeightUpdate, WeightVersion


class PrepareWeights(msgspec.Struct, frozen=True):
    """Instruction: prepare this update in the background."""

    update: WeightUpdate


class SwitchWeights(msgspec.Struct, frozen=True):
    """Instruction: go over to this version, which is prepared, between two steps."""

    update: WeightUpdate
    in_flight: InFlight


class DiscardWeights(msgspec.Struct, frozen=True):
    """Instruction: give back what was prepared for this update."""

    update: str


class Following:
    """The version in use, and the one that is prepared."""

    def __init__(self) -> None:
        self.number = 0
        """Number of the version in use."""
        self._in_use = ""
        """Id of the update that brought it."""
        self.preparing = ""
        """Id of the update that is being prepared."""
        self._prepared = self._digest = self._failed = self._reason = ""

    def __repr__(self) -> str:
        return f"<Following {self.number}, prepared {self._prepared!r}, preparing {self.preparing!r}>"

    def next(self, orders: StandingOrders) -> PrepareWeights | SwitchWeights | DiscardWeights | None:
        """What to do now; the caller does it, and reports what came of it."""
        must = not self.is_in_effect(orders)
        update = WeightUpdate(orders.weights, orders.in_flight) if must else orders.update
        if update is None or update.version.update != self._prepared:
            if self._prepared and not self.preparing:
                return DiscardWeights(self._prepared)
            if update is None or update.version.update in (self.preparing, self._failed):
                return None
            return None if self.preparing else PrepareWeights(update)
        return SwitchWeights(update, orders.in_flight) if must else None

    def stops(self, orders: StandingOrders) -> bool:
        """Whether what is being prepared is not wanted any more."""
        wanted = set() if self.is_in_effect(orders) else {orders.weights.update}
        if orders.update is not None:
            wanted.add(orders.update.version.update)
        return bool(self.preparing) and self.preparing not in wanted

    def problem(self, orders: StandingOrders) -> str | None:
        """Why this instance can never follow the orders; None if it may."""
        must = not self.is_in_effect(orders)
        return self._reason if must and orders.weights.update == self._failed else None

    def is_in_effect(self, orders: StandingOrders) -> bool:
        """Whether the version of the orders is in use, or a later one.

        Two coordinators that knew nothing of each other may have given one number to different weights.
        """
        weights = orders.weights
        is_other = weights.number == self.number and weights.update != self._in_use
        return not is_other and self.number >= weights.number

    def has(self, version: WeightVersion) -> bool:
        """Whether a version is in use, or prepared."""
        if version.number == self.number:
            return version.update == self._in_use
        return version.number > self.number and version.update == self._prepared

    @property
    def is_idle(self) -> bool:
        """Whether no version is prepared, or about to be."""
        return not self.preparing and not self._prepared

    def report(self) -> WeightsReport:
        """How far this instance is, for the coordinator."""
        return WeightsReport(self.number, self._prepared, self._digest, self._failed, self._reason)

    # ---- what came of it

    def begun(self, update: str) -> None:
        self.preparing = update

    def prepared(self, digest: str) -> None:
        """Note that the update under way is prepared."""
        self._prepared, self._digest, self.preparing = self.preparing, digest, ""

    def failed(self, reason: str) -> None:
        """Note that the update under way cannot be prepared; empty: it was stopped."""
        if reason:
            self._failed, self._reason = self.preparing, reason
        self.preparing = ""

    def switched(self, number: int) -> None:
        """Note that the prepared version is in use."""
        self.number, self._in_use = number, self._prepared
        self._prepared = self._digest = ""

    def discarded(self) -> None:
        self._prepared = self._digest = ""
