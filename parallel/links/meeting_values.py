"""The values of a meeting place, by name, and how many it holds (pure)."""

from __future__ import annotations

from collections.abc import Sequence

MOST_VALUES = 65_536
"""Maximum number of values in one meeting place, over all groups."""
MOST_VALUE_BYTES = 64 << 20
"""Maximum total bytes of values and names in a meeting place."""
LARGEST_VALUE = 256 << 10
"""Maximum bytes of one value in a meeting place."""
LONGEST_KEY = 512
"""Maximum characters of a value's name."""
MOST_KEYS_AT_ONCE = 4096
"""Maximum number of names in one query."""


class NoRoom(ValueError):
    """Error: a value exceeds the limits of the meeting place."""


class Values:
    """Bounded store of values by name."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0

    def __repr__(self) -> str:
        return f"<Values {len(self._values)} of {self._num_bytes} bytes>"

    def set(self, key: str, value: bytes) -> None:
        """Keep a value, in place of one that has this name.

        Raises:
            NoRoom: a bound is reached; nothing has changed.
        """
        if len(key) > LONGEST_KEY:
            raise NoRoom(f"a name of {len(key)} characters is too long: {LONGEST_KEY} are allowed")
        if len(value) > LARGEST_VALUE:
            raise NoRoom(f"a value of {len(value)} bytes is too large: {LARGEST_VALUE} are allowed")
        before = self._values.get(key)
        if before is None and len(self._values) >= MOST_VALUES:
            raise NoRoom(f"the meeting place is full: it holds {MOST_VALUES} values")
        more = len(value) - len(before) if before is not None else len(value) + len(key)
        if self._num_bytes + more > MOST_VALUE_BYTES:
            raise NoRoom(f"the meeting place is full: it holds {MOST_VALUE_BYTES} bytes")
        self._values[key] = value
        self._num_bytes += more

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def first_missing(self, keys: Sequence[str]) -> str | None:
        """The first of these names without a value; None if all have one."""
        return next((key for key in keys if key not in self._values), None)

    def find(self, keys: Sequence[str]) -> list[bytes] | None:
        """The values of these names; None unless all are there."""
        try:
            return [self._values[key] for key in keys]
        except KeyError:
            return None
