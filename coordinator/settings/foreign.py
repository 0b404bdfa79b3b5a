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
    """The long one, without hyphens in front."""
    shorts: tuple[str, ...] = ()
    is_switch: bool = False
    """Given alone, or with ``no-`` in front; others take one value."""
    here: str = ""
    """The flag of Lockstep with the same meaning."""
    harmless: tuple[str, ...] | None = ()
    """Values that change nothing; None: whatever it is. Switches are ``true`` or ``false``."""
    why: str = ""
    """They change nothing."""
    instead: str = ""
    """Why any other value cannot be served, and what to do."""


class ForeignError(ValueError):
    """A flag that is refused; the message names what to give instead."""


class ForeignFlags:
    """Takes the foreign flags that are given, and collects the messages about them."""

    def __init__(self, flags: Iterable[Foreign]) -> None:
        self.flags = tuple(flags)
        self._by_key = {flag.name.replace("-", "_"): flag for flag in self.flags}
        self.said: list[str] = []
        """A line for each flag that was ignored."""

    def __repr__(self) -> str:
        return f"<ForeignFlags {len(self.flags)}, said {self.said}>"

    def find(self, name: str) -> Foreign | None:
        """By its long name, in either spelling."""
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
    """So that true, "true" and True are one, and 0, 0.0 and "0" too."""
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
