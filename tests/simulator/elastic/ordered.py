"""Schedules with new weights, sleeps and pauses.

All that step under one epoch have the weights of its plan, no version comes back, and nobody computes while a
member of its group is without weights: through deaths, joins and restarts of the coordinator.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from coordinator.membership.operations import ACCEPTED, DONE
from coordinator.membership.records import Instruction
from coordinator.messages import (
    Evidence,
    GroupPlan,
    MemoryPart,
    OperatorCommand,
    PauseMode,
    SetSleep,
    StandingOrders,
    State,
    UpdateWeights,
    WakeUp,
    WeightUpdate,
)
from engine.weight_versions.following import DiscardWeights, Following, PrepareWeights
from parallel.lockstep import StepHeader
from tests.simulator.elastic.checker import Rule
from tests.simulator.elastic.group import Group
from tests.simulator.elastic.instance import Phase
from tests.simulator.elastic.paused import ASK_INTERVAL, PausedInstance, PausedWorld
from tests.simulator.elastic.world import Request, World
from tests.simulator.schedule import run_schedule

FIRST = "the first directory"
PARTS = ((MemoryPart.WEIGHTS,), (MemoryPart.KV_CACHE,), tuple(MemoryPart))


class OrderedInstance(PausedInstance):
    """A process that follows weight versions and sleeps."""

    world: OrderedWorld

    def __init__(self, world: OrderedWorld, number: int, rank: int | None) -> None:
        super().__init__(world, number, rank)
        self.following = Following()
        self.content = FIRST
        """Directory whose weights are in use."""
        self.update = ""
        """Id of the update that brought them."""
        self._next_content = self._next_update = ""
        self.without: set[MemoryPart] = set()
        """Memory that is given back."""
        self._is_reading = False
        self._has_rows = False
        """Whether anybody has rows in the step under way."""

    def _follow(self) -> None:
        orders = self.member_state.orders
        if self.following.stops(orders):
            self.following.failed("")
        if isinstance(self.following.next(orders), DiscardWeights):
            self.following.discarded()
        action = self.following.next(orders)
        if isinstance(action, PrepareWeights) and self._may_prepare(action.update):
            self._begins_to_read()
            self.following.begun(action.update.version.update)
            delay = 1 + self.world.up_to(self.world.settings.prepare)
            self.world.after(self, delay, self._prepared, action.update)
        report = self.following.report()
        if report != self.member_state.weights:
            self.member_state.weights = report
            self.say()
        if orders.standstill is None and self.without and not self._has_done(orders):
            return  # what was given back comes before the first step
        super()._follow()

    def _may_prepare(self, update: WeightUpdate) -> bool:
        """Whether nothing is to be read first.

        Weights that were given back are, unless the new ones take their place.
        """
        if MemoryPart.WEIGHTS not in self.without:
            return True
        return not self._is_reading and update.version == self.member_state.orders.weights

    def _begins_to_read(self) -> None:
        if self._is_reading or self.following.preparing:
            self.world.checker.broken(Rule.VERSIONS, f"{self.name} reads two versions at once")

    def _prepared(self, update: WeightUpdate) -> None:
        """A version is prepared, in the background."""
        if self.following.preparing != update.version.update:
            return
        if self.world.is_torn(update.version.source):
            self.following.failed("a file is cut off")
        else:
            self._next_content, self._next_update = self._read_weights(update), update.version.update
            self.following.prepared(update.version.source)
            self.world.have_prepared.add((update.version.update, self.name))
        self._look_again()

    def _read_weights(self, update: WeightUpdate) -> str:
        """The directory that is read."""
        return update.version.source

    def _has_done(self, orders: StandingOrders) -> bool:
        if not self.following.is_in_effect(orders):
            return False
        sleep = orders.sleep
        if sleep is not None and not sleep.gives_back:
            return True
        wanted = set() if sleep is None else set(sleep.parts)
        if not wanted <= self.without and not self.following.is_idle:
            return False
        self.without |= wanted
        self.without -= {MemoryPart.KV_CACHE} - wanted
        if self.without == wanted:
            return True
        if not self._is_reading and self.following.is_idle:
            self._begins_to_read()
            self._is_reading = True
            self.world.after(self, 1 + self.world.up_to(self.world.settings.prepare), self._took_back)
        return False

    def _took_back(self) -> None:
        self._is_reading = False
        sleep = self.member_state.orders.sleep
        self.without = set() if sleep is None else self.without & set(sleep.parts)
        self._look_again()

    def _look_again(self) -> None:
        if self.phase is Phase.LOADING:
            self._follow()
        self._poke()

    def _loaded(self) -> None:
        """It catches up with the mesh before it takes part."""
        self._follow()
        orders = self.member_state.orders
        follows = self.member_state.in_effect >= orders.revision
        if follows or self.following.has(orders.weights):
            super()._loaded()
        else:
            self.world.after(self, 5, self._loaded)

    # ---- groups

    def _read(self, form: GroupPlan) -> None:
        if self.recovery.target is not form:
            return
        weights, in_use = self.member_state.orders.weights, self.following.number
        if form.weights < in_use:
            self._carry_out(self.recovery.failed(form.epoch))
            return
        if form.weights == in_use:
            has_them = MemoryPart.WEIGHTS not in self.without
        else:
            has_them = form.weights == weights.number and self.following.has(weights)
        if has_them:
            super()._read(form)
        else:
            self.world.after(self, 2, self._read, form)

    def _enter(self, form: GroupPlan) -> None:
        if form.weights != self.following.number:
            self._switch(form.weights)
        super()._enter(form)

    def _switch(self, number: int) -> None:
        if number < self.following.number:
            self.world.checker.broken(Rule.VERSIONS, f"{self.name} goes back to weights {number}")
        self.world.checker.counts["switches"] += 1
        self.following.switched(number)
        self.content, self.update = self._next_content, self._next_update
        self.without.discard(MemoryPart.WEIGHTS)
        self.member_state.weights = self.following.report()

    def _decide(self, headers: list[StepHeader]) -> None:
        self._has_rows = any(header.num_tokens for header in headers)
        if self._has_rows and MemoryPart.WEIGHTS in self.without:
            self.world.is_asked_asleep(self)
            assert self.group is not None
            self._interrupted(self.group, [], Evidence.CLOSED)
            return
        super()._decide(headers)

    def _computed(self, group: Group) -> None:
        if self.phase is Phase.COMPUTING and group is self.group and self._has_rows:
            self.world.computes(self, group)
        super()._computed(group)


class OrderedWorld(PausedWorld):
    """The mesh of one schedule, with a trainer and an operator."""

    instance_class = OrderedInstance

    def __init__(self, seed: int) -> None:
        self.newest = 0
        """Highest version that was answered as in use everywhere."""
        self.is_asleep = False
        """Whether a sleep was answered as done, and nothing came after."""
        self._asleep_by = 0
        """Revision of the orders of that sleep."""
        self.have_prepared: set[tuple[str, str]] = set()
        """Updates and the instances that had prepared them."""
        self._waited_for: tuple[int, str] = 0, ""
        """A coordinator, and the update that its orders had when it was last seen."""
        self._orders_to_come = 0
        super().__init__(seed)
        draw = self._draw = random.Random(f"orders {seed}")
        self._torn = draw.random() < 0.3
        wanted: list[Callable[[], None]] = [self._updates] * draw.choice((1, 2, 4))
        wanted += [self._sleeps] * draw.choice((0, 1, 2))
        self._orders_to_come = len(wanted)
        for what in wanted:
            self.after(None, 50 + draw.randrange(self.settings.span + 300), what)
        self._bound += 4_000 * len(wanted)
        self._num_commands = 0

    def is_torn(self, source: str) -> bool:
        """Whether a directory has a file that is cut off."""
        return source.endswith("torn")

    # ---- trainer and operator

    def _name(self, what: str) -> str:
        self._num_commands += 1
        return f"{what} {self._num_commands}"

    def _updates(self) -> None:
        command = self._name("update")
        source = f"/{command}{' torn' if self._torn and self._draw.random() < 0.3 else ''}"
        self._repeat(UpdateWeights(command=command, source=source), partial(self._updated, command))

    def _updated(self, command: str, status: int) -> None:
        self._orders_to_come -= 1
        self.checker.counts[f"updates answered {status}"] += 1
        assert self.registry is not None
        weights = self.registry.view().orders.weights
        if status == DONE and weights.update == command:
            self._note_away()
            self.newest = max(self.newest, weights.number)

    def _sleeps(self) -> None:
        mode = self._draw.choice((PauseMode.KEEP, PauseMode.WAIT))
        parts = self._draw.choice(PARTS)
        self._repeat(SetSleep(command=self._name("sleep"), parts=parts, mode=mode), self._slept)

    def _slept(self, status: int) -> None:
        self.checker.counts[f"sleeps answered {status}"] += 1
        if status == DONE:
            self._note_away()
            self.is_asleep = True
            assert self.registry is not None
            self._asleep_by = self.registry.view().orders.revision
        self.after(None, self._draw.choice((5, 50, 300)), self._wakes)

    def _wakes(self) -> None:
        self.is_asleep = False
        self._repeat(WakeUp(command=self._name("wake")), self._awake)

    def _awake(self, status: int) -> None:
        self.checker.counts[f"wakes answered {status}"] += 1
        self._orders_to_come -= 1
        if status == DONE:
            self._note_away()

    def _carry_out(self, instructions: list[Instruction], sender: str = "") -> None:
        self._look_at_update()
        super()._carry_out(instructions, sender)

    def _look_at_update(self) -> None:
        """Check that all members had prepared an update that is decided now."""
        assert self.registry is not None
        orders, waited_for = self.registry._orders.current, self._waited_for
        update = "" if orders.update is None else orders.update.version.update
        self._waited_for = self.num_coordinators, update
        if waited_for != (self.num_coordinators, orders.weights.update) or not orders.weights.update:
            return
        self.checker.counts["updates decided"] += 1
        members = [each.instance for each in self.registry.view().members if each.state is State.READY]
        if late := [name for name in members if (orders.weights.update, name) not in self.have_prepared]:
            self.checker.broken(Rule.VERSIONS, f"{orders.weights.update} is decided without {late}")

    def _repeat(self, wish: OperatorCommand, then: Callable[[int], None]) -> None:
        """Send a command until its answer is final."""
        answer = self._answer(wish)
        if answer is None or answer.status == ACCEPTED:
            if isinstance(wish, WakeUp | SetSleep):
                self.is_asleep = False  # another command may have come between
            self.after(None, ASK_INTERVAL, self._repeat, wish, then)
            return
        self.note("operator", f"{answer.status} {answer.text}")
        self._disturbed(self.now)
        then(answer.status)

    def _note_away(self) -> None:
        assert self.registry is not None
        known = {member.instance for member in self.registry.view().members}
        self._away |= set(self.instances) - known

    def _coordinator_begins(self) -> None:
        super()._coordinator_begins()
        knowing = [each.member_state.orders for each in self.instances.values() if each.alive]
        if not any(orders.revision for orders in knowing):
            self.is_asleep = False
        if not any(orders.weights.number for orders in knowing):
            self.newest = 0  # all that knew of later versions are dead: it is a new mesh
        if any(each.alive and each.is_away for each in self.instances.values()):
            self.newest, self.is_asleep, self.stopped = 0, False, None  # this one may act without knowing

    # ---- what is checked

    def got_token(self, instance: PausedInstance, request: Request) -> None:
        super().got_token(instance, request)
        assert isinstance(instance, OrderedInstance)
        if instance.name in self._away:
            return
        if self.is_asleep and self._is_remembered(self._asleep_by):
            self.checker.broken(Rule.ASLEEP, f"{instance.name} gives a token after the sleep was done")
        known = max(each.member_state.orders.weights.number for each in self.instances.values() if each.alive)
        if instance.following.number < self.newest <= known:  # else all that knew of it are dead
            self.checker.broken(Rule.VERSIONS, f"{instance.name} uses weights older than {self.newest}")

    def is_asked_asleep(self, instance: OrderedInstance) -> None:
        """An instance without weights is to compute, and breaks the group instead."""
        self.checker.counts["steps refused without weights"] += 1
        if instance.name not in self._away:
            self.checker.broken(Rule.ASLEEP, f"{instance.name} is to compute without weights")

    def computes(self, instance: OrderedInstance, group: Group) -> None:
        """An instance has computed a step of its group."""
        number, content = instance.following.number, instance.content
        if number != group.form.weights:
            self.checker.broken(Rule.VERSIONS, f"{instance.name} uses {number}, not {group.form.weights}")
        for other in self.instances.values():
            assert isinstance(other, OrderedInstance)
            is_same = other.update == instance.update  # two coordinators may have given one number twice
            if other.group is group and other.alive and is_same and other.content != content:
                self.checker.broken(
                    Rule.VERSIONS, f"{instance.name} has {content}, {other.name} {other.content}"
                )
        if MemoryPart.WEIGHTS in instance.without:
            self.checker.broken(Rule.ASLEEP, f"{instance.name} computes without weights")

    @property
    def is_steady(self) -> bool:
        return super().is_steady and not self._orders_to_come


def simulate_ordered(seed: int) -> World:
    """Run the schedule of a seed; see :func:`tests.simulator.schedule.run_schedule`."""
    return run_schedule(seed, OrderedWorld(seed))
