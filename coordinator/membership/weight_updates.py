"""Updates of the mesh's weights: begun, decided or abandoned (pure).

Part of :mod:`coordinator.membership.registry`. An update is in the standing orders while instances prepare
it. Once all that serve have prepared it, with one digest, the orders name it as the current version, and
instances go over. Until then it can be abandoned, and nothing has changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from coordinator.membership.operations import ACCEPTED, CONFLICT, DONE, FAILED, UNAVAILABLE
from coordinator.membership.records import Note, Record, Records
from coordinator.membership.standing_orders import MOST_COMMANDS, Orders
from coordinator.messages import (
    MemoryPart,
    OperatorAnswer,
    State,
    UpdateWeights,
    WeightUpdate,
    WeightVersion,
)

PREPARE_TIMEOUT = 600.0
"""Seconds for all instances to prepare new weights."""
MOST_ABANDONED = 100
"""Abandoned updates whose reasons are remembered, for senders that ask again."""


class WeightUpdates:
    """The update under way, and why earlier ones were abandoned."""

    def __init__(self, orders: Orders, records: Records) -> None:
        self._orders = orders
        self._records = records
        self._abandoned: dict[str, str] = {}
        """Reasons by id of the update."""
        self._overtaken: deque[str] = deque(maxlen=MOST_COMMANDS)
        """Ids of updates whose weights were current when another one began."""
        self._watched: tuple[str, float] = ("", 0.0)
        """The update that is waited for, and until when."""

    def __repr__(self) -> str:
        update = self._orders.current.update
        return f"<WeightUpdates {update.version if update is not None else 'none under way'}>"

    def begin(self, wish: UpdateWeights) -> OperatorAnswer:
        """Begin an update; the same command again asks how far it is."""
        known = self._progress(wish.command)
        if known is not None:
            return known
        orders = self._orders.current
        number = orders.weights.number + 1 if wish.number is None else wish.number
        if (update := orders.update) is not None:
            text = f"another update is under way: {_shown(update.version)}"
            return _answer(wish.command, CONFLICT, text)
        if number <= orders.weights.number:
            text = f"weights {number} are no later version than the current one, {_shown(orders.weights)}"
            return _answer(wish.command, CONFLICT, text)
        sleep = orders.sleep
        if sleep is not None and MemoryPart.WEIGHTS in sleep.parts:
            text = "instances sleep without their weights: wake them up first, with the part weights"
            return _answer(wish.command, CONFLICT, text)
        if not self._orders.knows_all:  # a later version may be in use
            return _answer(wish.command, ACCEPTED, "instances have not registered again yet")
        if not self._serving():
            return _answer(wish.command, UNAVAILABLE, "no instance serves")
        version = WeightVersion(number, wish.label or str(number), wish.source, update=wish.command)
        self._overtaken.append(orders.weights.update)
        self._orders.change(update=WeightUpdate(version, wish.in_flight))
        return _answer(wish.command, ACCEPTED, f"instances prepare {_shown(version)}")

    def go_on(self, now: float) -> Iterator[Note]:
        """Decide or abandon the update under way, if it is time."""
        update = self._orders.current.update
        if update is None:
            return
        version = update.version
        if self._watched[0] != version.update:
            self._watched = version.update, now + PREPARE_TIMEOUT
        serving = self._serving()
        why = self._problem(serving, version, is_late=now > self._watched[1])
        if why is not None:
            self._abandoned[version.update] = why
            while len(self._abandoned) > MOST_ABANDONED:
                self._abandoned.pop(next(iter(self._abandoned)))
            self._orders.change(update=None)
            yield Note(f"the update to {_shown(version)} is abandoned: {why}", warning=True)
            return
        if not serving or not self._orders.knows_all or self._missing(serving, version):
            return
        decided = msgspec.structs.replace(version, digest=serving[0].weights.digest)
        self._orders.change(weights=decided, in_flight=update.in_flight, update=None)
        yield Note(f"all instances have prepared {_shown(decided)}, digest {decided.digest}: they go over")

    # ----

    def _progress(self, command: str) -> OperatorAnswer | None:
        """How far the update of this command is; None if it is not known."""
        orders, update = self._orders.current, self._orders.current.update
        if command in self._abandoned:
            return _answer(command, FAILED, self._abandoned[command])
        if update is not None and update.version.update == command:
            missing = (
                ", ".join(self._missing(self._serving(), update.version)) or "the coordinator's decision"
            )
            return _answer(command, ACCEPTED, f"{_shown(update.version)} are prepared; missing: {missing}")
        if orders.weights.update == command:
            if waits := self._orders.behind():
                text = f"{_shown(orders.weights)} are to be in use; not yet on {', '.join(waits)}"
                return _answer(command, ACCEPTED, text)
            return _answer(command, DONE, f"{_shown(orders.weights)} are in use on all instances")
        if command in self._overtaken:
            return _answer(command, DONE, f"later weights have taken their place, {_shown(orders.weights)}")
        return None

    def _serving(self) -> list[Record]:
        """The instances whose word counts.

        One that drains leaves: it need not follow.
        """
        return [record for record in self._records.values() if record.state is State.READY]

    def _missing(self, serving: list[Record], version: WeightVersion) -> list[str]:
        return [f"instance {each.rank}" for each in serving if each.weights.prepared != version.update]

    def _problem(self, serving: list[Record], version: WeightVersion, *, is_late: bool) -> str | None:
        """Why the update must be abandoned; None if it need not."""
        current = self._orders.current.weights
        if version.number <= current.number:
            return f"an instance came back with a later version, {_shown(current)}"
        for record in serving:
            if record.weights.failed == version.update:
                return f"instance {record.rank}: {record.weights.reason}"
        missing = self._missing(serving, version)
        if is_late:
            what = ", ".join(missing) or "instances that have not registered again"
            return f"not prepared within {PREPARE_TIMEOUT:.0f} s: {what}"
        digests = {each.weights.digest for each in serving if each.weights.prepared == version.update}
        if len(digests) > 1:
            found = ", ".join(sorted(digests))
            return f"instances have read different weights from {version.source} (digests {found})"
        return None


def _shown(version: WeightVersion) -> str:
    return f"weights {version.number} ({version.label})"


def _answer(command: str, status: int, text: str) -> OperatorAnswer:
    return OperatorAnswer(command=command, status=status, text=text)
