"""Health of a group in shared memory: state words, ended processes, deadlines.

This module loads no torch.

Each member has a state word that the others can read. Waits are in vain when the process of a member has
ended, when somebody has given up, when this end was aborted or closed, and when the time of the call is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from parallel.links.errors import Evidence
from parallel.links.last_words import Blame
from parallel.rounds import memory_order
from parallel.rounds.group_health import GroupHealth
from parallel.rounds.segments import ProcessWatch

_OPEN, _CLOSED, _ABORTED = 0, 1, 2  # values of a state word; above: aborted because of rank value - 3


class SharedMemoryHealth(GroupHealth):
    """Health of a group in shared memory as one member sees it.

    Only :meth:`abort` may be called from another thread than that of the calls.
    """

    def __init__(
        self,
        rank: int,
        timeout: float,
        should_stop: Callable[[], bool] | None,
        names: Sequence[int] | None = None,
    ) -> None:
        """``timeout`` (seconds) is that of each call. ``should_stop`` is asked until :meth:`formed`.

        ``names`` are the members' ranks in a larger group, by rank here: errors and state words name them.
        """
        self._names = names
        super().__init__(self.name(rank), timeout, should_stop)
        self.watch = ProcessWatch()
        self._fence = memory_order.fence_here() or memory_order.no_fence
        self._states: dict[int, memoryview] = {}

    def name(self, rank: int) -> int:
        """The rank by which errors name a member."""
        return rank if self._names is None else self._names[rank]

    def know(self, rank: int, state: memoryview) -> None:
        """Add the state word of a member."""
        self._states[self.name(rank)] = state

    def check(self, rank: int, has_arrived: Callable[[], bool]) -> None:
        """Check a wait for member ``rank``; called every few milliseconds.

        Raises:
            CollectiveError: the wait can no longer end well; from now on all calls fail, here and at the
                others.
        """
        blame = self._hopeless(self.name(rank))
        if blame is None:
            return
        self._fence()
        if not has_arrived():  # it may have come before it went
            self.fail(*blame)

    def _hopeless(self, rank: int) -> Blame | None:
        """Why a wait for the member of this name is in vain."""
        if self.reason is not None:
            return self.blame
        if self._should_stop is not None and self._should_stop():
            return "it was stopped from outside", None, "aborted"
        dead = self.watch.dead()
        # After the dead: a last word counts.
        states = {peer: state[0] for peer, state in self._states.items()}
        for peer in dead:
            if states[peer] == _OPEN:
                return f"rank {peer} has died", peer, "exited"
        for peer, state in states.items():
            if state == _ABORTED:
                return f"rank {peer} has aborted", None, "closed"
            if state > _ABORTED:
                blamed = state - _ABORTED - 1
                return f"rank {peer} has given up because of rank {blamed}", blamed, "closed"
        if states[rank] == _CLOSED:
            return f"rank {rank} has closed its end", rank, "closed"
        if self._deadline is None:
            self._deadline = time.monotonic() + self.timeout + self.grace
        elif time.monotonic() > self._deadline:
            return f"rank {rank} did not come within {self.timeout:g} s", rank, "deadline"
        return None

    def give_up(self, reason: str, rank: int | None, evidence: Evidence) -> None:
        """Break the group because of the member of this name, if it is known."""
        self._leave(_ABORTED if rank is None else _ABORTED + 1 + rank, reason, rank, evidence)

    def abort(self) -> None:
        """Make all calls fail from now on, here and soon at the others."""
        self._leave(_ABORTED, "it was aborted")

    def close(self) -> None:
        """Forget the words of the members; no call comes any more."""
        self._leave(_CLOSED, "it was closed")
        self._states = {}
        self.watch.close()

    def _leave(
        self, state: int, reason: str, rank: int | None = None, evidence: Evidence = "aborted"
    ) -> None:
        with self._lock:
            if self.reason is None:
                self.reason, self._blamed, self._evidence = reason, rank, evidence
                if self.rank in self._states:
                    self._fence()
                    self._states[self.rank][0] = state
