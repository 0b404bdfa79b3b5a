"""All-to-all exchange of one value per group member through a meeting place.

This module loads no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from parallel.links.errors import CollectiveError
from parallel.links.meeting_contract import Meeting

_LOOK_SECONDS = 0.02
"""Polling interval for an abort of the exchange, in seconds."""


def exchange(
    meeting: Meeting,
    rank: int,
    size: int,
    mine: bytes,
    *,
    timeout: float,
    should_stop: Callable[[], bool] | None = None,
    names: Sequence[int] | None = None,
) -> list[bytes]:
    """Exchange one value per member; returns all values by rank.

    Waits until all members have written theirs. ``names`` are the members' ranks in a larger group, by rank
    here: errors name them.

    Raises:
        CollectiveError: somebody did not come in time, ``should_stop`` returned True, or the meeting place is
            gone.
    """
    deadline = time.monotonic() + timeout
    keys = [f"member/{member}" for member in range(size)]
    try:
        meeting.set(keys[rank], mine)
        while (values := meeting.find(keys, _LOOK_SECONDS)) is None:
            if should_stop is not None and should_stop():
                raise CollectiveError("it was stopped from outside", None, "aborted")
            if time.monotonic() > deadline:
                ranks = range(size) if names is None else names
                missing = [ranks[member] for member in range(size) if not meeting.check([keys[member]])]
                raise CollectiveError(
                    f"rank {', '.join(map(str, missing))} did not come within {timeout:g} s",
                    min(missing, default=None),
                    "deadline",
                )
    except CollectiveError as error:
        raise CollectiveError(f"forming the group: {error}", error.rank, error.evidence) from error
    return values
