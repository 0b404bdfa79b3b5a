"""Watch over the other members of a group: broken connections, and processes that end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from parallel.communicators.base import CollectiveError, Communicator
from parallel.rounds.segments import ProcessWatch

WATCH_INTERVAL = 0.1
"""Seconds between two looks for processes that are ending."""

OnLost = Callable[[Sequence[int | None], str, str, str], None]
"""Called with lost ranks, the evidence, what noticed the loss, and the reason."""


class GroupWatch:
    """A thread that notices the end of a member at once, also while all sleep."""

    def __init__(self, group: Communicator, on_lost: OnLost, is_wanted: Callable[[], bool]) -> None:
        self._group = group
        self._on_lost = on_lost
        self._is_wanted = is_wanted

    def __repr__(self) -> str:
        return f"<GroupWatch {self._group!r}>"

    def start(self) -> None:
        """Start the thread; it ends by itself once the group is replaced."""
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def _run(self) -> None:
        self._group.on_broken = self._broken
        watch = ProcessWatch()
        try:
            for rank, pid in self._group.processes.items():
                with contextlib.suppress(OSError):  # it has ended: the next collective will tell
                    watch.add(rank, pid)
            while self._is_wanted():
                dead = watch.dead(WATCH_INTERVAL)
                if dead:
                    self._on_lost(dead, "exited", "its process", f"rank {dead[0]} has died")
                    return
        finally:
            watch.close()

    def _broken(self, error: CollectiveError) -> None:
        self._on_lost([error.rank], error.evidence, "a connection", str(error))
