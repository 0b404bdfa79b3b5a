"""Files of the batch API, in parts, in the routers' common store."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence

from router.batches.objects import FileObject
from router.stored.backend import Session
from router.stored.database import StoreDatabase, StoreUnusable
from router.stored.schema import ENDED

PART_BYTES = 1 << 18
"""Size of the parts in which a file is kept."""
UPLOAD_SECONDS = 3600.0
"""Seconds without a part until an unfinished file is deleted."""
LINES_IN_A_ROW = 32
"""Lines that are read without a look at other work."""
OUTPUT_PURPOSE = "batch_output"
"""Purpose of the files that batches end with."""
COLUMNS = "id, bytes, created, name, purpose, expires"


class FileInUse(Exception):
    """A batch that has not ended reads the file."""


class StoredFiles:
    """Files of all tenants. All methods may raise :class:`.StoreUnusable`."""

    def __init__(self, database: StoreDatabase) -> None:
        self._database = database

    def __repr__(self) -> str:
        return f"<StoredFiles in {self._database!r}>"

    async def begin(self, tenant: str, name: str, purpose: str) -> str:
        """A new file, empty and not to be seen yet; returns its id."""
        id, now = f"file-{uuid.uuid4().hex}", time.time()
        await self._database.write(
            "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, 0, 0)",
            (id, tenant, now, now + UPLOAD_SECONDS, name, purpose),
        )
        return id

    async def append(self, id: str, number: int, part: bytes, *, is_bounded: bool = True) -> None:
        """Add the next part of a file.

        Raises:
            StoreFull: there is no room, and the file ``is_bounded``.
        """

        def append(session: Session) -> None:
            if is_bounded:
                self._database.check_room(session, len(part))
            query = "UPDATE files SET bytes = bytes + ?, expires = ? WHERE id = ?"
            _changed(session, id, query, (len(part), time.time() + UPLOAD_SECONDS, id))
            session.execute("INSERT INTO file_parts VALUES (?, ?, ?)", (id, number, part))

        await self._database.run(append)

    async def end(self, id: str, expires: float) -> None:
        """Make a file whole."""
        await self._database.run(lambda session: make_whole(session, id, expires))

    async def get(self, id: str, tenant: str) -> FileObject | None:
        """A tenant's file, unless it has expired."""
        found = await self._database.run(
            lambda session: session.execute(
                f"SELECT {COLUMNS} FROM files WHERE id = ? AND tenant = ? AND is_whole = 1 AND expires > ?",
                (id, tenant, time.time()),
            ).fetchone()
        )
        return None if found is None else _object_of(found)

    async def all(self, tenant: str, purpose: str | None) -> list[FileObject]:
        """A tenant's files, oldest first."""
        rows = await self._database.run(
            lambda session: session.execute(
                f"SELECT {COLUMNS} FROM files WHERE tenant = ? AND is_whole = 1 AND expires > ?"
                f"{'' if purpose is None else ' AND purpose = ?'} ORDER BY created, id",
                (tenant, time.time(), *([] if purpose is None else [purpose])),
            ).fetchall()
        )
        return [_object_of(row) for row in rows]

    async def delete(self, id: str) -> None:
        """Delete a file.

        Raises:
            FileInUse: a batch reads it.
        """

        def delete(session: Session) -> None:
            query = f"SELECT id FROM batches WHERE input = ? AND state NOT IN ({ENDED})"
            if (found := session.execute(query, (id,)).fetchone()) is not None:
                raise FileInUse(f"The batch {found[0]} reads this file: cancel it first.")
            session.execute("DELETE FROM file_parts WHERE file = ?", (id,))
            session.execute("DELETE FROM files WHERE id = ?", (id,))

        await self._database.run(delete)

    async def discard(self, ids: Sequence[str]) -> None:
        """Delete those of these files that are not whole."""

        def discard(session: Session) -> None:
            for id in ids:
                discard_unless_whole(session, id)

        await self._database.run(discard)

    async def parts(self, id: str) -> AsyncIterator[bytes]:
        """Content of a file, part by part."""
        number = 0
        while True:
            found = await self._database.run(
                lambda session, number=number: session.execute(  # type: ignore[misc]
                    "SELECT data FROM file_parts WHERE file = ? AND number = ?", (id, number)
                ).fetchone()
            )
            if found is None:
                return
            yield found[0]
            number += 1

    async def lines(self, id: str, most_bytes: int) -> AsyncIterator[bytes]:
        """Lines of a file, blank ones left out; one over ``most_bytes`` comes cut.

        The event loop looks after others between every few of them.
        """
        number, begun = 0, bytearray()
        async for part in self.parts(id):
            *ended, rest = part.split(b"\n")
            for end in ended:
                begun += end[: most_bytes + 1 - len(begun)]
                if begun.strip() or len(begun) > most_bytes:
                    yield bytes(begun)
                begun.clear()
                number += 1
                if not number % LINES_IN_A_ROW:
                    await asyncio.sleep(0)
            begun += rest[: most_bytes + 1 - len(begun)]
        if begun.strip() or len(begun) > most_bytes:
            yield bytes(begun)


class FileWriter:
    """Writer of a file whose size is not known before."""

    def __init__(self, files: StoredFiles, id: str, *, is_bounded: bool = True) -> None:
        self._files = files
        self._id = id
        self._is_bounded = is_bounded
        self._number = 0
        self._waiting = bytearray()

    def __repr__(self) -> str:
        return f"<FileWriter of {self._id}, {self._number} parts>"

    async def write(self, data: bytes) -> None:
        """Add to the file; raises as :meth:`StoredFiles.append`."""
        self._waiting += data
        while len(self._waiting) >= PART_BYTES:
            await self._put(bytes(self._waiting[:PART_BYTES]))
            del self._waiting[:PART_BYTES]

    async def flush(self) -> None:
        """Write what waits; nothing may be added then."""
        if self._waiting:
            await self._put(bytes(self._waiting))

    async def end(self, expires: float) -> None:
        """Make the file whole."""
        await self.flush()
        await self._files.end(self._id, expires)

    async def _put(self, part: bytes) -> None:
        await self._files.append(self._id, self._number, part, is_bounded=self._is_bounded)
        self._number += 1


def make_whole(session: Session, id: str, expires: float) -> None:
    """Let a file be seen, in a transaction."""
    _changed(session, id, "UPDATE files SET is_whole = 1, expires = ? WHERE id = ?", (expires, id))


def _changed(session: Session, id: str, query: str, values: Sequence[object]) -> None:
    """Change a file's row, in a transaction; raises StoreUnusable if there is none."""
    if not session.execute(query, values).rowcount:
        raise StoreUnusable(f"the file {id} was deleted before it was whole")


def discard_unless_whole(session: Session, id: str) -> None:
    """Delete a file that is not whole, in a transaction."""
    if session.execute("DELETE FROM files WHERE id = ? AND is_whole = 0", (id,)).rowcount:
        session.execute("DELETE FROM file_parts WHERE file = ?", (id,))


def _object_of(row: tuple[str, int, float, str, str, float]) -> FileObject:
    id, size, created, name, purpose, expires = row
    return FileObject(id, size, int(created), name, purpose, int(expires))
