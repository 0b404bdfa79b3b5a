"""A router's connection to an instance, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio

from coordinator.rpc.arrivals import is_readable
from coordinator.rpc.rpc import AsyncListener
from engine.messages import (
    Attach,
    Attached,
    Capacity,
    Counters,
    Delta,
    FinishReason,
    InstanceReport,
    Submit,
    ToInstance,
    Tokens,
    ToRouter,
)
from engine.sampling import SamplingParams
from router.dispatch import client, instance_connection
from router.dispatch.client import MeshClient
from router.dispatch.instance_connection import InstanceConnection
from router.dispatch.pool import PooledInstance
from router.faults import FaultEvent
from router.mesh import Prompt
from tests.router.dispatch.test_mesh_parts import member, show, view
from tests.waiting import until_async

CAPACITY = Capacity(16, 10, 4, 64, 100)


class Receiver:
    """Does of :class:`router.dispatch.receiver.MessageReceiver` what the connection needs."""

    def received(self, instance: PooledInstance, message: ToRouter) -> None:
        assert isinstance(message, Attached)
        instance.attached = True

    def connection_broke(self, instance: PooledInstance) -> None:
        instance.lost(0.0)

    def connection_failed(self, instance: PooledInstance) -> None:
        raise AssertionError


@pytest.mark.parametrize(("count", "seconds"), [(1, 1.0), (1024, 1.0), (2048, 2.0), (100_000, 4.0)])
def test_signs_of_life_to_very_many_instances_come_less_often(count: int, seconds: float) -> None:
    assert instance_connection.attach_interval(count) == seconds


def test_a_router_that_lost_the_answer_asks_for_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """News of an old connection's end may come after the answer on the new one."""
    monkeypatch.setattr(instance_connection, "ATTACH_INTERVAL", 0.05)

    async def talk() -> None:
        context = zmq.asyncio.Context()
        listener: AsyncListener[ToInstance, ToRouter] = AsyncListener(
            context, "tcp://127.0.0.1:0", ToInstance, name="instance"
        )
        instance = PooledInstance(member("a", 0, address=listener.endpoint))
        connection = InstanceConnection(context, instance, Receiver(), None, router="r", wants_blocks=False)

        async def heard() -> tuple[bytes, Attach]:
            peer, message = await asyncio.wait_for(listener.receive(), 5)
            assert isinstance(message, Attach)
            return peer, message

        peer, first = await heard()
        assert first.unanswered
        listener.send(peer, Attached("a", CAPACITY))
        async with asyncio.timeout(5):
            while (await heard())[1].unanswered:
                pass
        assert instance.attached
        Receiver().connection_broke(instance)
        async with asyncio.timeout(5):
            while not (await heard())[1].unanswered:
                pass
        connection.close()
        listener.close()
        context.term()

    asyncio.run(talk())


@contextlib.asynccontextmanager
async def listening(name: str) -> AsyncIterator[AsyncListener[ToInstance, ToRouter]]:
    """The address of an instance of this name.

    What arrives is received by the test.
    """
    context = zmq.asyncio.Context()
    listener: AsyncListener[ToInstance, ToRouter] = AsyncListener(
        context, "tcp://127.0.0.1:0", ToInstance, name=name
    )
    try:
        yield listener
    finally:
        listener.close()
        context.term()


@contextlib.asynccontextmanager
async def routing() -> AsyncIterator[MeshClient]:
    """A router whose coordinator is away."""
    mesh = MeshClient("tcp://127.0.0.1:1")
    running = asyncio.create_task(mesh.run())
    await asyncio.sleep(0)
    try:
        yield mesh
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def answer(listener: AsyncListener[ToInstance, ToRouter], name: str) -> bytes:
    """Answer a new connection as an instance does; returns the peer."""
    while True:
        peer, _ = await asyncio.wait_for(listener.receive(), 5)
        if listener.send(peer, Attached(name, CAPACITY)):  # else it is what an old one left
            return peer


def test_an_instance_that_cannot_be_connected_to_is_none_of_the_others_concern(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "LOOK_INTERVAL", 0.05)

    async def serve() -> None:
        async with listening("b") as listener, routing() as mesh:
            nowhere = member("a", 0, address="tcp://no address")
            world = view(nowhere, member("b", 1, address=listener.endpoint))
            show(mesh, world)
            assert "instance 0 at tcp://no address: " in caplog.text
            await answer(listener, "b")
            await until_async(lambda: mesh.num_ready == 1)
            show(mesh, view(world.members[1]))
            assert list(mesh._connections) == ["b"]

    asyncio.run(serve())


def test_an_instance_is_connected_to_as_soon_as_there_are_sockets_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "LOOK_INTERVAL", 0.05)

    async def serve() -> None:
        async with listening("a") as listener, routing() as mesh:
            room = mesh._context.get(zmq.MAX_SOCKETS)
            assert room == mesh._context.get(zmq.SOCKET_LIMIT), "of 1023 sockets, 340 instances take all"
            with monkeypatch.context() as patch:
                patch.setattr(client, "InstanceConnection", _none_left)
                show(mesh, view(member("a", 0, address=listener.endpoint)))
                assert not mesh._connections
            await answer(listener, "a")
            await until_async(lambda: mesh.num_ready == 1)

    asyncio.run(serve())


def _none_left(*_: object, **__: object) -> None:
    raise zmq.ZMQError(errno.EMFILE)


async def submitted(listener: AsyncListener[ToInstance, ToRouter]) -> Submit:
    while True:
        _, message = await asyncio.wait_for(listener.receive(), 5)
        if isinstance(message, Submit):
            return message


def test_a_link_that_an_error_of_ours_ended_is_made_anew_and_what_it_had_moves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "LOOK_INTERVAL", 0.05)

    async def serve() -> None:
        async with listening("a") as first, listening("b") as second, routing() as mesh:
            show(mesh, view(member("a", 0, address=first.endpoint), member("b", 1, address=second.endpoint)))
            peer = await answer(first, "a")
            await answer(second, "b")
            await until_async(lambda: mesh.num_ready == 2)
            stream = mesh.generate(Prompt("r", [1, 2], SamplingParams(), 0, rank=0))
            assert (await submitted(first)).prompt_ids == [1, 2]
            with monkeypatch.context() as patch:
                patch.setattr(PooledInstance, "take_report", _fail)
                assert first.send(peer, Tokens([], InstanceReport(0, 0, 0, 0, 0, 10, Counters())))
                assert (await submitted(second)).prompt_ids == [1, 2]
            assert "reconnecting to instance 0 after an error" in caplog.text
            assert "RuntimeError: ours" in caplog.text
            assert mesh.num_ready == 1
            while await answer(first, "a") == peer:
                pass
            await until_async(lambda: mesh.num_ready == 2)
            stream.close()

    asyncio.run(serve())


def test_a_router_that_does_not_look_after_those_who_wait_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error with one of them goes to its client; the others wait on."""
    monkeypatch.setattr(client, "LOOK_INTERVAL", 0.05)

    async def serve() -> None:
        mesh = MeshClient("tcp://127.0.0.1:1")
        show(mesh, view(member("a", 0, address="tcp://127.0.0.1:1")))
        streams = [mesh.generate(Prompt("r", [1, 2], SamplingParams(), 0)) for _ in range(3)]
        monkeypatch.setattr(mesh._chooser, "choose", _fail)
        with pytest.raises(RuntimeError, match="ours"):
            await asyncio.wait_for(mesh.run(), 5)
        with pytest.raises(RuntimeError, match="ours"):
            await anext(aiter(streams[0]))
        assert [stream._entry for stream in streams[1:]] == mesh._mover._orphans

    asyncio.run(serve())


def _fail(*_: object) -> None:
    raise RuntimeError("ours")


def test_the_last_tokens_of_an_instance_come_before_the_news_that_it_has_left() -> None:
    """Else its requests would be computed again elsewhere for a token that is here."""

    async def serve() -> None:
        async with listening("a") as first, listening("b") as second, routing() as mesh:
            world = view(member("a", 0, address=first.endpoint), member("b", 1, address=second.endpoint))
            show(mesh, world)
            peer = await answer(first, "a")
            await answer(second, "b")
            await until_async(lambda: mesh.num_ready == 2)
            stream = mesh.generate(Prompt("r", [1, 2], SamplingParams(), 0, rank=0))
            number = (await submitted(first)).request
            assert first.send(peer, Tokens([Delta(number, [7], FinishReason.LENGTH)]))
            socket = mesh._connections["a"]._connection._socket
            for _ in range(5000):  # without a turn for those who would read it
                if is_readable(socket):
                    break
                time.sleep(0.001)  # noqa: ASYNC251 (nobody gets a turn)
            show(mesh, view(world.members[1]))
            async with asyncio.timeout(10):
                assert [delta.token_ids async for delta in stream] == [[7]]
            assert not mesh.faults.counts.get(FaultEvent.RESUME), "it was not moved"

    asyncio.run(serve())
