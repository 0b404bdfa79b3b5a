"""Memory of the instances' KV caches, which outlives them since ``serve`` holds it.

Each instance that is started gets an empty file (memfd); its pages come as it writes them. When it dies,
others read from it (:mod:`engine.inheritance`). One dead cache is kept for each place in the process table:
until another instance of that place serves, or all ends. That one gives the pages back before it sizes its
own cache.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from engine.inheritance.names import FILE_NAME, MEMORY_VARIABLE, PREDECESSOR_VARIABLE


class CacheFiles:
    """Cache files of one launcher's instances, by place in the process table."""

    def __init__(self) -> None:
        self._living: dict[int, int] = {}
        self._dead: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<CacheFiles {len(self._living)} in use, {len(self._dead)} dead>"

    def begin(self, key: int) -> Mapping[str, str]:
        """Make a cache file for a new instance; returns environment variables that name it."""
        if (before := self._living.pop(key, None)) is not None:
            self._close_dead(key)
            self._dead[key] = before
        self._living[key] = os.memfd_create(f"{FILE_NAME}-{key}", os.MFD_CLOEXEC)
        found = {MEMORY_VARIABLE: _path(self._living[key])}
        if key in self._dead:
            found[PREDECESSOR_VARIABLE] = _path(self._dead[key])
        return found

    def serves(self, key: int) -> None:
        """Free the predecessor's cache of an instance that has become ready."""
        self._close_dead(key)

    def forget(self, key: int) -> None:
        """Free the caches of an instance that ended in order or is not restarted."""
        self._close_dead(key)
        if (file := self._living.pop(key, None)) is not None:
            os.close(file)

    def close(self) -> None:
        for key in {*self._living, *self._dead}:
            self.forget(key)

    def _close_dead(self, key: int) -> None:
        if (file := self._dead.pop(key, None)) is not None:
            os.close(file)


def _path(file: int) -> str:
    return f"/proc/{os.getpid()}/fd/{file}"
