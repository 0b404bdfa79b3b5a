"""The kernels' waits for other members, which end as those of the communicator do."""

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
            self._group.check_exchange(rank, lambda: ctypes.c_int64.from_address(word).value >= target)
        except BaseException as error:  # noqa: BLE001 (raised by the caller: it may not pass through the kernels)
            self.error = error
            return 1
        return 0
