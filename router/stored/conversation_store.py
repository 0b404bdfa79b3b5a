"""Conversations: items that requests add to, in the routers' common store."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from router.stored.backend import Session
from router.stored.database import StoreDatabase

Item = dict[str, Any]

MOST_ITEMS = 10_000
"""Most items of a conversation."""


class TooManyItems(Exception):
    """A conversation would have over :data:`MOST_ITEMS` items."""


class StoredConversation(msgspec.Struct):
    """A conversation, and its items in their order."""

    id: str
    created: float
    metadata: dict[str, str]
    items: list[Item]


class ConversationStore:
    """Conversations of all tenants. All methods may raise :class:`.StoreUnusable`."""

    def __init__(self, database: StoreDatabase, ttl: float) -> None:
        """``ttl``: seconds that one is kept after its last change."""
        self._database = database
        self._ttl = ttl

    def __repr__(self) -> str:
        return f"<ConversationStore in {self._database!r}>"

    async def begin(self, tenant: str, items: Sequence[Item], metadata: dict[str, str]) -> StoredConversation:
        """A new conversation.

        Raises:
            StoreFull: there is no room.
        """
        now = time.time()
        made = StoredConversation(f"conv_{uuid.uuid4().hex}", now, metadata, list(items))
        encoded = msgspec.json.encode(made.items)

        def begin(session: Session) -> None:
            self._database.check_room(session, len(encoded))
            session.execute(
                "INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?)",
                (made.id, tenant, now, now + self._ttl, msgspec.json.encode(metadata), encoded, len(encoded)),
            )

        await self._database.run(begin)
        return made

    async def get(self, id: str, tenant: str) -> StoredConversation | None:
        """A tenant's conversation, unless it has expired."""
        return await self._database.run(lambda session: found_in(session, id, tenant))

    async def change(
        self, id: str, tenant: str, change: Callable[[StoredConversation], None]
    ) -> StoredConversation | None:
        """Change a tenant's conversation; returns it as it is now, None if there is none.

        Raises:
            TooManyItems, StoreFull: there is no room.
        """

        def write(session: Session) -> StoredConversation | None:
            found = found_in(session, id, tenant)
            if found is not None:
                before = len(msgspec.json.encode(found.items))
                change(found)
                self._database.check_room(session, len(msgspec.json.encode(found.items)) - before)
                put(session, found, time.time() + self._ttl)
            return found

        return await self._database.run(write)

    async def delete(self, id: str) -> None:
        """Delete a conversation; the answers in it stay."""
        await self._database.write("DELETE FROM conversations WHERE id = ?", (id,))


def found_in(session: Session, id: str, tenant: str) -> StoredConversation | None:
    """A tenant's conversation, in a transaction."""
    query = "SELECT created, metadata, items FROM conversations WHERE id = ? AND tenant = ? AND expires > ?"
    row = session.execute(query, (id, tenant, time.time())).fetchone()
    if row is None:
        return None
    return StoredConversation(id, row[0], msgspec.json.decode(row[1]), msgspec.json.decode(row[2]))


def put(session: Session, changed: StoredConversation, expires: float) -> None:
    """Write a conversation that was changed, in a transaction.

    Raises:
        TooManyItems: it has too many.
    """
    if len(changed.items) > MOST_ITEMS:
        raise TooManyItems(f"A conversation may have {MOST_ITEMS} items.")
    items = msgspec.json.encode(changed.items)
    session.execute(
        "UPDATE conversations SET metadata = ?, items = ?, bytes = ? WHERE id = ?",
        (msgspec.json.encode(changed.metadata), items, len(items), changed.id),
    )
    session.execute(
        "UPDATE conversations SET expires = ? WHERE id = ? AND expires < ?", (expires, changed.id, expires)
    )


def addition(id: str, tenant: str, items: list[Item], expires: float) -> Callable[[Session], None]:
    """Part of a transaction that adds items, unless the conversation is gone or full."""

    def add(session: Session) -> None:
        found = found_in(session, id, tenant)
        if found is not None and len(found.items) + len(items) <= MOST_ITEMS:
            found.items += items
            put(session, found, expires)

    return add
