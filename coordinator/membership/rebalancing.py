"""Balance of the load of experts over a group's members (pure).

A rebalancing is an epoch with the same members: they prepare it while they step, and enter it at an agreed
step, as they do where one joins. So it has no protocol of its own. Members count the rows of their experts in
windows of steps and report them with their heartbeats; what is lost makes a placement worse, never wrong.

A group that lost a member goes on with what is held, so that as little as possible is read. Some while later,
when the requests of the dead have been computed again, another group puts copies where they are missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from coordinator.membership.records import Record
from coordinator.messages import Balancing, BusyExpert, ExpertBalance, GroupPlan, Settings
from parallel.balancing.balance import (
    Balanced,
    Terms,
    balance,
    balancedness,
    keep,
    least_copies,
    with_copies,
)
from parallel.placement import Copies, Placement, Seats

BACK_OFF = 10.0
MAX_BACK_OFF = 600.0
"""Seconds until the next rebalancing after one that failed, rising while each fails."""
QUIET = 2.0
"""Seconds after a loss in which no copies are put back.

The requests of the dead are computed again in them, for which clients wait.
"""
MANY_FAILURES = 3
"""Failures in a row, or intervals without loads, from which on a warning is given."""
MOST_BUSY = 8
"""Experts that a view has with their rows and owners."""
MOST_MOVED = 2
"""At most one in so many copies moves where nothing must."""


class Rebalancing:
    """Loads of the experts of the newest group, and what follows from them."""

    def __init__(self) -> None:
        self._next: Balanced | None = None
        """Placement of the next group, if that is formed to balance."""
        self._epoch = 0
        """Epoch of the group that was formed to balance last, until it began or failed."""
        self._moves = 0
        """Copies that it moves."""
        self._since = 0.0
        """When it was formed."""
        self._copy_bytes = 0
        """Memory of a copy of an expert of one layer."""
        self._looked_at = 0
        """Epoch of the newest group that was looked at."""
        self._window = 0
        """Newest window of the newest group whose loads are known."""
        self._newest = 0
        """Newest window of that group that some member has reported."""
        self._interval = 0
        """Interval of windows that the last look was for."""
        self._is_silent = False
        """Whether loads have not come from all for too long."""
        self._follows_loss = False
        """Whether the next group follows a loss."""
        self._quiet_until = 0.0
        self._loads: list[list[int]] = []
        self._busiest: list[tuple[int, float]] = []
        """Experts with most rows in the newest window, and their parts of all rows."""
        self._placed: GroupPlan | None = None
        """The newest group that has begun; None where all have left."""
        self._last_shown: tuple[object, dict[str, Any]] | None = None
        """What :meth:`shown` made of a group, its living members and the busiest experts."""
        self._not_before = 0.0
        self._in_a_row = 0
        """Failures since the last success."""
        self._asked = False
        self.summary = ExpertBalance()
        self.notes: list[tuple[str, bool]] = []
        """Lines for the log, and whether they are warnings."""

    def __repr__(self) -> str:
        return f"<Rebalancing epoch {self._looked_at}, window {self._window}, {self.summary!r}>"

    def ask(self) -> None:
        """An operator wants a look now, with the loads of the newest window."""
        self._asked, self._not_before, self._quiet_until = True, 0.0, 0.0

    def waits(self, now: float) -> bool:
        """Whether nothing moves yet, since a loss or a failure was a moment ago."""
        return now < max(self._not_before, self._quiet_until)

    # ---- whether to move experts

    def reason(
        self, settings: Settings, form: GroupPlan, members: Sequence[Record], now: float
    ) -> str | None:
        """Why a group that is well is to be followed by one with other places.

        Its placement is :meth:`placement` then.
        """
        terms = settings.balancing
        if terms is None or not _layers(members):
            return None
        is_new = self._hear(settings, form, members)
        if is_new and terms.log_every and self._window % terms.log_every == 0:
            line = f"balancedness {self.summary.balancedness:.2f} over {terms.window_size} steps"
            self.notes.append((line, False))
        self._listen(terms, form, members)
        interval = self._window // terms.windows
        is_due = interval > self._interval or self._asked or self._looked_at != form.epoch
        if self.waits(now) or not is_due:
            return None
        asked, self._asked = self._asked, False
        self._looked_at, self._interval = form.epoch, interval
        found = self._balance(settings, terms, members, asked=asked)
        if found.moves == 0:
            return None
        self._next = found
        return f"{found.moves} copies of experts move, balancedness {found.before:.2f} to {found.after:.2f}"

    def begin(self) -> None:
        """Another look at what follows the newest group."""
        self._next = None

    def formed(self, form: GroupPlan, now: float) -> None:
        """The group of the last :meth:`reason` is formed, or one for another reason."""
        if self._next is not None:
            self._since = now
            self._epoch, self._moves, self._next = form.epoch, self._next.moves, None

    def begun(self, form: GroupPlan, now: float) -> None:
        """A group has begun: what was formed to balance has succeeded."""
        self._window = self._newest = self._interval = 0
        self._is_silent = False
        self._placed = form if form.peers else None
        if self._follows_loss:
            self._follows_loss, self._quiet_until = False, now + QUIET
        if self._epoch == form.epoch:
            self._epoch = self._in_a_row = 0
            self.summary = msgspec.structs.replace(
                self.summary,
                changes=self.summary.changes + 1,
                moves=self.summary.moves + self._moves,
                moved_bytes=self.summary.moved_bytes + self._moves * self._copy_bytes,
                seconds=self.summary.seconds + now - self._since,
            )
            self._judge()

    def failed(self, form: GroupPlan, now: float) -> bool:
        """A group broke or did not begin; whether it was formed to balance.

        The members go on where their experts are, and the next try comes later.
        """
        if self._epoch == 0 or self._epoch != form.epoch:
            return False
        self._epoch = 0
        self._not_before = now + min(MAX_BACK_OFF, BACK_OFF * 2**self._in_a_row)
        self._in_a_row += 1
        self.summary = msgspec.structs.replace(self.summary, failures=self.summary.failures + 1)
        self._judge()
        tries = f"{self._in_a_row} times in a row" if self._in_a_row >= MANY_FAILURES else "once"
        wait = self._not_before - now
        self.notes.append((f"experts could not move ({tries}): the next try in {wait:.0f} s", True))
        return True

    def _judge(self) -> None:
        is_failing = self._is_silent or self._in_a_row >= MANY_FAILURES
        if is_failing != self.summary.is_failing:
            self.summary = msgspec.structs.replace(self.summary, is_failing=is_failing)

    def _listen(self, terms: Balancing, form: GroupPlan, members: Sequence[Record]) -> None:
        """Find out whether steps go on, and no loads come that all members report."""
        heard, told = self._window // terms.windows, self._newest // terms.windows
        is_silent = told - heard >= MANY_FAILURES
        if is_silent and not self._is_silent:
            late = ", ".join(str(member.rank) for member in members if _number(member, form) < self._newest)
            self.notes.append(
                (
                    f"experts are not balanced: for {MANY_FAILURES} intervals of {terms.windows} windows no "
                    f"loads have come that all report; those of instances {late or 'all'} do not fit",
                    True,
                )
            )
        self._is_silent = is_silent
        self._judge()

    # ---- where experts are

    def shown(self, named: Callable[[str], Record | None]) -> ExpertBalance:
        """The summary, with the copies of experts on instances that are still here.

        ``named`` finds an instance by its name.
        """
        form = self._placed
        if form is None:
            return self.summary
        ranks = tuple(peer.rank if named(peer.instance) is not None else None for peer in form.peers)
        key = form.epoch, ranks, tuple(self._busiest)
        if self._last_shown is None or self._last_shown[0] != key:
            self._last_shown = key, _copies_on(form, ranks, self._busiest)
        return msgspec.structs.replace(self.summary, **self._last_shown[1])

    def first_placement(self, settings: Settings, members: Sequence[Record], first: Placement) -> Placement:
        """Where experts are in the first group: ``first``, with all copies."""
        terms, layers = settings.balancing, _layers(members)
        if terms is None or not terms.num_redundant or not layers:
            return first
        seats = _seats(settings, members)
        conditions = Terms(num_redundant=terms.num_redundant, survive=terms.survive)
        copies = with_copies(first.copies(), seats, conditions)
        return Placement((), seats.size, (copies,) * layers)

    def placement(self, settings: Settings, members: Sequence[Record], *, lost: bool) -> Placement | None:
        """Where experts are in the next group; None if their load is not balanced.

        ``lost``: the group before is of no use any more, and what is held stays.
        """
        terms, layers = settings.balancing, _layers(members)
        self._follows_loss = lost
        if terms is None or not layers:
            return None
        seats = _seats(settings, members)
        if self._next is not None:
            return Placement((), seats.size, self._next.layers)
        held = _held(settings, members)
        found = keep(held, seats.room) if lost else self._balance(settings, terms, members).layers
        return Placement((), seats.size, found)

    # ----

    def _hear(self, settings: Settings, form: GroupPlan, members: Sequence[Record]) -> bool:
        """Take over the loads of a window that all report; False if there is none."""
        loads = [member.loads for member in members]
        known = [each for each in loads if each is not None and each.epoch == form.epoch]
        numbers = {each.number for each in known}
        shapes = {(len(each.rows), *map(len, each.rows)) for each in known}
        expected = (_layers(members), *[settings.num_experts] * _layers(members))
        self._newest = max(numbers, default=self._newest)
        if len(known) < len(members) or len(numbers) != 1 or shapes != {expected}:
            return False
        if numbers == {self._window}:
            return False
        self._window = numbers.pop()
        self._copy_bytes = max(member.expert_bytes for member in members) // _layers(members)
        layers = list(zip(*(each.rows for each in known), strict=True))
        self._loads = [[sum(rows) for rows in zip(*of_layer, strict=True)] for of_layer in layers]
        totals = [[float(sum(rows)) for rows in of_layer] for of_layer in layers]
        measured = [(sum(rows) / len(rows), max(rows)) for rows in totals]
        self.summary = msgspec.structs.replace(
            self.summary,
            windows=self.summary.windows + 1,
            balancedness=balancedness(measured),
            by_layer=tuple(balancedness([each]) for each in measured),
        )
        self._busiest = _busiest(self._loads)
        return True

    def _balance(
        self, settings: Settings, terms: Balancing, members: Sequence[Record], *, asked: bool = False
    ) -> Balanced:
        held, seats = _held(settings, members), _seats(settings, members)
        loads = self._loads if len(self._loads) == len(held) else [[0] * settings.num_experts] * len(held)
        conditions = Terms(
            num_redundant=terms.num_redundant,
            survive=terms.survive,
            horizon=float("inf") if asked else float(terms.windows),
            most_moves=max(1, len(held) * (settings.num_experts + terms.num_redundant) // MOST_MOVED),
        )
        found = balance(loads, held, seats, conditions)
        self.summary = msgspec.structs.replace(
            self.summary,
            wanted_copies=terms.survive + 1,
            most_copies=least_copies(settings.num_experts, seats, conditions),
        )
        return found


def _number(member: Record, form: GroupPlan) -> int:
    """The newest window of a group that a member has reported; 0: none."""
    loads = member.loads
    return loads.number if loads is not None and loads.epoch == form.epoch else 0


def _busiest(loads: Sequence[Sequence[int]]) -> list[tuple[int, float]]:
    """The experts with most rows over all layers, and their parts of all rows."""
    rows = [sum(of_expert) for of_expert in zip(*loads, strict=True)]
    total = sum(rows)
    order = sorted(range(len(rows)), key=lambda expert: (-rows[expert], expert))
    return [(expert, rows[expert] / total) for expert in order[:MOST_BUSY] if rows[expert]]


def _copies_on(
    form: GroupPlan, ranks: Sequence[int | None], busiest: Sequence[tuple[int, float]]
) -> dict[str, Any]:
    """Fields of :class:`ExpertBalance` that follow from where experts are.

    ``ranks``: of the group's members, None for those that are gone.
    """
    layers = form.replicas or (form.placement.copies(),)
    holders = [
        [[rank for copy in copies if (rank := ranks[copy // form.ranks]) is not None] for copies in layer]
        for layer in layers
    ]
    found: dict[str, Any] = {
        "busiest": tuple(
            BusyExpert(expert, share, tuple(sorted({rank for layer in holders for rank in layer[expert]})))
            for expert, share in busiest
        )
    }
    if form.replicas:
        found["copies"] = min(len(held) for layer in holders for held in layer)
        found["held"] = dict(Counter(rank for layer in holders for held in layer for rank in held))
        found["replicas"] = tuple(sum(map(len, of_expert)) for of_expert in zip(*holders, strict=True))
    return found


def _layers(members: Sequence[Record]) -> int:
    """Layers with experts; 0 while some member has not said."""
    return min((member.expert_layers for member in members), default=0)


def _seats(settings: Settings, members: Sequence[Record]) -> Seats:
    each = settings.tensor_parallel_size
    ranks = [(number, member) for number, member in enumerate(members) for _ in range(each)]
    return Seats(
        tuple(member.max_experts for _, member in ranks),
        tuple(number for number, _ in ranks),
        tuple(member.host for _, member in ranks),
    )


def _held(settings: Settings, members: Sequence[Record]) -> list[Copies]:
    """Ranks that hold each expert, by layer."""
    each = settings.tensor_parallel_size
    held = []
    for layer in range(_layers(members)):
        ranks: list[list[int]] = [[] for _ in range(settings.num_experts)]
        for number, member in enumerate(members):
            for rank in range(each):
                for expert in member.held(rank, layer):
                    if expert < settings.num_experts:
                        ranks[expert].append(number * each + rank)
        held.append(tuple(map(tuple, ranks)))
    return held
