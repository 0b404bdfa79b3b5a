"""Shadow checks of a router's requests; the test plays the instances behind their connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from coordinator.membership.operations import ACCEPTED
from coordinator.messages import Drain, Member, OperatorAnswer
from coordinator.numerics import Numerics
from engine.messages import (
    Abort,
    Capacity,
    Delta,
    FinishReason,
    InstanceReport,
    RequestRefused,
    Submit,
    ToInstance,
    TokenLogprobs,
    Tokens,
)
from engine.sampling import SamplingParams
from router.dispatch.client import MeshClient
from router.dispatch.pool import PooledInstance
from router.dispatch.shadow.shadowing import RecordedStream
from router.dispatch.stream import Stream
from router.faults import FaultEvent
from router.mesh import MeshError, Prompt, ShadowResult
from tests.coordinator.membership.test_registry import SETTINGS
from tests.router.dispatch.test_mesh_parts import member, report, show, view
from tests.waiting import until_async

CAPACITY = Capacity(16, 100, 8, 64, 100)
NUMERICS = Numerics("fp_1", "avx2", "bfloat16", True)
IDS = [7, 8, 9]


def lines(ids: list[int], shift: float = 0.0) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -0.5 * token + shift, 1, [], []) for token in ids]


class Link:
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.submits: list[Submit] = []
        self.aborted: list[int] = []

    def send(self, message: ToInstance, growth: int = 0) -> bool:
        match message:
            case Submit():
                self.submits.append(message)
            case Abort(numbers):
                self.aborted += numbers
        return True

    def close(self) -> None:
        return


class Mesh:
    """A router whose instances are links."""

    def __init__(self, size: int, *, drains: bool = False, rate: float = 1.0) -> None:
        self.client = MeshClient("tcp://127.0.0.1:1", shadow_rate=rate, drains_odd=drains)
        self.links: dict[str, Link] = {}
        self.members: list[Member] = []
        self.told: dict[str, int] = {}
        self.drained: list[Drain] = []
        for rank in range(size):
            self.join(rank)
        if self.client._shadowing is not None:
            self.client._shadowing._tell = self.told.update
            if drains:
                self.client._shadowing._drain = self._drain

    async def _drain(self, wish: Drain) -> OperatorAnswer:
        self.drained.append(wish)
        return OperatorAnswer(command=wish.command, status=ACCEPTED, text="asked to drain")

    def join(self, rank: int, numerics: Numerics | None = NUMERICS) -> None:
        """Have one more instance, or another class of one."""
        self.members = [each for each in self.members if each.rank != rank]
        self.members.append(msgspec.structs.replace(member(f"i{rank}", rank), numerics=numerics))
        self.client._pool.apply(view(*self.members), time.monotonic())
        for instance in self.client._pool:
            instance.attached, instance.capacity = True, CAPACITY
            link = self.links.setdefault(instance.name, Link())
            self.client._connections[instance.name] = link  # type: ignore[assignment]

    def instance(self, name: str) -> PooledInstance:
        found = self.client._pool.get(name)
        assert found is not None
        return found

    def has(self, name: str) -> bool:
        return bool(self.links[name].submits)

    def tell(self, name: str, *deltas: Delta, **more: Any) -> None:
        self.client._receiver.received(self.instance(name), Tokens(list(deltas), **more))

    def rest(self) -> None:
        """Let all instances report that they have nothing."""
        for instance in self.client._pool:
            self.tell(instance.name, report=report(instance.last_dispatch))

    async def send(self, params: SamplingParams | None = None) -> tuple[Stream, str, Submit]:
        """A client's request, the instance that has it, and how it was sent."""
        stream = self.client.generate(Prompt("r", [5, 6], params or SamplingParams(), seed=1))
        (name,) = (name for name in self.links if self.has(name))
        return stream, name, self.links[name].submits.pop()

    async def shadow(self) -> tuple[str, Submit]:
        """The next request that is computed again, and where."""
        self.rest()
        await until_async(lambda: any(map(self.has, self.links)))
        (name,) = (name for name in self.links if self.has(name))
        submit = self.links[name].submits.pop()
        assert submit.background
        return name, submit

    def answer(self, name: str, submit: Submit, ids: list[int] = IDS, shift: float = 0.0) -> None:
        """Give all tokens, one delta each, and then the end."""
        for position, line in enumerate(lines(ids, shift)):
            reason = FinishReason.STOP if position == len(ids) - 1 else None
            self.tell(name, Delta(submit.request, [line.token_id], reason, logprobs=[line]))

    async def ends_with(self, result: ShadowResult, count: int = 1) -> None:
        await until_async(lambda: self.client.shadow_checks().get(result) == count)
        assert sum(self.client.shadow_checks().values()) == count, self.client.shadow_checks()
        assert len(self.client._ledger) == 0
        assert not self.client._mover.streams


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work()

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def running(size: int, *, drains: bool = False, rate: float = 1.0) -> AsyncIterator[Mesh]:
    """A router with so many instances, ended at the end."""
    mesh = Mesh(size, drains=drains, rate=rate)
    task = asyncio.create_task(mesh.client.run())
    try:
        for _ in range(5):
            await asyncio.sleep(0)  # all its tasks have begun: they close what they opened
        yield mesh
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def read(stream: Stream) -> list[Delta]:
    return [delta async for delta in stream]


def test_a_rate_of_zero_leaves_nothing_on_the_way_of_a_request() -> None:
    async def work() -> None:
        async with running(3, rate=0.0) as mesh:
            assert mesh.client._generate == mesh.client._mover.generate
            stream, _, submit = await mesh.send()
            assert type(stream) is Stream
            assert submit.params.logprobs is None
            assert mesh.client.shadow_checks() == {}

    run(work)


def test_a_request_is_computed_again_and_nobody_notices() -> None:
    async def work() -> None:
        async with running(3) as mesh:
            stream, name, submit = await mesh.send()
            assert submit.params.logprobs == 0
            assert not submit.background
            mesh.answer(name, submit)
            deltas = await read(stream)
            assert [delta.token_ids for delta in deltas] == [[7], [8], [9]]
            assert all(delta.logprobs is None for delta in deltas)
            choices = dict(mesh.client.choices())
            second, again = await mesh.shadow()
            assert second != name
            assert (again.prompt_ids, again.seed, again.params) == ([5, 6], 1, submit.params)
            assert mesh.client.num_in_flight == 0
            assert mesh.client.flights(9) == []
            assert all(health.in_flight == 0 for health in mesh.client.instance_health().values())
            mesh.answer(second, again)
            await mesh.ends_with(ShadowResult.EQUAL)
            assert mesh.client.choices() == choices

    run(work)


def test_log_probabilities_that_the_client_asked_for_are_kept() -> None:
    async def work() -> None:
        async with running(2) as mesh:
            stream, name, submit = await mesh.send(SamplingParams(logprobs=2))
            assert submit.params.logprobs == 2
            mesh.answer(name, submit)
            assert all(delta.logprobs is not None for delta in await read(stream))

    run(work)


@pytest.mark.parametrize("faulty", ["first", "second"])
def test_the_odd_one_is_logged_counted_and_drained(faulty: str, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with running(3, drains=True) as mesh:
            stream, name, submit = await mesh.send()
            mesh.answer(name, submit, shift=1e-9 if faulty == "first" else 0.0)
            await read(stream)
            second, again = await mesh.shadow()
            mesh.answer(second, again, shift=1e-9 if faulty == "second" else 0.0)
            third, once_more = await mesh.shadow()
            assert len({name, second, third}) == 3
            mesh.answer(third, once_more)
            await mesh.ends_with(ShadowResult.ODD)
            odd = mesh.instance(name if faulty == "first" else second)
            assert mesh.client.shadow_differences() == {str(odd.rank): 1}
            assert mesh.told == {odd.name: 1}
            assert mesh.client.faults.counts[FaultEvent.DETECTION] == {"shadow_difference": 1}
            await until_async(lambda: mesh.drained)
            (drain,) = mesh.drained
            assert (drain.rank, drain.instance, drain.force) == (odd.rank, odd.name, False)

    with caplog.at_level(logging.INFO):
        run(work)
    assert "request r has other bits on instance" in caplog.text
    assert "first differing token 0" in caplog.text
    assert "asked to drain" in caplog.text


def test_a_drain_that_the_coordinator_does_not_take_is_ordered_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        async with running(3, drains=True) as mesh:
            shadowing = mesh.client._shadowing
            assert shadowing is not None

            async def away(_wish: Drain) -> OperatorAnswer:
                raise TimeoutError

            async def odd_answer() -> None:
                stream, name, submit = await mesh.send()
                mesh.answer(name, submit, shift=1e-9)
                await read(stream)
                for _ in range(2):
                    mesh.answer(*await mesh.shadow())

            working, shadowing._drain = shadowing._drain, away
            await odd_answer()
            await until_async(lambda: "the coordinator does not answer" in caplog.text)
            shadowing._drain = working
            await odd_answer()
            await until_async(lambda: mesh.drained)

    run(work)


def test_with_two_instances_both_are_logged_and_none_is_drained(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with running(2, drains=True) as mesh:
            stream, name, submit = await mesh.send()
            mesh.answer(name, submit)
            await read(stream)
            second, again = await mesh.shadow()
            mesh.answer(second, again, [7, 8])
            await mesh.ends_with(ShadowResult.UNDECIDED)
            assert not mesh.drained
            assert mesh.told == {}

    run(work)
    assert "instance 0 (i0)" in caplog.text
    assert "instance 1 (i1)" in caplog.text
    assert "undecided, the class has no third instance that serves" in caplog.text


def test_an_answer_cut_by_its_reader_is_checked_as_far_as_it_went() -> None:
    async def work() -> None:
        async with running(3) as mesh:
            stream, name, submit = await mesh.send()
            mesh.tell(name, Delta(submit.request, [7], logprobs=lines([7])))
            mesh.tell(name, Delta(submit.request, [8], logprobs=lines([8])))
            stream.close()
            assert mesh.links[name].aborted == [submit.request]
            second, again = await mesh.shadow()
            mesh.tell(second, Delta(again.request, [7, 8, 9], logprobs=lines([7, 8, 9])))
            await mesh.ends_with(ShadowResult.EQUAL)
            assert mesh.links[second].aborted == [again.request], "it would go on"

    run(work)


def test_a_computation_that_goes_on_beyond_the_end_is_stopped_and_differs() -> None:
    async def work() -> None:
        async with running(2) as mesh:
            stream, name, submit = await mesh.send()
            mesh.answer(name, submit)
            await read(stream)
            second, again = await mesh.shadow()
            mesh.tell(second, Delta(again.request, [7, 8, 9, 10, 11], logprobs=lines([7, 8, 9, 10, 11])))
            await mesh.ends_with(ShadowResult.UNDECIDED)
            assert mesh.links[second].aborted == [again.request]

    run(work)


def test_a_request_that_moved_after_its_first_token_is_not_checked() -> None:
    async def work() -> None:
        async with running(3) as mesh:
            stream, name, submit = await mesh.send()
            mesh.tell(name, Delta(submit.request, [7], logprobs=lines([7])))
            mesh.client._receiver.connection_broke(mesh.instance(name))
            (other,) = (each for each in mesh.links if mesh.has(each))
            resumed = mesh.links[other].submits.pop()
            assert resumed.output_ids == [7]
            mesh.answer(other, resumed, [8, 9])
            assert [delta.token_ids for delta in await read(stream)] == [[7], [8], [9]]
            await mesh.ends_with(ShadowResult.SKIPPED)

    run(work)


def test_a_request_that_moved_before_its_first_token_is_checked() -> None:
    async def work() -> None:
        async with running(3) as mesh:
            stream, name, _ = await mesh.send()
            mesh.client._receiver.connection_broke(mesh.instance(name))
            (other,) = (each for each in mesh.links if mesh.has(each))
            mesh.answer(other, mesh.links[other].submits.pop())
            await read(stream)
            second, again = await mesh.shadow()
            assert second not in (name, other), "the first one is away"
            mesh.answer(second, again)
            await mesh.ends_with(ShadowResult.EQUAL)

    run(work)


def test_a_shadow_whose_instance_dies_goes_nowhere_else() -> None:
    async def work() -> None:
        async with running(3) as mesh:
            stream, name, submit = await mesh.send()
            mesh.answer(name, submit)
            await read(stream)
            second, _ = await mesh.shadow()
            mesh.client._receiver.connection_broke(mesh.instance(second))
            await mesh.ends_with(ShadowResult.LOST)
            assert not any(map(mesh.has, mesh.links))
            assert FaultEvent.RESUME not in mesh.client.faults.counts

    run(work)


def test_a_shadow_that_is_refused_is_lost() -> None:
    async def work() -> None:
        async with running(3) as mesh:
            stream, name, submit = await mesh.send()
            mesh.answer(name, submit)
            await read(stream)
            second, again = await mesh.shadow()
            refused = RequestRefused(again.request, "the instance's queue is full", retry=True)
            mesh.client._receiver.received(mesh.instance(second), refused)
            await mesh.ends_with(ShadowResult.LOST)

    run(work)


def test_a_shadow_makes_room_for_clients() -> None:
    async def work() -> None:
        async with running(2) as mesh:
            stream, name, submit = await mesh.send()
            mesh.answer(name, submit)
            await read(stream)
            second, again = await mesh.shadow()
            full = msgspec.structs.replace(report(again.request, running=8, waiting=2), queued=1)
            assert isinstance(full, InstanceReport)
            mesh.tell(second, report=full)
            await mesh.ends_with(ShadowResult.DROPPED)
            assert mesh.links[second].aborted == [again.request]

    run(work)


def test_variant_classes_and_lone_instances_are_not_recorded() -> None:
    async def work() -> None:
        variant = Numerics("fp_1_variant", "torch", "bfloat16", False)
        for numerics in (variant, None):
            async with running(0) as mesh:
                for rank in range(3):
                    mesh.join(rank, numerics)
                stream, _, submit = await mesh.send()
                assert type(stream) is Stream
                assert submit.params.logprobs is None
        for size, kind in ((1, Stream), (2, RecordedStream)):
            async with running(size) as mesh:
                stream, _, _ = await mesh.send()
                assert type(stream) is kind

    run(work)


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_class_that_changes_meanwhile_is_not_checked(comes_back: bool) -> None:
    async def work() -> None:
        async with running(3) as mesh:
            stream, name, submit = await mesh.send()
            mesh.tell(name, Delta(submit.request, [7], logprobs=lines([7])))
            classes = [Numerics("fp_2", "avx2", "bfloat16", True), *([NUMERICS] if comes_back else [])]
            for numerics in classes:
                changed = msgspec.structs.replace(mesh.instance(name).member, numerics=numerics)
                members = [changed if each.rank == changed.rank else each for each in mesh.members]
                show(mesh.client, view(*members))
            mesh.answer(name, submit, [8, 9])
            await read(stream)
            await mesh.ends_with(ShadowResult.SKIPPED)

    run(work)


def test_an_answer_that_fails_is_not_checked() -> None:
    async def work() -> None:
        async with running(3) as mesh:
            stream, name, submit = await mesh.send()
            mesh.tell(name, Delta(submit.request, [7], logprobs=lines([7])))
            mesh.tell(name, Delta(submit.request, [], FinishReason.ERROR, error="a grammar failed"))
            await read(stream)
            await mesh.ends_with(ShadowResult.SKIPPED)
            stream, name, _ = await mesh.send()
            mesh.client.give_up_all("the server ends")
            with pytest.raises(MeshError):
                await read(stream)
            stream.close()
            await mesh.ends_with(ShadowResult.SKIPPED)  # no token had come: none more is counted

    run(work)


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        ([NUMERICS], "the mesh has one instance"),
        ([NUMERICS, None], "requests of ranks 0, 1 are not checked"),
        (
            [NUMERICS, NUMERICS, Numerics("fp_2", "amx", "bfloat16", True)],
            "requests of rank 2 are not checked",
        ),
        ([NUMERICS, NUMERICS], None),
    ],
)
def test_a_warning_tells_once_that_requests_are_not_checked(
    classes: list[Numerics | None], words: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with running(0) as mesh:
            for rank, numerics in enumerate(classes):
                mesh.join(rank, numerics)
            shadowing = mesh.client._shadowing
            assert shadowing is not None
            seen = msgspec.structs.replace(view(*mesh.members), settings=SETTINGS)
            shadowing.on_view(msgspec.structs.replace(seen, waiting_for="rank 9 to register"))
            assert not caplog.records, "others may still come"
            shadowing.on_view(seen)
            shadowing.on_view(seen)

    run(work)
    warnings = [record.getMessage() for record in caplog.records if "--shadow-rate" in record.getMessage()]
    assert len(warnings) == (words is not None)
    assert words is None or words in warnings[0]
