"""The settings of one schedule, drawn from its seed, and their bounds."""

from __future__ import annotations

import random

from tests.simulator.checker import Bounds
from tests.simulator.schedule import CommonSettings


class Settings(CommonSettings, frozen=True, kw_only=True):
    """One schedule's world of instances that stay."""

    repeat: int | None
    """A waker repeats its wake after this time, exactly.

    Never, in a world that loses nothing.
    """
    losses: int
    """At most this many consecutive messages are lost between two instances."""
    loss: float
    duplication: float
    hold_back: int
    """A scheduler with work schedules nothing for at most this many consecutive steps."""
    gap: int
    """Time between random arrivals."""
    arrivals_at_sleep: int
    """Further requests that arrive in the ticks in which a sleep is decided."""
    pauses: int
    pause: int
    epochs: int
    cancellations: int
    impossible: int
    """Wakes for steps far ahead, from outside the group."""

    @classmethod
    def draw(cls, rng: random.Random) -> Settings:
        lossless = rng.random() < 0.2
        delay = rng.choice((0, 1, 3, 10, 30))
        return cls(
            size=rng.choice((2, 2, 3, 3, 4, 5)),
            budget=rng.choice((1, 2, 8)),
            compute=rng.choice((1, 2, 5, 20)),
            gather=rng.choice((0, 1, 3, 10)),
            delay=delay,
            repeat=None if lossless else 1 + rng.randrange(1 + 2 * delay),
            losses=0 if lossless else rng.randrange(5),
            loss=0.0 if lossless else rng.choice((0.1, 0.3, 0.7)),
            duplication=0.0 if lossless else rng.choice((0.0, 0.2, 0.5)),
            hold_back=rng.choice((0, 0, 0, 1, 2)),
            gap=rng.choice((1, 10, 50)),
            arrivals=1 + rng.randrange(12),
            arrivals_at_sleep=rng.randrange(25),
            pauses=rng.choice((0, 0, 1, 3)),
            pause=rng.choice((5, 50, 200)),
            epochs=rng.choice((0, 0, 0, 1, 2, 2)),
            cancellations=rng.choice((0, 0, 0, 2)),
            impossible=rng.choice((0, 0, 3)),
        )

    @property
    def bounds(self) -> Bounds:
        """The bounds that the checker may ask for.

        A wake has reached everybody ``wake`` ticks after it was made: the copy after the last loss arrives.
        Who sleeps before step k while work waits sleeps no longer than the last member needs to learn that
        step k - 1 was a sleep (``gather``), and then its wake needs. From one step's last header to the next
        one's it takes ``turn`` at most. Work that comes just after a header was sent misses this step, and is
        part of the next one but ``hold_back``; the third turn is the step's own end.
        """
        wake = self.delay + self.losses * (self.repeat or 0)
        turn = self.gather + max(self.compute, wake)
        return Bounds(asleep=self.gather + wake, progress=(3 + self.hold_back) * turn, switch=3 * turn)
