"""Schedules in which each process sees another mesh: partial ways, and clocks of their own.

Data may pass between A and B and between B and C, and yet not between A and C, or in one direction only. The
coordinator may hear an instance that does not hear it. Each process has a clock that begins anywhere, and goes
faster or slower than others: what one reads tells nothing of what another one reads.
"""

from __future__ import annotations

import itertools
import math
import random

from tests.simulator.elastic.instance import Instance
from tests.simulator.elastic.settings import TICKS_PER_SECOND
from tests.simulator.elastic.streams import StreamWorld
from tests.simulator.elastic.world import World
from tests.simulator.schedule import run_schedule

MOST_DRIFT = 0.02
"""Share by which a clock goes faster or slower; those of machines drift far less."""
LATEST_START = 10**7
"""Seconds that a clock shows at most when a schedule begins."""


class Clock:
    """The clock of one process."""

    def __init__(self, draws: random.Random, drift: float) -> None:
        self._rate = 1.0 + draws.uniform(-drift, drift)
        self._start = draws.choice((0.0, draws.uniform(0.0, LATEST_START)))

    def read(self, now: int) -> float:
        """Seconds that it shows at a tick."""
        return self._start + self._rate * now / TICKS_PER_SECOND

    def ticks(self, delay: int) -> int:
        """Ticks in which it goes on by the seconds of so many."""
        return math.ceil(delay / self._rate)


class ApartWorld(StreamWorld):
    """The mesh of one schedule, as each of its processes sees it."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._chance = random.Random(f"apart {seed}")
        self._drift = self._chance.choice((0.0, 0.0001, MOST_DRIFT))
        self._clocks: dict[str, Clock] = {}
        self._cut_share = 0.0
        """Share of the pairs of instances that are cut; 0: there are two sides."""
        self._ways: dict[frozenset[str], tuple[str, str] | bool] = {}
        """For each pair whether data passes, or the one way in which it does not."""
        self._only: dict[str, str] = {}
        """For instances that are cut off from the coordinator in one direction: which."""
        self._bound = int(self._bound * (1 + 2 * MOST_DRIFT)) + 1
        self._split_bound = int(2 * self._split_bound)  # who is left out may have to be found twice

    # ---- clocks

    def _clock_of(self, who: Instance | None) -> Clock:
        name = who.name if who is not None else f"coordinator {self.num_coordinators}"
        if name not in self._clocks:
            self._clocks[name] = Clock(self._chance, self._drift)
        return self._clocks[name]

    def clock(self, who: Instance | None) -> float:
        return self._clock_of(who).read(self.now)

    def timer(self, who: Instance | None, delay: int) -> int:
        return self._clock_of(who).ticks(delay)

    # ---- ways between instances

    def _split(self, victim: Instance) -> None:
        before = self.split_since
        super()._split(victim)
        if self.split_since != before:
            self._cut_share = self._chance.choice((0.0, 0.2, 0.2, 0.4))
            self._ways.clear()
            self.checker.counts["splits that are not transitive"] += self._cut_share > 0

    def passes(self, sender: str, receiver: str) -> bool:
        if not self._cut_share or self.now > self.split_until or sender == receiver:
            return super().passes(sender, receiver)
        pair = frozenset((sender, receiver))
        if pair not in self._ways:
            is_cut, is_one_way = (self._chance.random() < share for share in (self._cut_share, 0.25))
            self._ways[pair] = (sender, receiver) if is_cut and is_one_way else not is_cut
        way = self._ways[pair]
        return way if isinstance(way, bool) else way != (sender, receiver)

    def some_fit(self) -> bool:
        if not self._cut_share:
            return super().some_fit()
        living = [each for each in self.instances.values() if each.alive and not each.draining]
        return any(
            self.holds_all(some) and all(itertools.starmap(self._reach, itertools.combinations(some, 2)))
            for size in range(1, len(living) + 1)
            for some in itertools.combinations(living, size)
        )

    def may_be_left_out(self, instance: Instance) -> bool:
        """Only whom some do not reach, or did not before the split ended."""
        is_split = super().may_be_left_out(instance)
        if not self._cut_share or self.now > self.split_until:
            return is_split
        return is_split and not all(
            self._reach(instance, other) for other in self.instances.values() if other is not instance
        )

    def _reach(self, one: Instance, other: Instance) -> bool:
        return self.passes_between(one.name, other.name)

    # ---- ways to the coordinator

    def _cut(self, victim: Instance) -> None:
        super()._cut(victim)
        self._only[victim.name] = self._chance.choice(("", "", "mute", "deaf"))
        self.checker.counts["cuts in one direction"] += self._only[victim.name] != ""

    def is_mute(self, instance: Instance) -> bool:
        return super().is_mute(instance) and self._only.get(instance.name) != "deaf"

    def is_deaf(self, instance: Instance) -> bool:
        return super().is_deaf(instance) and self._only.get(instance.name) != "mute"


def simulate_apart(seed: int) -> World:
    """Run the schedule of a seed; see :func:`tests.simulator.schedule.run_schedule`."""
    return run_schedule(seed, ApartWorld(seed))
