"""Store of answers: an SQLite file that the routers of a host share.

An answer is *running* from its request on, then *done*, *failed* or *cancelled*. While it runs, every batch
of tokens is committed before any client sees it, so that a router which takes an answer over knows all that
was handed out. A router owns the answers that it runs; its locked file ``<store>.<owner>.lock`` shows that it
lives, and the kernel unlocks it at its death. One thread of each router reads and writes.

The schema is documented in docs/use/stored-answers.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import sqlite3
import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

logger = logging.getLogger(__name__)

VERSION = 1
"""Version of the schema (``PRAGMA user_version``); a file of another one is refused."""
BUSY_SECONDS = 10.0
"""Longest wait for another router's write."""
LOCK_SUFFIX = ".lock"
SCHEMA = """
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

Result = TypeVar("Result")


class AnswerState(StrEnum):
    """State of an answer."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class StoreUnusable(Exception):
    """The store cannot be opened or written, for the reason given."""


class StoreFull(Exception):
    """The store holds --store-max-bytes already."""


class AnswerExists(Exception):
    """An answer of this id is stored already."""


class StoredAnswer(msgspec.Struct, frozen=True):
    """A row of the table of answers."""

    id: str
    tenant: str
    created: float
    expires: float
    state: AnswerState
    owner: str
    request: bytes
    """How to run it again (:class:`router.stored.runs.RunRequest`)."""
    input: bytes = b""
    """Items of the conversation that it answers, in JSON; empty where it is no response."""
    answer: bytes | None = None
    """The whole answer in JSON, once it has ended."""
    events: bytes | None = None
    """All events of its stream, compressed, once it has ended."""


COLUMNS = ", ".join(StoredAnswer.__struct_fields__)


class AnswerStore:
    """Stored answers of one file. All methods may raise :class:`StoreUnusable`."""

    def __init__(self, path: Path, *, most_bytes: int, lasts: bool) -> None:
        """``lasts``: the file is to be whole after a power failure as well.

        Raises:
            StoreUnusable: the file cannot be opened.
        """
        self.owner = uuid.uuid4().hex
        self._path = path
        self._most_bytes = most_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._waiting: list[tuple[str, int, bytes]] = []
        self._commit: asyncio.Future[None] | None = None
        """Ends once what waits now is committed."""
        self._committing: asyncio.Task[None] | None = None
        self._lock = -1
        try:
            self._connection = self._thread.submit(self._opened, lasts).result()
            self._lock = self._locked()
            self._forget_the_dead()
        except (sqlite3.Error, OSError) as error:
            raise StoreUnusable(f"the store {path} cannot be opened: {error}") from error

    def __repr__(self) -> str:
        return f"<AnswerStore {self._path}, owner {self.owner[:8]}>"

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
        if version == 0:
            for statement in filter(str.strip, SCHEMA.split(";")):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
        if version not in (0, VERSION):
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

    async def _run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """The result of one transaction, in the store's thread."""

        def transaction() -> Result:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(self._connection)
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")
            return result

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)
        except (sqlite3.Error, RuntimeError) as error:
            raise StoreUnusable(f"the store {self._path} fails: {error}") from error

    # ---- answers

    async def begin(self, answer: StoredAnswer) -> None:
        """Store a running answer, which this router owns.

        Raises:
            StoreFull: there is no room, even without what has expired.
            AnswerExists: its id is taken.
        """
        size = len(answer.request) + len(answer.input)

        def begin(connection: sqlite3.Connection) -> None:
            _expire(connection, time.time())
            (held,) = connection.execute("SELECT COALESCE(SUM(bytes), 0) FROM answers").fetchone()
            if held + size > self._most_bytes:
                raise StoreFull(f"the store holds {held} bytes of at most {self._most_bytes}")
            row = (*msgspec.structs.astuple(answer), size)
            try:
                marks = ", ".join("?" * len(row))
                connection.execute(f"INSERT INTO answers ({COLUMNS}, bytes) VALUES ({marks})", row)
            except sqlite3.IntegrityError as error:
                raise AnswerExists(f"an answer {answer.id} is stored already") from error

        await self._run(begin)

    async def end(
        self, id: str, state: AnswerState, expires: float, answer: bytes | None, events: Sequence[bytes]
    ) -> None:
        """Store the end of an answer that this router owns, in place of its tokens."""
        packed = await asyncio.to_thread(zlib.compress, b"".join(events), 1)

        def end(connection: sqlite3.Connection) -> None:
            connection.execute(
                "UPDATE answers SET state = ?, expires = ?, answer = ?, events = ?, bytes = bytes + ?"
                " WHERE id = ? AND owner = ? AND state = 'running'",
                (state, expires, answer, packed, len(packed) + len(answer or b""), id, self.owner),
            )
            connection.execute("DELETE FROM tokens WHERE id = ?", (id,))

        await self._run(end)

    async def get(self, id: str, tenant: str | None) -> StoredAnswer | None:
        """The answer of this id, unless it has expired or is another tenant's."""

        def get(connection: sqlite3.Connection) -> StoredAnswer | None:
            row = connection.execute(f"SELECT {COLUMNS} FROM answers WHERE id = ?", (id,)).fetchone()
            if row is None:
                return None
            found = _answer_of(row)
            is_there = found.expires > time.time() or found.state is AnswerState.RUNNING
            return found if is_there and tenant in (None, found.tenant) else None

        return await self._run(get)

    async def delete(self, id: str) -> None:
        """Delete an answer and its tokens."""

        def delete(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM answers WHERE id = ?", (id,))
            connection.execute("DELETE FROM tokens WHERE id = ?", (id,))

        await self._run(delete)

    async def cancel(self, id: str, answer: bytes) -> None:
        """Store that a running answer is cancelled; its owner finds that out."""

        def cancel(connection: sqlite3.Connection) -> None:
            connection.execute(
                "UPDATE answers SET state = 'cancelled', answer = ? WHERE id = ? AND state = 'running'",
                (answer, id),
            )
            connection.execute("DELETE FROM tokens WHERE id = ?", (id,))

        await self._run(cancel)

    async def expire(self) -> None:
        """Delete what has expired."""
        await self._run(lambda connection: _expire(connection, time.time()))

    # ---- tokens

    async def append(self, id: str, number: int, batch: bytes) -> None:
        """Commit a batch of an answer's tokens, together with all batches that wait now."""
        loop = asyncio.get_running_loop()
        self._waiting.append((id, number, batch))
        if self._commit is None:
            self._commit = loop.create_future()
            self._committing = loop.create_task(self._commit_waiting(self._commit))
        await asyncio.shield(self._commit)

    async def _commit_waiting(self, commit: asyncio.Future[None]) -> None:
        await asyncio.sleep(0)  # the rest of the step's tokens
        batches, self._waiting, self._commit = self._waiting, [], None
        try:
            await self._run(
                lambda connection: connection.executemany("INSERT INTO tokens VALUES (?, ?, ?)", batches)
            )
        except Exception as error:  # noqa: BLE001 (raised where each of them waits)
            commit.set_exception(error)
        else:
            commit.set_result(None)

    async def tokens(self, id: str, first: int) -> list[bytes]:
        """Batches of an answer's tokens from number ``first`` on."""

        def tokens(connection: sqlite3.Connection) -> list[bytes]:
            query = "SELECT batch FROM tokens WHERE id = ? AND number >= ? ORDER BY number"
            return [batch for (batch,) in connection.execute(query, (id, first))]

        return await self._run(tokens)

    # ---- ownership

    async def claim(self, id: str) -> bool:
        """Own a running answer whose owner is dead; whether it is owned now."""

        def claim(connection: sqlite3.Connection) -> bool:
            query = "SELECT owner FROM answers WHERE id = ? AND state = 'running'"
            row = connection.execute(query, (id,)).fetchone()
            if row is None or (row[0] != self.owner and self._lives(row[0])):
                return False
            connection.execute("UPDATE answers SET owner = ? WHERE id = ?", (self.owner, id))
            return True

        return await self._run(claim)

    async def orphans(self) -> list[StoredAnswer]:
        """Running answers whose owners are dead."""

        def orphans(connection: sqlite3.Connection) -> list[StoredAnswer]:
            query = f"SELECT {COLUMNS} FROM answers WHERE state = 'running' AND owner != ?"
            rows = connection.execute(query, (self.owner,)).fetchall()
            found = [_answer_of(row) for row in rows]
            dead = {owner for owner in {each.owner for each in found} if not self._lives(owner)}
            return [each for each in found if each.owner in dead]

        return await self._run(orphans)

    def _lives(self, owner: str) -> bool:
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


def unpacked(events: bytes) -> list[bytes]:
    """Events of a stream as they were sent."""
    return [each + b"\n\n" for each in zlib.decompress(events).split(b"\n\n")[:-1]]


def _answer_of(row: tuple[Any, ...]) -> StoredAnswer:
    return msgspec.convert(dict(zip(StoredAnswer.__struct_fields__, row, strict=True)), StoredAnswer)


def _expire(connection: sqlite3.Connection, now: float) -> None:
    connection.execute("DELETE FROM answers WHERE state != 'running' AND expires <= ?", (now,))
