"""Sleep of the mesh as a standing order: begun, gone through, ended (pure).

Part of :mod:`coordinator.membership.registry`. Falling asleep has two parts: all stand still, then all give
memory back. Waking has the same two the other way round. The coordinator begins the second one when the
first is in effect on all instances.
"""

from __future__ import annotations

from collections import deque

import msgspec

from coordinator.membership.operations import ACCEPTED, CONFLICT, DONE
from coordinator.membership.standing_orders import MOST_COMMANDS, Orders
from coordinator.messages import MemoryPart, MeshSleep, OperatorAnswer, PauseMode, SetSleep, WakeUp


class SleepOrders:
    """Commands to sleep and to wake up, and what follows from them."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._overruled: deque[str] = deque(maxlen=MOST_COMMANDS)
        """Commands that later ones have taken the place of."""

    def __repr__(self) -> str:
        return f"<SleepOrders {self._orders.current.sleep}>"

    @property
    def changes(self) -> bool:
        """Whether the mesh falls asleep, or wakes up."""
        sleep = self._orders.current.sleep
        return sleep is not None and not (sleep.gives_back and sleep.parts)

    def begin(self, wish: SetSleep) -> OperatorAnswer:
        """Let the mesh fall asleep; the same command again asks whether it has."""
        orders = self._orders.current
        if wish.command != orders.sleep_command:
            if orders.update is not None and MemoryPart.WEIGHTS in wish.parts:
                text = "new weights are prepared: wait until they are in use"
                return OperatorAnswer(command=wish.command, status=CONFLICT, text=text)
            if (refused := self._refused(wish.command)) is not None:
                return refused
            before = orders.sleep if orders.sleep is not None else MeshSleep(mode=wish.mode)
            sleep = msgspec.structs.replace(
                before, parts=_sorted({*before.parts, *wish.parts}), level=max(before.level, wish.level)
            )
            self._give(sleep, wish.command)
        return self._answer(wish.command)

    def end(self, wish: WakeUp) -> OperatorAnswer:
        """Let the mesh take memory back; the same command again asks whether it has."""
        orders = self._orders.current
        if wish.command != orders.sleep_command:
            if (refused := self._refused(wish.command)) is not None:
                return refused
            sleep = orders.sleep
            if sleep is not None:
                parts = _sorted(set(sleep.parts) - set(wish.parts or MemoryPart))
                sleep = msgspec.structs.replace(sleep, parts=parts)
            self._give(sleep, wish.command)
        return self._answer(wish.command)

    def go_on(self, *, is_settled: bool) -> None:
        """Begin the second part of falling asleep or waking up, if it is time.

        ``is_settled``: whether no group of spread experts is about to form. None is while weights lack.
        """
        sleep = self._orders.current.sleep
        if sleep is None or not self.changes or self._orders.behind():
            return
        if sleep.parts and not is_settled:
            return
        self._orders.change(sleep=msgspec.structs.replace(sleep, gives_back=True) if sleep.parts else None)

    # ----

    def _give(self, sleep: MeshSleep | None, command: str) -> None:
        self._overruled.append(self._orders.current.sleep_command)
        pause = self._orders.current.pause
        if sleep is not None and pause is PauseMode.WAIT:
            pause = PauseMode.KEEP  # nobody could tell afterwards which requests had come before it
        self._orders.change(sleep=sleep, sleep_command=command, pause=pause)

    def _refused(self, command: str) -> OperatorAnswer | None:
        """Why a new command cannot be obeyed now; None if it can."""
        if command in self._overruled:
            text = "a later command to sleep or to wake up has taken the place of this one"
            return OperatorAnswer(command=command, status=CONFLICT, text=text)
        if not self._orders.knows_all:
            text = "instances have not registered again yet"
            return OperatorAnswer(command=command, status=ACCEPTED, text=text)
        return None

    def _answer(self, command: str) -> OperatorAnswer:
        sleep, waits = self._orders.current.sleep, self._orders.behind()
        what = "awake" if sleep is None else f"asleep, without {' and '.join(sleep.parts) or 'nothing'}"
        if self.changes or waits:
            late = ", ".join(waits) or "the next part"
            text = f"the mesh is to be {what}; not in effect yet: {late}"
            return OperatorAnswer(command=command, status=ACCEPTED, text=text)
        return OperatorAnswer(command=command, status=DONE, text=f"all instances are {what}")


def _sorted(parts: set[MemoryPart]) -> tuple[MemoryPart, ...]:
    return tuple(sorted(parts))
