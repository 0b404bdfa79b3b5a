"""Events of a simulated world.

A new kind (a death, a join) is another class here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from parallel.lockstep import StepHeader, Wake

if TYPE_CHECKING:
    from tests.simulator.instance import Instance
    from tests.simulator.world import World


class Event(msgspec.Struct, frozen=True):
    """An event, which happens at its time."""

    def happen(self, world: World) -> None:
        raise NotImplementedError


class ToInstance(Event, frozen=True):
    """An event at an instance; while the instance is paused, it waits."""

    who: int

    def happen(self, world: World) -> None:
        instance = world.instances[self.who]
        if instance.paused:
            instance.inbox.append(self)
        else:
            self.meet(instance)

    def meet(self, instance: Instance) -> None:
        raise NotImplementedError


class Arrive(Event, frozen=True):
    """A request arrives at an instance."""

    who: int
    tokens: int

    def happen(self, world: World) -> None:
        world.checker.arrived(self.who, self.tokens)
        Accept(self.who, self.tokens).happen(world)


class Accept(ToInstance, frozen=True):
    """An instance takes a request that has arrived."""

    tokens: int

    def meet(self, instance: Instance) -> None:
        instance.accept(self.tokens)


class Cancel(ToInstance, frozen=True):
    """A client disconnects: some of the work here is not wanted any more."""

    tokens: int

    def meet(self, instance: Instance) -> None:
        instance.cancel(self.tokens)


class Prepare(ToInstance, frozen=True):
    """An instance is ready for an epoch."""

    epoch: int

    def meet(self, instance: Instance) -> None:
        instance.prepare(self.epoch)


class Gathered(ToInstance, frozen=True):
    """The headers of all have reached an instance."""

    headers: tuple[StepHeader, ...]

    def __repr__(self) -> str:
        return f"Gathered(who={self.who}, step=({self.headers[0].epoch}, {self.headers[0].step}))"

    def meet(self, instance: Instance) -> None:
        instance.gathered(self.headers)


class Computed(ToInstance, frozen=True):
    """An instance is at the end of a step."""

    def meet(self, instance: Instance) -> None:
        instance.computed()


class WakeArrives(ToInstance, frozen=True):
    """A wake message reaches an instance."""

    wake: Wake

    def meet(self, instance: Instance) -> None:
        instance.woken(self.wake)


class ImpossibleWake(ToInstance, frozen=True):
    """A process outside the epoch sends a wake for a step far ahead."""

    ahead: int

    def meet(self, instance: Instance) -> None:
        instance.woken_impossibly(self.ahead)


class RepeatWake(ToInstance, frozen=True):
    """Send a wake again, if it is still outstanding."""

    wake: Wake

    def meet(self, instance: Instance) -> None:
        if instance.lockstep.outstanding_wake == self.wake:
            instance.checker.wake_repeated(self.who, self.wake)
            instance.world.network.send_wake(self.who, self.wake)


class Pause(Event, frozen=True):
    """Stop an instance for some time: what reaches it waits."""

    who: int
    ticks: int

    def happen(self, world: World) -> None:
        instance = world.instances[self.who]
        if not instance.paused:
            instance.paused = True
            world.push(self.ticks, GoOn(self.who))
            world.count_pauses(+1)


class GoOn(Event, frozen=True):
    """A paused instance goes on, and takes what came meanwhile in random order.

    Messages wait in several sockets, which have no common order.
    """

    who: int

    def happen(self, world: World) -> None:
        instance = world.instances[self.who]
        instance.paused = False
        world.count_pauses(-1)
        waiting, instance.inbox = instance.inbox, []
        world.rng.shuffle(waiting)
        for event in waiting:
            event.meet(instance)
