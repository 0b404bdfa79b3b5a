"""Waits of kernels for other members, which end by the communicator's rules."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

_Check = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


class ExchangingGroup(Protocol):
    """A communicator whose members exchange in native code between two calls."""

    @property
    def is_crowded(self) -> bool:
        """Whether there are more members on this host than cores."""
        ...

    def begin_exchange(self, call: str) -> None:
        """Begin a call that waits by itself; raises CollectiveError if the group is broken."""
        ...

    def check_exchange(self, rank: int, has_arrived: Callable[[], bool]) -> None:
        """Check a wait for a member; raises CollectiveError if it can no longer end well."""
        ...


HasArrived = Callable[[int, int, int], bool]
"""(rank, address of its word, target) -> whether the word has risen to the target"""


def _has_risen(rank: int, word: int, target: int) -> bool:
    return bool(ctypes.c_int64.from_address(word).value >= target)


class NativeWaits:
    """Decides for the kernels, every few milliseconds, whether a wait can still end well."""

    def __init__(self, group: ExchangingGroup, what: str, has_arrived: HasArrived = _has_risen) -> None:
        """``what``: the call that errors name."""
        self._group = group
        self._has_arrived = has_arrived
        self._what = what
        self._check = _Check(self._on_check)
        self._awaited = (0, 0)
        self.error: BaseException | None = None
        """Why the step was given up, if it was."""

    def __repr__(self) -> str:
        return f"<NativeWaits of {self._group!r} in {self._what}>"

    @property
    def address(self) -> int | None:
        """Address of the function that the kernels call, as long as this lives."""
        return ctypes.cast(self._check, ctypes.c_void_p).value

    def begin(self) -> None:
        """Prepare for a step.

        Raises:
            parallel.communicators.base.CollectiveError: the group is broken.
        """
        self._awaited, self.error = (0, 0), None
        self._group.begin_exchange(self._what)

    def _on_check(self, rank: int, word: int, target: int) -> int:
        """Callback while kernels wait for a word of member ``rank`` to be ``target``.

        Returns 1 to give up.
        """
        try:
            if self._awaited != (word, target):
                self._awaited = (word, target)
                self._group.begin_exchange(self._what)  # each wait has the time that a collective has
            self._group.check_exchange(rank, lambda: self._has_arrived(rank, word, target))
        except BaseException as error:  # noqa: BLE001 (raised by the caller: it may not pass through the kernels)
            self.error = error
            return 1
        return 0
