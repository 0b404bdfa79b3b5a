"""Schedules in which the load of experts is balanced, too.

Copies of experts, moves for loads that shift, operators who ask for them, and moves that fail: what is read
for them cannot be read.
"""

from __future__ import annotations

import random

import msgspec

from coordinator.membership.rebalancing import QUIET
from coordinator.messages import Balancing, GroupPlan, Rebalance
from parallel.balancing.balance import Terms, least_copies
from parallel.placement import Seats
from tests.simulator.elastic.instance import Instance
from tests.simulator.elastic.settings import TICKS_PER_SECOND
from tests.simulator.elastic.world import World
from tests.simulator.schedule import run_schedule

TOKEN_ROWS = (1, 1, 1, 5, 40, 300, 2000)
"""Rows of an expert for each token: with many a difference is no chance."""
QUIET_TICKS = int(QUIET * TICKS_PER_SECOND)


class BalancedWorld(World):
    """The mesh of one schedule, with ``--enable-eplb``."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        chance = self._chance = random.Random(f"balance {seed}")
        self.num_layers = 2
        self._shift()
        self.mesh_settings = msgspec.structs.replace(
            self.mesh_settings,
            balancing=Balancing(
                window_size=chance.choice((1, 2, 5)),
                windows=chance.choice((1, 2)),
                num_redundant=chance.choice((0, 1, 4, 8, 8, 16, 16)),
                survive=chance.choice((0, 1, 1, 1, 2)),
            ),
        )
        self._fails = chance.choice((0.0, 0.0, 0.2)) if self.settings.has_faults else 0.0
        for _ in range(chance.choice((0, 1, 3))):
            self.after(None, 50 + chance.randrange(self.settings.span + 100), self._shift)
        for _ in range(chance.choice((0, 1, 2))):
            self.after(None, 50 + chance.randrange(self.settings.span + 100), self._operator_asks)
        for _ in range(chance.choice((5, 20))):
            self.after(None, 50 + chance.randrange(self.settings.span + 100), self._arrive)
        changes = 4 + 2 * (self.settings.kills + self.settings.joins + self.settings.leaves)
        self._steady += QUIET_TICKS  # copies are put back when a loss is that old
        each = self.settings.prepare + self.settings.forming + self.settings.deadline
        self._bound += changes * (each + QUIET_TICKS) + 20 * 40 * (
            self.settings.compute + self.settings.gather + 5
        )

    def _shift(self) -> None:
        """Other experts are chosen most from now on."""
        experts = range(self.settings.num_experts)
        layers = range(self.num_layers)
        self.popularity = [[self._chance.choice(TOKEN_ROWS) for _ in experts] for _ in layers]

    def _operator_asks(self) -> None:
        """Send a wish to the coordinator, as the admin API does."""
        somebody = self._anybody()
        if somebody is not None:
            self.checker.counts["operator asks"] += 1
            self.to_coordinator(somebody, Rebalance(command="c"))

    def reading_fails(self) -> bool:
        return self._chance.random() < self._fails and self.now < self.last_fault

    def _look_whether_it_is_tried_in_vain(self, form: GroupPlan) -> None:
        super()._look_whether_it_is_tried_in_vain(form)
        balancing, fits = self.mesh_settings.balancing, len(form.peers) <= self.settings.num_experts
        if self._highest == 0 and fits and not self.settings.room and balancing is not None:
            self.checker.begins_balanced(form, balancing.num_redundant)

    def ends(self) -> None:
        registry, balancing = self.registry, self.mesh_settings.balancing
        assert registry is not None
        assert balancing is not None
        epochs = registry._groups.epochs
        form, summary = epochs.form, epochs.rebalancing.summary
        self.checker.counts["rebalancings"] += summary.changes
        self.checker.counts["failed rebalancings"] += summary.failures
        waits = epochs.rebalancing.waits(self.now / TICKS_PER_SECOND) or not epochs.is_well
        if form is None or waits or self.settings.room:
            return
        size = len(form.peers)
        seats = Seats((0,) * size, tuple(range(size)), ("h",) * size)
        terms = Terms(num_redundant=balancing.num_redundant, survive=balancing.survive)
        self.checker.balanced(form, least_copies(self.settings.num_experts, seats, terms))


def simulate_balanced(seed: int) -> World:
    """Run the schedule of a seed; see :func:`tests.simulator.schedule.run_schedule`."""
    return run_schedule(seed, BalancedWorld(seed))


__all__ = ["BalancedWorld", "Instance", "simulate_balanced"]
