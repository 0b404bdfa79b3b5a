"""The relay to workers on other hosts: messages both ways, its end, failures."""

from __future__ import annotations

import asyncio
import select
import threading
from collections.abc import Callable
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.executor.ends import RelayedWorker
from engine.executor.relay import Relay
from engine.settings import resolve


def echoing(worker: RelayedWorker) -> Callable[[asyncio.Event], Any]:
    """Serves a worker by giving each message back."""

    async def serve(closed: asyncio.Event) -> None:
        worker.forward(asyncio.get_running_loop(), worker.deliver)
        await closed.wait()

    return serve


def test_messages_pass_until_the_relay_is_closed() -> None:
    worker, failures, last = RelayedWorker("W0", "elsewhere", "", "", 0), [], threading.Event()
    relay = Relay("echo", echoing(worker), failures.append)
    relay.workers.append(worker)
    relay.start()
    for payload in (b"one", b"two"):
        worker.channel.send(payload)
        assert worker.channel.receive(0.0) == payload
    worker.channel.close()
    relay.close(last.set)
    assert last.is_set()
    assert not relay.workers
    assert not failures
    relay.call(lambda: failures.append(ValueError("called behind the end")))
    assert not failures


def test_one_that_was_never_started_gives_up_its_workers() -> None:
    worker = RelayedWorker("W0", "elsewhere", "", "", 0)
    relay = Relay("echo", echoing(worker), lambda error: None)
    relay.workers.append(worker)
    relay.close()
    assert not relay.workers
    worker.channel.close()


def test_a_failure_is_passed_on_and_ends_the_thread() -> None:
    failures: list[Exception] = []
    failed = threading.Event()

    async def serve(closed: asyncio.Event) -> None:
        raise ValueError("no way there")

    def note(error: Exception) -> None:
        failures.append(error)
        failed.set()

    relay = Relay("failing", serve, note)
    relay.start()
    assert failed.wait(10)
    relay.close()
    assert [str(each) for each in failures] == ["no way there"]


class Actor:
    """Stands in for a Ray actor that gives messages back, and dies when asked to."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.told: asyncio.Queue[bytes] | None = None
        self.begin, self.tell, self.listen = (
            _Method(each) for each in (self._begin, self._tell, self._listen)
        )

    def _queue(self) -> asyncio.Queue[bytes]:
        if self.told is None:
            self.told = asyncio.Queue()
        return self.told

    def _begin(self, payload: bytes) -> None:
        self.begun.append(payload)
        self._queue().put_nowait(payload)

    def _tell(self, payload: bytes) -> None:
        self._queue().put_nowait(payload)

    async def _listen(self) -> list[bytes]:
        from ray.exceptions import RayError

        payload = await self._queue().get()
        if payload == b"die":
            raise RayError("the actor is dead")
        return [payload]


class _Method:
    """A method of an actor: called by ``remote``."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.remote = method


def test_the_crew_of_ray_relays_to_actors_and_notices_their_deaths() -> None:
    pytest.importorskip("ray")
    from engine.executor.cluster.crew import RayCrew

    config = EngineConfig()
    crew, actor = RayCrew(config, resolve(config)[1], ["W0"], 1.0), Actor()
    worker = RelayedWorker("W0", "actor, pid 1 on alpha", "", "", 0)
    crew._actors.append(actor)
    crew._relay.workers.append(worker)
    crew._relay.start()
    for payload in (b"begin", b"a step"):
        worker.channel.send(payload)
        assert worker.channel.receive(0.0) == payload
    assert actor.begun == [b"begin"], "the first message begins the worker"
    worker.channel.send(b"die")
    assert select.select([worker.ended], [], [], 10.0)[0]
    assert worker.how_it_ended() == "died: the actor is dead"
    worker.channel.close()
    crew._relay.close()
    assert not crew._relay.workers
