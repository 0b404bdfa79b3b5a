"""The store: several routers of one file, and of one PostgreSQL database."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest

from router.stored.conversation_store import ConversationStore, addition
from router.stored.database import StoreDatabase, StoreFull, StoreUnusable
from router.stored.schema import ANSWERS
from router.stored.store import (
    AnswerExists,
    AnswerState,
    AnswerStore,
    AnswerTaken,
    StoredAnswer,
    key_of,
    unpacked,
)


def opened(place: Path | str, most_bytes: int = 1 << 20) -> AnswerStore:
    return AnswerStore(StoreDatabase(place, most_bytes=most_bytes, lasts=False))


def answer(store: AnswerStore, id: str, *, tenant: str = "t", lasts: float = 60.0) -> StoredAnswer:
    now = time.time()
    return StoredAnswer(
        key_of(tenant, id), tenant, now, now + lasts, AnswerState.RUNNING, store.owner, b"request", b"[]"
    )


def dies(store: AnswerStore) -> None:
    """A router's death as others see it: its lock is free."""
    store.database.seem_dead()


def test_life_of_an_answer(place: Path | str) -> None:
    async def run() -> None:
        store, other = opened(place), opened(place)
        await store.begin(answer(store, "a"))
        with pytest.raises(AnswerExists):
            await other.begin(answer(other, "a"))
        await asyncio.gather(*(store.append("t/a", number, b"%d" % number) for number in range(3)))
        assert await other.tokens("t/a", 1) == [b"1", b"2"]
        await store.end("t/a", AnswerState.DONE, time.time() + 60, b"{}", [b"data: 1\n\n", b"data: 2\n\n"])
        row = await other.get(key_of("t", "a"))
        assert row is not None
        assert (row.state, row.answer, unpacked(row.events or b"")) == (
            AnswerState.DONE, b"{}", [b"data: 1\n\n", b"data: 2\n\n"]
        )  # fmt: skip
        assert await other.tokens("t/a", 0) == []
        assert await other.get(key_of("someone else", "a")) is None
        await other.delete("t/a")
        assert await store.get("t/a") is None
        store.database.close()
        other.database.close()

    asyncio.run(run())


def test_only_the_dead_lose_their_answers_and_only_to_one(place: Path | str) -> None:
    async def run() -> None:
        dead, *others = (opened(place) for _ in range(4))
        await dead.begin(answer(dead, "a"))
        assert not any([await each.claim("t/a") for each in others])
        assert not await others[0].orphans()
        dies(dead)
        assert [each.id for each in await others[0].orphans()] == ["t/a"]
        claimed = await asyncio.gather(*(each.claim("t/a") for each in others))
        assert sorted(claimed) == [False, False, True]
        assert not any([await each.orphans() for each in others])
        for store in (dead, *others):
            store.database.close()

    asyncio.run(run())


def test_a_router_that_was_taken_for_dead_writes_nothing_more(place: Path | str) -> None:
    async def run() -> None:
        lost, owner = opened(place), opened(place)
        for id in "ab":
            await lost.begin(answer(lost, id))
        await lost.append("t/a", 0, b"0")
        dies(lost)
        assert await owner.claim("t/a")
        written = await asyncio.gather(
            lost.append("t/a", 1, b"late"), lost.append("t/b", 0, b"own"), return_exceptions=True
        )
        assert [type(each) for each in written] == [AnswerTaken, type(None)], "the other answer is its own"
        await owner.append("t/a", 1, b"1")
        await lost.end("t/a", AnswerState.DONE, time.time() + 60, b"{}", [])
        assert await owner.tokens("t/a", 0) == [b"0", b"1"]
        await owner.cancel("t/a", b"{}")
        with pytest.raises(AnswerTaken):
            await owner.append("t/a", 2, b"2")
        assert await owner.tokens("t/a", 0) == [], "nothing is left of what has ended"
        for store in (lost, owner):
            store.database.close()

    asyncio.run(run())


def test_room_and_expiry(place: Path | str) -> None:
    async def run() -> None:
        store = opened(place, most_bytes=20)
        await store.begin(answer(store, "a"))
        await store.begin(answer(store, "b", lasts=0.0))
        with pytest.raises(StoreFull):
            await store.begin(answer(store, "c"))
        await store.end("t/b", AnswerState.DONE, time.time() - 1, None, [])
        assert await store.get("t/b") is None
        await store.begin(answer(store, "c"))
        store.database.close()

    asyncio.run(run())


def test_unusable_files_are_refused_or_reported(tmp_path: Path) -> None:
    (tmp_path / "answers").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreUnusable):
        opened(tmp_path / "answers")
    (tmp_path / "answers").unlink()
    with sqlite3.connect(tmp_path / "answers") as connection:
        connection.execute("PRAGMA user_version = 7")
    with pytest.raises(StoreUnusable, match="version 7"):
        opened(tmp_path / "answers")
    (tmp_path / "answers").unlink()

    async def run() -> None:
        store = opened(tmp_path / "answers")
        with sqlite3.connect(tmp_path / "answers") as connection:
            connection.execute("DROP TABLE tokens")
        with pytest.raises(StoreUnusable):
            await store.append("t/a", 0, b"")
        store.database.close()

    asyncio.run(run())


def test_a_file_of_version_one_is_brought_up_to_date(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "answers") as connection:
        connection.executescript(ANSWERS)
        row = ("a", "t", 0.0, 4e9, "running", "nobody", b"request", b"[]", None, None, 9)
        connection.execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        connection.execute("INSERT INTO tokens VALUES ('a', 0, x'01')")
        connection.execute("PRAGMA user_version = 1")

    async def run() -> None:
        store = opened(tmp_path / "answers")
        assert [each.id for each in await store.orphans()] == ["t/a"]
        assert await store.tokens("t/a", 0) == [b"\1"]
        assert await store.expire() == 9
        await store.delete("t/a")
        assert await store.expire() == 0
        store.database.close()

    asyncio.run(run())


def test_files_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path: Path) -> None:
    dead, living = opened(tmp_path / "answers"), opened(tmp_path / "answers")
    dies(dead)
    newest = opened(tmp_path / "answers")
    assert {each.name.split(".")[1] for each in tmp_path.glob("*.lock")} == {living.owner, newest.owner}
    for store in (dead, living, newest):
        store.database.close()


def test_an_answer_is_added_to_its_conversation_once(place: Path | str) -> None:
    async def run() -> None:
        lost, owner = opened(place), opened(place)
        conversations = ConversationStore(owner.database, 60.0)
        made = await conversations.begin("t", [], {})
        add = addition(made.id, "t", [{"id": "m"}], time.time() + 60)
        await lost.begin(answer(lost, "a"))
        dies(lost)
        assert await owner.claim("t/a")
        for store in (lost, owner, owner):
            await store.end("t/a", AnswerState.DONE, time.time() + 60, b"{}", [], add)
        found = await conversations.get(made.id, "t")
        assert found is not None
        assert found.items == [{"id": "m"}]
        for store in (lost, owner):
            store.database.close()

    asyncio.run(run())
