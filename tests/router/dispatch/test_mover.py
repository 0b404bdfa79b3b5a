"""Requests that lose their instance: tries, aborts, waiting without an instance, what is counted meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from coordinator.rpc import rpc
from coordinator.rpc.codec import encode
from coordinator.rpc.rpc import TooLarge
from engine.messages import Delta, RequestRefused, Submit, ToInstance
from engine.sampling import SamplingParams
from router.dispatch.ledger import BESIDE_OUTPUT, ID_BYTES, MAX_FRUITLESS, entry_of
from router.dispatch.mover import RequestMover
from router.dispatch.stream import Stream
from router.mesh import MeshError, Prompt
from tests.router.dispatch.shadow.test_shadowing import CAPACITY, Link, Mesh, running

LONG = list(range(40))
"""A prompt of two full blocks, and some tokens."""


def run(work: Callable[[Mesh], Awaitable[None]], size: int) -> None:
    """Do something with a router and so many instances."""

    async def main() -> None:
        async with asyncio.timeout(20), running(size, rate=0.0) as mesh:
            await work(mesh)

    asyncio.run(main())


def mover(mesh: Mesh) -> RequestMover:
    return mesh.client._mover


def lose(mesh: Mesh, name: str, patience: float = 60.0) -> None:
    """Break the connection to an instance."""
    instance = mesh.instance(name)
    mover(mesh).lose(instance)
    mover(mesh).move_all(instance, "connection_lost", patience=patience)


async def ends_with_503(stream: Stream, *, is_final: bool = False) -> None:
    with pytest.raises(MeshError) as caught:
        await asyncio.wait_for(anext(aiter(stream)), 5)
    assert (caught.value.status, caught.value.is_final) == (503, is_final)


def test_a_request_that_ends_its_instances_is_given_up() -> None:
    async def work(mesh: Mesh) -> None:
        stream, name, _ = await mesh.send()
        for _ in range(MAX_FRUITLESS - 1):
            lose(mesh, name)
            (name,) = (each for each in mesh.links if mesh.has(each))
            mesh.links[name].submits.clear()
        lose(mesh, name)
        assert not any(map(mesh.has, mesh.links)), "the last instance is spared"
        await ends_with_503(stream, is_final=True)
        assert mesh.client.num_in_flight == 0

    run(work, MAX_FRUITLESS + 1)


def test_a_request_that_goes_on_elsewhere_is_aborted_where_it_was() -> None:
    async def work(mesh: Mesh) -> None:
        _, name, submit = await mesh.send()
        mover(mesh).move_all(mesh.instance(name), "no_group")
        assert mesh.links[name].aborted == [submit.request]

    run(work, 2)


def test_blocks_are_expected_until_the_first_token() -> None:
    async def work(mesh: Mesh) -> None:
        mesh.client.generate(Prompt("r", LONG, SamplingParams(), seed=1))
        index = mesh.client._pool.index
        assert index.num_expected("i0") == 2
        mesh.tell("i0", Delta(mesh.links["i0"].submits[0].request, [7]))
        assert index.num_expected("i0") == 0

    run(work, 1)


def test_the_error_of_a_request_counts_the_instances_that_ended_since_its_last_token() -> None:
    async def work(mesh: Mesh) -> None:
        stream, name, submit = await mesh.send()
        mesh.tell(name, Delta(submit.request, [7]))
        lose(mesh, name)
        (name,) = filter(mesh.has, mesh.links)
        lose(mesh, name, patience=-1.0)
        mover(mesh).dispatch_orphans()
        deltas = aiter(stream)
        assert (await anext(deltas)).token_ids == [7]
        with pytest.raises(MeshError) as caught:
            await asyncio.wait_for(anext(deltas), 5)
        assert (caught.value.status, caught.value.is_final, caught.value.num_lost) == (503, False, 2)

    run(work, 2)


@pytest.mark.parametrize("patience", [60.0, -1.0])
def test_a_request_without_an_instance_waits_for_so_long(patience: float) -> None:
    async def work(mesh: Mesh) -> None:
        stream, name, _ = await mesh.send()
        lose(mesh, name, patience)
        assert mesh.client.num_in_flight == 1
        mover(mesh).dispatch_orphans()
        if patience > 0:
            assert mesh.client.num_in_flight == 1
        else:
            await ends_with_503(stream)

    run(work, 1)


def test_a_background_request_goes_nowhere_else() -> None:
    async def work(mesh: Mesh) -> None:
        prompt = Prompt("r", [5, 6], SamplingParams(), seed=1, background=True)
        stream = mover(mesh).generate_at(prompt, mesh.instance("i0"))
        assert mesh.has("i0")
        lose(mesh, "i0")
        assert not mesh.has("i1")
        await ends_with_503(stream)

    run(work, 2)


def test_a_request_that_no_message_holds_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each instance would hang up on it, and on all others with it."""

    def send(_: Link, message: ToInstance, growth: int) -> bool:
        assert isinstance(message, Submit)
        raise TooLarge("9 bytes in one message")

    async def work(mesh: Mesh) -> None:
        with monkeypatch.context() as changed:
            changed.setattr(Link, "send", send)
            stream = mesh.client.generate(Prompt("r", LONG, SamplingParams(), seed=1))
        with pytest.raises(MeshError, match="too large for an instance: 9 bytes in one message") as caught:
            await asyncio.wait_for(anext(aiter(stream)), 5)
        assert caught.value.status == 400
        assert mesh.client.num_in_flight == 0
        assert all(instance.attached for instance in mesh.client._pool)
        await mesh.send()

    run(work, 2)


def test_a_request_that_was_taken_is_never_too_large_for_the_next_instance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tokens go along, and what they may take is checked before the first try."""
    plain, params = Link.send, SamplingParams(max_tokens=1000)
    large = 2**31 - 1  # five bytes in a message

    def send(link: Link, message: ToInstance, growth: int = 0) -> bool:
        rpc._bounded(message, growth)
        return plain(link, message)

    async def begin(mesh: Mesh) -> Stream:
        stream = mesh.client.generate(Prompt("r", LONG, params, seed=1))
        await asyncio.sleep(0)
        return stream

    async def work(mesh: Mesh) -> None:
        with monkeypatch.context() as changed:
            changed.setattr(Link, "send", send)
            first = len(encode(entry_of(Prompt("r", LONG, params, seed=1), 0.0).submit(1)))
            most = first + 1000 * ID_BYTES + BESIDE_OUTPUT
            changed.setattr(rpc, "MAX_MESSAGE_BYTES", most - 1)
            with pytest.raises(MeshError, match=f"{first} bytes in one message, and later up to") as caught:
                await anext(aiter(await begin(mesh)))
            assert caught.value.status == 400
            changed.setattr(rpc, "MAX_MESSAGE_BYTES", most)
            await begin(mesh)
            (name,) = filter(mesh.has, mesh.links)
            mesh.tell(name, Delta(mesh.links[name].submits.pop().request, [large] * 999))
            lose(mesh, name)
            (name,) = filter(mesh.has, mesh.links)
            assert mesh.links[name].submits[0].output_ids == [large] * 999

    run(work, 2)


def test_an_answer_that_has_begun_outlives_the_refusal_of_a_smaller_instance() -> None:
    async def work(mesh: Mesh) -> None:
        stream, name, submit = await mesh.send()
        mesh.tell(name, Delta(submit.request, [7]))
        tried = {name}
        for _ in range(2):
            lose(mesh, name) if len(tried) == 1 else refuse(mesh, name)
            (name,) = filter(mesh.has, mesh.links)
            assert name not in tried
            tried.add(name)
            assert mesh.links[name].submits[0].output_ids == [7]
        refuse(mesh, name)
        await is_refused(mesh, stream)

    run(work, 3)


def refuse(mesh: Mesh, name: str) -> None:
    number = mesh.links[name].submits.pop().request
    refused = RequestRefused(number, "the cache is too small", retry=False)
    mesh.client._receiver.received(mesh.instance(name), refused)


async def is_refused(mesh: Mesh, stream: Stream) -> None:
    """The stream has one token, and ends with the refusal of an instance."""
    assert not any(map(mesh.has, mesh.links)), "all have refused it"
    deltas = aiter(stream)
    assert (await anext(deltas)).token_ids == [7]
    with pytest.raises(MeshError, match="too small") as caught:
        await asyncio.wait_for(anext(deltas), 5)
    assert caught.value.status == 400
    assert mesh.client.num_in_flight == 0


def test_more_instances_may_refuse_an_answer_than_may_end_of_it() -> None:
    async def work(mesh: Mesh) -> None:
        stream, name, submit = await mesh.send()
        mesh.tell(name, Delta(submit.request, [7]))
        lose(mesh, name)
        for _ in range(MAX_FRUITLESS + 1):
            (name,) = filter(mesh.has, mesh.links)
            refuse(mesh, name)
        await is_refused(mesh, stream)

    run(work, MAX_FRUITLESS + 2)


def test_a_refusal_for_good_is_the_end_where_others_lack_the_adapter() -> None:
    async def work(mesh: Mesh) -> None:
        lacking = msgspec.structs.replace(CAPACITY, lacks_adapters=("a digest",))
        mesh.instance("i0").capacity = lacking
        prompt = Prompt("r", [5, 6], SamplingParams(), seed=1, adapter="a digest")
        stream = mesh.client.generate(prompt)
        mesh.tell("i1", Delta(mesh.links["i1"].submits[0].request, [7]))
        refuse(mesh, "i1")
        await is_refused(mesh, stream)

    run(work, 2)


def test_what_was_sent_to_a_lost_instance_is_no_load_of_it() -> None:
    async def work(mesh: Mesh) -> None:
        await mesh.send()
        instance = mesh.instance("i0")
        assert instance.candidate(time.monotonic()).waiting_tokens == 2
        lose(mesh, "i0")
        counted = instance.candidate(time.monotonic())
        assert (counted.requests, counted.waiting_tokens, counted.queued_tokens) == (0, 0, 0)

    run(work, 1)
