"""Batches that this router runs: their lines are checked, answered, and gathered into files.

A run is begun by a sweep over the batches that this router owns, and ends with the router. The next owner of
the batch goes on with the lines that have no answer yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import msgspec

from router.batches.batch_store import BatchStore, BatchTaken, OwnedBatch
from router.batches.file_store import OUTPUT_PURPOSE, FileWriter, StoredFiles
from router.batches.line_runner import LineRunner
from router.batches.line_window import LineWindow
from router.batches.lines import LineProblem, read_line, unanswered
from router.batches.objects import MOST_ERRORS, BatchObject, BatchState, WrongLine, WrongLines
from router.mesh import Mesh
from router.metrics.store_counts import StoreCounts
from router.stored.database import StoreFull, StoreUnusable

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 0.5
"""Interval at which new batches, dead routers and cancellations are looked for."""
FULL_SECONDS = 5.0
"""Pause of a line whose answer the store has no room for."""
EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")
CANCELLED = ("batch_cancelled", "This request was not executed before the batch was cancelled.")


class BatchLimits(msgspec.Struct, frozen=True):
    """Bounds of batches, from the flags."""

    lines: int
    """Lines of a batch."""
    line_bytes: int
    lines_per_instance: int
    """Lines in flight for each instance."""
    ttl: float
    """Seconds that a batch and its files are kept after its end."""


class BatchRuns:
    """All batches that this router runs."""

    def __init__(
        self, files: StoredFiles, batches: BatchStore, runner: LineRunner, mesh: Mesh, limits: BatchLimits
    ) -> None:
        self.files = files
        self.batches = batches
        self.limits = limits
        self._runner = runner
        self._mesh = mesh
        self._window = LineWindow(mesh, limits.lines_per_instance)
        self._began = asyncio.Event()
        """Set while a new batch waits for a sweep."""
        self._running: dict[str, asyncio.Task[None]] = {}
        self._answering: dict[str, asyncio.Task[None]] = {}
        """Tasks that answer lines, by batch."""
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<BatchRuns {list(self._running)}>"

    @property
    def lines_in_flight(self) -> int:
        """Lines that have room now."""
        return self._window.count

    async def keep(self, counts: StoreCounts) -> None:
        """Run what this router owns, and take over batches of dead routers, until cancelled."""
        while True:
            self._began.clear()
            try:
                await self._sweep(counts)
            except StoreUnusable as error:
                logger.warning("%s", error)
                await asyncio.sleep(10 * SWEEP_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._began.wait(), SWEEP_SECONDS)

    async def begin(self, tenant: str, batch: BatchObject) -> None:
        """Store a new batch, and run it at once; raises as :meth:`.BatchStore.begin`."""
        await self.batches.begin(tenant, batch)
        self._began.set()
        if self._is_closed:
            await self.batches.release()

    async def _sweep(self, counts: StoreCounts) -> None:
        if self._is_closed or self._mesh.model is None or not self._mesh.healthy:
            return
        for id in await self.batches.orphans():
            if not self._is_closed and await self.batches.claim(id):
                logger.info("goes on with batch %s, whose router is gone", id)
                counts.events["batch_taken_over"] += 1
        for owned in await self.batches.owned():
            id = owned.object.id
            if id not in self._running and not self._is_closed:
                self._running[id] = asyncio.create_task(self._run(owned))
            elif owned.object.status is BatchState.CANCELLING and id in self._answering:
                self._answering[id].cancel()

    async def close(self) -> None:
        """End all runs for good; another router may go on with their batches at once."""
        self._is_closed = True
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self.batches.release()
        except StoreUnusable as error:
            logger.warning("%s", error)

    # ---- one batch

    async def _run(self, owned: OwnedBatch) -> None:
        id = owned.object.id
        try:
            await self._carried_out(owned)
        except StoreUnusable as error:
            logger.error("batch %s waits: %s", id, error)  # the next sweep begins it again
            await asyncio.sleep(FULL_SECONDS)
        except BatchTaken as error:
            logger.warning("%s", error)
        except Exception:
            logger.exception("batch %s failed", id)
            await self._fail(id, [WrongLine("server_error", "Internal server error.")])
        finally:
            self._running.pop(id, None)

    async def _carried_out(self, owned: OwnedBatch) -> None:
        batch = owned.object
        if batch.status is BatchState.VALIDATING:
            total, wrong = await self._checked(batch)
            if wrong:
                await self._fail(batch.id, wrong)
                return

            def begin(each: BatchObject) -> None:
                each.request_counts.total = total
                if each.status is BatchState.VALIDATING:
                    each.status, each.in_progress_at = BatchState.IN_PROGRESS, int(time.time())

            batch = await self.batches.advance(batch.id, begin)
        if batch.status is BatchState.IN_PROGRESS:
            await self._answer_lines(batch)

        def finalize(each: BatchObject) -> None:
            if each.status is BatchState.IN_PROGRESS:
                each.status, each.finalizing_at = BatchState.FINALIZING, int(time.time())

        batch = await self.batches.advance(batch.id, finalize)
        reason: tuple[str, str] | None = None
        if batch.status is BatchState.CANCELLING:
            reason = CANCELLED
        elif len(await self.batches.answered(batch.id)) < batch.request_counts.total:
            reason = EXPIRED  # whoever has found that out
        await self._gather(owned.tenant, batch, reason)

    async def _checked(self, batch: BatchObject) -> tuple[int, list[WrongLine]]:
        """Number of lines of a batch, and what is wrong with them."""
        wrong: list[WrongLine] = []
        seen: set[str] = set()
        total = 0
        async for text in self.files.lines(batch.input_file_id, self.limits.line_bytes):
            total += 1
            if total > self.limits.lines:
                return total, [WrongLine("too_many_lines", f"A batch may have {self.limits.lines} lines.")]
            try:
                if len(text) > self.limits.line_bytes:
                    message = f"A line may have {self.limits.line_bytes} bytes."
                    raise LineProblem("line_too_long", message)
                id = read_line(text, batch.endpoint).custom_id
                if id in seen:
                    message = f"The custom_id {id[:80]!r} stands in an earlier line."
                    raise LineProblem("duplicate_custom_id", message, "custom_id")
                seen.add(id)
            except LineProblem as problem:
                if len(wrong) < MOST_ERRORS:
                    wrong.append(WrongLine(problem.code, str(problem), total, problem.param))
        return total, wrong if total else [WrongLine("empty_file", "The file has no lines.")]

    async def _answer_lines(self, batch: BatchObject) -> None:
        """Answer the lines without an answer, until time is over or the batch cancelled."""
        task = self._answering[batch.id] = asyncio.create_task(self._answer_all(batch))
        try:
            done, _ = await asyncio.wait((task,), timeout=max(0.0, batch.expires_at - time.time()))
            if done and not task.cancelled():
                task.result()
        finally:
            del self._answering[batch.id]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _answer_all(self, batch: BatchObject) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                async for number, text in self._unanswered(batch):
                    await self._window.enter()
                    answering = group.create_task(self._answer(batch, number, text))
                    # Not in the task: one that is cancelled before its first step does nothing at all.
                    answering.add_done_callback(lambda _: self._window.leave())
                    await asyncio.sleep(0)  # tokens of other requests come between two lines
        except* (StoreUnusable, BatchTaken) as errors:
            raise first_of(errors) from errors

    async def _answer(self, batch: BatchObject, number: int, text: bytes) -> None:
        line = read_line(text, batch.endpoint)
        answer = await self._runner.answer(batch.id, batch.created_at, number, line)
        while True:
            try:
                await self.batches.answer(batch.id, number, answer)
                return
            except StoreFull as error:
                logger.warning("batch %s waits: %s", batch.id, error)
                await asyncio.sleep(FULL_SECONDS)

    async def _unanswered(self, batch: BatchObject) -> AsyncIterator[tuple[int, bytes]]:
        """Lines without an answer, with their numbers."""
        answered, number = await self.batches.answered(batch.id), 0
        async for text in self.files.lines(batch.input_file_id, self.limits.line_bytes):
            if number not in answered:
                yield number, text
            number += 1

    # ---- its end

    async def _gather(self, tenant: str, batch: BatchObject, reason: tuple[str, str] | None) -> None:
        """Write the answers to files, and end the batch; ``reason``: why some lines have none."""
        now = time.time()
        written: list[str] = []
        try:
            await self.batches.clear(batch.id, [_file_name(batch, each) for each in ("output", "error")])
            answers = self.batches.answers(batch.id, errors=False)
            outputs = await self._written(tenant, batch, "output", answers, written)
            errors = await self._written(tenant, batch, "error", self._errors(batch, reason), written)
            ended = await self._ended(batch, reason, outputs, errors, now)
        except Exception:
            with contextlib.suppress(StoreUnusable):
                # Not those that are whole: the end was committed, and only the news of it was lost.
                await self.files.discard(written)
            raise
        logger.info("batch %s is %s: %s", batch.id, ended.status, ended.request_counts)

    async def _ended(
        self,
        batch: BatchObject,
        reason: tuple[str, str] | None,
        outputs: str | None,
        errors: str | None,
        now: float,
    ) -> BatchObject:
        def end(each: BatchObject) -> None:
            each.output_file_id, each.error_file_id = outputs, errors
            if each.status is BatchState.CANCELLING:
                each.status, each.cancelled_at = BatchState.CANCELLED, int(now)
            elif reason is EXPIRED:
                each.status, each.expired_at = BatchState.EXPIRED, int(now)
            else:
                each.status, each.completed_at = BatchState.COMPLETED, int(now)

        files = [id for id in (outputs, errors) if id is not None]
        return await self.batches.advance(batch.id, end, ended=now + self.limits.ttl, files=files)

    async def _errors(self, batch: BatchObject, reason: tuple[str, str] | None) -> AsyncIterator[bytes]:
        async for text in self.batches.answers(batch.id, errors=True):
            yield text
        if reason is None:
            return
        async for number, text in self._unanswered(batch):
            try:
                custom_id = read_line(text).custom_id
            except LineProblem:  # it was cancelled before its lines were checked
                continue
            yield unanswered(batch.id, number, custom_id, *reason).text

    async def _written(
        self, tenant: str, batch: BatchObject, name: str, lines: AsyncIterator[bytes], written: list[str]
    ) -> str | None:
        """Id of a new file with these lines, added to ``written``; None without lines.

        It is not to be seen before the batch has ended: another router may have to write it anew.
        """
        writer, id = None, None
        async for line in lines:
            if writer is None:
                id = await self.files.begin(tenant, _file_name(batch, name), OUTPUT_PURPOSE)
                written.append(id)
                writer = FileWriter(self.files, id, is_bounded=False)  # its lines had room
            await writer.write(line + b"\n")
        if writer is not None:
            await writer.flush()
        return id

    async def _fail(self, id: str, wrong: list[WrongLine]) -> None:
        def fail(batch: BatchObject) -> None:
            batch.status, batch.failed_at = BatchState.FAILED, int(time.time())
            batch.errors = WrongLines(wrong)

        with contextlib.suppress(BatchTaken):
            await self.batches.advance(id, fail, ended=time.time() + self.limits.ttl)


def _file_name(batch: BatchObject, name: str) -> str:
    return f"{batch.id}_{name}.jsonl"


def first_of(errors: BaseExceptionGroup[Exception]) -> Exception:
    """The first error of a group, however deep."""
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, Exception)
    return found
