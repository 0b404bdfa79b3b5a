"""The kernels' waits for other members of a group, which end as those of its communicator do."""

from __future__ import annotations

import ctypes

from parallel.communicators.shared_memory import SharedMemoryCommunicator

_Check = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


class NativeWaits:
    """Decides for the kernels, every few milliseconds, whether a wait can still end well."""

    def __init__(self, group: SharedMemoryCommunicator, what: str) -> None:
        """``what``: the call that errors name."""
        self._group = group
        self._what = what
        self._check = _Check(self._on_check)
        self._awaited = (0, 0)
        self.error: BaseException | None = None
        """Why the step was given up, if it was."""

    def __repr__(self) -> str:
        return f"<NativeWaits of {self._group!r} in {self._what}>"

    @property
    def address(self) -> int | None:
        """Of the function that the kernels call, as long as this lives."""
        return ctypes.cast(self._check, ctypes.c_void_p).value

    def begin(self) -> None:
        """A step comes.

        Raises:
            parallel.communicators.base.CollectiveError: the group is broken.
        """
        self._awaited, self.error = (0, 0), None
        self._group.begin_exchange(self._what)

    def _on_check(self, rank: int, word: int, target: int) -> int:
        """The kernels wait until the word of member ``rank`` is ``target``; 1: give up."""
        try:
            if self._awaited != (word, target):
                self._awaited = (word, target)
                self._group.begin_exchange(self._what)  # each wait has the time that a collective has
            self._group.check_exchange(rank, lambda: ctypes.c_int64.from_address(word).value >= target)
        except BaseException as error:  # noqa: BLE001 (raised by the caller: it may not pass through the kernels)
            self.error = error
            return 1
        return 0
