"""Adoption: how long a restarted coordinator waits for the group that it finds (pure).

A restarted coordinator takes over the newest group that anybody steps in, and changes nothing until all its
members are back, or have had the time to.
"""

from __future__ import annotations

from collections.abc import Collection

from coordinator.membership.records import Records, Rules
from coordinator.messages import GroupPlan


class Adoption:
    """What a coordinator knows of the time before its start."""

    def __init__(self, rules: Rules, records: Records) -> None:
        """``records`` are the registry's; only read here."""
        self._rules = rules
        self._records = records
        self._began_at: float | None = None
        """When this coordinator began."""
        self._heard_at: float | None = None
        """When it first heard of an epoch, restarted."""
        self._adopted_at: float | None = None
        """When it adopted its predecessor's newest group; None once that group's fate is known."""
        self._reported_lost: set[str] = set()
        """Members of the adopted group that others report as lost."""

    def __repr__(self) -> str:
        return f"<Adoption {'open' if self.is_open else 'over'}>"

    @property
    def is_open(self) -> bool:
        """Whether the fate of an adopted group is unknown yet."""
        return self._adopted_at is not None

    def age(self, now: float) -> float:
        """Seconds since this was asked first: since this coordinator began."""
        self._began_at = now if self._began_at is None else self._began_at
        return now - self._began_at

    def is_young(self, now: float) -> bool:
        """Whether there may be a mesh that has not noticed this coordinator yet."""
        return self.age(now) < self._rules.return_grace

    def hear_of_epoch(self, now: float) -> None:
        """Note that an instance knows of an epoch of a coordinator before this one."""
        if self._heard_at is None:
            self._heard_at = now

    def waited(self, now: float) -> float:
        """Seconds since this coordinator first heard that the mesh had begun before."""
        return now - self._heard_at if self._heard_at is not None else 0.0

    def adopt(self, now: float) -> None:
        """Take over the newest group of the coordinator before this one."""
        self._adopted_at = now

    def report_lost(self, suspects: Collection[str]) -> None:
        """Note members of the adopted group that others report as lost."""
        if self.is_open:
            self._reported_lost.update(suspects)

    def is_over(self, group: GroupPlan, size: int | None, now: float) -> bool:
        """Whether the members of the adopted group are back, or have had the time."""
        assert self._adopted_at is not None
        since = now - self._adopted_at
        if self.is_young(now) and not self._all_are_back(group, size):
            return False  # there may be a newer group, of which nobody has registered yet
        missing, rules = self._records.progress.loading, self._rules
        if since < rules.return_grace and (missing & self._reported_lost):
            return False
        return since >= rules.member_timeout or missing <= self._reported_lost

    def end(self) -> None:
        """End the wait: the adopted group is one like any other from now on."""
        self._adopted_at = None

    def _all_are_back(self, group: GroupPlan, size: int | None) -> bool:
        """Whether the adopted group is whole and steps: ``-dp`` members, all in it.

        A smaller one may be the remains of a group whose other members go on in a newer one.
        """
        return len(group.peers) >= max(2, size or 0) and not self._records.progress.elsewhere
