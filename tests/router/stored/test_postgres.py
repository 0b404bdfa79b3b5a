"""PostgreSQL as the store: connections that break, servers that go, what no other store has."""

from __future__ import annotations

import asyncio
import time

import pytest

from router.stored.database import StoreDatabase, StoreUnusable
from router.stored.store import AnswerState, AnswerStore, AnswerTaken
from tests.router.postgres import new_database
from tests.router.stored.test_store import answer, opened

psycopg = pytest.importorskip("psycopg")


def broken(url: str, *stores: AnswerStore) -> None:
    """End the sessions of routers, as a server does that cannot reach them."""
    with psycopg.connect(url, autocommit=True) as connection:
        for store in stores:
            query = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = %s"
            assert connection.execute(query, (f"lockstep {store.owner}",)).fetchall() == [(True,)]


def test_a_broken_connection_is_made_anew_and_costs_what_others_have_taken_over(postgres: str) -> None:
    url = new_database(postgres)

    async def run() -> None:
        lost, owner = opened(url), opened(url)
        for id in "ab":
            await lost.begin(answer(lost, id))
        broken(url, lost)
        assert [each.id for each in await owner.orphans()] == ["t/a", "t/b"]
        assert await owner.claim("t/a")
        await lost.append("t/b", 0, b"0")
        assert not await owner.claim("t/b"), "its router is back"
        with pytest.raises(AnswerTaken):
            await lost.append("t/a", 0, b"late")
        assert await owner.tokens("t/b", 0) == [b"0"]
        for store in (lost, owner):
            store.database.close()

    asyncio.run(run())


def test_tokens_of_many_answers_are_committed_beside_claims(postgres: str) -> None:
    url = new_database(postgres)

    async def run() -> None:
        stores = [opened(url) for _ in range(3)]
        ids = [f"{number}-{index}" for number in range(3) for index in range(5)]
        for id in ids:
            store = stores[int(id[0])]
            await store.begin(answer(store, id))

        async def write(id: str) -> None:
            for number in range(20):
                await stores[int(id[0])].append(f"t/{id}", number, b"%d" % number)

        await asyncio.gather(*map(write, ids), *(store.claim(f"t/{id}") for id in ids for store in stores))
        for id in ids:
            assert await stores[0].tokens(f"t/{id}", 0) == [b"%d" % number for number in range(20)]
            await stores[int(id[0])].end(f"t/{id}", AnswerState.DONE, time.time() + 60, b"{}", [])
        assert await stores[0].expire() > 0
        for store in stores:
            store.database.close()

    asyncio.run(run())


def test_a_server_that_is_away_is_an_error_at_once_and_not_for_ever(postgres: str) -> None:
    with pytest.raises(StoreUnusable, match="USER@HOST/DATABASE"):
        StoreDatabase("postgresql://nowhere", most_bytes=1, lasts=True)
    with pytest.raises(StoreUnusable, match="cannot be opened") as refused:
        StoreDatabase(
            f"{postgres}/no_such".replace("lockstep@", "lockstep:secret@"), most_bytes=1, lasts=True
        )
    assert "secret" not in str(refused.value)


def test_a_schema_of_another_version_is_refused(postgres: str) -> None:
    url = new_database(postgres)
    opened(url).database.close()
    opened(url).database.close()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE lockstep.version SET number = 7")
    with pytest.raises(StoreUnusable, match="version 7"):
        opened(url)
