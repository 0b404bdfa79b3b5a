"""Drain and scale commands of operators, and their answers (pure).

Part of :mod:`coordinator.membership.registry`, which passes messages in and sends what is returned. The
coordinator decides whether an instance may leave, and commands it. Only a launcher knows how many instances
its machine can hold, so a scale command is forwarded to it and its answer passed back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from coordinator.messages import Drain, FromCoordinator, OperatorAnswer, Scale, State

Peer = bytes
Sent = tuple[Peer, FromCoordinator]

DONE, ACCEPTED, NOT_FOUND, CONFLICT, FAILED, UNAVAILABLE = 200, 202, 404, 409, 500, 503

MAX_PENDING = 100
"""Most commands that wait for the launcher.

Beyond that the oldest are dropped; their clients send them again.
"""
LAUNCHER_TIMEOUT = 3.0
"""Seconds of silence after which the launcher counts as away.

It asks for the view every second.
"""


class CommandTarget(Protocol):
    """The part of a record that commands to its instance need."""

    @property
    def instance(self) -> str: ...
    @property
    def peer(self) -> Peer: ...
    @property
    def state(self) -> State: ...


class Operations:
    """Commands of operators that are under way."""

    def __init__(self) -> None:
        self._launcher: tuple[Peer, float] | None = None
        self._pending: dict[str, Peer] = {}
        self._drains: dict[str, Drain] = {}
        """Drain commands sent, by instance; the instance may not have reported yet that it drains."""

    def __repr__(self) -> str:
        return f"<Operations {len(self._pending)} pending, asked to drain: {sorted(self._drains)}>"

    def on_launcher(self, peer: Peer, now: float) -> None:
        """Note a sign of life of the launcher."""
        self._launcher = (peer, now)

    def drain(self, asker: Peer, wish: Drain, instances: Mapping[int, CommandTarget]) -> Iterator[Sent]:
        """Pass a drain command on to its instance, unless no other instance would be left."""
        here = {known.instance for known in instances.values()}
        self._drains = {instance: drain for instance, drain in self._drains.items() if instance in here}
        known = instances.get(wish.rank)
        if known is None:
            ranks = ", ".join(map(str, sorted(instances))) or "none"
            yield asker, _answer(wish, NOT_FOUND, f"there is no instance {wish.rank}; ranks now: {ranks}")
            return
        if wish.instance not in ("", known.instance):
            problem = f"another instance has rank {wish.rank} by now: {known.instance}, not {wish.instance}"
            yield asker, _answer(wish, NOT_FOUND, problem)
            return
        others_serve = any(
            other.state is State.READY and other.instance not in self._drains
            for rank, other in instances.items()
            if rank != wish.rank
        )
        if known.state is State.READY and not others_serve and not wish.force:
            problem = f"instance {wish.rank} is the last one that serves: add one first, or say --force"
            yield asker, _answer(wish, CONFLICT, problem)
            return
        self._drains[known.instance] = wish
        yield known.peer, wish
        yield asker, _answer(wish, ACCEPTED, f"instance {wish.rank} was asked to drain")

    def still_wanted(self, known: CommandTarget) -> Drain | None:
        """A drain command that an instance does not obey yet: messages get lost with connections."""
        return None if known.state is State.DRAINING else self._drains.get(known.instance)

    def was_told(self, instance: str) -> bool:
        """Whether a drain command was sent, even if the instance has not reported it yet."""
        return instance in self._drains

    def scale(self, asker: Peer, wish: Scale, now: float) -> Iterator[Sent]:
        """Forward a scale command to the launcher."""
        if self._launcher is None or now - self._launcher[1] > LAUNCHER_TIMEOUT:
            problem = (
                "no serve command runs this mesh's coordinator, so nobody here can start instances: start or "
                "drain them one by one (serve --headless, lockstep drain)"
            )
            yield asker, _answer(wish, UNAVAILABLE, problem)
            return
        self._pending[wish.command] = asker
        while len(self._pending) > MAX_PENDING:
            self._pending.pop(next(iter(self._pending)))
        yield self._launcher[0], wish

    def answer(self, answer: OperatorAnswer) -> Iterator[Sent]:
        """Pass an answer of the launcher on to the client of the command."""
        asker = self._pending.pop(answer.command, None)
        if asker is not None:
            yield asker, answer


def _answer(wish: Drain | Scale, status: int, text: str) -> OperatorAnswer:
    return OperatorAnswer(command=wish.command, status=status, text=text)
