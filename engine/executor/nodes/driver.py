"""The engine's side of an instance on several hosts: waits, then relays (no torch).

A thread with an event loop owns the socket. Each worker elsewhere is an
:class:`engine.executor.ends.RelayedWorker`, so the executor sees no difference. A host that does not come
is named when the time is over; one that is refused is sent the reason. A host that goes takes its workers
along: that is noticed when its connection is gone, or when it is silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import zmq.asyncio

from coordinator.addresses import AddressError, is_loopback, own
from coordinator.config import endpoint
from coordinator.membership.admission import NEEDS_SIZE, differences_of
from coordinator.messages import Settings
from coordinator.process.process import EXIT_WORKER_LOST, how_it_ended
from coordinator.rpc.codec import OtherProtocol
from coordinator.rpc.keys import MeshKeys
from coordinator.rpc.rpc import AsyncListener, Peer, PortInUse
from engine.config import EngineConfig
from engine.executor.ends import LocalWorker, RelayedWorker, WorkerEnd
from engine.executor.nodes.messages import (
    ALIVE_INTERVAL,
    SILENCE,
    Alive,
    Hire,
    Hired,
    MessageFromWorker,
    MessageToWorker,
    NodeEnd,
    NodeEnded,
    NodeJoin,
    NodeLeaving,
    NodeRefused,
    NodeWait,
    ToEngine,
    ToNode,
)
from engine.executor.relay import Relay
from engine.executor_contract import CannotStart, Progress
from engine.host.versions import other_versions
from parallel.topology import workers_of_node

logger = logging.getLogger(__name__)

SAY_INTERVAL = 5.0
"""Seconds between two log lines about missing hosts."""
LEAVE_SECONDS = 0.5
"""Seconds for the other hosts to confirm the end."""


class _Node:
    """A host that has joined, and its workers."""

    def __init__(self, join: NodeJoin, peer: Peer) -> None:
        self.join = join
        self.peer = peer
        self.heard_at = time.monotonic()
        self.workers: dict[int, RelayedWorker] = {}
        self.pids: dict[int, int] | None = None
        self.left = False

    def __str__(self) -> str:
        return f"{self.join.host} (node rank {self.join.node_rank})"


class NodeCrew:
    """Implements ``executor.ends.Crew`` over the hosts of ``--nnodes``."""

    def __init__(
        self,
        config: EngineConfig,
        settings: Settings,
        names: Sequence[str],
        threads: int,
        *,
        keys: MeshKeys | None,
        timeout: float,
    ) -> None:
        """``names`` of all workers, by number.

        ``threads`` of each on this host; ``timeout``: seconds to wait for the other hosts.
        """
        self._config = config
        self._settings = settings
        self._names = names
        self._threads = threads
        self._keys = keys
        self._timeout = timeout
        self._nodes: dict[int, _Node] = {}
        self._changed = threading.Event()
        """Set when a host joined or started its workers, or the thread failed."""
        self._failure: Exception | None = None
        self._hired = False
        self._leaving = asyncio.Event()
        """Set when a host has left."""
        self._relay = Relay("nodes", self._serve, self._fail)

    def __repr__(self) -> str:
        return f"<NodeCrew {', '.join(map(str, self._nodes.values()))}>"

    # ---- the engine's thread

    def start(self, workers: list[WorkerEnd], progress: Progress) -> None:
        """See ``Crew``."""
        nodes = self._config.nodes
        address = "127.0.0.1"
        try:
            address = own("--master-addr", nodes.master_addr)
        except AddressError as error:
            raise CannotStart(f"{error}; the command with --node-rank 0 runs on that host") from error
        self._address = address
        self._relay.start()
        deadline = time.monotonic() + self._timeout
        self._await(lambda: not self._missing(), deadline, progress)
        progress("starting workers")
        total = len(self._names)
        for node in range(nodes.nnodes):
            for number, worker in enumerate(workers_of_node(total, node, nodes.nnodes)):
                workers.append(self._worker(node, worker, number))
        self._relay.call(self._hire)
        self._await(lambda: all(node.pids is not None for node in self._nodes.values()), deadline, progress)
        logger.info(
            "workers on %d hosts: %s",
            nodes.nnodes,
            "; ".join(
                f"{name} on {self._nodes[node].join.host if node else 'this one'}"
                for node in range(nodes.nnodes)
                for name in (self._names[worker] for worker in workers_of_node(total, node, nodes.nnodes))
            ),
        )

    def threads_of(self, worker: WorkerEnd) -> int | None:
        """See ``Crew``. Each host knows its own cores; the number here is only a placeholder."""
        return None if isinstance(worker, LocalWorker) else 1

    def close(self, problem: str) -> None:
        """See ``Crew``. The other hosts are sent the end."""
        self._relay.close(lambda: self._send_end(problem))

    def _worker(self, node: int, worker: int, number: int) -> WorkerEnd:
        name = self._names[worker]
        if node == 0:
            return LocalWorker(name, self._threads, host="0", address=self._address, number=number)
        join = self._nodes[node].join
        relayed = RelayedWorker(name, f"on {join.host}, node rank {node}", str(node), join.address, number)
        self._nodes[node].workers[worker] = relayed
        self._relay.workers.append(relayed)
        return relayed

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._config.nodes.nnodes) if rank not in self._nodes]

    def _waits_for(self) -> str:
        missing = self._missing()
        return f"node rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}" if missing else ""

    def _await(self, done: Callable[[], bool], deadline: float, progress: Progress) -> None:
        said_at = 0.0
        while not done():
            self._changed.clear()
            if self._failure is not None:
                raise CannotStart(str(self._failure)) from self._failure
            nodes, waits_for, now = self._config.nodes, self._waits_for(), time.monotonic()
            if now > deadline:
                raise CannotStart(
                    f"gave up: {waits_for or 'the workers of a host'} of {nodes.nnodes} did not come within "
                    f"{self._timeout:g} s: start `serve --nnodes {nodes.nnodes} --node-rank "
                    f"{(self._missing() or [1])[0]} --master-addr {nodes.master_addr} --master-port "
                    f"{nodes.master_port} ...` there, with the same model and settings"
                )
            if now - said_at > SAY_INTERVAL:
                said_at = now
                progress(f"waiting for {waits_for or 'workers of other hosts'}")
                logger.info(
                    "waiting for %s at %s:%d (at most %.0f s more)",
                    f"{waits_for} of {nodes.nnodes}" if waits_for else "workers of other hosts",
                    self._address, nodes.master_port,
                    deadline - now,
                )  # fmt: skip
            if not done():
                self._changed.wait(min(SAY_INTERVAL, max(0.01, deadline - now)))

    # ---- the thread with the socket

    def _fail(self, error: Exception) -> None:
        """Note why the thread has failed, and count all hosts as lost."""
        if isinstance(error, PortInUse):
            error = PortInUse(f"--master-addr, --master-port: {error}")
        else:
            logger.error("the thread for other hosts failed", exc_info=error)
        self._failure = error
        self._lose_all()

    def _lose_all(self) -> None:
        for node in list(self._nodes.values()):
            self._lose(node, "the engine does not listen any more")
        self._changed.set()

    async def _serve(self, closed: asyncio.Event) -> None:
        context = zmq.asyncio.Context()
        where = endpoint(self._address, self._config.nodes.master_port)
        self._listener: AsyncListener[ToEngine, ToNode] = AsyncListener(
            context, where, ToEngine, name="nodes", keys=self._keys
        )
        if not is_loopback(self._address):
            logger.info("listens for the other hosts at %s", where)
        tasks = [asyncio.create_task(each) for each in (self._receive(), self._keep_alive())]
        closing = asyncio.ensure_future(closed.wait())
        try:
            await asyncio.wait([*tasks, closing], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            with contextlib.suppress(TimeoutError):  # what a closed connection had not delivered is lost
                await asyncio.wait_for(self._all_left(), LEAVE_SECONDS)
        finally:
            closing.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, closing, return_exceptions=True)
            self._listener.close()
            context.term()
        self._lose_all()

    async def _all_left(self) -> None:
        while any(not node.left for node in self._nodes.values()):
            await self._leaving.wait()
            self._leaving.clear()

    async def _receive(self) -> None:
        while True:
            peer, message = await self._listener.receive()
            node = next((each for each in self._nodes.values() if each.peer == peer), None)
            if node is not None:
                node.heard_at = time.monotonic()
            match message:
                case OtherProtocol():
                    logger.error("a host with another version of Lockstep wants to join: %s", message)
                    self._listener.send(peer, NodeRefused("it has another version of Lockstep"))
                case NodeJoin():
                    self._join(peer, message)
                case _ if node is None:
                    logger.warning("%s of a host that has not joined is ignored", type(message).__name__)
                case Hired(pids):
                    self._started(node, pids)
                case MessageFromWorker(number, payload):
                    if number in node.workers:
                        node.workers[number].deliver(payload)
                case NodeEnded(number, status):
                    if number in node.workers:
                        node.workers[number].gone(how_it_ended(status), status)
                case NodeLeaving(reason):
                    self._lose(node, f"went with its host {node}: {reason}")

    async def _keep_alive(self) -> None:
        while True:
            now = time.monotonic()
            for node in list(self._nodes.values()):
                there = self._listener.send(node.peer, Alive())
                silent = now - node.heard_at
                if there and silent < SILENCE:
                    continue
                why = f"says nothing for {silent:.0f} s" if there else "is gone: its connection broke"
                self._lose(node, f"went with its host {node}, which {why}", hears=there)
            await asyncio.sleep(ALIVE_INTERVAL)

    def _join(self, peer: Peer, join: NodeJoin) -> None:
        problem = self._problem_with(peer, join)
        if problem is not None:
            logger.error("%s, node rank %d, is refused: %s", join.host, join.node_rank, problem)
            self._listener.send(peer, NodeRefused(problem))
            return
        if join.node_rank not in self._nodes:
            self._nodes[join.node_rank] = _Node(join, peer)
            logger.info("%s (%s) is node rank %d", join.host, join.address, join.node_rank)
            self._changed.set()
        self._listener.send(peer, NodeWait(self._waits_for()))

    def _problem_with(self, peer: Peer, join: NodeJoin) -> str | None:
        """Why a host cannot join, None if it can."""
        nnodes = self._config.nodes.nnodes
        if join.nnodes != nnodes:
            return f"--nnodes is {join.nnodes} there, {nnodes} at the engine"
        if not 1 <= join.node_rank < nnodes:
            return f"--node-rank {join.node_rank} is not in 1 to {nnodes - 1}"
        holder = self._nodes.get(join.node_rank)
        if holder is not None and holder.peer != peer:
            return f"node rank {join.node_rank} is {holder.join.host} already: each host needs its own"
        versions = other_versions(join.versions)
        if versions:
            return "; ".join(versions) + " (the engine)"
        if join.settings is not None:
            differences = differences_of(join.settings, self._settings, "the engine", NEEDS_SIZE)
            if differences:
                return "this host differs from the engine: " + "; ".join(differences)
        if is_loopback(join.address) != is_loopback(self._address):
            return (
                f"its address {join.address} and --master-addr {self._address} do not reach each other: one "
                "of them is loopback"
            )
        return None

    def _hire(self) -> None:
        """Order all hosts, which have joined, to start their workers."""
        self._hired = True
        for node in self._nodes.values():
            names = {number: worker.name for number, worker in node.workers.items()}
            hire = Hire(names, self._config.model, self._settings.fingerprint)
            for number, worker in node.workers.items():
                worker.forward(asyncio.get_running_loop(), partial(self._tell, node, number))
            if not self._listener.send(node.peer, hire):
                self._lose(node, f"went with its host {node}: its connection broke")

    def _started(self, node: _Node, pids: dict[int, int]) -> None:
        node.pids = pids
        for number, worker in node.workers.items():
            worker.where = f"pid {pids.get(number, 0)} on {node}"
        self._changed.set()

    def _tell(self, node: _Node, number: int, payload: bytes) -> bool:
        if self._listener.send(node.peer, MessageToWorker(number, payload)):
            return True
        self._lose(node, f"went with its host {node}: its connection broke")
        return False

    def _lose(self, node: _Node, how: str, *, hears: bool = False) -> None:
        """Count a host and its workers as lost; ``hears``: it still gets messages."""
        node.left = node.left or not hears
        self._leaving.set()
        for worker in node.workers.values():
            worker.gone(how)
        if not self._hired:
            self._nodes.pop(node.join.node_rank, None)  # it may come again
        elif node.pids is None:
            self._failure = self._failure or CannotStart(f"workers of {node} do not start: one {how}")
        self._changed.set()

    def _send_end(self, problem: str) -> None:
        """Send all hosts the end."""
        for node in self._nodes.values():
            status = EXIT_WORKER_LOST if problem else 0
            self._listener.send(node.peer, NodeEnd(status, problem or "it was asked to"))
