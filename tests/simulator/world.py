"""The simulated world: instances around real :class:`Lockstep` objects, and a network.

See :mod:`tests.simulator.schedule` for clock, chance and queue. All that happens is an :class:`Event` that is
pushed with a delay and then happens to the world. To add a kind (a death, a join, a restarted coordinator),
write another event and push it from :meth:`World.plan`: instances go by their identity, not by their rank,
:meth:`World.members` lists the members of an epoch, and the checker gets a call for it. Read a schedule with
``python -m tests.simulator.world SEED``.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence

from parallel.lockstep import Lockstep
from tests.simulator.checker import Checker, Rule
from tests.simulator.events import Arrive, Cancel, Event, ImpossibleWake, Pause, Prepare
from tests.simulator.instance import Instance
from tests.simulator.network import Network
from tests.simulator.schedule import Schedule, run_schedule
from tests.simulator.settings import Settings


class World(Schedule[Event]):
    """The instances of one schedule and what is between them."""

    MAX_EVENTS = 30_000
    settings: Settings
    checker: Checker

    def __init__(
        self, seed: int, lockstep: type[Lockstep] = Lockstep, ignored: Collection[Rule] = ()
    ) -> None:
        super().__init__(seed)
        self.settings = Settings.draw(self.rng)
        self.checker = Checker(range(self.settings.size), self.settings.bounds, ignored)
        self.network = Network(self)
        self.instances = {
            who: Instance(self, who, lockstep(rank, self.settings.size, 0))
            for rank, who in enumerate(self.members(0))
        }
        self._arrivals_at_sleep = self.settings.arrivals_at_sleep
        self._paused = 0
        self._counted = 0
        self._counted_at = 0
        self.plan()

    def members(self, epoch: int) -> tuple[int, ...]:
        """The identities of an epoch's members, in rank order."""
        return tuple(range(self.settings.size))

    # ---- time

    def count_pauses(self, change: int) -> None:
        """Stop counted time while any instance is paused."""
        self._counted, self._counted_at = self.counted, self.now
        self._paused += change

    @property
    def counted(self) -> int:
        return self._counted + (0 if self._paused else self.now - self._counted_at)

    # ---- what happens

    def plan(self) -> None:
        """Push the events from outside."""
        settings = self.settings
        span = settings.gap * settings.arrivals
        for _ in range(settings.arrivals):
            self.push(self.up_to(span), self._arrival())
        for _ in range(settings.pauses):
            self.push(self.up_to(span), self._pause())
        for _ in range(settings.cancellations):
            self.push(self.up_to(span), Cancel(self._anybody(), 1 + self.up_to(5)))
        for _ in range(settings.impossible):
            ahead = self.rng.choice((2, 3, 100, 2**62))
            self.push(self.up_to(span), ImpossibleWake(self._anybody(), ahead))
        for epoch in range(1, settings.epochs + 1):
            begin = self.up_to(2 * span)
            spread = self.rng.choice((0, span))
            for who in self.members(epoch - 1):
                self.push(begin + self.up_to(spread), Prepare(who, epoch))

    def provoke(self, delays: Sequence[int]) -> None:
        """Add work at the worst time: all headers are empty, and known after these delays."""
        if self._arrivals_at_sleep and self.rng.random() < 0.7:
            self._arrivals_at_sleep -= 1
            self.push(self.rng.choice(delays), self._arrival())
            if self._arrivals_at_sleep and self.rng.random() < 0.5:  # for two wakers at once
                self._arrivals_at_sleep -= 1
                self.push(self.up_to(2 * max(delays)), self._arrival())
            if self.settings.pauses and self.rng.random() < 0.2:
                self.push(self.rng.choice(delays), self._pause())

    def begin(self) -> None:
        for instance in self.instances.values():
            instance.begin()

    def happen(self, event: Event) -> None:
        self.note(None, event)
        self.checker.tick(self.counted)
        event.happen(self)

    def state(self) -> Iterable[object]:
        return self.instances.values()

    def line(self, time: int, who: object, what: object) -> str:
        return f"{time:6d}  {what}" if who is None else f"{time:6d}      {who}: {what}"

    def _arrival(self) -> Arrive:
        return Arrive(self._anybody(), 1 + self.up_to(self.rng.choice((0, 0, 4, 20))))

    def _pause(self) -> Pause:
        return Pause(self._anybody(), 1 + self.up_to(self.settings.pause))

    def _anybody(self) -> int:
        return self.rng.randrange(self.settings.size)


def simulate(seed: int, lockstep: type[Lockstep] = Lockstep, ignored: Collection[Rule] = ()) -> World:
    """Run the schedule of a seed; see :func:`tests.simulator.schedule.run_schedule`."""
    return run_schedule(seed, World(seed, lockstep, ignored))


if __name__ == "__main__":
    print(simulate(int(sys.argv[1])).report(int(sys.argv[1]), most_lines=10_000))
