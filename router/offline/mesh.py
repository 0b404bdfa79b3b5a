"""Processes behind one ``LLM``, and the thread in the program that runs them.

The processes are those of ``serve`` without a router: that part is played by this thread, whose event loop
supervises them and runs a :class:`router.dispatch.client.MeshClient`. The user's own thread may block, run an
event loop, or be interrupted; nothing here depends on it. Children die with this thread, however the program
ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import os
import socket
import threading
import time
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop

from coordinator.addresses import is_ipv6
from coordinator.config import MeshConfig
from coordinator.messages import AdapterSource, LoadAdapter, Member, Settings, State, UpdateWeights
from coordinator.process import process
from coordinator.rpc import keys, own_key
from parallel.devices import cuda_devices
from parallel.topology import usable_cores
from router.config import ServeConfig
from router.dispatch.client import MeshClient
from router.dispatch.policy import Policy
from router.launcher.launch import process_table
from router.launcher.overseer import Overseer
from router.launcher.preflight import machine_of
from router.launcher.serve import wait_for_instances, with_key_for_children
from router.launcher.shutdown import Shutdown
from router.launcher.supervisor import Supervisor
from router.metrics.metrics import Metrics
from router.offline.weights import carry_out

POLL_INTERVAL = 0.02
"""Seconds between two looks at whether all instances are connected, or have left."""
ALIVE_INTERVAL = 1.0
"""Seconds between two looks at whether a thread that does not answer still lives."""
CONNECT_TIMEOUT = 30.0
"""Seconds until all instances, ready by then, have answered on our connections."""
OTHERS_TIMEOUT = 60.0
"""Seconds that a closing head waits for idle instances of other nodes to leave."""

Result = TypeVar("Result")


class EngineDeadError(RuntimeError):
    """The processes behind an ``LLM`` have ended; it can generate no more."""


class PrivateMesh:
    """Processes and client of a mesh that ends with its ``LLM``."""

    client: MeshClient
    metrics: Metrics

    def __init__(self, config: ServeConfig, settings: Settings | None, *, port_is_free_choice: bool) -> None:
        """``settings`` are those of the model, when this side knows it. ``port_is_free_choice``: nobody else
        has to know the coordinator's port.

        Raises:
            OSError: the coordinator's port cannot be bound, or too few files may be open.
            coordinator.rpc.keys.KeyFileError: --mesh-key-file cannot be used.
        """
        if problem := process.open_files_problem():
            raise OSError(errno.EMFILE, problem)
        self._held = contextlib.ExitStack()
        """Descriptors to close when the processes have ended."""
        self._listener: socket.socket | None = None
        listen_fd = None
        mesh_name = ""
        if not config.mesh.headless:
            self._listener, port = _listen(config, any_port=port_is_free_choice)
            listen_fd = self._listener.fileno()
            mesh_name = uuid.uuid4().hex[:8]
            config = msgspec.structs.replace(
                config, mesh=msgspec.structs.replace(config.mesh, data_parallel_rpc_port=port)
            )
        is_private = port_is_free_choice and not config.mesh.headless
        self._keys = _keys_of(config.mesh, is_private=is_private)
        config = with_key_for_children(config, self._keys)
        for descriptor in own_key.descriptors(config.mesh):
            self._held.callback(os.close, descriptor)
        self._config, self._mesh_name = config, mesh_name
        table = process_table(
            config, settings, usable_cores(), mesh_name,
            devices=cuda_devices(), listen_fd=listen_fd, with_router=False,
        )  # fmt: skip
        drain_timeout = config.engine.drain_timeout if config.mesh.headless else 0.0
        self._supervisor = Supervisor(table, shutdown=Shutdown(drain_timeout=drain_timeout))
        self._owner = os.getpid()
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._begun = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._supervising: asyncio.Task[int] | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        # A daemon: the callback that stops it at the program's end runs only after other threads are joined.
        self._thread = threading.Thread(target=self._run, name="lockstep", daemon=True)

    def __repr__(self) -> str:
        pids = " ".join(map(str, self._supervisor.children.pids))
        return f"<PrivateMesh at {self._config.mesh.coordinator_endpoint}, processes {pids or 'ended'}>"

    @property
    def is_alive(self) -> bool:
        """Whether the mesh runs; False once closed or ended, and in a forked child."""
        return os.getpid() == self._owner and self._thread.is_alive()

    @property
    def pids(self) -> list[int]:
        """Process ids of all processes that run."""
        return self._supervisor.children.pids

    def start(self) -> None:
        """Start everything and wait until all instances take requests.

        Raises:
            EngineDeadError: a process ended before, or nothing happened for --startup-timeout seconds.
        """
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:  # Ctrl-C, too
            self.close(waits_for_others=False)
            raise

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the mesh's event loop and wait for its result.

        Interrupted (Ctrl-C), it is cancelled.

        Raises:
            EngineDeadError: the processes ended meanwhile, or had ended before.
        """
        if self._loop is None or not self.is_alive:
            work.close()
            raise self.dead()
        waiting = self._unless_ended(work)
        try:
            future = asyncio.run_coroutine_threadsafe(waiting, self._loop)
        except RuntimeError as error:  # its loop has just ended by itself
            waiting.close()
            work.close()
            raise self.dead() from error
        try:
            while not future.done():
                concurrent.futures.wait([future], ALIVE_INTERVAL)
                if not (self._thread.is_alive() or future.done()):  # it ended before it took the work
                    waiting.close()
                    work.close()
                    raise self.dead()
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise self.dead() from error
        except BaseException:
            future.cancel()
            raise

    def update_weights(self, wish: UpdateWeights) -> str:
        """Have all instances go over to other weights; raises as :func:`.carry_out` does."""
        return self.call(carry_out(self._config.mesh.coordinator_endpoint, self._keys, wish))

    def load_adapter(self, wish: LoadAdapter) -> tuple[AdapterSource, ...]:
        """Have all instances serve an adapter; raises as :func:`.carry_out` does.

        Returns:
            All adapters of the mesh.
        """
        return self.call(self._load_adapter(wish))

    async def _load_adapter(self, wish: LoadAdapter) -> tuple[AdapterSource, ...]:
        await carry_out(self._config.mesh.coordinator_endpoint, self._keys, wish)
        deadline = time.monotonic() + CONNECT_TIMEOUT
        while True:  # this process learns of it, too
            view, found = self.client.view, self.client.model
            if found is not None and view is not None and wish.command in view.orders.adapters.commands:
                return found.adapters
            if time.monotonic() > deadline:
                raise TimeoutError(f"adapter {wish.name!r} is loaded, but not known here yet")
            await asyncio.sleep(POLL_INTERVAL)

    def close(self, *, waits_for_others: bool = True) -> None:
        """End all processes.

        A head first waits until the instances of other nodes have left, since their programs may still need
        ours. Harmless twice, and in a forked child.
        """
        if not self.is_alive:
            return
        self._begun.wait()
        if self._loop is None:
            return
        if waits_for_others and not self._config.mesh.headless:
            with contextlib.suppress(EngineDeadError):
                self.call(self._others_have_left())
        with contextlib.suppress(RuntimeError):  # its loop has just ended by itself
            self._loop.call_soon_threadsafe(self._stop)
        if threading.current_thread() is not self._thread:  # garbage is collected anywhere
            self._thread.join()

    # ---- in the thread

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except Exception as error:  # noqa: BLE001 (whatever it is, the user's thread must not wait for ever)
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            self._begun.set()
            if not self._ready.done():
                self._ready.set_exception(self.dead())
            if self._listener is not None:
                self._listener.close()
            self._held.close()

    async def _serve(self) -> None:
        mesh = self.client = MeshClient(
            self._config.mesh.coordinator_endpoint,
            tokenizer=self._config.http.tokenizer,
            keys=self._keys,
            policy=Policy(self._config.http.load_balancing_policy),
        )
        self.metrics = Metrics(mesh)
        self._loop = asyncio.get_running_loop()
        self._begun.set()
        following = asyncio.create_task(mesh.run())
        self._overseer = Overseer(
            self._config.mesh.coordinator_endpoint,
            self._mesh_name,
            self._supervisor,
            machine_of(self._config),
            self._keys,
        )
        overseeing = asyncio.create_task(self._overseer.run())
        self._supervising = asyncio.create_task(self._supervisor.run(self._until_ready, takes_signals=False))
        try:
            await asyncio.wait((self._supervising, following), return_when=asyncio.FIRST_COMPLETED)
            self._supervisor.stop()
            await self._supervising
        finally:
            for task in (following, overseeing):
                task.cancel()
            await asyncio.gather(following, overseeing, return_exceptions=True)

    async def _until_ready(self) -> None:
        """Wait until all instances are ready and connected.

        So the first requests are spread over all of them.
        """
        await wait_for_instances(self._config, self._supervisor, self._overseer)
        deadline = time.monotonic() + CONNECT_TIMEOUT
        while not self._is_connected():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not connected to all instances after {CONNECT_TIMEOUT:.0f} s")
            await asyncio.sleep(POLL_INTERVAL)
        self._ready.set_result(None)

    def _is_connected(self) -> bool:
        """Whether the client is connected to all ready instances.

        These are the ones of the overseer's view, which was waited for: the client's own may be older.
        """
        view = self._overseer.view
        if view is None or self.client.model is None:
            return False
        serving = sum(member.state is State.READY for member in view.members)
        return self.client.num_ready >= serving > 0

    async def _unless_ended(self, work: Coroutine[Any, Any, Result]) -> Result:
        assert self._supervising is not None
        task = asyncio.ensure_future(work)
        self._calls.add(task)
        try:
            await asyncio.wait((task, self._supervising), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self.dead()
            return task.result()
        finally:
            self._calls.discard(task)
            task.cancel()

    async def _others_have_left(self) -> None:
        """Wait for instances of other nodes, at most OTHERS_TIMEOUT without a sign of work."""
        seen: list[tuple[str, int]] = []
        deadline = time.monotonic() + OTHERS_TIMEOUT
        while others := self._members_elsewhere():
            now = [(member.instance, member.load.steps) for member in others]
            if now != seen:
                seen, deadline = now, time.monotonic() + OTHERS_TIMEOUT
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(POLL_INTERVAL)

    def _members_elsewhere(self) -> list[Member]:
        """Instances that another program started."""
        view = self.client.view
        ours = set(self._supervisor.children.pids)
        here = socket.gethostname()
        members = view.members if view is not None else []
        return [
            member
            for member in members
            if (member.host != here or member.pid not in ours)
            and not self._supervisor.children.has_started(member.instance)
        ]

    def _stop(self) -> None:
        for task in self._calls:
            task.cancel()
        self._supervisor.stop()

    def dead(self) -> EngineDeadError:
        """Error for calls after the end of the processes, with the reason."""
        problem = self._supervisor.problem
        if not problem:
            return EngineDeadError("this LLM is closed")
        return EngineDeadError(f"the mesh behind this LLM has ended: {problem}; its log above says why")


def _keys_of(mesh: MeshConfig, *, is_private: bool) -> keys.MeshKeys | None:
    """The mesh's keys; ``is_private``: no other program knows the port, or needs the key."""
    if own_key.is_own(mesh):
        return keys.generate() if is_private else own_key.obtain(mesh)
    return keys.load(Path(mesh.mesh_key_file)) if mesh.mesh_key_file is not None else None


def _listen(config: ServeConfig, *, any_port: bool) -> tuple[socket.socket, int]:
    """The coordinator's listening socket and its port.

    It is held before the port is passed to any process.
    """
    mesh = config.mesh
    address = (mesh.data_parallel_address, 0 if any_port else mesh.data_parallel_rpc_port)
    family = socket.AF_INET6 if is_ipv6(address[0]) else socket.AF_INET
    try:
        listener = socket.create_server(address, family=family, backlog=128)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the coordinator cannot listen at {address[0]}:{address[1]} ({error.strerror}): choose another "
            "data_parallel_address or data_parallel_rpc_port",
        ) from error
    return listener, int(listener.getsockname()[1])
