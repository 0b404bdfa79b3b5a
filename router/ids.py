"""Ids within answers: calls of tools, items."""

from __future__ import annotations

import random
from contextvars import ContextVar
from functools import cached_property
from uuid import UUID, uuid4

_source: ContextVar[_Seeded | None] = ContextVar("ids_of_answer", default=None)
"""Source of the ids of this task's answer; None: unpredictable ones."""


class _Seeded:
    """Source that is made once an id is drawn: few answers have any."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @cached_property
    def source(self) -> random.Random:
        return random.Random(self._seed)


def repeat_ids(seed: int) -> None:
    """Draw the ids of this task's answer from a seed, the same each time."""
    _source.set(_Seeded(seed))


def _source_now() -> random.Random | None:
    seeded = _source.get()
    return None if seeded is None else seeded.source


def hex_id() -> str:
    """A new id of 32 hexadecimal digits."""
    source = _source_now()
    return uuid4().hex if source is None else UUID(int=source.getrandbits(128)).hex


def letters(alphabet: str, count: int) -> str:
    """A new id of so many letters of an alphabet."""
    return "".join((_source_now() or random.SystemRandom()).choices(alphabet, k=count))
