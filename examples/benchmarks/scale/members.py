"""A process with many simulated instances: their membership is real, nothing is computed.

Each has a connection of its own to the coordinator, registers and sends heartbeats as an instance does
(:class:`coordinator.member_state.MemberState`). Routers connect to a socket that some instances share.
Commands come as lines of standard input, and each is answered by a line:

    join COUNT     so many instances register; answered when all are welcome
    ready          all become ready
    churn RATE     from now on so many instances in all leave each second, and as many others join
    settle         answered when all instances step in one group (with spread experts)
    lose           one instance dies, and the others report their group as lost; answered when they step again
    stop
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import uuid
from pathlib import Path

import zmq.asyncio

sys.path.insert(0, str(Path(__file__).parents[3]))

from coordinator.member_state import MemberState
from coordinator.messages import (
    Evidence,
    FromCoordinator,
    GroupPlan,
    Leave,
    Load,
    Lost,
    Register,
    Settings,
    State,
    ToCoordinator,
)
from coordinator.rpc.keys import MeshKeys, load
from coordinator.rpc.rpc import AsyncConnection, AsyncListener, with_room
from engine.messages import Attach, Attached, Capacity, ToInstance, ToRouter

ASK_INTERVAL = 0.3
BLOCKS = 10_000
CAPACITY = Capacity(
    block_size=16, num_blocks=BLOCKS, max_num_seqs=64, max_num_batched_tokens=2048, max_num_queued_reqs=1024
)
LOADING_TIME = 0.2
"""Seconds that an instance which joins during churn takes to load."""
ENTERING_TIME = 0.1
"""Seconds until an instance that is ready for a group enters it."""
LOOK_INTERVAL = 0.02
INSTANCES_PER_HOST = 8
SOCKETS = 16
"""Sockets at which the instances of a process listen.

With a single one, eight routers make 8,192 connections to it at once. The kernel keeps 4,096 that wait
(``net.core.somaxconn``). It drops the first packets of the others, which are sent again after seconds.
"""


def settings(model: str, instances: int, experts: int) -> Settings:
    """The settings that all instances bring; without ``experts``, they are those of a dense model."""
    return Settings(
        model=model, revision=None, served_model_name=("m",), fingerprint="f", dtype="bfloat16",
        max_model_len=2048, block_size=16, vocab_size=1000, tensor_parallel_size=1, pipeline_parallel_size=1,
        enable_expert_parallel=experts > 0, expert_placement_strategy="linear", all2all_backend="auto",
        num_experts=experts, data_parallel_size=instances, max_num_batched_tokens=2048, max_num_seqs=64,
    )  # fmt: skip


class SimulatedInstance:
    """An instance's membership, without the instance."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        register: Register,
        address: str,
        keys: MeshKeys | None,
    ) -> None:
        self.state = MemberState(register)
        self.state.address, self.state.phase = address, "weights"
        self.welcomed = asyncio.Event()
        self.changed = asyncio.Event()
        self._rng = random.Random(register.instance)
        self._connection: AsyncConnection[FromCoordinator, ToCoordinator] = AsyncConnection(
            context, endpoint, FromCoordinator, name="coordinator", keys=keys
        )
        self.form: GroupPlan | None = None
        """The group that it steps in."""
        self.state.on_form = self._on_form
        self._tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._receive())]

    @property
    def name(self) -> str:
        return self.state.register.instance

    def become_ready(self) -> None:
        """It has its weights; where experts are spread, it waits for its group."""
        welcome = self.state.welcome
        spreads = welcome is not None and welcome.settings.enable_expert_parallel
        self.state.state, self.state.phase = (
            State.LOADED if spreads and self.form is None else State.READY,
            "serving",
        )
        self.state.store = self.state.address
        self.changed.set()

    def leave(self) -> None:
        self._connection.send(Leave(self.name))
        self.die()

    def die(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._connection.close()

    def loses(self, other: SimulatedInstance) -> None:
        """Its group is broken, for an end of another member is closed."""
        if self.form is not None:
            self.state.report(
                Lost(
                    instance=self.name,
                    epoch=self.form.epoch,
                    suspects=(other.name,),
                    evidence=Evidence.CLOSED,
                )
            )
            self.changed.set()

    def _on_form(self, form: GroupPlan) -> None:
        if form.epoch > self.state.ready_epoch:
            self.state.ready_epoch = form.epoch
            self.changed.set()
            asyncio.get_running_loop().call_later(ENTERING_TIME, self._enter, form)

    def _enter(self, form: GroupPlan) -> None:
        if self.state.form is None or self.state.form.epoch != form.epoch:
            return
        place = next(at for at, peer in enumerate(form.peers) if peer.instance == self.name)
        self.form, self.state.state = form, State.READY
        self.state.hold([[[expert for expert, owner in enumerate(form.owners) if owner == place]]])
        self.state.enter(form)
        self.changed.set()

    async def _send(self) -> None:
        await asyncio.sleep(self._rng.random() * 0.5)  # instances of a mesh do not send at the same moment
        while True:
            self.changed.clear()
            for message in self.state.outgoing(self._load()):
                self._connection.send(message)
            interval = self.state.heartbeat_interval or ASK_INTERVAL
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), interval)

    async def _receive(self) -> None:
        await self._connection.receive_all(self._take)

    def _take(self, message: FromCoordinator) -> None:
        if self.state.take(message):
            self.changed.set()
        if self.state.welcome is not None:
            self.welcomed.set()

    def _load(self) -> Load:
        """As of an instance that has work: no two in a row are equal."""
        if self.state.state is not State.READY:
            return Load(blocks_total=BLOCKS)
        running = self._rng.randrange(64)
        return Load(
            running, self._rng.randrange(4), running * 20, BLOCKS, running * 31.7, self._rng.randrange(10**6)
        )


class Crowd:
    """All simulated instances of this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._keys = load(Path(args.key)) if args.key else None
        self._context = with_room(zmq.asyncio.Context())
        self._listeners: list[AsyncListener[ToInstance, ToRouter]] = []
        self._settings = settings(args.model, args.of, args.experts)
        self._instances: list[SimulatedInstance] = []
        self._numbers = itertools.count()
        self._answering: list[asyncio.Task[None]] = []
        self._churning: asyncio.Task[None] | None = None

    def _address(self, number: int) -> str:
        """Where routers connect to an instance; numbers come in their order."""
        index = number % SOCKETS
        if index == len(self._listeners):
            context = zmq.asyncio.Context()  # one with keys has room for one listener
            listener: AsyncListener[ToInstance, ToRouter] = AsyncListener(
                context, "tcp://127.0.0.1:*", ToInstance, name="instances", keys=self._keys
            )
            self._listeners.append(listener)
            self._answering.append(asyncio.create_task(self._answer_routers(listener)))
        return self._listeners[index].endpoint

    def _add(self) -> SimulatedInstance:
        number = next(self._numbers)
        register = Register(
            instance=f"{self._args.name}-{number}-{uuid.uuid4().hex[:8]}", rank=None, size=self._args.of,
            settings=self._settings, host=f"{self._args.name}-{number // INSTANCES_PER_HOST}", pid=number,
        )  # fmt: skip
        made = SimulatedInstance(
            self._context, self._args.coordinator, register, self._address(number), self._keys
        )
        self._instances.append(made)
        return made

    async def obey(self, command: str, *arguments: str) -> None:
        match command:
            case "join":
                joined = [self._add() for _ in range(int(arguments[0]))]
                await asyncio.gather(*(each.welcomed.wait() for each in joined))
            case "ready":
                for each in self._instances:
                    each.become_ready()
            case "churn":
                if self._churning is not None:
                    self._churning.cancel()
                if float(arguments[0]):
                    self._churning = asyncio.create_task(self._churn(float(arguments[0])))
            case "settle":
                await self._settle(0)
            case "lose":
                dead = self._instances.pop(len(self._instances) // 2)
                assert dead.form is not None
                dead.die()
                for each in self._instances:
                    each.loses(dead)
                await self._settle(dead.form.epoch)

    async def _settle(self, after: int) -> None:
        """Wait until all step in one group of a later epoch."""
        while True:
            forms = {each.form.epoch if each.form else 0: each.form for each in self._instances}
            (newest, *older) = sorted(forms, reverse=True)
            form = forms[newest]
            if not older and form is not None and newest > after and len(form.peers) >= len(self._instances):
                return
            await asyncio.sleep(LOOK_INTERVAL)

    async def _churn(self, rate: float) -> None:
        while True:
            await asyncio.sleep(1 / rate)
            self._instances.pop(0).leave()
            joined = self._add()
            asyncio.get_running_loop().call_later(LOADING_TIME, joined.become_ready)

    async def _answer_routers(self, listener: AsyncListener[ToInstance, ToRouter]) -> None:
        while True:
            peer, message = await listener.receive()
            if isinstance(message, Attach) and message.unanswered:
                listener.send(peer, Attached("simulated", CAPACITY))


async def main() -> None:
    parser = argparse.ArgumentParser(description="Many simulated instances.")
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--key")
    parser.add_argument("--experts", type=int, default=0, help="spread over the instances; 0: a dense model")
    parser.add_argument("--of", type=int, required=True, help="instances of the whole mesh")
    crowd = Crowd(parser.parse_args())
    loop = asyncio.get_running_loop()
    while (line := await loop.run_in_executor(None, sys.stdin.readline)).split()[:1] not in ([], ["stop"]):
        await crowd.obey(*line.split())
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
