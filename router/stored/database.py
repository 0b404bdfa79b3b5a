"""The store that routers share: transactions in a thread, and ownership of rows."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from router.stored.backend import Backend, Session
from router.stored.postgres_backend import PostgresBackend
from router.stored.schema import expire, total_of
from router.stored.sqlite_backend import SqliteBackend

Result = TypeVar("Result")
Transaction = Callable[[Session], Result]


class StoreUnusable(Exception):
    """The store cannot be opened or written, for the reason given."""


class StoreFull(Exception):
    """The store holds --store-max-bytes already."""


class StoreDatabase:
    """This router's use of the store."""

    def __init__(self, place: Path | str, *, most_bytes: int, lasts: bool) -> None:
        """``place``: a file of SQLite, or the URL of a PostgreSQL database.

        ``lasts``: a file is to be whole after a power failure as well.

        Raises:
            StoreUnusable: it cannot be opened.
        """
        self.owner = uuid.uuid4().hex
        self._most_bytes = most_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        try:
            self._backend = _backend_of(place, lasts)
        except ValueError as error:
            raise StoreUnusable(str(error)) from error
        self._failures: tuple[type[Exception], ...] = (*self._backend.failures, RuntimeError)
        try:
            self._thread.submit(self._backend.open, self.owner).result()
        except self._backend.failures as error:
            raise StoreUnusable(f"the store {self!r} cannot be opened: {error}") from error

    def __repr__(self) -> str:
        return repr(self._backend)

    def close(self) -> None:
        """Give up what this router owns: others may take it over."""
        self._thread.submit(self._backend.close).result()
        self._thread.shutdown()

    def seem_dead(self) -> None:
        """Give the lock up and go on, as if the connection had broken."""
        self._thread.submit(self._backend.forget).result()

    async def run(self, work: Transaction[Result], *, only_adds: bool = False) -> Result:
        """The result of one transaction, in the store's thread.

        Raises:
            StoreUnusable: it failed.
        """

        def transaction() -> Result:
            with self._backend.transaction(only_adds=only_adds) as session:
                result = work(session)
                # A cursor's end in another thread would reset the statement that this one executes by then.
                assert not hasattr(result, "rowcount"), "cursors stay in the store's thread"
                return result

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)
        except self._failures as error:
            raise StoreUnusable(f"the store {self!r} fails: {error}") from error

    async def write(self, statement: str, values: Sequence[object]) -> None:
        """Execute one statement as a transaction; raises as :meth:`run`."""

        def write(session: Session) -> None:
            session.execute(statement, values)

        await self.run(write)

    def check_room(self, session: Session, size: int) -> None:
        """Make sure, in a transaction, that so many bytes may be added.

        Raises:
            StoreFull: there is no room, even without what has expired.
        """
        if size > self.room_in(session):
            raise self.full(session)

    def room_in(self, session: Session) -> int:
        """Bytes that may be added in a transaction, once what has expired is gone."""
        expire(session, time.time())
        return self._most_bytes - total_of(session)

    def full(self, session: Session) -> StoreFull:
        """The error for what there is no room for."""
        return StoreFull(f"the store holds {total_of(session)} bytes of at most {self._most_bytes}")

    # ---- ownership

    def claim(self, session: Session, table: str, id: str, states: str) -> bool:
        """Own a row whose owner is dead, in a transaction; whether it is owned now."""
        query = f"SELECT owner FROM {table} WHERE id = ? AND state IN ({states})"
        row = session.execute(query, (id,)).fetchone()
        if row is None or (row[0] != self.owner and self.lives(row[0])):
            return False
        session.execute(f"UPDATE {table} SET owner = ? WHERE id = ?", (self.owner, id))
        return True

    def lives(self, owner: str) -> bool:
        """Whether a router holds its lock, in a transaction."""
        return self._backend.lives(owner)


def _backend_of(place: Path | str, lasts: bool) -> Backend:
    return PostgresBackend(place) if isinstance(place, str) else SqliteBackend(place, lasts=lasts)
