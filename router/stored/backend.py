"""Protocol of a store's database: transactions, and locks of living routers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Rows(Protocol):
    """Result of a statement."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Session(Protocol):
    """Connection within a transaction; statements mark their values with ``?``."""

    def execute(self, statement: str, values: Sequence[Any] = ..., /) -> Rows: ...
    def executemany(self, statement: str, rows: Iterable[Sequence[Any]], /) -> Rows: ...


class Backend(Protocol):
    """A database. All methods are called in the store's thread, and may raise ``failures``."""

    failures: tuple[type[Exception], ...]

    def open(self, owner: str) -> None:
        """Connect, make the schema if there is none, and take the owner's lock."""

    def transaction(self, *, only_adds: bool) -> AbstractContextManager[Session]:
        """Context of a transaction that no other one overlaps.

        Those that ``only_adds`` may overlap one another.
        """

    def lives(self, owner: str) -> bool:
        """Whether a router holds the owner's lock."""

    def forget(self) -> None:
        """Give the owner's lock up, as at its death."""

    def close(self) -> None:
        """Give the lock up, and the connection."""
