"""Requests that lose their instance: tries, aborts, waiting without an instance, what is counted meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from coordinator.rpc.rpc import TooLarge
from engine.messages import Delta, Submit, ToInstance
from engine.sampling import SamplingParams
from router.dispatch.ledger import MAX_FRUITLESS
from router.dispatch.mover import RequestMover
from router.dispatch.stream import Stream
from router.mesh import MeshError, Prompt
from tests.router.dispatch.shadow.test_shadowing import Link, Mesh, running

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


async def ends_with_503(stream: Stream) -> None:
    with pytest.raises(MeshError) as caught:
        await asyncio.wait_for(anext(aiter(stream)), 5)
    assert caught.value.status == 503


def test_a_request_that_ends_its_instances_is_given_up() -> None:
    async def work(mesh: Mesh) -> None:
        stream, name, _ = await mesh.send()
        for _ in range(MAX_FRUITLESS - 1):
            lose(mesh, name)
            (name,) = (each for each in mesh.links if mesh.has(each))
            mesh.links[name].submits.clear()
        lose(mesh, name)
        assert not any(map(mesh.has, mesh.links)), "the last instance is spared"
        await ends_with_503(stream)
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

    def send(_: Link, message: ToInstance) -> bool:
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


def test_what_was_sent_to_a_lost_instance_is_no_load_of_it() -> None:
    async def work(mesh: Mesh) -> None:
        await mesh.send()
        instance = mesh.instance("i0")
        assert instance.candidate(time.monotonic()).waiting_tokens == 2
        lose(mesh, "i0")
        counted = instance.candidate(time.monotonic())
        assert (counted.requests, counted.waiting_tokens, counted.queued_tokens) == (0, 0, 0)

    run(work, 1)
