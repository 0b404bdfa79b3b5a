"""Ids within answers: calls of tools, items."""

from __future__ import annotations

import random
from contextvars import ContextVar
from uuid import UUID, uuid4

_source: ContextVar[random.Random | None] = ContextVar("ids_of_answer", default=None)
"""Source of the ids of this task's answer; None: unpredictable ones."""


def repeat_ids(seed: int) -> None:
    """Draw the ids of this task's answer from a seed, the same each time."""
    _source.set(random.Random(seed))


def hex_id() -> str:
    """A new id of 32 hexadecimal digits."""
    source = _source.get()
    return uuid4().hex if source is None else UUID(int=source.getrandbits(128)).hex


def letters(alphabet: str, count: int) -> str:
    """A new id of so many letters of an alphabet."""
    return "".join((_source.get() or random.SystemRandom()).choices(alphabet, k=count))
