"""Batches and the answers of their lines, in the routers' common store.

One router owns a batch and answers its lines; another one takes it over once that is dead. A line has one
answer, the first that was stored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from router.batches.file_store import OUTPUT_PURPOSE, discard_unless_whole, make_whole
from router.batches.lines import LineAnswer
from router.batches.objects import BatchObject, BatchState, RequestCounts
from router.stored.backend import Session
from router.stored.database import StoreDatabase, StoreUnusable
from router.stored.schema import ENDED

MOST_UNENDED = 100
"""Batches of a tenant that have not ended; more are refused with 429."""
NEVER = 2.0**53
"""Time of expiry of what runs."""
WRITE_SECONDS = 0.02
"""Time in which answers of lines are gathered for one transaction."""
MOST_GATHERED = 64
"""Answers of lines in one transaction."""
READ_AT_ONCE = 500
"""Lines that are read in one transaction."""
ALIVE = ", ".join(f"'{each}'" for each in BatchState if not each.has_ended)
"""States of batches that have not ended, in SQL."""

_decode = msgspec.json.Decoder(BatchObject).decode


class TooManyBatches(Exception):
    """A tenant has :data:`MOST_UNENDED` batches that have not ended."""


class BatchTaken(Exception):
    """Another router has taken a batch over, or it has ended."""


class OwnedBatch(msgspec.Struct, frozen=True):
    """A batch that this router runs."""

    tenant: str
    object: BatchObject


@dataclass(frozen=True)
class _Gathered:
    """Answer of a line that is to be stored."""

    id: str
    """The line's batch."""
    number: int
    answer: LineAnswer
    stored: asyncio.Future[None]


class BatchStore:
    """Batches of all tenants. All methods may raise :class:`.StoreUnusable`."""

    def __init__(self, database: StoreDatabase) -> None:
        self._database = database
        self._gathered: list[_Gathered] = []
        self._writing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<BatchStore in {self._database!r}>"

    async def begin(self, tenant: str, batch: BatchObject) -> None:
        """Store a new batch, which this router owns.

        Raises:
            StoreFull: there is no room.
            TooManyBatches: others of the tenant have to end first.
        """
        body = msgspec.json.encode(batch)

        def begin(session: Session) -> None:
            self._database.check_room(session, len(body))
            query = f"SELECT COUNT(*) FROM batches WHERE tenant = ? AND state NOT IN ({ENDED})"
            if session.execute(query, (tenant,)).fetchone()[0] >= MOST_UNENDED:
                raise TooManyBatches
            row = (batch.id, tenant, time.time(), NEVER, batch.status, self._database.owner)
            session.execute(
                "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, batch.input_file_id, body, len(body)),
            )

        await self._database.run(begin)

    async def get(self, id: str, tenant: str) -> BatchObject | None:
        """A tenant's batch, with its counts as they are now."""

        def get(session: Session) -> BatchObject | None:
            query = "SELECT body FROM batches WHERE id = ? AND tenant = ?"
            row = session.execute(query, (id, tenant)).fetchone()
            return None if row is None else _counted(session, _decode(row[0]))

        return await self._database.run(get)

    async def all(self, tenant: str) -> list[BatchObject]:
        """A tenant's batches, newest first."""

        def all(session: Session) -> list[BatchObject]:
            query = "SELECT body FROM batches WHERE tenant = ? ORDER BY created DESC, id"
            return [_counted(session, _decode(body)) for (body,) in session.execute(query, (tenant,))]

        return await self._database.run(all)

    async def change(self, id: str, change: Callable[[BatchObject], None]) -> None:
        """Change a batch that has not ended, also one of another router."""

        def write(session: Session) -> None:
            row = session.execute(
                f"SELECT body FROM batches WHERE id = ? AND state IN ({ALIVE})", (id,)
            ).fetchone()
            if row is not None:
                batch = _decode(row[0])
                change(batch)
                _put(session, batch, NEVER)

        await self._database.run(write)

    async def advance(
        self,
        id: str,
        change: Callable[[BatchObject], None],
        *,
        ended: float | None = None,
        files: Sequence[str] = (),
    ) -> BatchObject:
        """Change a batch that this router owns; returns it as it is now.

        ``ended``: when it is deleted; its lines' answers then are. ``files`` become whole, for as long.

        Raises:
            BatchTaken: it is another router's, or has ended.
        """

        def write(session: Session) -> BatchObject:
            batch = self._owned(session, id)
            change(batch)
            if ended is not None:
                batch = _counted(session, batch)
                session.execute("DELETE FROM batch_lines WHERE batch = ?", (id,))
                for file in files:
                    make_whole(session, file, ended)
            _put(session, batch, NEVER if ended is None else ended)
            return batch

        return await self._database.run(write)

    async def clear(self, id: str, names: Sequence[str]) -> None:
        """Delete unfinished files of these names, which earlier tries to end the batch have left.

        Raises:
            BatchTaken: it is another router's, or has ended.
        """
        query = "SELECT id FROM files WHERE name = ? AND purpose = ? AND is_whole = 0"

        def clear(session: Session) -> None:
            self._owned(session, id)
            for name in names:
                for (file,) in session.execute(query, (name, OUTPUT_PURPOSE)).fetchall():
                    discard_unless_whole(session, file)

        await self._database.run(clear)

    # ---- lines

    async def answer(self, id: str, number: int, answer: LineAnswer) -> None:
        """Store the answer of a line, unless it has one.

        Raises:
            StoreFull: there is no room.
            BatchTaken: the batch is another router's, or has ended.
        """

        stored = asyncio.get_running_loop().create_future()
        self._gathered.append(_Gathered(id, number, answer, stored))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_gathered())
        await stored

    async def _write_gathered(self) -> None:
        """Store what is gathered, in a transaction for all."""
        while self._gathered:
            await asyncio.sleep(WRITE_SECONDS)
            # A cancelled line's would come after the answers were read for the batch's files.
            waiting = [each for each in self._gathered if not each.stored.done()]
            gathered, self._gathered = waiting[:MOST_GATHERED], waiting[MOST_GATHERED:]
            if not gathered:
                continue
            for each, problem in zip(gathered, await self._problems(gathered), strict=True):
                if each.stored.done():  # its line was cancelled
                    continue
                if problem is None:
                    each.stored.set_result(None)
                else:
                    each.stored.set_exception(problem)

    async def _problems(self, gathered: Sequence[_Gathered]) -> Sequence[Exception | None]:
        """Store answers; returns what is wrong with each."""
        try:
            return await self._database.run(partial(self._write_lines, gathered))
        except StoreUnusable as error:
            return [error] * len(gathered)
        except Exception as error:  # noqa: BLE001 (is that of one line, and not of those stored with it)
            if len(gathered) == 1:
                return [error]
            return [problem for each in gathered for problem in await self._problems([each])]

    def _write_lines(self, gathered: Sequence[_Gathered], session: Session) -> list[Exception | None]:
        """Store answers in a transaction; returns what is wrong with each."""
        problems: list[Exception | None] = []
        lost = {id: self._why_not_owned(session, id) for id in {each.id for each in gathered}}
        left = self._database.room_in(session)
        for each in gathered:
            text = each.answer.text
            problem = lost[each.id]
            if problem is None and len(text) > left:
                problem = self._database.full(session)
            if problem is None:
                left -= len(text)
                session.execute(
                    "INSERT INTO batch_lines VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                    (each.id, each.number, int(each.answer.is_error), text, len(text)),
                )
            problems.append(problem)
        return problems

    def _why_not_owned(self, session: Session, id: str) -> Exception | None:
        try:
            self._owned(session, id)
        except BatchTaken as problem:
            return problem
        return None

    async def answered(self, id: str) -> set[int]:
        """Numbers of the lines that have an answer."""
        return await self._database.run(
            lambda session: {
                row[0] for row in session.execute("SELECT number FROM batch_lines WHERE batch = ?", (id,))
            }
        )

    async def answers(self, id: str, *, errors: bool) -> AsyncIterator[bytes]:
        """Answers of a batch in the order of its lines: ``errors``, or the others."""
        after = -1
        while True:
            rows = await self._database.run(
                lambda session, after=after: session.execute(  # type: ignore[misc]
                    "SELECT number, answer FROM batch_lines WHERE batch = ? AND number > ? AND is_error = ?"
                    " ORDER BY number LIMIT ?",
                    (id, after, int(errors), READ_AT_ONCE),
                ).fetchall()
            )
            if not rows:
                return
            for _, text in rows:
                yield text
            after = rows[-1][0]

    # ---- ownership

    def _owned(self, session: Session, id: str) -> BatchObject:
        """A running batch of this router, in a transaction; raises BatchTaken."""
        query = f"SELECT body FROM batches WHERE id = ? AND owner = ? AND state IN ({ALIVE})"
        row = session.execute(query, (id, self._database.owner)).fetchone()
        if row is None:
            raise BatchTaken(f"the batch {id} belongs to another router, or has ended")
        return _decode(row[0])

    async def claim(self, id: str) -> bool:
        """Own a batch whose owner is dead; whether it is owned now."""
        return await self._database.run(lambda session: self._database.claim(session, "batches", id, ALIVE))

    async def release(self) -> None:
        """Leave this router's batches that have not ended to the first one that claims them."""
        await self._database.write(
            f"UPDATE batches SET owner = '' WHERE owner = ? AND state IN ({ALIVE})", (self._database.owner,)
        )

    async def owned(self) -> list[OwnedBatch]:
        """Batches of this router that have not ended."""
        query = f"SELECT tenant, body FROM batches WHERE state IN ({ALIVE}) AND owner = ? ORDER BY created"
        rows = await self._database.run(
            lambda session: session.execute(query, (self._database.owner,)).fetchall()
        )
        return [OwnedBatch(tenant, _decode(body)) for tenant, body in rows]

    async def orphans(self) -> list[str]:
        """Ids of batches that have not ended, whose owners are dead."""

        def orphans(session: Session) -> list[str]:
            query = f"SELECT id, owner FROM batches WHERE state IN ({ALIVE}) AND owner != ?"
            rows = session.execute(query, (self._database.owner,)).fetchall()
            dead = {owner for owner in {owner for _, owner in rows} if not self._database.lives(owner)}
            return [id for id, owner in rows if owner in dead]

        return await self._database.run(orphans)


def _put(session: Session, batch: BatchObject, expires: float) -> None:
    body = msgspec.json.encode(batch)
    session.execute(
        "UPDATE batches SET state = ?, expires = ?, body = ?, bytes = ? WHERE id = ?",
        (batch.status, expires, body, len(body), batch.id),
    )


def _counted(session: Session, batch: BatchObject) -> BatchObject:
    """The batch with the counts of its lines."""
    if not batch.status.has_ended or not batch.request_counts.completed + batch.request_counts.failed:
        query = "SELECT COUNT(*), COALESCE(SUM(is_error), 0) FROM batch_lines WHERE batch = ?"
        answered, failed = session.execute(query, (batch.id,)).fetchone()
        batch.request_counts = RequestCounts(batch.request_counts.total, answered - int(failed), int(failed))
    return batch
