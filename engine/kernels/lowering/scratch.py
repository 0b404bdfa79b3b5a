"""Rows that operations of a part hand on to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch


@dataclass(frozen=True)
class Scratch:
    """Rows that operations of a part hand on; parts share those of one name."""

    name: str
    width: int
    """Numbers of a row. The widest part of a model decides."""
    per: Literal["token", "group token"] = "token"
    """One row for each token of this member, or of all members of its group."""
    times: int = 1
    """Rows for each token."""
    slack: int = 0
    """Further rows, which may be read but are not used."""
    dtype: torch.dtype | None = None
    """None: rows of the model's type, laid out as :mod:`engine.kernels.core.rows` describes."""
    is_input: bool = True
    """Whether products read them, which may want them in 8 bits."""


class UsesScratch(Protocol):
    """Contract of layer parts that hand rows on between their operations."""

    def scratch(self) -> list[Scratch]:
        """Rows that its operations hand on."""


def all_scratch(parts: Sequence[UsesScratch]) -> dict[str, Scratch]:
    """Rows of all parts by name, each of the widest and most."""
    found: dict[str, Scratch] = {}
    for each in (scratch for part in parts for scratch in part.scratch()):
        known = found.get(each.name)
        if known is None or (each.width, each.times) > (known.width, known.times):
            found[each.name] = each
    return found
