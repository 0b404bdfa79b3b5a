"""The network between simulated instances."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel.lockstep import StepHeader, Wake
from tests.simulator.events import Gathered, RepeatWake, WakeArrives

if TYPE_CHECKING:
    from tests.simulator.world import World


class Network:
    """A reliable collective for headers, and an unreliable transport for wakes.

    The transport loses, delays, doubles and reorders.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._calls: dict[tuple[int, int], int] = {}
        """How often each instance has called the collective of each epoch."""
        self._gathers: dict[tuple[int, int], dict[int, StepHeader]] = {}
        """Contributions by epoch and number of the call: a collective knows nothing of steps."""
        self._lost: dict[tuple[int, int], int] = {}
        """Consecutive losses between two instances."""

    def contribute(self, who: int, header: StepHeader) -> None:
        """Call the header exchange.

        Each member has the result some time after the last one called.
        """
        world = self.world
        call = self._calls.get((who, header.epoch), 0)
        self._calls[who, header.epoch] = call + 1
        gather = self._gathers.setdefault((header.epoch, call), {})
        gather[who] = StepHeader.of(header.ints())
        members = world.members(header.epoch)
        if len(gather) < len(members):
            return
        del self._gathers[header.epoch, call]
        headers = tuple(gather[member] for member in members)
        delays = [world.up_to(world.settings.gather) for _ in members]
        for member, delay in zip(members, delays, strict=True):
            world.push(delay, Gathered(member, headers))
        if not any(header.num_tokens for header in headers):
            world.provoke(delays)

    def send_wake(self, who: int, wake: Wake) -> None:
        """Send a wake to all other members, and plan to repeat it."""
        for other in self.world.members(wake.epoch):
            if other != who:
                self._send(who, WakeArrives(other, wake))
        if self.world.settings.repeat is not None:
            self.world.push(self.world.settings.repeat, RepeatWake(who, wake))

    def _send(self, who: int, message: WakeArrives) -> None:
        world, settings = self.world, self.world.settings
        link = (who, message.who)
        losses = self._lost.get(link, 0)
        if losses < settings.losses and world.rng.random() < settings.loss:
            self._lost[link] = losses + 1
            world.checker.counts["losses"] += 1
            if world.rng.random() < 0.3:  # so late that it is as good as lost, but it comes
                world.push(settings.delay + world.up_to(500), message)
            return
        self._lost[link] = 0
        world.push(world.up_to(settings.delay), message)
        if world.rng.random() < settings.duplication:
            world.push(world.up_to(10 * settings.delay), message)
