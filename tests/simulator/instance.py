"""One simulated instance: an engine's loop around a real :class:`Lockstep`."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from parallel.lockstep import Lockstep, RunStep, StepHeader, Wake
from tests.simulator.events import Computed, ToInstance

if TYPE_CHECKING:
    from tests.simulator.world import World


class Phase(enum.Enum):
    ASLEEP = enum.auto()
    GATHERING = enum.auto()
    COMPUTING = enum.auto()


class Instance:
    """The loop of an engine around its :class:`Lockstep`.

    To its scheduler, work is a number of tokens.
    """

    def __init__(self, world: World, who: int, lockstep: Lockstep) -> None:
        self.world = world
        self.checker = world.checker
        self.who = who
        self.lockstep = lockstep
        self.phase = Phase.ASLEEP
        self.work = 0
        self.scheduled = 0
        self.held_back = 0
        self.ready_epoch = 0
        self.paused = False
        self.inbox: list[ToInstance] = []

    def __repr__(self) -> str:
        return f"<Instance {self.who} {self.phase.name} {self.work} tokens {self.lockstep!r}>"

    # the loop

    def begin(self) -> None:
        """The loop's top: begin the next step, if there is one."""
        lockstep = self.lockstep
        if not lockstep.awake and self.has_work and (wake := lockstep.wake()) is not None:
            self.world.note(self.who, wake)
            self.checker.wake_made(self.who, wake)
            self.world.network.send_wake(self.who, wake)
        if not lockstep.awake:
            self.phase = Phase.ASLEEP
            self.checker.sleeps(self.who)
            return
        self.phase = Phase.GATHERING
        self.scheduled = self._schedule()
        header = lockstep.header(
            self.scheduled, queued_prefill=self.work - self.scheduled, ready_epoch=self.ready_epoch
        )
        self.world.note(self.who, header)
        self.checker.header_sent(self.who, header)
        self.world.network.contribute(self.who, header)

    def gathered(self, headers: Sequence[StepHeader]) -> None:
        decision = self.lockstep.advance(headers)
        self.world.note(self.who, decision)
        self.checker.decided(self.who, decision)
        if isinstance(decision, RunStep):
            self.phase = Phase.COMPUTING
            self.world.push(1 + self.world.up_to(self.world.settings.compute - 1), Computed(self.who))
        else:
            self.begin()

    def computed(self) -> None:
        done = min(self.scheduled, self.work)
        self.work -= done
        self.checker.computed(self.who, done)
        self.begin()

    @property
    def has_work(self) -> bool:
        return self.work > 0 or self.ready_epoch > self.lockstep.epoch

    def _schedule(self) -> int:
        settings = self.world.settings
        if self.work and self.held_back < settings.hold_back and self.world.rng.random() < 0.5:
            self.held_back += 1
            return 0
        self.held_back = 0
        return min(settings.budget, self.work)

    # what comes from outside

    def accept(self, tokens: int) -> None:
        self.work += tokens
        self._look()

    def cancel(self, tokens: int) -> None:
        unwanted = min(tokens, self.work)
        self.work -= unwanted
        self.checker.cancelled(self.who, unwanted)

    def prepare(self, epoch: int) -> None:
        """Get ready for an epoch, unless a newer one is ready already."""
        if epoch > self.ready_epoch:
            self.ready_epoch = epoch
            self.checker.ready(self.who, epoch)
            self._look()

    def woken(self, wake: Wake) -> None:
        slept = not self.lockstep.awake
        self.lockstep.on_wake(wake)
        self.checker.wake_received(self.who, wake, woke=slept and self.lockstep.awake)
        self._look()

    def woken_impossibly(self, ahead: int) -> None:
        self.lockstep.on_wake(Wake(self.lockstep.epoch, self.lockstep.step + ahead))
        self.checker.counts["impossible wakes"] += 1
        self._look()

    def _look(self) -> None:
        if self.phase is Phase.ASLEEP:
            self.begin()
