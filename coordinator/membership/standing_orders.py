"""Standing orders of the mesh: their changes, and how far its instances follow (pure).

Part of :mod:`coordinator.membership.registry`. Instances register with the orders that they have, so a
coordinator that is started again has them from those. docs/design/weight-versions.md has the rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from coordinator.membership.operations import ACCEPTED, CONFLICT, DONE
from coordinator.membership.records import Record, Records
from coordinator.messages import OperatorAnswer, PauseMode, SetPause, StandingOrders, State, is_same_but_name

GENERATION = 2**20
"""Step between the revisions of one coordinator process and those of the next.

A coordinator begins above all revisions of its predecessors, also those that reached nobody who is here.
"""
STEPPING = (State.READY, State.DRAINING, State.DRAINED)
"""States of instances that compute.

With spread experts a drained one computes for others until it leaves.
"""
MOST_COMMANDS = 1000
"""Commands that are remembered: their senders still repeat them."""


class Orders:
    """The orders of the mesh, and which instances do not follow them yet."""

    def __init__(
        self,
        token: str,
        records: Records,
        knows_all: Callable[[], bool],
        left_out: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """``knows_all``: whether all live instances have been heard of.

        ``left_out``: names of instances that no group takes, as others do not reach them.
        """
        self._token = token
        self._records = records
        self._knows_all = knows_all
        self._left_out = left_out
        self.current = StandingOrders(revision=GENERATION, token=token)
        self._learned = 0
        """Highest revision that an instance brought from an earlier coordinator."""
        self._is_asked = False
        """Whether an operator has had a command for this coordinator, beside pauses."""
        self._pauses = False
        """Whether an operator has had a command to pause or resume for it."""
        self._overruled: deque[str] = deque(maxlen=MOST_COMMANDS)
        """Commands about the pause that later ones have taken the place of."""

    def __repr__(self) -> str:
        return f"<Orders {self.current}>"

    # ---- from instances

    def learn(self, theirs: StandingOrders | None) -> None:
        """Take over an instance's orders from an earlier coordinator, if they are the newest.

        After a command to this coordinator its own count. Weight version and list of adapters never go back:
        the highest that any instance may use is the mesh's.
        """
        if theirs is None or theirs.token in ("", self._token):
            return
        ours = self.current
        weights = max(ours.weights, theirs.weights, key=lambda each: each.number)
        adapters = max(ours.adapters, theirs.adapters, key=lambda each: each.number)
        if theirs.revision > self._learned:
            if not self._is_asked:
                pause = {"pause": ours.pause, "command": ours.command} if self._pauses else {}
                ours = msgspec.structs.replace(theirs, **pause)
                if ours.sleep is not None and ours.pause is PauseMode.WAIT:
                    ours = msgspec.structs.replace(ours, pause=PauseMode.KEEP)
            self._learned = theirs.revision
        revision = max(self.current.revision, (self._learned // GENERATION + 1) * GENERATION)
        ours = msgspec.structs.replace(
            ours, weights=weights, adapters=adapters, revision=revision, token=self._token
        )
        if ours == self.current:
            return
        self._change(ours)
        for record in self._records.values():  # some came with older ones, before these were known
            record.follows_orders &= self._has_them(record)

    def for_newcomers(self) -> StandingOrders:
        """The orders that an instance is welcomed with."""
        return self.current

    def heard(self, record: Record) -> StandingOrders | None:
        """Take in how far an instance is; returns the orders if it has others."""
        has_them = self._has_them(record)
        if has_them and record.orders.in_effect and record.state is State.READY:
            record.follows_orders = True
        return None if has_them else self.current

    # ---- from operators

    def set_pause(self, wish: SetPause) -> OperatorAnswer:
        """Pause or resume the mesh; the same command again asks whether that is in effect."""
        if wish.command != self.current.command:
            if wish.command in self._overruled:
                text = "a later command to pause or resume has taken the place of this one"
                return OperatorAnswer(command=wish.command, status=CONFLICT, text=text)
            self._overruled.append(self.current.command)
            self._pauses = True
            waits_asleep = wish.mode is PauseMode.WAIT and self.current.sleep is not None
            mode = PauseMode.KEEP if waits_asleep else wish.mode
            self._change(msgspec.structs.replace(self.current, pause=mode, command=wish.command))
        waits = self.behind()
        what = f"paused ({wish.mode})" if wish.mode is not None else "resumed"
        if not waits:
            return OperatorAnswer(command=wish.command, status=DONE, text=f"all instances are {what}")
        text = f"the mesh is being {what}; not in effect yet: {', '.join(waits)}"
        return OperatorAnswer(command=wish.command, status=ACCEPTED, text=text)

    # ---- who follows

    def behind(self) -> list[str]:
        """The instances that serve and do not follow the orders yet, as text for people.

        One that is left out computes nothing, and cannot go over to new weights. It follows when it is let
        back.
        """
        out = self._left_out()
        late = [
            f"instance {record.rank}"
            for record in self._records.values()
            if record.state in STEPPING and record.instance not in out and not self._follows(record)
        ]
        return late if late or self._knows_all() else ["instances that have not registered again yet"]

    def _follows(self, record: Record) -> bool:
        return self._has_them(record) and record.orders.in_effect

    def _has_them(self, record: Record) -> bool:
        """Whether an instance has these orders, or has none and needs none."""
        report, ours = record.orders, self.current
        is_blank = report.revision == 0 and is_same_but_name(ours, StandingOrders())
        return is_blank or report.revision == ours.revision

    def change(self, **fields: Any) -> None:
        """Give orders with some other fields."""
        self._is_asked = True
        self._change(msgspec.structs.replace(self.current, **fields))

    @property
    def change_weights(self) -> bool:
        """Whether instances may have other weights than those that the mesh was started with."""
        return self.current.weights.number > 0

    @property
    def change_adapters(self) -> bool:
        """Whether the mesh may serve other adapters than it was started with."""
        return self.current.adapters.number > 0

    @property
    def knows_all(self) -> bool:
        """Whether all live instances have been heard of."""
        return self._knows_all()

    def _change(self, orders: StandingOrders) -> None:
        self.current = msgspec.structs.replace(orders, revision=orders.revision + 1, token=self._token)


def in_words(orders: StandingOrders) -> str:
    """Orders in words, for the log."""
    update, weights = orders.update, orders.weights
    sleep = orders.sleep
    parts = [f"paused ({orders.pause})" if orders.pause is not None else "not paused"]
    if sleep is not None:
        without = " and ".join(sleep.parts)
        parts.append(f"asleep, {'without' if sleep.gives_back else 'to be without'} {without or 'nothing'}")
    if weights.number:
        parts.append(f"weights {weights.number} ({weights.label})")
    if update is not None:
        parts.append(f"weights {update.version.number} to be prepared from {update.version.source}")
    if orders.adapters.number:
        parts.append(f"{len(orders.adapters.adapters)} adapters, {len(orders.adapters.retired)} retired")
    if orders.adapter_load is not None:
        parts.append(f"adapter {orders.adapter_load.source.name} to be read")
    return ", ".join(parts)
