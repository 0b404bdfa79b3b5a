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


@dataclass
class Instance:
    """One instance of the world."""

    member: Member
    report: Report | None = None
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

    def dispatch(self, prompt_tokens: int) -> int:
        """Number the next request to this instance and count it until a report does."""
        self.last_dispatch += 1
        self.unreported.append((self.last_dispatch, prompt_tokens))
        return self.last_dispatch

    def take_report(self, report: Report) -> None:
        """A report counts every dispatch up to its ``last_dispatch``; only later ones remain to add."""
        self.report = report
        while self.unreported and self.unreported[0][0] <= report.last_dispatch:
            self.unreported.popleft()

    def candidate(self) -> Candidate:
        """This instance for the policy."""
        report = self.report
        return Candidate(
            rank=self.rank,
            ready=self.ready,
            stalled_for=self.member.load.stalled_for,
            waiting_tokens=(report.waiting_tokens if report else 0)
            + sum(tokens for _, tokens in self.unreported),
            requests=(report.running + report.waiting if report else 0) + len(self.unreported),
            dispatches=self.last_dispatch,
        )


class Changes(msgspec.Struct, frozen=True):
    """What a new view did to the pool."""

    added: list[Instance]
    removed: list[Instance]


class Pool:
    """The instances that this router may talk to, by name."""

    def __init__(self) -> None:
        self._instances: dict[str, Instance] = {}

    def __repr__(self) -> str:
        return f"<Pool {' '.join(f'{i.rank}:{i.member.state}' for i in self)}>"

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances.values())

    def get(self, name: str) -> Instance | None:
        return self._instances.get(name)

    def with_rank(self, rank: int) -> Instance | None:
        return next((instance for instance in self if instance.rank == rank), None)

    def apply(self, view: View) -> Changes:
        """Bring the pool up to a view. An instance enters once it has an address."""
        members = {member.instance: member for member in view.members if member.address}
        removed = [self._instances.pop(name) for name in list(self._instances) if name not in members]
        added = []
        for name, member in members.items():
            if name in self._instances:
                self._instances[name].member = member
            else:
                self._instances[name] = Instance(member)
                added.append(self._instances[name])
        return Changes(added, removed)
