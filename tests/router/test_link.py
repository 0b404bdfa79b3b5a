"""A router's connection to an instance, over real sockets."""

from __future__ import annotations

import asyncio

import pytest
import zmq.asyncio

from coordinator.rpc import AsyncListener
from engine.messages import Attach, Attached, Capacity, ToInstance, ToRouter
from router import link
from router.link import Link
from router.pool import Instance
from tests.router.test_mesh_parts import member

CAPACITY = Capacity(16, 10, 4, 64, 100)


class Receiver:
    """Does of :class:`router.client.MeshClient` what the connection needs."""

    def received(self, instance: Instance, message: ToRouter) -> None:
        assert isinstance(message, Attached)
        instance.attached = True

    def connection_broke(self, instance: Instance) -> None:
        instance.lost(0.0)


def test_a_router_that_lost_the_answer_asks_for_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """News of an old connection's end may come after the answer on the new one."""
    monkeypatch.setattr(link, "ATTACH_INTERVAL", 0.05)

    async def talk() -> None:
        context = zmq.asyncio.Context()
        listener: AsyncListener[ToInstance, ToRouter] = AsyncListener(
            context, "tcp://127.0.0.1:0", ToInstance, name="instance"
        )
        instance = Instance(member("a", 0, address=listener.endpoint))
        connection = Link(context, instance, Receiver(), None, router="r", wants_blocks=False)

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
