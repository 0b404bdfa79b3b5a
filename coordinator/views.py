"""Views of the world in numbered changes, from the coordinator to its watchers (pure).

A mesh of thousands changes many times a second while it starts, and a view of 1,024 members has 200 KB. So a
watcher gets the whole view once, and then changes with consecutive numbers, at most 20 a second. A watcher
that misses a number asks for the whole again. :class:`ViewLog` is the coordinator's end and :class:`ViewCopy`
the watcher's; docs/design/processes.md has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from coordinator.messages import LoadChange, Member, View, ViewChange, ViewCurrent

PUSH_INTERVAL = 0.05
"""Least seconds between two changes that are sent."""
LOAD_INTERVAL = 1.0
"""Seconds between two changes that have the loads of all members."""


class ViewLog:
    """What the watchers of a coordinator were sent last, and what may have changed since."""

    def __init__(self, series: str) -> None:
        self._series = series
        self._number = 0
        self._head: View | None = None
        """The last view that was numbered, without its members."""
        self._members: dict[str, Member] = {}
        """Those that it has, by name."""
        self._touched: set[str] = set()
        self._removed: set[str] = set()
        self._is_dirty = True
        self._pushed_at = self._loads_at = float("-inf")

    def __repr__(self) -> str:
        return f"<ViewLog {self._series} {self._number} of {len(self._members)}>"

    def touch(self, instance: str) -> None:
        """Note that a member may have changed otherwise than in its load."""
        self._touched.add(instance)
        self._is_dirty = True

    def touch_head(self) -> None:
        """Note that something beside the members may have changed."""
        self._is_dirty = True

    def remove(self, instance: str) -> None:
        """Note that a member was taken out, even if it comes back at once."""
        self._removed.add(instance)
        self._is_dirty = True

    def due_at(self) -> float | None:
        """When the next change should be made; None while nothing has changed but loads."""
        return self._pushed_at + PUSH_INTERVAL if self._is_dirty else None

    def is_due(self, now: float) -> bool:
        """Whether to make a change now."""
        return self._is_dirty and now >= self._pushed_at + PUSH_INTERVAL

    def has_old_loads(self, now: float) -> bool:
        """Whether it is time to look at the loads of all members."""
        return now >= self._loads_at + LOAD_INTERVAL

    def change(
        self, head: View, members: Callable[[set[str] | None], Iterable[Member]], now: float
    ) -> ViewChange | None:
        """Number the view that is true now; returns None if nothing has changed.

        ``head`` is that view without members. ``members`` returns those of some names that are there, and
        all of them for None.
        """
        wants_all = self._head is None or self.has_old_loads(now)
        self._loads_at = now if wants_all else self._loads_at
        self._pushed_at, self._is_dirty = now, False
        found = members(None if wants_all else self._touched)
        left = [name for name in self._removed if self._members.pop(name, None) is not None]
        changed, loads = self._take(found)
        self._touched.clear()
        self._removed.clear()
        before, self._head = self._head, head
        if before == head and not (left or changed or loads):
            return None
        self._number += 1
        is_same = before is not None and before.settings == head.settings
        return ViewChange(
            series=self._series,
            number=self._number,
            epoch=head.epoch,
            size=head.size,
            waiting_for=head.waiting_for,
            refused_peers=head.refused_peers,
            balance=head.balance,
            orders=head.orders,
            answers=head.answers,
            complete=head.complete,
            settings=None if is_same else head.settings,
            left=left,
            members=changed,
            loads=loads,
        )

    def whole(self) -> View:
        """The view of the last number."""
        assert self._head is not None
        members = sorted(self._members.values(), key=lambda member: member.rank)
        return msgspec.structs.replace(self._head, members=members, series=self._series, number=self._number)

    def has(self, series: str, number: int) -> bool:
        """Whether a watcher with this view can follow by changes."""
        return series == self._series and 0 < number <= self._number

    def current(self) -> ViewCurrent:
        return ViewCurrent(self._series, self._number)

    def _take(self, found: Iterable[Member]) -> tuple[list[Member], list[LoadChange]]:
        """Remember members as sent; returns changed ones, and changed loads of others."""
        changed, loads = [], []
        for member in found:
            before = self._members.get(member.instance)
            if before is member:
                continue
            self._members[member.instance] = member
            if before is None or not is_same_but_load(before, member):
                changed.append(member)
            elif before.load != member.load:
                loads.append(LoadChange.of(member.rank, member.load))
        return changed, loads


def is_same_but_load(one: Member, other: Member) -> bool:
    return (
        one.rank == other.rank
        and one.state is other.state
        and one.phase == other.phase
        and one.address == other.address
        and one.numerics == other.numerics
        and one.odd == other.odd
        and one.role is other.role
        and one.host == other.host
        and one.pid == other.pid
        and one.instance == other.instance
    )


class ViewNews(msgspec.Struct, frozen=True):
    """What a message brought that changed a :class:`ViewCopy`."""

    whole: bool
    """Whether it was the whole view.

    Members that are missing in a complete one are gone."""
    left: Sequence[str]
    """Instances that were taken out, before ``members`` were added."""
    members: Sequence[Member]
    """New and changed members, also by load alone; all of them in a whole view."""


class ViewCopy:
    """A watcher's copy of the view."""

    def __init__(self) -> None:
        self._head: View | None = None
        self._members: dict[str, Member] = {}
        self._names: dict[int, str] = {}
        """Instances by rank."""
        self._view: View | None = None
        self._series = ""
        self._number = 0
        self.misses_some = True
        """Whether to ask for the whole view: none is here, or a change was missed."""

    def __repr__(self) -> str:
        return f"<ViewCopy {self._series} {self._number} of {len(self._members)}>"

    @property
    def view(self) -> View | None:
        """The newest view; None before the first one."""
        if self._view is None and self._head is not None:
            members = sorted(self._members.values(), key=lambda member: member.rank)
            self._view = msgspec.structs.replace(self._head, members=members)
        return self._view

    @property
    def head(self) -> View | None:
        """The same without members, which costs nothing."""
        return self._head

    @property
    def known(self) -> tuple[str, int]:
        """Series and number for :class:`coordinator.messages.Watch`."""
        return self._series, 0 if self.misses_some else self._number

    def take(self, message: View | ViewChange | ViewCurrent) -> ViewNews | None:
        """Take a message; returns None if it changes nothing."""
        match message:
            case View():
                return self._take_whole(message)
            case ViewChange():
                return self._take_change(message)
            case ViewCurrent(series, number):
                self.misses_some |= series != self._series or number > self._number
                return None

    def _take_whole(self, view: View) -> ViewNews | None:
        if view.series == self._series and view.number < self._number:
            return None  # an older answer
        self._series, self._number, self.misses_some = view.series, view.number, False
        self._members = {member.instance: member for member in view.members}
        self._names = {member.rank: member.instance for member in view.members}
        self._head, self._view = msgspec.structs.replace(view, members=[]), view
        return ViewNews(True, (), view.members)

    def _take_change(self, change: ViewChange) -> ViewNews | None:
        head = self._head
        if head is None or change.series != self._series or change.number > self._number + 1:
            self.misses_some = True
        if head is None or self.misses_some or change.number <= self._number:
            return None
        for name in change.left:
            self._remove(name)
        for member in change.members:
            self._remove(member.instance)
            self._put(member)
        members = [*change.members, *map(self._with_load, change.loads)]
        self._number = change.number
        self._head = msgspec.structs.replace(
            head,
            epoch=change.epoch,
            size=change.size,
            waiting_for=change.waiting_for,
            refused_peers=change.refused_peers,
            balance=change.balance,
            orders=change.orders,
            answers=change.answers,
            complete=change.complete,
            settings=change.settings or head.settings,
            number=change.number,
        )
        self._view = None
        return ViewNews(False, change.left, members)

    def _with_load(self, change: LoadChange) -> Member:
        member = msgspec.structs.replace(self._members[self._names[change.rank]], load=change.load())
        self._members[member.instance] = member
        return member

    def _put(self, member: Member) -> None:
        self._members[member.instance] = member
        self._names[member.rank] = member.instance

    def _remove(self, name: str) -> None:
        member = self._members.pop(name, None)
        if member is not None and self._names.get(member.rank) == name:
            del self._names[member.rank]
