"""The mesh client over real sockets; the test plays coordinator and instance."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import zmq.asyncio

from coordinator.messages import FromCoordinator, Member, Settings, State, ToCoordinator
from coordinator.rpc.rpc import AsyncListener, Peer
from coordinator.views import ViewNews
from engine.messages import (
    Attach,
    Attached,
    Capacity,
    Delta,
    FinishReason,
    Recalled,
    Submit,
    ToInstance,
    Tokens,
    ToRouter,
)
from engine.sampling import SamplingParams, ThinkingBudget
from router.dispatch.client import MeshClient
from router.dispatch.ledger import MAX_FRUITLESS
from router.mesh import Prompt
from tests.coordinator.membership.test_registry import SETTINGS
from tests.router.dispatch.test_mesh_parts import member, view
from tests.waiting import until_async

TOO_LARGE = SamplingParams(thinking=ThinkingBudget(10**30, (), (5,)))
"""Parameters that no message can hold.

Requests are checked long before; should one get as far, it must not harm others.
"""


CAPACITY = Capacity(16, 10, 4, 64, 100)


class World:
    """The other ends of a client's connections."""

    def __init__(self, context: zmq.asyncio.Context, tokenizer: str | None) -> None:
        self._coordinator: AsyncListener[ToCoordinator, FromCoordinator] = AsyncListener(
            context, "tcp://127.0.0.1:0", ToCoordinator, name="coordinator"
        )
        self._instance: AsyncListener[ToInstance, ToRouter] = AsyncListener(
            context, "tcp://127.0.0.1:0", ToInstance, name="instance"
        )
        self.client = MeshClient(self._coordinator.endpoint, tokenizer=tokenizer)
        self._watcher: Peer | None = None
        self._attached = Attached("a", CAPACITY)

    def member(self, name: str = "a", state: State = State.READY) -> Member:
        """A member of the view; all of them have the same address."""
        return member(name, 0, state, self._instance.endpoint)

    async def show(self, *members: Member, settings: Settings | None = None) -> None:
        """Send the client a view with these members."""
        if self._watcher is None:
            self._watcher, _ = await self._coordinator.receive()
        self._coordinator.send(self._watcher, msgspec.structs.replace(view(*members), settings=settings))
        await until_async(lambda: (found := self.client.view) is not None and found.members == [*members])

    async def taken(self) -> tuple[Peer, Submit]:
        """The next request at the instance, and the peer that sent it."""
        while True:
            peer, message = await self._instance.receive()
            if isinstance(message, Attach):
                self._instance.send(peer, self._attached)
            elif isinstance(message, Submit):
                return peer, message

    def tell(self, peer: Peer, message: ToRouter) -> None:
        """Send a message as the instance."""
        self._instance.send(peer, message)

    async def submitted(self) -> Submit:
        """The next request at the instance, which gives it a token and its end."""
        peer, message = await self.taken()
        self.tell(peer, Tokens([Delta(message.request, [7], FinishReason.LENGTH)]))
        return message

    def close(self) -> None:
        self._coordinator.close()
        self._instance.close()


def run(work: Callable[[World], Awaitable[None]], tokenizer: str | None = None) -> None:
    """The client must be there until the end."""

    async def checked() -> None:
        context = zmq.asyncio.Context()
        world = World(context, tokenizer)
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
        await world.show(world.member())
        first = client.generate(prompt("first"))
        assert (await world.submitted()).request_id == "first"
        assert [delta.token_ids async for delta in first] == [[7]]
        with pytest.raises(OverflowError):
            client.generate(prompt("too large", TOO_LARGE))
        assert (client.num_in_flight, client.flights(9)) == (0, [])
        assert "<Ledger 0 in flight>" in repr(client)
        await world.show()

    run(work)


def test_what_cannot_be_sent_ends_alone() -> None:
    """Both wait for the instance to answer on its connection."""

    async def work(world: World) -> None:
        client = world.client
        await world.show(world.member())
        large, small = client.generate(prompt("too large", TOO_LARGE)), client.generate(prompt("small"))
        assert client.num_in_flight == 2
        assert (await world.submitted()).request_id == "small"
        assert [delta.token_ids async for delta in small] == [[7]]
        with pytest.raises(OverflowError):
            async for _ in large:
                pass
        assert client.num_in_flight == 0

    run(work)


def test_a_request_goes_on_whose_instances_leave_one_after_the_other() -> None:
    """As when all of a large mesh restart, and the request waits in each queue."""

    async def work(world: World) -> None:
        await world.show(world.member("0"))
        stream = world.client.generate(prompt("queued"))
        for number in range(MAX_FRUITLESS + 1):
            await world.taken()
            await world.show(world.member(str(number), State.DRAINING))
            await world.show()
            assert world.client.num_in_flight == 1
            await world.show(world.member(str(number + 1)))
        await world.submitted()
        assert [delta.token_ids async for delta in stream] == [[7]]
        await world.show()

    run(work)


def test_a_request_that_was_often_asked_back_survives_a_loss() -> None:
    async def work(world: World) -> None:
        await world.show(world.member("a"))
        stream = world.client.generate(prompt("queued"))
        for _ in range(MAX_FRUITLESS):
            peer, submit = await world.taken()
            world.tell(peer, Recalled([submit.request]))
        await world.taken()
        await world.show()
        assert world.client.num_in_flight == 1
        await world.show(world.member("b"))
        await world.submitted()
        assert [delta.token_ids async for delta in stream] == [[7]]
        await world.show()

    run(work)


def test_a_tokenizer_of_another_directory_leaves_the_model_where_it_is(tmp_path: Path) -> None:
    """Sampling defaults are read from the model; elsewhere only without it on this host."""
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    model.mkdir()

    def directory_of(name: str) -> str:
        found: list[str] = []

        async def work(world: World) -> None:
            await world.show(settings=msgspec.structs.replace(SETTINGS, model=name))
            assert world.client.model is not None
            found.append(world.client.model.directory)

        run(work, str(tokenizer))
        return found[0]

    assert directory_of(str(model)) == str(model)
    assert directory_of("/nowhere") == str(tokenizer)


class DeadLink:
    """A connection that has just broken, before its end was reported."""

    def send(self, _message: ToInstance, growth: int = 0) -> bool:
        return False

    def close(self) -> None:
        return


def with_dead_links(client: MeshClient, count: int) -> None:
    """Give the client ``count`` instances whose connections have just broken."""
    client._pool.apply(view(*(member(f"i{rank}", rank) for rank in range(count))), time.monotonic())
    for instance in client._pool:
        instance.attached, instance.capacity = True, CAPACITY
        client._connections[instance.name] = DeadLink()  # type: ignore[assignment]


def test_any_number_of_connections_may_have_broken_at_once() -> None:
    async def work(world: World) -> None:
        client = world.client
        await world.show()
        with_dead_links(client, 600)
        client.generate(prompt("tried everywhere"))
        (flight,) = client.flights(9)
        assert (flight.rank, flight.attempts) == (None, 600), "it waits for an instance to come"
        assert [entry.fruitless for entry in client._mover._orphans] == [0], "it was nowhere yet"

    run(work)


def test_an_instance_that_has_answered_or_is_connected_anew_is_asked_for_requests_again() -> None:
    async def work(world: World) -> None:
        await world.show()
        with_dead_links(world.client, 1)
        (instance,) = world.client._pool
        for answer in (Recalled([]), Attached("i0", CAPACITY)):
            instance.asked_back = True
            world.client._receiver.received(instance, answer)
            assert not instance.asked_back

    run(work)


def test_an_instance_that_was_taken_out_and_is_back_in_one_piece_of_news_has_one_connection() -> None:
    """A process may register again before routers hear that it was taken out."""

    async def work(world: World) -> None:
        client = world.client
        await world.show(world.member())
        before = client._connections["a"]
        again = ViewNews(whole=False, left=["a"], members=[world.member()])
        client._pool.can_follow = lambda *_: True  # type: ignore[method-assign]
        client._on_news(again)
        assert before._is_closed
        now = client._connections["a"]
        assert now is not before
        assert not now._is_closed
        stream = client.generate(prompt("after it"))
        await world.submitted()
        assert [delta.token_ids async for delta in stream] == [[7]]

    run(work)
