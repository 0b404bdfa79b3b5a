"""SQLite file that routers of a host share, with a lock for each living one.

Each router has a locked file ``<store>.<owner>.lock`` beside it, which the kernel unlocks at its death. One
thread of each router reads and writes. Triggers keep the total of stored bytes.

The schema is documented in docs/use/stored-answers.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

VERSION = 2
"""Version of the schema (``PRAGMA user_version``); a file of a later one is refused."""
BUSY_SECONDS = 10.0
"""Longest wait for another router's write."""
LOCK_SUFFIX = ".lock"
ANSWERS = """
CREATE TABLE answers (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, expires REAL NOT NULL,
  state TEXT NOT NULL, owner TEXT NOT NULL, request BLOB NOT NULL, input BLOB NOT NULL, answer BLOB,
  events BLOB, bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX answers_by_expiry ON answers (expires);
CREATE INDEX answers_by_state ON answers (state);
CREATE TABLE tokens (
  id TEXT NOT NULL, number INTEGER NOT NULL, batch BLOB NOT NULL, PRIMARY KEY (id, number)
) WITHOUT ROWID;
"""
"""Schema of version 1."""
REST = """
CREATE TABLE files (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, expires REAL NOT NULL,
  name TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL, is_whole INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE file_parts (
  file TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (file, number)
);
CREATE TABLE batches (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, expires REAL NOT NULL,
  state TEXT NOT NULL, owner TEXT NOT NULL, input TEXT NOT NULL, body BLOB NOT NULL, bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX batches_by_state ON batches (state);
CREATE TABLE batch_lines (
  batch TEXT NOT NULL, number INTEGER NOT NULL, is_error INTEGER NOT NULL, answer BLOB NOT NULL,
  bytes INTEGER NOT NULL, PRIMARY KEY (batch, number)
);
CREATE TABLE conversations (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, expires REAL NOT NULL,
  metadata BLOB NOT NULL, items BLOB NOT NULL, bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE totals (bytes INTEGER NOT NULL);
"""
ENDED = "'completed', 'failed', 'expired', 'cancelled'"
"""States of batches that have ended, in SQL."""
READ_FILES = f"SELECT input FROM batches WHERE state NOT IN ({ENDED})"
"""Input files of batches that have not ended, in SQL."""
COUNTED = ("answers", "files", "batches", "batch_lines", "conversations")
"""Tables whose column ``bytes`` counts."""

Result = TypeVar("Result")
Transaction = Callable[[sqlite3.Connection], Result]


class StoreUnusable(Exception):
    """The store cannot be opened or written, for the reason given."""


class StoreFull(Exception):
    """The store holds --store-max-bytes already."""


class StoreDatabase:
    """Connection of this router to the file, and its lock."""

    def __init__(self, path: Path, *, most_bytes: int, lasts: bool) -> None:
        """``lasts``: the file is to be whole after a power failure as well.

        Raises:
            StoreUnusable: the file cannot be opened.
        """
        self.owner = uuid.uuid4().hex
        self._path = path
        self._most_bytes = most_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._lock = -1
        try:
            self._connection = self._thread.submit(self._opened, lasts).result()
            self._lock = self._locked()
            self._forget_the_dead()
        except (sqlite3.Error, OSError) as error:
            raise StoreUnusable(f"the store {path} cannot be opened: {error}") from error

    def __repr__(self) -> str:
        return f"<StoreDatabase {self._path}, owner {self.owner[:8]}>"

    def close(self) -> None:
        """Give up what this router owns: others may take it over."""
        self._thread.submit(self._connection.close).result()
        self._thread.shutdown()
        with contextlib.suppress(OSError):
            self._lock_of(self.owner).unlink()
        os.close(self._lock)

    def _opened(self, lasts: bool) -> sqlite3.Connection:
        descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)  # for this user alone
        os.close(descriptor)
        connection = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'NORMAL' if lasts else 'OFF'}")
        connection.execute("BEGIN IMMEDIATE")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version in (0, 1):
            _make_schema(connection, version)
        connection.execute("COMMIT")
        if version not in (0, 1, VERSION):
            raise sqlite3.DatabaseError(f"its schema has version {version}, this Lockstep's {VERSION}")
        return connection

    def _locked(self) -> int:
        """Descriptor of this router's locked file.

        Another router may take a new file for a dead one's before it is locked.
        """
        path = self._lock_of(self.owner)
        while True:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            os.close(descriptor)

    def _forget_the_dead(self) -> None:
        """Remove the files of routers that were killed, each while it is locked here."""
        for path in self._path.parent.glob(f"{self._path.name}.*{LOCK_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()

    def _lock_of(self, owner: str) -> Path:
        return self._path.with_name(f"{self._path.name}.{owner}{LOCK_SUFFIX}")

    async def run(self, work: Transaction[Result]) -> Result:
        """The result of one transaction, in the store's thread.

        Raises:
            StoreUnusable: it failed.
        """

        def transaction() -> Result:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(self._connection)
                # A cursor's end in another thread would reset the statement that this one executes by then.
                assert not isinstance(result, sqlite3.Cursor), "cursors stay in the store's thread"
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")
            return result

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)
        except (sqlite3.Error, RuntimeError) as error:
            raise StoreUnusable(f"the store {self._path} fails: {error}") from error

    async def write(self, statement: str, values: Sequence[object]) -> None:
        """Execute one statement as a transaction; raises as :meth:`run`."""

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(statement, values)

        await self.run(write)

    def check_room(self, connection: sqlite3.Connection, size: int) -> None:
        """Make sure, in a transaction, that so many bytes may be added.

        Raises:
            StoreFull: there is no room, even without what has expired.
        """
        expire(connection, time.time())
        if (held := total_of(connection)) + size > self._most_bytes:
            raise StoreFull(f"the store holds {held} bytes of at most {self._most_bytes}")

    # ---- ownership

    def claim(self, connection: sqlite3.Connection, table: str, id: str, states: str) -> bool:
        """Own a row whose owner is dead, in a transaction; whether it is owned now."""
        query = f"SELECT owner FROM {table} WHERE id = ? AND state IN ({states})"
        row = connection.execute(query, (id,)).fetchone()
        if row is None or (row[0] != self.owner and self.lives(row[0])):
            return False
        connection.execute(f"UPDATE {table} SET owner = ? WHERE id = ?", (self.owner, id))
        return True

    def lives(self, owner: str) -> bool:
        """Whether a router holds the lock of its file."""
        try:
            descriptor = os.open(self._lock_of(owner), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False


def _make_schema(connection: sqlite3.Connection, version: int) -> None:
    """Make what a file of version 0 (new) or 1 lacks."""
    for statement in filter(str.strip, ((ANSWERS if version == 0 else "") + REST).split(";")):
        connection.execute(statement)
    if version == 1:
        keys = "SELECT tenant || '/' || id FROM answers WHERE answers.id = tokens.id"
        connection.execute(f"UPDATE tokens SET id = ({keys}) WHERE id IN (SELECT id FROM answers)")
        connection.execute("UPDATE answers SET id = tenant || '/' || id")
    connection.execute("INSERT INTO totals SELECT COALESCE(SUM(bytes), 0) FROM answers")
    for table in COUNTED:
        for event, change in (
            ("INSERT", "NEW.bytes"),
            ("UPDATE OF bytes", "NEW.bytes - OLD.bytes"),
            ("DELETE", "-OLD.bytes"),
        ):
            connection.execute(
                f"CREATE TRIGGER {table}_{event.split()[0].lower()} AFTER {event} ON {table}"
                f" BEGIN UPDATE totals SET bytes = bytes + ({change}); END"
            )
    connection.execute(f"PRAGMA user_version = {VERSION}")


def total_of(connection: sqlite3.Connection) -> int:
    """Bytes that all tables hold."""
    (held,) = connection.execute("SELECT bytes FROM totals").fetchone()
    return int(held)


def expire(connection: sqlite3.Connection, now: float) -> None:
    """Delete what has expired, with what belongs to it."""
    connection.execute("DELETE FROM answers WHERE state != 'running' AND expires <= ?", (now,))
    connection.execute("DELETE FROM conversations WHERE expires <= ?", (now,))
    for table, part, key, condition in (
        ("batches", "batch_lines", "batch", f"state IN ({ENDED}) AND expires <= ?"),
        ("files", "file_parts", "file", f"expires <= ? AND id NOT IN ({READ_FILES})"),
    ):
        ids = [row[0] for row in connection.execute(f"SELECT id FROM {table} WHERE {condition}", (now,))]
        for id in ids:
            connection.execute(f"DELETE FROM {part} WHERE {key} = ?", (id,))
            connection.execute(f"DELETE FROM {table} WHERE id = ?", (id,))
