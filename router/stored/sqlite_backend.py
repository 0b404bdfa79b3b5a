"""SQLite file that routers of a host share, with a lock for each living one.

Each router has a locked file ``<store>.<owner>.lock`` beside it, which the kernel unlocks at its death.
Triggers keep the total of stored bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from router.stored.backend import Session
from router.stored.schema import ANSWERS, COUNTED, REST, VERSION, statements_of

BUSY_SECONDS = 10.0
"""Longest wait for another router's write."""
LOCK_SUFFIX = ".lock"


class SqliteBackend:
    """Connection of this router to the file, and its lock."""

    failures: tuple[type[Exception], ...] = (sqlite3.Error, OSError)

    def __init__(self, path: Path, *, lasts: bool) -> None:
        """``lasts``: the file is to be whole after a power failure as well."""
        self._path = path
        self._lasts = lasts
        self._owner = ""
        self._lock = -1

    def __repr__(self) -> str:
        return str(self._path)

    def open(self, owner: str) -> None:
        """See :class:`.Backend`."""
        self._owner = owner
        self._connection = self._opened()
        self._lock = self._locked()
        self._forget_the_dead()

    def close(self) -> None:
        """See :class:`.Backend`."""
        self._connection.close()
        with contextlib.suppress(OSError):
            self._lock_of(self._owner).unlink()
        self.forget()

    def forget(self) -> None:
        """See :class:`.Backend`; the file stays, as the kernel leaves it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @contextlib.contextmanager
    def transaction(self, *, only_adds: bool) -> Iterator[Session]:
        """See :class:`.Backend`."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def lives(self, owner: str) -> bool:
        """See :class:`.Backend`."""
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

    def _opened(self) -> sqlite3.Connection:
        descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)  # for this user alone
        os.close(descriptor)
        connection = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'NORMAL' if self._lasts else 'OFF'}")
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
        path = self._lock_of(self._owner)
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


def _make_schema(connection: sqlite3.Connection, version: int) -> None:
    """Make what a file of version 0 (new) or 1 lacks."""
    for statement in statements_of((ANSWERS if version == 0 else "") + REST):
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
