"""Rendezvous of the members of a group: a key per member in a store.

This module loads no torch.

The store's own blocking calls cannot be ended from outside, so this asks again at short intervals.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from parallel.communicators.base import CollectiveError

if TYPE_CHECKING:
    from torch.distributed import Store

_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.02


def exchange(
    store: Store,
    rank: int,
    size: int,
    mine: bytes,
    *,
    timeout: float,
    should_stop: Callable[[], bool] | None = None,
) -> list[bytes]:
    """Exchange one value per member through the store; returns all values by rank.

    Waits until all members have written theirs.
    """
    deadline = time.monotonic() + timeout
    keys = [f"member/{member}" for member in range(size)]
    pause = _FIRST_PAUSE
    try:
        store.set(keys[rank], mine)
        while not store.check(keys):
            if should_stop is not None and should_stop():
                raise CollectiveError("forming the group was stopped from outside", None, "aborted")
            if time.monotonic() > deadline:
                missing = [member for member in range(size) if not store.check([keys[member]])]
                names = ", ".join(map(str, missing))
                raise CollectiveError(
                    f"forming the group: rank {names} did not come within {timeout:g} s",
                    min(missing, default=None),
                    "deadline",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return [bytes(store.get(key)) for key in keys]
    except CollectiveError:
        raise
    except RuntimeError as error:  # the store's errors are a family of these
        raise CollectiveError(f"forming the group: the store does not answer ({error})") from error
