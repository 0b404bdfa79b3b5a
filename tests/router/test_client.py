"""The router's mesh client, between a coordinator and an instance that a test plays, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest
import zmq.asyncio

from coordinator.messages import FromCoordinator, ToCoordinator
from coordinator.rpc import AsyncListener
from engine.messages import (
    Attach,
    Attached,
    Capacity,
    Delta,
    FinishReason,
    Submit,
    ToInstance,
    Tokens,
    ToRouter,
)
from engine.sampling import SamplingParams, ThinkingBudget
from router.client import MeshClient
from router.mesh import Prompt
from tests.router.test_mesh_parts import member, view
from tests.waiting import until_async

TOO_LARGE = SamplingParams(thinking=ThinkingBudget(10**30, (), (5,)))
"""No message can hold it. Requests are checked long before; should one get as far, it must not harm others."""


class World:
    """The other ends of a client's connections."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._coordinator: AsyncListener[ToCoordinator, FromCoordinator] = AsyncListener(
            context, "tcp://127.0.0.1:0", ToCoordinator, name="coordinator"
        )
        self._instance: AsyncListener[ToInstance, ToRouter] = AsyncListener(
            context, "tcp://127.0.0.1:0", ToInstance, name="instance"
        )
        self.client = MeshClient(self._coordinator.endpoint)
        self._attached = Attached("a", Capacity(16, 10, 4, 64, 100))

    async def show(self, *, with_instance: bool) -> None:
        """Tell the client who is there."""
        peer, _ = await self._coordinator.receive()
        members = [member("a", 0, address=self._instance.endpoint)] if with_instance else []
        self._coordinator.send(peer, view(*members))
        await until_async(
            lambda: (found := self.client.view) is not None and len(found.members) == len(members)
        )

    async def submitted(self) -> Submit:
        """The next request at the instance, which gives it a token and its end."""
        while True:
            peer, message = await self._instance.receive()
            if isinstance(message, Attach):
                self._instance.send(peer, self._attached)
            elif isinstance(message, Submit):
                self._instance.send(peer, Tokens([Delta(message.request, [7], FinishReason.LENGTH)]))
                return message

    def close(self) -> None:
        self._coordinator.close()
        self._instance.close()


def run(work: Callable[[World], Awaitable[None]]) -> None:
    """The client must be there until the end."""

    async def checked() -> None:
        context = zmq.asyncio.Context()
        world = World(context)
        following = asyncio.create_task(world.client.run())
        async with asyncio.timeout(20):
            await work(world)
        assert not following.done()
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        world.close()
        context.term()

    asyncio.run(checked())


def prompt(name: str, params: SamplingParams | None = None) -> Prompt:
    return Prompt(name, [5, 6], params or SamplingParams(), 1)


def test_what_cannot_be_sent_is_forgotten() -> None:
    async def work(world: World) -> None:
        client = world.client
        await world.show(with_instance=True)
        first = client.generate(prompt("first"))
        assert (await world.submitted()).request_id == "first"
        assert [delta.token_ids async for delta in first] == [[7]]
        with pytest.raises(OverflowError):
            client.generate(prompt("too large", TOO_LARGE))
        assert (client.num_in_flight, client.flights(9)) == (0, [])
        assert "<Ledger 0 in flight>" in repr(client)
        await world.show(with_instance=False)

    run(work)


def test_what_cannot_be_sent_ends_alone() -> None:
    """Both wait for the instance to answer on its connection."""

    async def work(world: World) -> None:
        client = world.client
        await world.show(with_instance=True)
        large, small = client.generate(prompt("too large", TOO_LARGE)), client.generate(prompt("small"))
        assert client.num_in_flight == 2
        assert (await world.submitted()).request_id == "small"
        assert [delta.token_ids async for delta in small] == [[7]]
        with pytest.raises(OverflowError):
            async for _ in large:
                pass
        assert client.num_in_flight == 0

    run(work)
