"""Schedules in which operators pause the mesh, and let it go on.

From the answer *done* to a pause until the next command no instance may give a token to a request that the pause
stops, through deaths, joins and restarts.
"""

from __future__ import annotations

import random

from coordinator.membership.operations import CONFLICT, DONE
from coordinator.messages import OperatorAnswer, OperatorCommand, PauseMode, SetPause, StandingOrders, State
from tests.simulator.elastic.checker import Rule
from tests.simulator.elastic.instance import Instance
from tests.simulator.elastic.world import Request, World
from tests.simulator.schedule import run_schedule

ASK_INTERVAL = 20
"""Ticks between two questions whether a command is in effect."""
MODES = (PauseMode.KEEP, PauseMode.KEEP, PauseMode.WAIT)
OPERATOR = b"operator"


class PausedInstance(Instance):
    """A process that follows standing orders."""

    world: PausedWorld

    def __init__(self, world: World, number: int, rank: int | None) -> None:
        super().__init__(world, number, rank)
        self.mode: PauseMode | None = None
        self._late: list[Request] = []
        """Requests that came after a pause that waits for the others."""
        self._rows: list[tuple[Request, int]] = []
        """Those of the step under way."""
        self.member_state.on_orders = self._poke

    @property
    def serves(self) -> bool:
        return super().serves and self.name in self.world.shown

    @property
    def runnable(self) -> list[tuple[Request, int]]:
        if self.mode is PauseMode.KEEP:
            return []
        return [each for each in self.requests if each[0] not in self._late]

    def loop(self) -> None:
        self._follow()
        super().loop()

    def _follow(self) -> None:
        """Follow the newest orders, and report when they are in effect."""
        orders = self.member_state.orders
        if self.member_state.in_effect >= orders.revision:
            return
        self.mode = orders.standstill
        if self.mode is not PauseMode.WAIT:
            self._late = []
        elif self.runnable:
            return
        if not self._has_done(orders):
            return
        self.member_state.in_effect = orders.revision
        self.say()

    def _has_done(self, orders: StandingOrders) -> bool:
        """Whether all beside the pause is done that orders ask for."""
        return True

    def accept(self, request: Request, attempt: int) -> None:
        if self.mode is PauseMode.WAIT and request not in self.world.begun:
            self._late.append(request)
        super().accept(request, attempt)

    def _begin_step(self) -> None:
        self._rows = self.runnable
        everything, self.requests = self.requests, self._rows
        super()._begin_step()
        self.requests = everything

    def _commit(self) -> None:
        scheduled = [request for request, attempt in self._rows if request.attempt == attempt]
        before = {id(request): request.left for request in scheduled}
        others = [each for each in self.requests if each not in self._rows]
        self.requests = [each for each in self.requests if each in self._rows]
        super()._commit()
        self.requests += others
        for request in scheduled:
            if request.left < before[id(request)]:
                self.world.got_token(self, request)


class PausedWorld(World):
    """The mesh of one schedule, and an operator who pauses it."""

    instance_class = PausedInstance

    def __init__(self, seed: int) -> None:
        self.shown: set[str] = set()
        """Instances that routers take for ready."""
        self.begun: list[Request] = []
        """Requests that have tokens."""
        self.stopped: PauseMode | None = None
        """The pause that was answered as done, until the next command."""
        self._stopped_by = 0
        """Revision of the orders that the last answered command gave."""
        self._away: set[str] = set()
        """Instances that the coordinator did not hear then.

        What they had taken goes on when they are back.
        """
        super().__init__(seed)
        chance = self._chance = random.Random(f"pause {seed}")
        self._commands = 0
        self._under_way = False
        self._to_come = chance.choice((1, 1, 2, 3))
        for _ in range(self._to_come):
            self.after(None, 50 + chance.randrange(self.settings.span + 200), self._pauses)
        for _ in range(chance.choice((2, 10))):
            self.after(None, 50 + chance.randrange(self.settings.span + 300), self._arrive)
        self._bound += 3_000 * self._to_come

    # ---- the operator

    def _pauses(self) -> None:
        if self._under_way:
            self._to_come -= 1
            return
        self._under_way = True
        self._commands += 1
        self.after(None, 0, self._ask, f"pause {self._commands}", self._chance.choice(MODES))

    def _ask(self, command: str, mode: PauseMode | None) -> None:
        """Send a command, again until it is in effect."""
        answer = self._answer(SetPause(command=command, mode=mode))
        if answer is not None and answer.status == DONE:
            self.checker.counts[f"{mode or 'resume'} done"] += 1
            self.note("operator", f"{answer.text}")
            self._is_done(mode)
        elif answer is None or answer.status != CONFLICT:
            self.after(None, ASK_INTERVAL, self._ask, command, mode)

    def _is_done(self, mode: PauseMode | None) -> None:
        self._disturbed(self.now)
        if mode is None:
            self._under_way = False
            self._to_come -= 1
            return
        self.stopped = mode
        assert self.registry is not None
        self._stopped_by = self.registry.view().orders.revision
        known = {member.instance for member in self.registry.view().members}
        self._away = set(self.instances) - known
        self.checker.counts["requests in a pause"] += sum(bool(request.left) for request in self.requests)
        self.after(None, self._chance.choice((5, 50, 400)), self._resumes)

    def _resumes(self) -> None:
        self.stopped = None
        self._ask(f"resume {self._commands}", None)

    def _answer(self, wish: OperatorCommand) -> OperatorAnswer | None:
        """The coordinator's answer; None while it is away."""
        if self.registry is None:
            return None
        done = self.registry.handle(OPERATOR, wish, self.clock(None))
        mine = [each for each in done if getattr(each, "peer", None) == OPERATOR]
        self._carry_out([each for each in done if each not in mine])
        message = mine[0].message  # type: ignore[union-attr]
        assert isinstance(message, OperatorAnswer)
        return message

    def _coordinator_begins(self) -> None:
        super()._coordinator_begins()
        if not any(each.alive and each.member_state.orders.revision for each in self.instances.values()):
            self.stopped = None  # all that knew of the pause are dead

    def _is_remembered(self, revision: int) -> bool:
        """Whether anybody is left who has these orders, or later ones."""
        known = [each.member_state.orders.revision for each in self.instances.values() if each.alive]
        if self.registry is not None:
            known.append(self.registry.view().orders.revision)
        return max(known, default=0) >= revision

    # ---- what is checked

    def got_token(self, instance: PausedInstance, request: Request) -> None:
        """A request gets tokens at an instance."""
        has_begun = request in self.begun
        if not has_begun:
            self.begun.append(request)
        if instance.name in self._away or not self._is_remembered(self._stopped_by):
            return
        if self.stopped is PauseMode.KEEP or (self.stopped is PauseMode.WAIT and not has_begun):
            self.checker.broken(Rule.PAUSED, f"{instance.name} computes in a pause ({self.stopped})")

    def _tick(self) -> None:
        if self.registry is not None:
            view = self.registry.view()
            ready = {member.instance for member in view.members if member.state is State.READY}
            self.shown = ready if view.complete else self.shown | ready
        super()._tick()

    @property
    def is_steady(self) -> bool:
        return super().is_steady and not self._to_come


def simulate_paused(seed: int) -> World:
    """Run the schedule of a seed; see :func:`tests.simulator.schedule.run_schedule`."""
    return run_schedule(seed, PausedWorld(seed))
