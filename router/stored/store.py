"""Stored answers, in the store that routers share.

An answer is *running* from its request on, then *done*, *failed* or *cancelled*. While it runs, every batch
of tokens is committed before any client sees it, so that a router which takes an answer over knows all that
was handed out. A router owns the answers that it runs.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from router.stored.backend import Session
from router.stored.database import StoreDatabase
from router.stored.schema import expire, total_of


class AnswerState(StrEnum):
    """State of an answer."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class AnswerExists(Exception):
    """An answer of this id is stored already."""


class AnswerTaken(Exception):
    """Another router has taken a running answer over, or ended it."""


class StoredAnswer(msgspec.Struct, frozen=True):
    """A row of the table of answers."""

    id: str
    """Key that :func:`key_of` makes."""
    tenant: str
    """Digest of the API key, without which no other client's answer has this id."""
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


def key_of(tenant: str, id: str) -> str:
    """Key of an answer in the store, where tenants may have chosen the same id."""
    return f"{tenant}/{id}"


def id_of(key: str) -> str:
    """The id that clients know, of an answer's key."""
    return key.partition("/")[2]


IS_OURS = "id = ? AND owner = ? AND state = 'running'"
"""Condition, in SQL, for a router to write into an answer: id, router."""
COLUMNS = ", ".join(StoredAnswer.__struct_fields__)


class AnswerStore:
    """Stored answers, by their keys. All methods may raise :class:`.StoreUnusable`."""

    def __init__(self, database: StoreDatabase) -> None:
        self.database = database
        self._waiting: list[tuple[str, int, bytes]] = []
        self._commit: asyncio.Future[set[str]] | None = None
        """Ends once what waits now is committed, with the ids of answers that are lost."""
        self._committing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<AnswerStore in {self.database!r}>"

    @property
    def owner(self) -> str:
        """Name of this router in the store."""
        return self.database.owner

    # ---- answers

    async def begin(self, answer: StoredAnswer) -> None:
        """Store a running answer, which this router owns.

        Raises:
            StoreFull: there is no room, even without what has expired.
            AnswerExists: its id is taken.
        """
        size = len(answer.request) + len(answer.input)

        def begin(session: Session) -> None:
            self.database.check_room(session, size)
            row = (*msgspec.structs.astuple(answer), size)
            marks = ", ".join("?" * len(row))
            begun = session.execute(
                f"INSERT INTO answers ({COLUMNS}, bytes) VALUES ({marks}) ON CONFLICT DO NOTHING", row
            )
            if not begun.rowcount:
                raise AnswerExists(f"an answer {answer.id} is stored already")

        await self.database.run(begin)

    async def end(
        self,
        id: str,
        state: AnswerState,
        expires: float,
        answer: bytes | None,
        events: Sequence[bytes],
        also: Callable[[Session], None] | None = None,
    ) -> None:
        """Store the end of an answer that this router owns, in place of its tokens.

        ``also`` is done in the same transaction if the answer ends now.
        """
        packed = await asyncio.to_thread(zlib.compress, b"".join(events), 1)

        def end(session: Session) -> None:
            ended = session.execute(
                "UPDATE answers SET state = ?, expires = ?, answer = ?, events = ?, bytes = bytes + ?"
                f" WHERE {IS_OURS}",
                (state, expires, answer, packed, len(packed) + len(answer or b""), id, self.owner),
            )
            if not ended.rowcount:
                return
            session.execute("DELETE FROM tokens WHERE id = ?", (id,))
            if also is not None:
                also(session)

        await self.database.run(end)

    async def get(self, id: str) -> StoredAnswer | None:
        """The answer of this key, unless it has expired."""

        def get(session: Session) -> StoredAnswer | None:
            row = session.execute(f"SELECT {COLUMNS} FROM answers WHERE id = ?", (id,)).fetchone()
            if row is None:
                return None
            found = _answer_of(row)
            is_there = found.expires > time.time() or found.state is AnswerState.RUNNING
            return found if is_there else None

        return await self.database.run(get)

    async def delete(self, id: str) -> None:
        """Delete an answer and its tokens."""

        def delete(session: Session) -> None:
            session.execute("DELETE FROM answers WHERE id = ?", (id,))
            session.execute("DELETE FROM tokens WHERE id = ?", (id,))

        await self.database.run(delete)

    async def cancel(self, id: str, answer: bytes) -> None:
        """Store that a running answer is cancelled; its owner finds that out."""

        def cancel(session: Session) -> None:
            session.execute(
                "UPDATE answers SET state = 'cancelled', answer = ? WHERE id = ? AND state = 'running'",
                (answer, id),
            )
            session.execute("DELETE FROM tokens WHERE id = ?", (id,))

        await self.database.run(cancel)

    async def expire(self) -> int:
        """Delete what has expired; returns the bytes that are left."""

        def left(session: Session) -> int:
            expire(session, time.time())
            return total_of(session)

        return await self.database.run(left)

    # ---- tokens

    async def append(self, id: str, number: int, batch: bytes) -> None:
        """Commit a batch of an answer's tokens, together with all batches that wait now.

        Raises:
            AnswerTaken: this router does not own the answer, or it has ended.
        """
        loop = asyncio.get_running_loop()
        self._waiting.append((id, number, batch))
        if self._commit is None:
            self._commit = loop.create_future()
            self._committing = loop.create_task(self._commit_waiting(self._commit))
        if id in await asyncio.shield(self._commit):
            raise AnswerTaken(f"the answer {id} belongs to another router, or has ended")

    async def _commit_waiting(self, commit: asyncio.Future[set[str]]) -> None:
        await asyncio.sleep(0)  # the rest of the step's tokens
        batches, self._waiting, self._commit = self._waiting, [], None

        def write(session: Session) -> set[str]:
            written = session.executemany(
                f"INSERT INTO tokens SELECT id, ?, ? FROM answers WHERE {IS_OURS}",
                [(number, batch, id, self.owner) for id, number, batch in batches],
            )
            if written.rowcount == len(batches):
                return set()
            query = f"SELECT 1 FROM answers WHERE {IS_OURS}"
            ids = {id for id, _, _ in batches}
            return {id for id in ids if session.execute(query, (id, self.owner)).fetchone() is None}

        try:
            commit.set_result(await self.database.run(write, only_adds=True))
        except Exception as error:  # noqa: BLE001 (raised where each of them waits)
            commit.set_exception(error)

    async def tokens(self, id: str, first: int) -> list[bytes]:
        """Batches of an answer's tokens from number ``first`` on."""

        def tokens(session: Session) -> list[bytes]:
            query = "SELECT batch FROM tokens WHERE id = ? AND number >= ? ORDER BY number"
            return [batch for (batch,) in session.execute(query, (id, first))]

        return await self.database.run(tokens)

    # ---- ownership

    async def claim(self, id: str) -> bool:
        """Own a running answer whose owner is dead; whether it is owned now."""

        return await self.database.run(
            lambda session: self.database.claim(session, "answers", id, "'running'")
        )

    async def orphans(self) -> list[StoredAnswer]:
        """Running answers whose owners are dead."""

        def orphans(session: Session) -> list[StoredAnswer]:
            query = f"SELECT {COLUMNS} FROM answers WHERE state = 'running' AND owner != ?"
            rows = session.execute(query, (self.owner,)).fetchall()
            found = [_answer_of(row) for row in rows]
            dead = {owner for owner in {each.owner for each in found} if not self.database.lives(owner)}
            return [each for each in found if each.owner in dead]

        return await self.database.run(orphans)


def unpacked(events: bytes) -> list[bytes]:
    """Events of a stream as they were sent."""
    return [each + b"\n\n" for each in zlib.decompress(events).split(b"\n\n")[:-1]]


def _answer_of(row: tuple[Any, ...]) -> StoredAnswer:
    return msgspec.convert(dict(zip(StoredAnswer.__struct_fields__, row, strict=True)), StoredAnswer)
