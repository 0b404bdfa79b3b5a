"""Numbers of the adapters that running requests compute with (pure).

Workers have room for a few adapters at once. A request's adapter has a number while it runs; one that nobody
runs with keeps its number until another one needs it, the one longest without requests first.
"""

from __future__ import annotations

from collections import OrderedDict


class AdapterNumbers:
    """Numbers 1, 2, ... of adapters by their digest."""

    def __init__(self, most: int) -> None:
        """``most``: adapters at once."""
        self._most = most
        self._numbers: dict[str, int] = {}
        self._running: dict[str, int] = {}
        """Running requests of each adapter that has some."""
        self._idle: OrderedDict[str, None] = OrderedDict()
        """Adapters with a number and no requests, the one longest so first."""

    def __repr__(self) -> str:
        return f"<AdapterNumbers: {len(self._running)} of {self._most} run, {len(self._idle)} idle>"

    def has_room(self, digest: str) -> bool:
        """Whether a request of this adapter may run now; always, without one."""
        return not digest or digest in self._numbers or len(self._running) < self._most

    def take(self, digest: str) -> int:
        """Number for one more running request of this adapter; 0 without one."""
        if not digest:
            return 0
        if digest not in self._numbers:
            self._numbers[digest] = self._free()
        self._idle.pop(digest, None)
        self._running[digest] = self._running.get(digest, 0) + 1
        return self._numbers[digest]

    def give_back(self, digest: str) -> None:
        """Note that a request of this adapter runs no more."""
        if not digest:
            return
        self._running[digest] -= 1
        if not self._running[digest]:
            del self._running[digest]
            self._idle[digest] = None

    @property
    def running(self) -> list[str]:
        """Adapters that requests run with."""
        return list(self._running)

    @property
    def laid_out(self) -> list[str]:
        """Adapters with a number, which requests can run with at no cost."""
        return list(self._numbers)

    def _free(self) -> int:
        if len(self._numbers) < self._most:
            return len(self._numbers) + 1
        digest, _ = self._idle.popitem(last=False)
        return self._numbers.pop(digest)
