"""Batches whose router ends or dies at an unlucky moment; reading of lines."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response

from router.batches import file_store
from router.batches.batch_runs import BatchRuns
from router.batches.batch_store import BatchStore, OwnedBatch
from router.batches.file_store import LINES_IN_A_ROW, UPLOAD_SECONDS
from router.batches.lines import LineAnswer
from router.batches.objects import BatchObject, BatchState
from router.batches.routes import batch_runs
from router.config import HttpConfig
from router.mesh import ServedModel
from router.metrics.metrics import Metrics
from router.stored.database import StoreDatabase, StoreUnusable
from router.stored.replayed_body import Handler
from router.stored.schema import expire
from tests.router.batches.test_endpoints import database_of, file_of, line
from tests.router.fake_mesh import FakeMesh, saying

ENDPOINT = "/v1/chat/completions"


def runs_on(
    database: StoreDatabase, served: ServedModel, handlers: Mapping[str, Handler]
) -> tuple[BatchRuns, Metrics]:
    mesh = FakeMesh(served, saying([]))
    metrics = Metrics(mesh)
    return batch_runs(database, mesh, HttpConfig(), metrics, handlers), metrics


async def stored(
    runs: BatchRuns, status: BatchState = BatchState.VALIDATING, lasts: int = 600
) -> BatchObject:
    """A batch of two lines, which this router owns."""
    file = await runs.files.begin("t", "lines", "batch")
    await runs.files.append(file, 0, file_of(line("a"), line("b")).read())
    await runs.files.end(file, 4e9)
    batch = BatchObject(
        id="batch_a",
        endpoint=ENDPOINT,
        input_file_id=file,
        completion_window="1m",
        created_at=0,
        expires_at=int(time.time()) + lasts,
        status=status,
    )
    batch.request_counts.total = 2
    await runs.begin("t", batch)
    return batch


def test_a_batch_that_a_draining_router_has_left_is_not_begun_again(
    served: ServedModel, tmp_path: Path
) -> None:
    database, both_began, begun = database_of(tmp_path / "store"), asyncio.Event(), 0
    others = database_of(tmp_path / "store")

    async def hang(_: Request) -> NoReturn:
        nonlocal begun
        begun += 1
        if begun == 2:
            both_began.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        runs, metrics = runs_on(database, served, {ENDPOINT: hang})
        batch = await stored(runs)
        await runs._sweep(metrics.store)
        await both_began.wait()
        await runs.close()
        await runs._sweep(metrics.store)  # it goes on while connections end
        assert (runs._running, begun, runs.lines_in_flight) == ({}, 2, 0)
        assert await runs.batches.owned() == []
        later = BatchStore(others)
        assert await later.claim("batch_a"), "its first owner lives, and has left it"
        assert [owned.object.status for owned in await later.owned()] == [BatchState.IN_PROGRESS]
        await runs.begin("t", msgspec.structs.replace(batch, id="batch_b"))
        assert await later.orphans() == ["batch_b"]

    asyncio.run(asyncio.wait_for(run(), 20))
    database.close()
    others.close()


def test_a_sweep_takes_nothing_over_once_its_router_drains(served: ServedModel, tmp_path: Path) -> None:
    dead, database = (database_of(tmp_path / "store") for _ in range(2))

    async def run() -> None:
        before, _ = runs_on(dead, served, {})
        batch = await stored(before)
        await before.begin("t", msgspec.structs.replace(batch, id="batch_b"))
        dead.seem_dead()
        runs, metrics = runs_on(database, served, {})
        claim, claimed = runs.batches.claim, []

        async def claim_and_close(id: str) -> bool:
            claimed.append(id)
            found = await claim(id)
            await runs.close()
            return found

        runs.batches.claim = claim_and_close  # type: ignore[method-assign]
        await runs._sweep(metrics.store)
        assert len(claimed) == 1
        assert await runs.batches.owned() == []

    asyncio.run(asyncio.wait_for(run(), 20))
    dead.close()
    database.close()


async def answered(runs: BatchRuns) -> BatchObject:
    """A stored batch of two lines with answers, whose files are to be written."""
    batch = await stored(runs, BatchState.FINALIZING)
    for number in range(2):
        await runs.batches.answer(batch.id, number, LineAnswer(number == 1, b"{}"))
    return batch


async def completed(runs: BatchRuns, id: str) -> BatchObject:
    """The batch as its client sees it, at its end."""
    ended = await runs.batches.get(id, "t")
    assert ended is not None
    assert ended.status is BatchState.COMPLETED
    return ended


class Killed(BaseException):
    """Stands for the death of the router: nothing is tidied up."""


def test_files_of_a_router_that_died_before_its_batch_had_ended_are_never_seen(
    served: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = database_of(tmp_path / "store")

    async def run() -> None:
        runs, _ = runs_on(database, served, {})
        batch = await answered(runs)

        async def die(*_: object) -> NoReturn:
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(runs, "_ended", die)
            with pytest.raises(Killed):
                await runs._carried_out(OwnedBatch("t", batch))
        assert [each.id for each in await runs.files.all("t", None)] == [batch.input_file_id]
        await runs._carried_out(OwnedBatch("t", batch))
        ended = await completed(runs, batch.id)
        seen = [each.id for each in await runs.files.all("t", None)]
        assert seen == [batch.input_file_id, ended.output_file_id, ended.error_file_id]
        count = "SELECT COUNT(*), (SELECT COUNT(DISTINCT file) FROM file_parts) FROM files"
        kept = await database.run(lambda session: tuple(session.execute(count).fetchone()))
        assert kept == (3, 3), "nothing is left of the first try"

    asyncio.run(run())
    database.close()


def test_files_stay_where_only_the_news_of_the_end_was_lost(
    served: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database commits, and the connection breaks before it says so."""
    database = database_of(tmp_path / "store")

    async def run() -> None:
        runs, _ = runs_on(database, served, {})
        batch = await answered(runs)
        commit = runs._ended

        async def commit_and_break(*terms: Any) -> NoReturn:
            await commit(*terms)
            raise StoreUnusable("the connection broke")

        monkeypatch.setattr(runs, "_ended", commit_and_break)
        with pytest.raises(StoreUnusable):
            await runs._carried_out(OwnedBatch("t", batch))
        ended = await completed(runs, batch.id)
        for id in (ended.output_file_id, ended.error_file_id):
            assert id is not None
            assert [line async for line in runs.files.lines(id, 50)] == [b"{}"]
            assert await runs.files.get(id, "t") is not None

    asyncio.run(run())
    database.close()


def test_a_batch_whose_files_have_expired_before_its_end_writes_them_again(
    served: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = database_of(tmp_path / "store")

    async def run() -> None:
        runs, _ = runs_on(database, served, {})
        batch = await answered(runs)
        end = runs._ended

        async def end_late(*terms: Any) -> BatchObject:
            await database.run(lambda session: expire(session, time.time() + UPLOAD_SECONDS + 1))
            return await end(*terms)

        with monkeypatch.context() as patch:
            patch.setattr(runs, "_ended", end_late)
            with pytest.raises(StoreUnusable, match="was deleted before it was whole"):
                await runs._carried_out(OwnedBatch("t", batch))
        await runs._carried_out(OwnedBatch("t", batch))
        ended = await completed(runs, batch.id)
        for id in (ended.output_file_id, ended.error_file_id):
            assert await runs.files.get(id or "", "t") is not None

    asyncio.run(run())
    database.close()


def test_a_file_expires_long_after_its_newest_part(
    served: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = database_of(tmp_path / "store")

    async def run() -> None:
        runs, _ = runs_on(database, served, {})
        with monkeypatch.context() as patch:
            patch.setattr(file_store, "UPLOAD_SECONDS", 30.0)
            id = await runs.files.begin("t", "lines", "batch")
        await runs.files.append(id, 0, b"a\n")
        await database.run(lambda session: expire(session, time.time() + UPLOAD_SECONDS / 2))
        assert [each async for each in runs.files.parts(id)] == [b"a\n"]
        await runs.files.delete(id)
        with pytest.raises(StoreUnusable):
            await runs.files.append(id, 1, b"b\n")
        assert [each async for each in runs.files.parts(id)] == [], "nor a part without its file"

    asyncio.run(run())
    database.close()


@pytest.mark.parametrize("status", [BatchState.IN_PROGRESS, BatchState.FINALIZING])
@pytest.mark.parametrize("answered", [2, 1])
def test_a_batch_that_was_answered_in_time_is_completed_however_late_its_files_are(
    served: ServedModel, tmp_path: Path, answered: int, status: BatchState
) -> None:
    database = database_of(tmp_path / "store")

    async def run() -> None:
        runs, _ = runs_on(database, served, {})
        batch = await stored(runs, status, lasts=-5)
        for number in range(answered):
            await runs.batches.answer(batch.id, number, LineAnswer(False, b"{}"))
        await runs._carried_out(OwnedBatch("t", batch))
        ended = await runs.batches.get(batch.id, "t")
        assert ended is not None
        assert ended.status is (BatchState.COMPLETED if answered == 2 else BatchState.EXPIRED)

    asyncio.run(run())
    database.close()


def test_lines_are_read_few_at_a_time_and_as_they_were_written(served: ServedModel, tmp_path: Path) -> None:
    database, rng = database_of(tmp_path / "store"), random.Random(5)
    text = b"".join(rng.choice((b"\n", b" ", b"ab", b"x" * 30)) for _ in range(6000))

    async def run() -> None:
        runs, _ = runs_on(database, served, {})
        id, begin, number = await runs.files.begin("t", "lines", "batch"), 0, 0
        while begin < len(text):
            end = begin + rng.randrange(1, 40_000)
            await runs.files.append(id, number, text[begin:end])
            begin, number = end, number + 1
        most_in_a_row = in_a_row = 0

        async def look() -> None:
            nonlocal in_a_row
            while True:
                in_a_row = 0
                await asyncio.sleep(0)

        looking = asyncio.create_task(look())
        found = []
        async for each in runs.files.lines(id, 50):
            found.append(each)
            in_a_row += 1
            most_in_a_row = max(most_in_a_row, in_a_row)
        looking.cancel()
        assert found == [each[:51] for each in text.split(b"\n") if each[:51].strip() or len(each) > 50]
        assert most_in_a_row <= LINES_IN_A_ROW

    asyncio.run(run())
    database.close()


def test_a_line_that_ends_its_instances_has_an_error_and_is_not_tried_for_ever(
    served: ServedModel, tmp_path: Path
) -> None:
    """See tests/router/dispatch/test_mover.py for the error of the mesh."""
    from router.mesh import MeshError

    database, tries = database_of(tmp_path / "store"), 0

    async def end(_: Request) -> Response:
        nonlocal tries
        tries += 1
        raise MeshError(503, "ServiceUnavailableError", "8 instances in turn", is_final=True)

    async def run() -> None:
        runs, metrics = runs_on(database, served, {ENDPOINT: end})
        batch = await stored(runs)
        await runs._sweep(metrics.store)
        await asyncio.gather(*runs._running.values())
        found = await runs.batches.get(batch.id, "t")
        assert found is not None
        assert (tries, found.request_counts.failed) == (2, 2)
        assert not metrics.store.events["line_tried_again"]

    asyncio.run(asyncio.wait_for(run(), 20))
    database.close()
