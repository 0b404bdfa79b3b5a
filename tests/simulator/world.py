"""The simulated world: instances around real :class:`Lockstep` objects, a network, an event queue, a clock.

A schedule is a seed: it fixes the settings, every delay, loss, pause and arrival, and the order of events of
the same tick. Ticks are whole numbers, so that events do meet in one tick, and then in random order.

Whatever happens is an :class:`Event` that is pushed with a delay and then happens to the world. To add a kind
(a death, a join, a restarted coordinator), write another event and push it from :meth:`World.plan`: instances
go by their identity, not by their rank, :meth:`World.members` says who the members of an epoch are, and the
checker is told what happened. Read a schedule with ``python -m tests.simulator.world SEED``.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Collection, Sequence

from parallel.lockstep import Decision, Header, Lockstep, LockstepError, Wake
from tests.simulator.checker import Checker, Rule, Violation
from tests.simulator.events import Arrive, Cancel, Event, ImpossibleWake, Pause, Prepare
from tests.simulator.instance import Instance
from tests.simulator.network import Network
from tests.simulator.settings import Settings

MAX_EVENTS = 30_000


class World:
    """Everything that there is in one schedule."""

    def __init__(
        self, seed: int, lockstep: type[Lockstep] = Lockstep, ignored: Collection[Rule] = ()
    ) -> None:
        self.rng = random.Random(seed)
        self.settings = Settings.draw(self.rng)
        self.now = 0
        self.num_events = 0
        self.trace: list[tuple[int, int | None, Event | Header | Decision | Wake]] = []
        """(time, None, an event) and (time, an instance, what it sends or decides)."""
        self.checker = Checker(range(self.settings.size), self.settings.bounds, ignored)
        self.network = Network(self)
        self.instances = {
            who: Instance(self, who, lockstep(rank, self.settings.size, 0))
            for rank, who in enumerate(self.members(0))
        }
        self._arrivals_at_sleep = self.settings.arrivals_at_sleep
        self._queue: list[tuple[int, float, int, Event]] = []
        self._paused = 0
        self._counted = 0
        self._counted_at = 0
        self.plan()

    def members(self, epoch: int) -> tuple[int, ...]:
        """The identities of an epoch's members, in rank order."""
        return tuple(range(self.settings.size))

    # ---- time and chance

    def up_to(self, most: int) -> int:
        """A random number of ticks."""
        return int(self.rng.random() * (most + 1))

    def push(self, delay: int, event: Event) -> None:
        """Let an event happen after a delay; events of one tick happen in random order."""
        self.num_events += 1
        heapq.heappush(self._queue, (self.now + delay, self.rng.random(), self.num_events, event))

    def count_pauses(self, change: int) -> None:
        """Counted time stands still while anybody is paused."""
        self._counted, self._counted_at = self.counted, self.now
        self._paused += change

    @property
    def counted(self) -> int:
        return self._counted + (0 if self._paused else self.now - self._counted_at)

    # ---- what happens

    def plan(self) -> None:
        """Push what the outside world will do."""
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
        """All headers are empty, and it will be known after these delays: now is the worst time for work."""
        if self._arrivals_at_sleep and self.rng.random() < 0.7:
            self._arrivals_at_sleep -= 1
            self.push(self.rng.choice(delays), self._arrival())
            if self._arrivals_at_sleep and self.rng.random() < 0.5:  # for two wakers at once
                self._arrivals_at_sleep -= 1
                self.push(self.up_to(2 * max(delays)), self._arrival())
            if self.settings.pauses and self.rng.random() < 0.2:
                self.push(self.rng.choice(delays), self._pause())

    def note(self, who: int, what: Header | Decision | Wake) -> None:
        """Write into the trace what an instance sends or decides."""
        self.trace.append((self.now, who, what))

    def run(self) -> None:
        """Let everything happen until nothing is left to happen."""
        try:
            for instance in self.instances.values():
                instance.begin()
            while self._queue:
                self.now, _, _, event = heapq.heappop(self._queue)
                self.trace.append((self.now, None, event))
                self.checker.tick(self.counted)
                event.happen(self)
                if self.num_events > MAX_EVENTS:
                    self.checker.endless(self.num_events)
                    return
            self.checker.end()
        except LockstepError as error:
            self.checker.error(str(error))

    def _arrival(self) -> Arrive:
        return Arrive(self._anybody(), 1 + self.up_to(self.rng.choice((0, 0, 4, 20))))

    def _pause(self) -> Pause:
        return Pause(self._anybody(), 1 + self.up_to(self.settings.pause))

    def _anybody(self) -> int:
        return self.rng.randrange(self.settings.size)


def simulate(seed: int, lockstep: type[Lockstep] = Lockstep, ignored: Collection[Rule] = ()) -> World:
    """Run the schedule of a seed.

    Raises:
        Violation: a rule that is not ignored was broken; its notes are the seed and the trace.
    """
    world = World(seed, lockstep, ignored)
    try:
        world.run()
    except Violation as violation:
        violation.add_note(report(seed, world))
        raise
    return world


def report(seed: int, world: World, lines: int = 80) -> str:
    """The end of a schedule, to read."""
    told = [f"seed {seed}: {world.settings}"]
    if len(world.trace) > lines:
        told.append(f"({len(world.trace) - lines} earlier lines left out)")
    for time, who, what in world.trace[-lines:]:
        told.append(f"{time:6d}  {what}" if who is None else f"{time:6d}      {who}: {what}")
    return "\n".join([*told, *map(repr, world.instances.values())])


if __name__ == "__main__":
    print(report(int(sys.argv[1]), simulate(int(sys.argv[1])), lines=10_000))
