"""Answers of lines that come together, in few transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from router.batches.batch_store import BatchStore, BatchTaken
from router.batches.lines import LineAnswer
from router.stored.database import StoreDatabase, StoreFull, StoreUnusable
from router.stored.schema import total_of
from tests.router.batches.test_endpoints import database_of
from tests.router.batches.test_line_window import BATCH


def with_batch(tmp_path: Path, work: Callable[[StoreDatabase, BatchStore], Awaitable[None]]) -> StoreDatabase:
    """Do something with a store that has begun a batch; returns its database."""

    database = database_of(tmp_path / "store")
    store = BatchStore(database)

    async def run() -> None:
        await store.begin("tenant", BATCH)
        await work(database, store)

    asyncio.run(run())
    return database


def test_answers_that_come_together_share_a_transaction_and_not_their_errors(tmp_path: Path) -> None:
    async def run(database: StoreDatabase, store: BatchStore) -> None:
        transactions = _counted(database)
        answers = [
            store.answer(id, number, LineAnswer(number == 3, b"%d" % number))
            for number in range(30)
            for id in (BATCH.id, "batch_foreign")
        ]
        found = await asyncio.gather(*answers, return_exceptions=True)
        assert found[::2] == [None] * 30
        assert {type(each) for each in found[1::2]} == {BatchTaken}
        assert len(transactions) == 1
        assert await store.answered(BATCH.id) == set(range(30))
        assert [text async for text in store.answers(BATCH.id, errors=True)] == [b"3"]

    with_batch(tmp_path, run).close()


def test_the_answer_of_a_cancelled_line_is_not_stored_afterwards(tmp_path: Path) -> None:
    async def run(database: StoreDatabase, store: BatchStore) -> None:
        lines = [
            asyncio.create_task(store.answer(BATCH.id, number, LineAnswer(False, b""))) for number in range(4)
        ]
        await asyncio.sleep(0)
        lines[1].cancel()
        lines[3].cancel()
        await asyncio.wait(lines)
        assert await store.answered(BATCH.id) == {0, 2}

    with_batch(tmp_path, run).close()


def test_a_transaction_that_fails_fails_for_each_of_its_answers(tmp_path: Path) -> None:
    async def run(database: StoreDatabase, store: BatchStore) -> None:
        await asyncio.to_thread(database.close)
        answers = [store.answer(BATCH.id, number, LineAnswer(False, b"")) for number in range(3)]
        found = await asyncio.wait_for(asyncio.gather(*answers, return_exceptions=True), 5)
        assert [type(each) for each in found] == [StoreUnusable] * 3
        with pytest.raises(StoreUnusable):
            await store.answer(BATCH.id, 3, LineAnswer(False, b""))

    with_batch(tmp_path, run)


def test_an_error_of_one_answer_is_no_error_of_those_stored_with_it(tmp_path: Path) -> None:
    async def run(_database: StoreDatabase, store: BatchStore) -> None:
        write = store._write_lines

        def fail(gathered: Any, session: Any) -> Any:
            if any(each.number == 2 for each in gathered):
                raise MemoryError
            return write(gathered, session)

        store._write_lines = fail  # type: ignore[method-assign]
        answers = [store.answer(BATCH.id, size, LineAnswer(False, b"x" * size)) for size in range(4)]
        found = await asyncio.wait_for(asyncio.gather(*answers, return_exceptions=True), 5)
        assert [type(each) for each in found] == [type(None), type(None), MemoryError, type(None)]
        assert await store.answered(BATCH.id) == {0, 1, 3}

    with_batch(tmp_path, run).close()


def test_of_answers_that_come_together_those_with_room_are_stored(tmp_path: Path) -> None:
    async def run(database: StoreDatabase, store: BatchStore) -> None:
        database._most_bytes = 10 + await database.run(total_of)
        answers = [store.answer(BATCH.id, each, LineAnswer(False, b"x" * each)) for each in (5, 4, 3, 1)]
        found = await asyncio.wait_for(asyncio.gather(*answers, return_exceptions=True), 5)
        assert [type(each) for each in found] == [type(None), type(None), StoreFull, type(None)]
        assert await store.answered(BATCH.id) == {5, 4, 1}

    with_batch(tmp_path, run).close()


def _counted(database: StoreDatabase) -> list[Any]:
    """Transactions of a database from now on."""
    begun: list[Any] = []
    run = database.run

    def counting(work: Any, **terms: Any) -> Any:
        begun.append(work)
        return run(work, **terms)

    database.run = counting  # type: ignore[method-assign]
    return begun
