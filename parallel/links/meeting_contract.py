"""The contract of a meeting place: values by name that one process keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Meeting(Protocol):
    """A member's way to the values.

    All calls raise CollectiveError when the process that keeps them is gone.
    """

    def set(self, key: str, value: bytes) -> None: ...

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these have values."""
        ...

    def get(self, key: str) -> bytes:
        """A value that is there."""
        ...
