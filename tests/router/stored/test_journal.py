"""Journals of running answers, over a store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from engine.messages import Delta, FinishReason
from engine.sampling import SamplingParams
from router.mesh import Prompt, ServedModel
from router.stored.database import StoreUnusable
from router.stored.journal import Journal, JournalBatch, JournalMesh, by_token
from tests.router.fake_mesh import FakeMesh, logprobs_of, saying

MODEL = ServedModel(("tiny",), "", 512, 256)


class RouterDies(Exception):
    """Raised in place of a death."""


class Memory:
    """Batches of one answer."""

    def __init__(self) -> None:
        self._batches: dict[int, bytes] = {}

    @property
    def batches(self) -> list[bytes]:
        return [self._batches[number] for number in range(len(self._batches))]

    async def append(self, id: str, number: int, batch: bytes) -> None:
        assert number not in self._batches, "two routers write"
        self._batches[number] = batch
        await asyncio.sleep(0)

    async def tokens(self, id: str, first: int) -> list[bytes]:
        return self.batches[first:]


def prompt_of(sample: int) -> Prompt:
    return Prompt("r", [1, 2, 3], SamplingParams(max_tokens=8), seed=1, sample_index=sample)


def behind_known(token_ids: Sequence[int]) -> FakeMesh:
    """A mesh that says these tokens, behind those that a prompt brings."""

    def script(prompt: Prompt) -> Sequence[Delta]:
        known = len(prompt.known.token_ids) if prompt.known else 0
        return list(saying(token_ids)(prompt))[known:]

    return FakeMesh(MODEL, script)


async def taken(journal: Journal, mesh: FakeMesh, samples: int, most: int = 100) -> list[tuple[int, int]]:
    """Tokens of all samples in the order in which they come, as (sample, token)."""
    found: list[tuple[int, int]] = []
    journalled = JournalMesh(mesh, journal)

    async def read(sample: int) -> None:
        async for delta in journalled.generate(prompt_of(sample)):
            found.append((sample, delta.token_ids[0]))
            if len(found) == most:
                raise RouterDies

    reading = [asyncio.create_task(read(sample)) for sample in range(samples)]
    done, rest = await asyncio.wait(reading, return_when=asyncio.FIRST_EXCEPTION)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    for task in done:
        if not isinstance(task.exception(), RouterDies):
            task.result()
    return found


def test_tokens_are_committed_before_they_are_handed_out() -> None:
    async def run() -> None:
        memory = Memory()
        found = await taken(Journal("a", memory, [], None), behind_known([5, 6, 7]), 1)
        assert found == [(0, 5), (0, 6), (0, 7)]
        recorded = [msgspec.msgpack.decode(each, type=JournalBatch) for each in memory.batches]
        assert [each.deltas[0].token_ids for each in recorded] == [[5], [6], [7]]
        assert recorded[-1].deltas[0].finish_reason is FinishReason.LENGTH

    asyncio.run(run())


def test_another_router_goes_on_behind_what_is_recorded() -> None:
    async def run() -> None:
        for died_after in range(12):
            memory = Memory()
            first = await taken(Journal("a", memory, [], None), behind_known([5, 6, 7, 8]), 3, died_after + 1)
            recorded = list(memory.batches)
            mesh = behind_known([5, 6, 7, 8])
            second = await taken(Journal("a", memory, recorded, None), mesh, 3)
            assert second[: len(first)] == first, "what was handed out comes again, in the same order"
            assert sorted(second) == [(sample, token) for sample in range(3) for token in (5, 6, 7, 8)]
            for prompt in mesh.prompts:
                known = prompt.known.token_ids if prompt.known else []
                before = [batch for batch in map(_decoded, recorded) if batch.sample == prompt.sample_index]
                assert known == [each.deltas[0].token_ids[0] for each in before]

    asyncio.run(run())


def _decoded(batch: bytes) -> JournalBatch:
    return msgspec.msgpack.decode(batch, type=JournalBatch)


def test_a_follower_reads_what_another_router_writes_then_goes_on() -> None:
    async def run() -> None:
        memory = Memory()
        writer = asyncio.create_task(taken(Journal("a", memory, [], None), behind_known([5, 6, 7]), 2, 3))
        looks = 0

        async def continues() -> bool:
            nonlocal looks
            looks += 1
            await asyncio.sleep(0)
            return not writer.done()

        found = await taken(Journal("a", memory, [], continues), behind_known([5, 6, 7]), 2)
        assert sorted(found) == [(sample, token) for sample in range(2) for token in (5, 6, 7)]
        assert looks > 1
        handed_out = await writer
        assert found[: len(handed_out)] == handed_out

    asyncio.run(run())


def test_a_delta_of_several_tokens_is_cut_and_keeps_all_it_brings() -> None:
    whole = Delta(
        1, [5, 6, 7], FinishReason.STOP, 7, logprobs=[logprobs_of(each, 2) for each in (5, 6, 7)],
        num_cached_tokens=3, times=(0.1, 0.2),
    )  # fmt: skip
    first, second, third = by_token(whole)
    assert (first.token_ids, first.num_cached_tokens, first.times) == ([5], 3, (0.1, 0.2))
    assert first.finish_reason is second.finish_reason is None
    assert second == Delta(1, [6], logprobs=[logprobs_of(6, 2)])
    assert third == Delta(1, [7], FinishReason.STOP, 7, logprobs=[logprobs_of(7, 2)])
    assert by_token(Delta(1, [5])) == [Delta(1, [5])]


def test_an_answer_goes_on_where_the_store_fails() -> None:
    class Failing(Memory):
        async def append(self, id: str, number: int, batch: bytes) -> None:
            if number == 1:
                raise StoreUnusable("the disk is full")
            assert number == 0, "nothing behind a hole"
            await super().append(id, number, batch)

    async def run() -> None:
        found = await taken(Journal("a", Failing(), [], None), behind_known([5, 6, 7]), 1)
        assert found == [(0, 5), (0, 6), (0, 7)]

    asyncio.run(run())
