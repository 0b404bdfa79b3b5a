"""Health of a group as one member sees it, and the call under way.

The base of both kinds: over links, and in shared memory.

This module loads no torch.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn

from parallel.links.errors import CollectiveError, Evidence
from parallel.links.last_words import Blame


class GroupHealth(ABC):
    """Health of a group: why it is broken, and how its calls fail."""

    def __init__(self, rank: int, timeout: float, should_stop: Callable[[], bool] | None) -> None:
        """``rank`` is the one that errors name. ``timeout`` (seconds) is that of each call.

        ``should_stop`` is asked until :meth:`formed`.
        """
        self.rank = rank
        self.reason: str | None = None
        """Why the group is broken."""
        self.on_broken: Callable[[CollectiveError], None] | None = None
        """Called once when a break is noticed between calls.

        Not every group watches its members then.
        """
        self.timeout = timeout
        """Seconds that a call may take."""
        self.grace = 0.0
        """Seconds that it may take longer, since it waits for members who wait for others."""
        self._blamed: int | None = None
        self._evidence: Evidence = "aborted"
        self._should_stop = should_stop
        self._call = "forming the group"
        self._deadline: float | None = None
        """Deadline of the current call.

        It is computed when the call first waits for long, since most do not.
        """
        self._lock = threading.RLock()  # abort may come from a signal handler

    @property
    def blame(self) -> Blame | None:
        """Why the group is broken; None while it is not."""
        return None if self.reason is None else (self.reason, self._blamed, self._evidence)

    def name(self, rank: int) -> int:
        """The rank by which errors name a member."""
        return rank

    def formed(self) -> None:
        """Note that all members have come, and drop the wait for them."""
        self._should_stop = None

    def begin(self, call: str) -> None:
        """Begin a call, whose deadline counts from now.

        Raises:
            CollectiveError: the group is broken.
        """
        if self.reason is not None:
            raise self._error(call)
        self._call, self._deadline = call, None

    @abstractmethod
    def give_up(self, reason: str, rank: int | None, evidence: Evidence) -> None:
        """Break the group because of the member of this name, if it is known."""

    def fail(self, reason: str, rank: int | None, evidence: Evidence) -> NoReturn:
        """The call has failed, because of the member of this name, if it is known."""
        self.give_up(reason, rank, evidence)
        raise self._error(self._call)

    def fail_on_bytes(self, rank: int, sent: int, expected: int) -> NoReturn:
        """Member ``rank`` sends another number of bytes than is expected here."""
        name = self.name(rank)
        self.fail(f"rank {name} sends {sent} bytes where {expected} are expected", name, "closed")

    def _error(self, call: str) -> CollectiveError:
        return CollectiveError(f"{call} on rank {self.rank}: {self.reason}", self._blamed, self._evidence)
