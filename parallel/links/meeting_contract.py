"""The contract of a meeting place: values by name that one process keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Meeting(Protocol):
    """Interface of a meeting place, as members use it.

    All calls raise CollectiveError when the process that keeps them is gone, or does not answer in time.
    """

    def set(self, key: str, value: bytes) -> None:
        """Keep a value under this name, in place of any before.

        Raises:
            CollectiveError: it is too large, or the meeting place is full.
        """
        ...

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these have values."""
        ...

    def get(self, key: str) -> bytes:
        """Value of a name that is known to be set."""
        ...

    def find(self, keys: Sequence[str], seconds: float) -> list[bytes] | None:
        """Values of these names as soon as all are there.

        None if they are not within ``seconds``, of which one call waits at most
        :data:`parallel.links.meeting_server.LONGEST_WAIT`.
        """
        ...


class Prefixed:
    """A meeting place in which all names begin with another's: the part of one group."""

    def __init__(self, meeting: Meeting, name: str) -> None:
        self._meeting = meeting
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name} at {self._meeting!r}>"

    def set(self, key: str, value: bytes) -> None:
        self._meeting.set(self._key(key), value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._meeting.check([self._key(key) for key in keys])

    def get(self, key: str) -> bytes:
        return self._meeting.get(self._key(key))

    def find(self, keys: Sequence[str], seconds: float) -> list[bytes] | None:
        return self._meeting.find([self._key(key) for key in keys], seconds)

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"
