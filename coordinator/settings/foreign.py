"""Flags of other systems that Lockstep does not have, and how each is treated (pure).

Commands list them (:mod:`router.launcher.foreign_flags`); :mod:`coordinator.settings.flags` looks up each,
from the command line or a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec


class Foreign(msgspec.Struct, frozen=True, kw_only=True):
    """One flag of another serving system.

    It has a name here, or is ignored with some values and refused with all others.
    """

    name: str
    """Long name of the flag, without leading hyphens."""
    shorts: tuple[str, ...] = ()
    is_switch: bool = False
    """Whether the flag takes no value and may begin with ``no-``."""
    here: str = ""
    """The flag of Lockstep with the same meaning."""
    harmless: tuple[str, ...] | None = ()
    """Values that are ignored; None: all. Switches are ``true`` or ``false``."""
    why: str = ""
    """Reason, for the warning, why harmless values change nothing."""
    instead: str = ""
    """Reason for refusing other values, and what to give instead."""


class ForeignError(ValueError):
    """A flag that is refused; the message names what to give instead."""


class ForeignFlags:
    """Takes the foreign flags that are given, and collects the messages about them."""

    def __init__(self, flags: Iterable[Foreign]) -> None:
        self.flags = tuple(flags)
        self._by_key = {flag.name.replace("-", "_"): flag for flag in self.flags}
        self.said: list[str] = []
        """Warning lines, one per ignored flag."""

    def __repr__(self) -> str:
        return f"<ForeignFlags {len(self.flags)}, said {self.said}>"

    def find(self, name: str) -> Foreign | None:
        """Foreign flag of this long name, with hyphens or underscores; None if unknown."""
        return self._by_key.get(name.replace("-", "_"))

    def take(self, flag: Foreign, value: Any) -> None:
        """Take a flag given with this value, from a command line, file or program.

        Raises:
            ForeignError: it means something that is not there.
        """
        if value is None:
            return
        written = _written(value)
        shown = _shown(flag, written)
        if flag.here:
            raise ForeignError(f"--{flag.name} is {flag.here} here")
        if flag.harmless is not None and written not in flag.harmless:
            raise ForeignError(f"{shown} is not possible: {flag.instead}")
        self.said.append(f"{shown} ignored: {flag.why}")


def _written(value: Any) -> str:
    """Canonical text of a value: "true" is True, and 0, 0.0 and "0" are one."""
    if isinstance(value, str):
        try:
            return f"{float(value):g}"
        except ValueError:
            return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return " ".join(map(_written, value))
    return json.dumps(value, default=str)


def _shown(flag: Foreign, written: str) -> str:
    if flag.is_switch and written in ("true", "false"):
        return f"--{'no-' * (written == 'false')}{flag.name}"
    return f"--{flag.name} {written}".rstrip()
