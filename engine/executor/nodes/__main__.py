"""``python -m engine.executor.nodes``: one host's workers of an instance whose engine is on another host.

Started by ``serve --nnodes N --node-rank R``. Asks to join, starts the workers that the engine names, and
relays messages between them. It ends with its instance: when the engine asks for it, when its
connection is gone, and when a worker ends. Its workers end with it, whatever ends it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time

import msgspec
import uvloop
import zmq.asyncio

from coordinator.addresses import AddressError, own, toward
from coordinator.config import endpoint
from coordinator.messages import Settings
from coordinator.process import process
from coordinator.rpc.codec import OtherProtocol
from coordinator.rpc.handshakes import KeyRefused
from coordinator.rpc.keys import MeshKeys
from coordinator.rpc.rpc import AsyncConnection
from coordinator.settings.flags import parse
from engine.config import InstanceConfig
from engine.executor.channel import ChannelClosed
from engine.executor.ends import END_TIMEOUT, LocalWorker
from engine.executor.local_model import begin_of, differs, find_copy, with_own
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
from engine.host.cores import Share, share_of_cores
from engine.host.versions import versions
from engine.model.checkpoint import CheckpointError, ModelInfo
from engine.settings import resolve
from parallel.topology import cores_of_worker

logger = logging.getLogger("engine.executor.nodes")

ASK_INTERVAL = 0.3
"""Seconds between two tries to join."""
SAY_INTERVAL = 5.0
"""Seconds between two log lines about what the host waits for."""
LAST_WORDS = 0.2
"""Seconds to read messages that an engine sent before its connection ended."""


class Over(Exception):
    """End of this host's part of an instance, with the exit status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Node:
    """One host of an instance, from joining to the end of its workers."""

    def __init__(self, config: InstanceConfig, keys: MeshKeys | None = None) -> None:
        self._mesh = config.mesh
        self._config = config.engine
        self._log_level = config.log_level
        self._keys = keys
        self._endpoint = endpoint(config.engine.nodes.master_addr, config.engine.nodes.master_port)
        self._workers: dict[int, LocalWorker] = {}
        self._begun: set[int] = set()
        self._gone: set[int] = set()
        self._info: ModelInfo | None = None
        self._missing = ""
        self._finds = ""
        self._heard_at = 0.0
        self._over: asyncio.Future[None]

    async def run(self) -> None:
        """Run until the instance ends.

        Raises:
            Over: how it did.
        """
        self._over = asyncio.get_running_loop().create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(
                number, self._end, Over(0, "asked to stop: the instance ends")
            )
        settings = self._own_settings()
        self._address = self._own_address()
        context = zmq.asyncio.Context()
        self._connection: AsyncConnection[ToNode, ToEngine] = AsyncConnection(
            context, self._endpoint, ToNode, name="node", keys=self._keys
        )
        parts = (self._join(settings), self._receive(), self._watch_connection())
        tasks = [asyncio.create_task(each) for each in parts]
        try:
            await asyncio.wait([*tasks, self._over], return_when=asyncio.FIRST_COMPLETED)
            for each in (self._over, *tasks):
                if each.done():
                    each.result()
        except Over as over:
            self._connection.send(NodeLeaving(str(over)))
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._dismiss()
            self._connection.close()
            context.term()

    # ---- joining

    def _own_settings(self) -> Settings | None:
        """Settings of the model, if this host's flags name one.

        A headless host may take them from the engine.
        """
        if self._config.model.model is None:
            return None
        return resolve(self._config, self._mesh.data_parallel_size)[1]

    def _own_address(self) -> str:
        if self._mesh.instance_address is not None:
            return own("--instance-address", self._mesh.instance_address)
        nodes = self._config.nodes
        return toward(nodes.master_addr, nodes.master_port)

    async def _join(self, settings: Settings | None) -> None:
        """Repeat the request to join until workers run, then send signs of life."""
        nodes, patience = self._config.nodes, self._mesh.startup_timeout
        join = NodeJoin(
            node_rank=nodes.node_rank,
            nnodes=nodes.nnodes,
            host=socket.gethostname(),
            address=self._address,
            versions=versions(),
            settings=settings,
        )
        began = said_at = time.monotonic()
        while not self._workers:
            self._connection.send(join)
            now = time.monotonic()
            waits_for = self._missing if now - self._heard_at < SILENCE else ""
            waits_for = self._finds or waits_for or f"the engine (node rank 0) at {self._endpoint}"
            if now - began > patience:
                raise Over(process.EXIT_FAILED, f"gave up after {patience:g} s of waiting for {waits_for}")
            if now - said_at >= SAY_INTERVAL:
                said_at = now
                logger.info("waiting for %s (%.0f s of at most %.0f s)", waits_for, now - began, patience)
            await asyncio.sleep(ASK_INTERVAL)
        while True:
            self._connection.send(Alive())
            silent = time.monotonic() - self._heard_at
            if silent > SILENCE:
                raise Over(process.EXIT_WORKER_LOST, f"the engine says nothing for {silent:.0f} s")
            await asyncio.sleep(ALIVE_INTERVAL)

    async def _watch_connection(self) -> None:
        while True:
            await self._connection.broken()
            refused = await self._connection.refusal()
            if refused is not None:
                raise refused
            if self._workers:
                await asyncio.sleep(LAST_WORDS)
                raise Over(process.EXIT_WORKER_LOST, "the engine is gone: its connection broke")

    # ---- what the engine says

    async def _receive(self) -> None:
        while True:
            message = await self._connection.receive()
            self._heard_at = time.monotonic()
            match message:
                case NodeWait(missing):
                    self._missing = missing
                case NodeRefused(reason):
                    raise Over(
                        process.EXIT_REFUSED, f"the engine at {self._endpoint} refuses this host: {reason}"
                    )
                case Hire():
                    await self._hire(message)
                case MessageToWorker(number, payload):
                    self._tell(number, payload)
                case NodeEnd(status, reason):
                    raise Over(status, f"the instance ends: {reason}")

    async def _hire(self, hire: Hire) -> None:
        if self._workers:
            return
        self._finds = "the model to be found here"
        self._info = await asyncio.to_thread(self._find_model, hire)  # may take minutes: it may be downloaded
        self._heard_at = time.monotonic()  # nobody listened meanwhile
        nodes = self._config.nodes
        threads = self._share().threads
        loop = asyncio.get_running_loop()
        for place, (number, name) in enumerate(sorted(hire.names.items())):
            worker = LocalWorker(name, threads, str(nodes.node_rank), self._address, place)
            self._workers[number] = worker
            loop.add_reader(worker.channel.fileno(), self._said, number)
            loop.add_reader(worker.ended, self._ended, number)
        logger.info(
            "workers %s, of %d thread%s each, for the engine at %s",
            ", ".join(hire.names.values()), threads, "s" * (threads > 1), self._endpoint,
        )  # fmt: skip
        self._connection.send(Hired({number: each.child.pid for number, each in self._workers.items()}))

    def _find_model(self, hire: Hire) -> ModelInfo:
        """This host's copy of what the engine serves."""
        own = self._config.model
        info, found = find_copy(
            msgspec.structs.replace(
                hire.model,
                model=own.model or hire.model.model,
                revision=own.revision or hire.model.revision,
            )
        )
        problem = differs(info.directory, found, hire.model.model, hire.fingerprint)
        if problem:
            raise Over(process.EXIT_REFUSED, f"{problem}: give MODEL")
        return info

    def _share(self) -> Share:
        workers = len(self._workers) or self._config.num_local_workers
        return share_of_cores(workers, self._config.device.cpu_threads, self._mesh.local_size)

    def _tell(self, number: int, payload: bytes) -> None:
        """Pass a message of the engine on to a worker.

        In what comes first, some things are for this host to say.
        """
        worker = self._workers.get(number)
        if worker is None:
            return
        if number not in self._begun:
            self._begun.add(number)
            assert self._info is not None
            share = self._share()
            payload = with_own(
                begin_of(payload),
                self._info,
                threads=share.threads,
                cores=cores_of_worker(share.cores, worker.number, len(self._workers), share.threads),
                log_level=logging.getLevelName(self._log_level.upper()),
            )
        try:
            if worker.channel.offer(payload):
                loop = asyncio.get_running_loop()
                loop.add_writer(worker.channel.fileno(), self._go_on_telling, number)
        except ChannelClosed:
            self._ended(number)

    def _go_on_telling(self, number: int) -> None:
        """Pass on more of a message, since the worker has room for it.

        To wait for it would keep back signs of life, and what others say.
        """
        worker = self._workers[number]
        try:
            if worker.channel.flush():
                return
        except ChannelClosed:
            self._ended(number)
        asyncio.get_running_loop().remove_writer(worker.channel.fileno())

    # ---- what the workers say

    def _said(self, number: int) -> None:
        worker = self._workers[number]
        try:
            while (payload := worker.channel.take()) is not None:
                self._connection.send(MessageFromWorker(number, payload))
        except ChannelClosed:
            asyncio.get_running_loop().remove_reader(worker.channel.fileno())

    def _ended(self, number: int) -> None:
        """Report the end of a worker to the engine at once.

        It then ends the instance, and with it this host's part.
        """
        worker = self._workers[number]
        loop = asyncio.get_running_loop()
        loop.remove_reader(worker.ended)
        if number in self._gone:
            return
        self._gone.add(number)
        self._said(number)  # its last words explain more
        how = worker.how_it_ended()
        logger.error("%s %s", worker, how)
        self._connection.send(NodeEnded(number, worker.child.returncode or 0))
        loop.call_later(END_TIMEOUT, self._end, Over(process.EXIT_WORKER_LOST, f"{worker} {how}"))

    # ---- the end

    def _end(self, over: Over) -> None:
        if not self._over.done():
            self._over.set_exception(over)

    def _dismiss(self) -> None:
        loop = asyncio.get_running_loop()
        for worker in self._workers.values():
            loop.remove_reader(worker.channel.fileno())
            loop.remove_writer(worker.channel.fileno())
            loop.remove_reader(worker.ended)
            worker.kill()  # what they hold is of no use any more
            worker.channel.close()
        deadline = time.monotonic() + END_TIMEOUT
        for worker in self._workers.values():
            worker.end(deadline)


def main(argv: list[str] | None = None) -> int:
    config = parse(
        InstanceConfig,
        sys.argv[1:] if argv is None else argv,
        prog="python -m engine.executor.nodes",
        description="Workers of an instance whose engine is on another host.",
    )
    process.set_up(
        f"Node_{config.engine.nodes.node_rank}", config.log_level, config.mesh.observability.log_format
    )
    keys = process.member_keys(config.mesh, "python -m engine.executor.nodes")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(Node(config, keys).run())
    except Over as over:
        logger.log(logging.ERROR if over.status else logging.INFO, "%s", over)
        return over.status
    except (KeyRefused, OtherProtocol) as error:
        logger.error("the engine refuses this host: %s", error)
        return process.EXIT_REFUSED
    except (CheckpointError, AddressError) as error:
        logger.error("%s", error)
        return process.EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
