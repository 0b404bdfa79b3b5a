"""The world of one schedule of views: instances, coordinators, watchers and their messages.

A schedule is a seed.
Real are :class:`coordinator.membership.registry.Registry` and :class:`coordinator.views.ViewCopy`. A message to a watcher
may be lost, be late, or be overtaken by later ones: more than ZeroMQ does, which loses them with a connection
or a full queue. Each watcher also keeps the names that it believes to be there from the news alone, as a router
does. Rules: a copy with the number of a view is that view, and never goes back in a series; once nothing is lost
any more, every watcher soon has the newest one.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from coordinator.membership.records import Instruction, Publish, Rules, Send
from coordinator.membership.registry import Registry
from coordinator.messages import (
    Exited,
    Heartbeat,
    Leave,
    Load,
    Register,
    State,
    View,
    ViewChange,
    ViewCurrent,
    Watch,
)
from coordinator.views import ViewCopy, ViewLog
from tests.coordinator.membership.test_registry import SETTINGS

STEPS = 120
"""Events with losses."""
CALM = 8.0
"""Seconds without losses at the end."""
WATCH_INTERVAL = 1.0


class Broken(Exception):
    """A rule was broken; the message says which."""


class Follower:
    """A watcher, as :class:`coordinator.member_connection.Watcher` is one."""

    def __init__(self, name: str, make: Callable[[], ViewCopy]) -> None:
        self.name = name
        self.copy = make()
        self.believed: dict[str, int] = {}
        """Ranks by instance, from the news alone."""
        self.newest = ("", 0)

    def take(self, message: View | ViewChange | ViewCurrent) -> bool:
        """Whether to ask at once."""
        missed = self.copy.misses_some
        news = self.copy.take(message)
        if news is not None:
            if news.whole:
                self.believed.clear()
            for name in news.left:
                self.believed.pop(name, None)
            self.believed |= {member.instance: member.rank for member in news.members}
        return self.copy.misses_some and not missed


class World:
    """One schedule."""

    def __init__(
        self,
        seed: int,
        make_log: Callable[[str], ViewLog] = ViewLog,
        make_copy: Callable[[], ViewCopy] = ViewCopy,
    ) -> None:
        self._rng = random.Random(seed)
        self._make_log = make_log
        self._now = 0.0
        self._loss = self._rng.choice((0.0, 0.1, 0.4))
        self._delay = self._rng.choice((0.0, 0.05, 0.5))
        self._names = itertools.count()
        self._instances: dict[str, Heartbeat] = {}
        self._wire: list[tuple[float, int, Follower, Any]] = []
        self._orders = itertools.count()
        self._views: dict[tuple[str, int], View] = {}
        """Each view that was numbered."""
        self._followers = [Follower(f"w{number}", make_copy) for number in range(3)]
        self._num_coordinators = 0
        self._asked_at = {each.name: float("-inf") for each in self._followers}
        self._begin()

    def run(self) -> int:
        """Number of views.

        Raises:
            Broken: a rule was.
        """
        for _ in range(STEPS):
            self._advance(self._rng.choice((0.0, 0.01, 0.06, 0.3)))
            self._something()
        self._loss = self._delay = 0.0
        end = self._now + CALM
        while self._now < end:
            self._advance(0.05)
        for follower in self._followers:
            view = follower.copy.view
            if view is None or follower.copy.misses_some or view != self._truth():
                raise Broken(f"{follower.name} has {follower.copy}, not the newest view")
        return len(self._views)

    # ---- what happens

    def _begin(self) -> None:
        self._num_coordinators += 1
        with patch("coordinator.membership.registry.ViewLog", self._make_log):
            self._registry = Registry(Rules(token=f"c{self._num_coordinators}", member_timeout=60.0))

    def _something(self) -> None:
        kind = self._rng.choices(
            ("join", "change", "load", "leave", "back", "restart"), (4, 6, 4, 2, 2, 0.3)
        )[0]
        if kind == "restart":
            self._begin()
            for name in self._instances:
                self._register(name)
        elif kind == "join" and len(self._instances) < 12:
            name = f"i{next(self._names)}"
            self._instances[name] = Heartbeat(
                instance=name, state=State.LOADING, phase="", address="", load=Load()
            )
            self._register(name)
        elif self._instances:
            self._change(kind, self._rng.choice(list(self._instances)))

    def _change(self, kind: str, name: str) -> None:
        if kind in ("leave", "back"):
            said = self._rng.choice((Leave(name), Exited(name, "ended")))
            self._hear(said)
            if kind == "back":
                self._register(name)
            else:
                del self._instances[name]
        elif kind in ("change", "load"):
            before = self._instances[name]
            state = self._rng.choice(list(State)) if kind == "change" else before.state
            self._instances[name] = Heartbeat(
                instance=name, state=state, phase=self._rng.choice("ab"), address="tcp://a:1",
                load=Load(running=self._rng.randrange(5)),
            )  # fmt: skip
            self._hear(self._instances[name])

    def _register(self, name: str) -> None:
        self._hear(Register(instance=name, rank=None, size=None, settings=SETTINGS, host="h", pid=1))

    def _hear(self, message: Any, peer: bytes = b"i") -> None:
        self._carry_out(self._registry.handle(peer, message, self._now))

    # ---- time and messages

    def _advance(self, seconds: float) -> None:
        end = self._now + seconds
        while self._wire and self._wire[0][0] <= end:
            self._now, _, follower, message = heapq.heappop(self._wire)
            self._deliver(follower, message)
        self._now = end
        due = self._registry.push_due()
        if due is not None and due <= end:
            self._carry_out(self._registry.push(end))
        self._carry_out(self._registry.tick(end))
        for follower in self._followers:
            if end >= self._asked_at[follower.name] + WATCH_INTERVAL:
                self._ask(follower)

    def _ask(self, follower: Follower) -> None:
        self._asked_at[follower.name] = self._now
        if self._rng.random() >= self._loss:
            series, number = follower.copy.known
            self._hear(Watch(follower.name, series=series, number=number), follower.name.encode())

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Publish):
                self._remember(instruction.message)
                self._send(instruction.message, *instruction.peers)
            elif isinstance(instruction, Send) and isinstance(instruction.message, ViewCurrent):
                self._send(instruction.message, instruction.peer)

    def _send(self, message: Any, *peers: bytes) -> None:
        for follower in self._followers:
            if follower.name.encode() in peers and self._rng.random() >= self._loss:
                when = self._now + self._rng.random() * self._delay
                heapq.heappush(self._wire, (when, next(self._orders), follower, message))

    def _remember(self, message: View | ViewChange) -> None:
        """Note the view of a number, as the registry knows it at that moment."""
        self._views.setdefault((message.series, message.number), self._truth())

    def _truth(self) -> View:
        return self._registry._log.whole()

    def _deliver(self, follower: Follower, message: View | ViewChange | ViewCurrent) -> None:
        if follower.take(message):
            self._ask(follower)
        copy = follower.copy
        if copy.misses_some or copy.view is None:
            return
        if follower.newest[0] == copy.known[0] and follower.newest[1] > copy.known[1]:
            raise Broken(f"{follower.name} went back from {follower.newest} to {copy.known}")
        follower.newest = copy.known
        known = self._views.get(copy.known)
        if known is not None and copy.view != known:
            raise Broken(f"{follower.name} at {copy.known} has not the view of that number")
        if follower.believed != {member.instance: member.rank for member in copy.view.members}:
            raise Broken(f"{follower.name} at {copy.known}: the news were not all of the change")
