"""Room for lines of batches, where their answers cannot be stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.batches.batch_runs import BatchLimits, BatchRuns
from router.batches.line_window import LineWindow
from router.batches.lines import LineAnswer
from router.batches.objects import BatchObject
from router.stored.database import StoreUnusable

BATCH = BatchObject(
    id="batch_a", endpoint="/v1/completions", input_file_id="file-a", completion_window="1h", created_at=0, expires_at=9
)  # fmt: skip
LINE = b'{"custom_id": "%d", "method": "POST", "url": "/v1/completions", "body": {"model": "m"}}'


class Unusable:
    """A store with lines to read, that takes no answer; and what computes and counts."""

    async def lines(self, id: str, most_bytes: int) -> AsyncIterator[bytes]:
        for number in range(9):
            yield LINE % number

    async def answered(self, batch: str) -> set[int]:
        return set()

    async def answer(self, *_: Any) -> LineAnswer:
        return LineAnswer(False, b"computed")

    def instances_by_state(self) -> dict[str, int]:
        return {"ready": 1}


class Refusing(Unusable):
    async def answer(self, *_: Any) -> LineAnswer:
        raise StoreUnusable("full")


@pytest.mark.parametrize("lines_at_once", [1, 2, 5])
def test_lines_that_failed_or_never_began_leave_their_room(lines_at_once: int) -> None:
    """One that begins while another fails is cancelled before its first step."""
    computes: Any = Unusable()
    refuses: Any = Refusing()
    runs = BatchRuns(computes, refuses, computes, computes, BatchLimits(9, 1000, lines_at_once, 1.0))

    async def run() -> None:
        for _ in range(3):
            with pytest.raises(StoreUnusable):
                await asyncio.wait_for(runs._answer_all(BATCH), 5)

    asyncio.run(run())
    assert runs.lines_in_flight == 0


class Counting(Unusable):
    """One that knows in which turn of the event loop each line began."""

    def __init__(self) -> None:
        self.turn = 0
        self.began: list[int] = []

    async def answer(self, *_: Any) -> LineAnswer:
        self.began.append(self.turn)
        await asyncio.sleep(0.01)
        return LineAnswer(False, b"computed")

    async def count(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


class Taking(Unusable):
    async def answer(self, *_: Any) -> Any:
        return None


def test_lines_begin_one_by_one_so_that_others_are_served_between_them() -> None:
    computes: Any = Counting()
    takes: Any = Taking()
    runs = BatchRuns(computes, takes, computes, computes, BatchLimits(9, 1000, 9, 1.0))

    async def run() -> None:
        counting = asyncio.create_task(computes.count())
        await asyncio.wait_for(runs._answer_all(BATCH), 5)
        counting.cancel()

    asyncio.run(run())
    assert len(computes.began) == len(set(computes.began)) == 9


def test_places_go_to_the_earliest_line_and_never_to_one_that_is_gone() -> None:
    facts: Any = Unusable()
    window = LineWindow(facts, 2)
    entered: list[str] = []

    async def enter(name: str, turn: int) -> None:
        await window.enter(turn)
        entered.append(name)

    async def run() -> None:
        tasks = {
            name: asyncio.create_task(enter(name, turn))
            for name, turn in [
                ("a", 5),
                ("b", 5),
                ("late", 9),
                ("first", 1),
                ("second", 1),
                ("gone", 0),
                ("lost", 0),
            ]
        }
        await asyncio.sleep(0)
        tasks["gone"].cancel()
        await asyncio.sleep(0)
        assert entered == ["a", "b"]
        window.leave()  # the place is lost's, which is cancelled before it gets to run
        tasks["lost"].cancel()
        await asyncio.gather(tasks["lost"], return_exceptions=True)
        await asyncio.sleep(0)
        assert (entered, window.count) == (["a", "b", "first"], 2)
        for _ in range(2):
            window.leave()
            await asyncio.sleep(0)
        assert entered == ["a", "b", "first", "second", "late"]
        for _ in range(2):
            window.leave()
        await enter("after", 0)
        assert window.count == 1

    asyncio.run(run())


def test_of_lines_that_end_together_few_are_answered_before_the_loop_looks_after_others() -> None:
    facts: Any = Unusable()
    window = LineWindow(facts, 200)
    answered = others = 0
    most = 0

    async def answer() -> None:
        nonlocal answered
        await window.spread()
        answered += 1

    async def run() -> None:
        nonlocal others, most
        tasks = [asyncio.create_task(answer()) for _ in range(100)]
        await asyncio.sleep(0)
        tasks[0].cancel()  # it has the turn
        tasks[5].cancel()
        while answered < 98:
            before = answered
            await asyncio.sleep(0)
            others += 1
            most = max(most, answered - before)
        assert (await asyncio.gather(*tasks, return_exceptions=True)).count(None) == 98

    asyncio.run(asyncio.wait_for(run(), 5))
    assert most <= 2
    assert others >= 50
