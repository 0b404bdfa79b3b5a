"""The world of one schedule with faults, drawn from its seed.

Times in ticks of 10 ms.
"""

from __future__ import annotations

import random

from coordinator.membership.records import Rules
from tests.simulator.schedule import CommonSettings

TICKS_PER_SECOND = 100
COORDINATOR_TICK = 10
ASK_INTERVAL = 30
"""Ticks between two tries to register."""
PASS_ON_AFTER = 50
"""Ticks after which a woken instance wakes the others, too, unless the step began.

Less than the shortest deadline of a collective, as in life.
"""

RULES = Rules(
    heartbeat_interval=0.5,
    member_timeout=2.0,
    loading_timeout=30.0,
    probe_grace=0.3,
    quiet_grace=0.6,
    return_grace=1.0,
    forming_timeout=10.0,
    reach_timeout=1.0,
    reach_interval=2.0,
    reach_patience=20.0,
    steady_after=15.0,
)
"""The coordinator's rules, shorter than in life and in the same order."""


LONG_SPLIT = 25_000


class Settings(CommonSettings, frozen=True, kw_only=True):
    """One schedule's mesh and its faults; one wake in five is lost."""

    num_experts: int
    room: int
    """Experts that fit on an instance; 0: any number."""
    wire: int
    """Delay between an instance and the coordinator, one way, in order."""
    prepare: int
    """Time to read the experts of an epoch."""
    deadline: int
    """Deadline of a collective."""
    forming: int
    """Time after which an instance gives up the forming of a group."""
    exited: float
    """Probability that others see a death as a process's end.

    Otherwise they see a closed connection only.
    """
    span: int
    """Time in which all faults and arrivals are planned."""
    kills: int
    stalls: int
    stall: int
    hangs: int
    """Step threads that stand still, in processes that answer."""
    cuts: int
    """Broken connections to the coordinator, for as long as a stall: all messages are lost."""
    joins: int
    leaves: int
    restarts: int
    """Restarts of the coordinator."""
    absence: int
    """Longest absence of the coordinator."""
    provoked: float
    """Probability that a fault waits for one of the worst moments instead of its time."""
    splits: int
    """Cuts of data between some instances and the others.

    All instances still reach the coordinator.
    """
    split: int
    """Longest duration of a split.

    The longest is longer than the mesh may take to go on without some.
    """
    connect: int
    """Time to give up a connection that cannot be made."""

    @classmethod
    def draw(cls, rng: random.Random) -> Settings:
        size = rng.choice((1, 2, 2, 3, 3, 4))
        calm = rng.random() < 0.2
        faulty = (0, 0, 0, 0) if calm else (0, 0, 1, 2)
        return cls(
            size=size,
            num_experts=8,
            room=rng.choice((0, 0, 0, 8, 4, -(-8 // size))),
            budget=rng.choice((1, 4, 16)),
            compute=rng.choice((1, 2, 5, 15)),
            gather=rng.choice((0, 1, 2, 8)),
            delay=rng.choice((0, 1, 4)),
            wire=rng.choice((0, 1, 5)),
            prepare=rng.choice((0, 2, 20, 100)),
            deadline=rng.choice((100, 150)),
            forming=rng.choice((200, 400)),
            exited=rng.choice((0.0, 0.5, 1.0)),
            arrivals=1 + rng.randrange(8),
            span=rng.choice((50, 300, 800)),
            kills=rng.choice(faulty),
            stalls=rng.choice(faulty),
            stall=rng.choice((5, 40, 150, 500)),
            hangs=rng.choice((*faulty, 0, 0)),
            cuts=rng.choice((*faulty, 0)),
            joins=rng.choice((1, 2, 3) if calm else (0, 1, 1, 2)),
            leaves=rng.choice((0, 0, 1, 2)),
            restarts=rng.choice((*faulty, 0)),
            absence=rng.choice((5, 60, 400)),
            provoked=rng.choice((0.0, 0.5, 1.0)),
            splits=rng.choice((*faulty, 0)),
            split=rng.choice((20, 300, LONG_SPLIT)),
            connect=rng.choice((1, 50)),
        )

    @property
    def has_faults(self) -> bool:
        """Whether anything happens but joins, leaves and work."""
        return self.kills + self.stalls + self.hangs + self.cuts + self.restarts + self.splits > 0

    @property
    def bound(self) -> int:
        """Time from the last fault until all serve in one group, with no work left.

        In the worst case a restarted coordinator waits for an instance that does not come back
        (``member_timeout``). The group that it forms loses a member that falls silent, again. A change that
        was under way must run into its timeout. Then the last change happens, and the rest of the work is
        done.
        """
        seconds = 3 * RULES.member_timeout + 2 * RULES.forming_timeout + 5.0
        seconds += RULES.reach_patience + RULES.reach_timeout if self.splits else 0.0
        changes = (2 + self.joins + self.leaves) * (self.prepare + self.forming + self.deadline)
        return (
            int(seconds * TICKS_PER_SECOND) + changes + 40 * self.arrivals * (self.compute + self.gather + 5)
        )

    @property
    def split_bound(self) -> int:
        """Time from a split or a later event until the remaining instances are done."""
        tries = (RULES.reach_tries + 2) * (self.deadline + self.forming + self.connect + self.prepare)
        return self.bound + tries
