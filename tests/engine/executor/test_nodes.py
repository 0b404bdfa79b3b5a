"""Choice of hosts for an instance's workers, and their end when the engine ends."""

from __future__ import annotations

import asyncio
import select
import threading
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from coordinator.config import endpoint
from coordinator.messages import Settings
from coordinator.rpc.rpc import AsyncConnection
from engine.config import DeviceConfig, EngineConfig, InstanceConfig, NodesConfig
from engine.executor.ends import RelayedWorker, WorkerEnd
from engine.executor.nodes import driver
from engine.executor.nodes.__main__ import Node
from engine.executor.nodes.driver import NodeCrew
from engine.executor.nodes.messages import (
    Alive,
    Hire,
    Hired,
    MessageFromWorker,
    MessageToWorker,
    NodeEnd,
    NodeJoin,
    NodeLeaving,
    NodeWait,
    ToNode,
)
from engine.executor_contract import CannotStart
from engine.host.versions import versions
from engine.settings import resolve
from tests.mesh.harness import free_port

CONFIG = EngineConfig(
    device=DeviceConfig(tensor_parallel_size=2),
    nodes=NodesConfig(nnodes=2, master_port=1),
)


def crew(port: int = 1, timeout: float = 20.0) -> NodeCrew:
    nodes = msgspec.structs.replace(CONFIG.nodes, master_port=port)
    config = msgspec.structs.replace(CONFIG, nodes=nodes)
    return NodeCrew(config, settings(), ["W0", "W1"], 1, keys=None, timeout=timeout)


def settings(**changes: Any) -> Settings:
    return msgspec.structs.replace(resolve(CONFIG)[1], **changes)


def join(**changes: Any) -> NodeJoin:
    ours = NodeJoin(
        node_rank=1, nnodes=2, host="other", address="127.0.0.1", versions=versions(), settings=settings()
    )
    return msgspec.structs.replace(ours, **changes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"settings": None}, None),
        ({"nnodes": 3}, "--nnodes is 3 there, 2 at the engine"),
        ({"node_rank": 2}, "--node-rank 2 is not in 1 to 1"),
        ({"versions": {**versions(), "torch": "1.0"}}, "torch is 1.0 there, "),
        ({"settings": settings(dtype="float16")}, "--dtype is float16, the engine has bfloat16"),
        ({"settings": settings(fingerprint="x")}, "model is lockstep-moe (fingerprint x), the engine has"),
        ({"address": "10.0.0.2"}, "do not reach each other"),
    ],
)
def test_a_host_that_differs_is_told_in_what(changes: dict[str, Any], problem: str | None) -> None:
    made = crew()
    made._address = "127.0.0.1"
    found = made._problem_with(b"peer", join(**changes))
    assert found is None if problem is None else problem in str(found)


class OtherHost(threading.Thread):
    """A host that joins, starts one echoing worker, and falls silent on request."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self.silent = False
        self.heard: list[ToNode] = []

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        context = zmq.asyncio.Context()
        connection: AsyncConnection[ToNode, Any] = AsyncConnection(
            context, endpoint("127.0.0.1", self._port), ToNode, name="other"
        )
        said: object = join()
        receiving = asyncio.ensure_future(connection.receive())
        while not any(isinstance(each, NodeEnd) for each in self.heard):
            if not self.silent:
                connection.send(said)
            if not (await asyncio.wait({receiving}, timeout=0.05))[0]:
                continue
            message = receiving.result()
            receiving = asyncio.ensure_future(connection.receive())
            self.heard.append(message)
            match message:
                case Hire():
                    connection.send(Hired({1: 4711}))
                    said = Alive()
                case MessageToWorker(number, payload):
                    connection.send(MessageFromWorker(number, payload))
                case NodeEnd(_, reason):
                    connection.send(NodeLeaving(reason))
        receiving.cancel()
        connection.close()
        context.term()


def test_a_worker_elsewhere_is_reached_and_a_silent_host_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "SILENCE", 1.0)
    monkeypatch.setattr(driver, "LEAVE_SECONDS", 4.0)  # of less than END_TIMEOUT, also where cores are busy
    monkeypatch.setattr(
        driver, "LocalWorker", lambda name, *_, **kinds: RelayedWorker(name, "here", "0", "", 0)
    )
    port = free_port()
    other, made = OtherHost(port), crew(port)
    other.start()
    workers: list[WorkerEnd] = []
    made.start(workers, lambda text: None)
    try:
        assert [str(each) for each in workers] == ["W0 (here)", "W1 (pid 4711 on other (node rank 1))"]
        workers[1].channel.send(b"echo")
        assert workers[1].channel.receive(0.0) == b"echo"
        other.silent = True
        assert workers[1].channel.wait(0.0) is False
        assert select.select([workers[1].ended], [], [], 20.0)[0]
        assert "went with its host other (node rank 1), which says nothing for" in workers[1].how_it_ended()
    finally:
        for worker in workers:
            worker.channel.close()
        made.close("W1 is lost")
        assert isinstance(workers[0], RelayedWorker)
        workers[0].forget()
    other.join(10)
    assert other.heard[0] == NodeWait("")
    assert other.heard[-1] == NodeEnd(4, "W1 is lost")


def test_a_host_that_never_comes_is_named() -> None:
    made = crew(free_port(), timeout=0.2)
    with pytest.raises(
        CannotStart, match=r"gave up: node rank 1 of 2 did not come within 0.2 s: start `serve"
    ):
        made.start([], lambda text: None)
    made.close("")


def test_a_worker_that_takes_nothing_keeps_no_others_waiting() -> None:
    """A busy worker's messages wait here, and the engine still receives from this host."""
    busy: Any = RelayedWorker("W1", "here", "1", "", 0)
    messages = [b"a step" * 500_000, b"the next one"]

    async def tell() -> list[bytes]:
        node = Node(InstanceConfig(engine=CONFIG))
        node._workers, node._begun = {1: busy}, {1}
        for message in messages:
            node._tell(1, message)
        found = []
        while len(found) < len(messages):
            await asyncio.sleep(0)
            message = busy.relay.take()
            if message is not None:
                found.append(message)
        return found

    busy.channel.send_timeout = 5.0
    assert asyncio.run(tell()) == messages
    busy.channel.close()
    busy.forget()


def test_nothing_more_is_passed_to_a_worker_that_is_out_of_reach() -> None:
    passed: list[bytes] = []

    def send(payload: bytes) -> bool:
        passed.append(payload)
        return len(passed) < 2

    async def forward() -> None:
        worker = RelayedWorker("W1", "there", "1", "", 0)
        worker.forward(asyncio.get_running_loop(), send)
        for payload in (b"1", b"2", b"3", b"4"):
            worker.channel.send(payload)
            for _ in range(3):
                await asyncio.sleep(0)  # the loop looks at its descriptors
        worker.channel.close()
        worker.forget()

    asyncio.run(forward())
    assert passed == [b"1", b"2"]
