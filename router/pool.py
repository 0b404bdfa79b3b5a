"""What a router knows of each instance (pure): its place in the world, its last report, and what was
dispatched to it since that report."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from coordinator.messages import Member, State, View
from engine.messages import Report
from router.policy import Candidate
from router.trust import Trust


@dataclass
class Instance:
    """One instance of the world."""

    member: Member
    report: Report | None = None
    trust: Trust = field(default_factory=Trust)
    """Of its rank: a process that is started again does not begin with a clean record."""
    attached: bool = False
    """Whether it has answered on our connection."""
    last_dispatch: int = 0
    unreported: deque[tuple[int, int]] = field(default_factory=deque)
    """(dispatch number, prompt tokens) of what the last report does not include."""

    @property
    def name(self) -> str:
        return self.member.instance

    @property
    def rank(self) -> int:
        return self.member.rank

    @property
    def ready(self) -> bool:
        return self.member.state is State.READY and self.attached

    def dispatch(self, prompt_tokens: int, now: float) -> int:
        """Number the next request to this instance and count it until a report does."""
        self.trust.dispatched(now)
        self.last_dispatch += 1
        self.unreported.append((self.last_dispatch, prompt_tokens))
        return self.last_dispatch

    def take_report(self, report: Report) -> None:
        """A report counts every dispatch up to its ``last_dispatch``; only later ones remain to add."""
        self.report = report
        while self.unreported and self.unreported[0][0] <= report.last_dispatch:
            self.unreported.popleft()

    def lost(self, now: float) -> bool:
        """The connection to it broke, or it was taken out of the world; whether that was news. What was
        sent to it goes on elsewhere; it is not used before it answers on a new connection, and then on
        trial."""
        was_attached, self.attached = self.attached, False
        if was_attached and self.member.state is State.READY:
            self.trust.failed(now)
        self.unreported.clear()
        return was_attached

    def candidate(self, now: float) -> Candidate:
        """This instance for the policy."""
        report = self.report
        return Candidate(
            rank=self.rank,
            ready=self.ready,
            admitted=self.trust.admits(now),
            stalled_for=self.member.load.stalled_for,
            waiting_tokens=(report.waiting_tokens if report else 0)
            + sum(tokens for _, tokens in self.unreported),
            requests=(report.running + report.waiting if report else 0) + len(self.unreported),
            dispatches=self.last_dispatch,
        )


class Standing(msgspec.Struct, frozen=True):
    """How one router stands with an instance, for operators."""

    attached: bool
    """It answers on our connection."""
    failures: int
    """In a row, without tokens in between; above 0 it is on trial."""
    in_flight: int
    """Requests of ours there."""


class InFlight(msgspec.Struct, frozen=True):
    """One sample that is being generated, for operators."""

    request: str
    """Its id, as the client has it; with a number behind it where there are several samples."""
    rank: int | None
    """The instance that it runs on; null while it waits for one."""
    tokens: int
    """Already passed on."""
    attempts: int
    """Instances that it was sent to so far."""


class Changes(msgspec.Struct, frozen=True):
    """What a new view did to the pool."""

    added: list[Instance]
    removed: list[Instance]


class Pool:
    """The instances that this router may talk to, by name."""

    def __init__(self) -> None:
        self._instances: dict[str, Instance] = {}
        self._trust: dict[int, Trust] = {}
        """By rank, also of ranks that are away."""

    def __repr__(self) -> str:
        return f"<Pool {' '.join(f'{i.rank}:{i.member.state}' for i in self)}>"

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances.values())

    def get(self, name: str) -> Instance | None:
        return self._instances.get(name)

    def with_rank(self, rank: int) -> Instance | None:
        return next((instance for instance in self if instance.rank == rank), None)

    def apply(self, view: View, now: float) -> Changes:
        """Bring the pool up to a view. An instance enters once it has an address. Who is missing leaves,
        unless the coordinator has just started and may not know of it yet."""
        members = {member.instance: member for member in view.members if member.address}
        missing = [name for name in self._instances if name not in members] if view.complete else []
        removed = [self._instances.pop(name) for name in missing]
        added = []
        for name, member in members.items():
            if name in self._instances:
                self._instances[name].member = member
            else:
                trust = self._trust.setdefault(member.rank, Trust())
                self._instances[name] = Instance(member, trust=trust)
                added.append(self._instances[name])
        here = {instance.rank for instance in self}
        for rank in [rank for rank in self._trust if rank not in here]:
            if self._trust[rank].is_forgotten(now):
                del self._trust[rank]
        return Changes(added, removed)
