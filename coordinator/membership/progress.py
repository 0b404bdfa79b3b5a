"""How far the members of the newest group are (pure).

Sets of exceptions, kept as messages come, so that a message costs the same in a mesh of any size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from coordinator.messages import State


class MemberReport(Protocol):
    """Name, state and epoch of an instance: the part of its record that counts here."""

    @property
    def instance(self) -> str: ...
    @property
    def state(self) -> State: ...
    @property
    def epoch(self) -> int: ...


class Progress:
    """Members of a group that are missing, late or elsewhere."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._leavers: frozenset[str] = frozenset()
        self._epoch = 0
        self.absent: set[str] = set()
        """Members that are not here."""
        self.loading: set[str] = set()
        """Members that are not here, or load."""
        self.outside: set[str] = set()
        """Members that have not entered the group."""
        self.elsewhere: set[str] = set()
        """Members that do not step in this very group."""
        self.leaving: set[str] = set()
        """Leavers that are still here."""

    def __repr__(self) -> str:
        return f"<Progress epoch {self._epoch}: {len(self.absent)} absent, {len(self.outside)} outside>"

    def follow(
        self, epoch: int, names: frozenset[str], leavers: Collection[str], here: Iterable[MemberReport]
    ) -> None:
        """Follow another group from now on; ``here`` are all instances."""
        self._epoch, self._names, self._leavers = epoch, names, frozenset(leavers)
        self.absent, self.loading, self.outside, self.elsewhere = (set(names) for _ in range(4))
        self.leaving = set()
        for record in here:
            self.heard(record)

    def heard(self, record: MemberReport) -> None:
        """Note an instance that is here, and the epoch and state that it reports."""
        name = record.instance
        if name in self._leavers:
            self.leaving.add(name)
        if name not in self._names:
            return
        self.absent.discard(name)
        _mark(self.loading, name, record.state is State.LOADING)
        _mark(self.outside, name, record.epoch < self._epoch)
        _mark(self.elsewhere, name, record.epoch != self._epoch)

    def left(self, name: str) -> None:
        """Note that an instance is gone."""
        self.leaving.discard(name)
        if name in self._names:
            for missing in (self.absent, self.loading, self.outside, self.elsewhere):
                missing.add(name)


def _mark(names: set[str], name: str, is_in: bool) -> None:
    if is_in:
        names.add(name)
    else:
        names.discard(name)
