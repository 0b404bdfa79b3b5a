"""What members of a group meet at: values by name, kept by one process for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Meeting(Protocol):
    """A member's way to the values; all calls may raise :class:`.CollectiveError` when its host is gone."""

    def set(self, key: str, value: bytes) -> None: ...

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these have values."""
        ...

    def get(self, key: str) -> bytes:
        """A value that is there."""
        ...
