"""Requests that another process will dispatch, counted where they are chosen to go (pure).

An endpoint picker chooses instances, and routers send them the requests. So no report of an instance bears
the numbers of the picker's dispatches: time decides when a request is in the reports of its instance.
"""

from __future__ import annotations

from collections import deque

import msgspec

from router.dispatch.chooser import Chooser
from router.dispatch.ledger import Entry, Ledger
from router.dispatch.policy import Policy
from router.dispatch.pool import Pool, PooledInstance
from router.mesh import Prompt

COUNTED_FOR = 0.6
"""Seconds until an instance's own reports hold a request that was chosen for it."""
EXPECTED_FOR = 2.0
"""Least seconds for which the blocks of its prompt are expected there."""


class Reservation:
    """One request at the instance that was chosen for it."""

    def __init__(self, entry: Entry, instance: PooledInstance, now: float) -> None:
        self.entry = entry
        self.instance = instance
        self.made_at = now
        self.has_ended = False
        """Its answer has ended, or its client is gone."""

    def __repr__(self) -> str:
        return f"<Reservation {self.entry.prompt.request_id} at instance {self.instance.rank}>"


class Reservations:
    """Reservations of a process that dispatches nothing itself, as the endpoint picker."""

    def __init__(self, pool: Pool, policy: Policy = Policy.PREFIX_AWARE) -> None:
        self._ledger = Ledger()
        self._chooser = Chooser(pool, self._ledger, policy)
        self._uncounted: deque[tuple[Reservation, int]] = deque()
        """Those that count beside their instance's report, oldest first, with their numbers there."""
        self._ended: deque[Reservation] = deque()
        """Those that ended early: the blocks of their prompts are still expected for a moment."""
        self.num_open = 0
        """Those that have not ended."""

    def __repr__(self) -> str:
        return f"<Reservations {self.num_open} open, {len(self._uncounted)} uncounted>"

    def make(self, prompt: Prompt, now: float) -> Reservation:
        """Choose an instance and count the request there.

        Raises:
            MeshError: no instance can take it (503), or none ever could (400).
        """
        self.look(now)
        entry = Entry(prompt, begun_at=now)
        instance = self._chooser.choose(entry, now)
        made = Reservation(entry, instance, now)
        self._uncounted.append((made, self._chooser.dispatch(entry, instance, now)))
        self.num_open += 1
        return made

    def end(self, reservation: Reservation, now: float) -> None:
        """Note that the request's answer has ended; harmless twice."""
        if reservation.has_ended:
            return
        reservation.has_ended = True
        self.num_open -= 1
        self._ended.append(reservation)
        self.look(now)

    def look(self, now: float) -> None:
        """Take out what the instances report themselves by now."""
        while self._uncounted and self._uncounted[0][0].made_at + COUNTED_FOR <= now:
            made, number = self._uncounted.popleft()
            if made.instance.report is not None:
                report = msgspec.structs.replace(made.instance.report, last_dispatch=number)
                made.instance.take_report(report, now)
        while self._ended and self._ended[0].made_at + EXPECTED_FOR <= now:
            entry = self._ended.popleft().entry
            self._chooser.settle(entry)
            self._ledger.drop(entry)
