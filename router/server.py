"""The router process: one HTTP server and one mesh client in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from coordinator.commands import ask
from coordinator.messages import OperatorAnswer, OperatorCommand
from coordinator.process import process
from coordinator.process.tracing import Tracing, TracingMissing
from coordinator.rpc.codec import OtherProtocol
from coordinator.rpc.handshakes import KeyRefused
from coordinator.rpc.keys import MeshKeys
from router.app.adapters import loads_adapters
from router.app.admin import AdminGate, make_admin_app
from router.app.app import make_app
from router.app.dashboard.feed import Feed
from router.app.dashboard.page import Dashboard
from router.app.middleware import KeyCheck, RootPath
from router.app.refusals import Refusals
from router.app.store_work import StoreWork
from router.config import HttpConfig, RouterConfig
from router.dispatch.client import MeshClient
from router.dispatch.ledger import named
from router.dispatch.policy import Policy
from router.dispatch.pool import ANSWER_TIMEOUT
from router.http.accept import Acceptor, Tally
from router.http.connection import PatientProtocol
from router.http.listen import at_path, bind, inherited, let_successors_in, name_of
from router.http.quotas import Quotas
from router.http.request_path import prefix_of, without_prefix
from router.http.shared_files import ANSWERS, CONNECTIONS, QUOTAS
from router.http.tls import tls_problem
from router.metrics.metrics import Metrics
from router.metrics.shared_counts import SharedCounts
from router.stored.database import StoreDatabase, StoreUnusable
from router.stored.store import AnswerStore
from router.text.text_models import TextModels

logger = logging.getLogger(__name__)

BACKLOG = 2048
YOUNG_OBJECTS = 5_000
"""New objects between two garbage collections; Python's 700 cost 8% of the CPU."""
ERROR_TIMEOUT = 1.0
"""Seconds for clients to take a final error before their connections are cut."""
COMMAND_TIMEOUT = 5.0
"""Seconds that the coordinator gets to answer a command of the admin API."""


class _Server(uvicorn.Server):
    """uvicorn's server with Lockstep's own signals and its own accepting of connections.

    uvicorn would raise signals again after its end, and no code of ours would run. Connections are accepted
    evenly among routers, and none that this process has no file for.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        tally: Tally,
        feed: Feed | None,
        mesh: MeshClient,
        patience: float,
        work: StoreWork | None = None,
    ) -> None:
        """``patience``: seconds that requests may still run once this ends.

        ``work``: its answers that take longer are left to another router, or to the next start.
        """
        super().__init__(config)
        self._tally = tally
        self._feed = feed
        self._mesh = mesh
        self._patience = patience
        self._work = work

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._feed is not None:  # nobody waits for those who only look
            self._feed.close()
        if self._work is not None:
            await self._work.drain()
        late = asyncio.get_running_loop().call_later(self._patience, self._give_up)
        try:
            await super().shutdown(sockets)
            if self._work is not None:  # also answers that no connection waits for
                await self._work.drained()
        finally:
            late.cancel()

    def _give_up(self) -> None:
        """End requests with an error: a connection that just breaks would give no reason."""
        if self._work is not None:
            self._work.give_up()
        given_up = self._mesh.give_up_all("the server ends, and the answer with it")
        if given_up:
            logger.warning(
                "%d requests have not ended within --shutdown-timeout (%g s): they end with an error: %s",
                len(given_up),
                self._patience,
                named(given_up),
            )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        state, config = self.server_state, self.config

        def make_protocol() -> asyncio.Protocol:
            return PatientProtocol(config, state, self.lifespan.state)

        for listener in sockets or []:
            acceptor: Any = Acceptor(
                listener,
                make_protocol,
                lambda: len(state.connections),
                self._tally,
                BACKLOG,
                config.ssl,
            )
            self.servers.append(acceptor)


async def serve(config: RouterConfig, keys: MeshKeys | None = None) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status."""
    with contextlib.ExitStack() as held:
        try:
            listeners = _open_doors(config, held)
        except OSError as error:
            logger.error("%s", error.strerror)
            return process.EXIT_FAILED
        return await _serve(config, keys, listeners)


async def _serve(config: RouterConfig, keys: MeshKeys | None, listeners: list[socket.socket]) -> int:
    http = config.http
    if config.front_ends > 1:
        process.set_up(f"Router_{config.front_end}", config.log_level)
    PatientProtocol.head_timeout = http.request_timeout
    _quiet_uvicorn(http)
    try:
        tracing = _tracing(config)
        tally, quotas = _tally(config), _quotas(config)
    except TracingMissing as error:
        logger.error("%s", error)
        return process.EXIT_USAGE
    except OSError as error:
        logger.error("cannot open the files that routers share (quotas, connections): %s", error)
        return process.EXIT_FAILED
    mesh = MeshClient(
        config.mesh.coordinator_endpoint,
        tokenizer=http.tokenizer,
        keys=keys,
        policy=Policy(http.load_balancing_policy),
        shadow_rate=http.shadow_rate,
        drains_odd=http.shadow_action == "drain",
    )
    counts = _shared_counts(config)
    metrics = Metrics(mesh, faults=mesh.faults, shared=counts, alone=config.front_ends == 1)
    dashboard = None
    if http.dashboard:
        dashboard = Dashboard(mesh, metrics.faults_of_all, metrics.in_flight_of_all, config.front_end)
    store = _store(config)
    app, work, models = _app(config, mesh, metrics, quotas, dashboard, tracing, listeners, keys, store)
    settings = _settings(app, http)
    try:
        settings.load()
    except (ssl.SSLError, OSError) as error:
        logger.error("%s", tls_problem(http) or f"the endpoint cannot speak TLS: {error}")
        return process.EXIT_FAILED
    feed = dashboard.feed if dashboard else None
    server = _Server(settings, tally, feed, mesh, http.shutdown_timeout, work)
    following = asyncio.create_task(_follow(mesh, server))
    beside = [following, asyncio.create_task(models.open_images())]
    if counts is not None:
        beside.append(asyncio.create_task(counts.keep(metrics.snapshot)))
    if work is not None:
        beside.append(asyncio.create_task(work.keep()))
    try:
        await _listen(listeners, http, mesh, following)
        _collect_seldom()
        await server.serve(sockets=listeners)
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    if work is not None:
        work.give_up()
    if store is not None:
        store.database.close()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)
    logger.info("ends")
    return process.EXIT_REFUSED if following.done() and not following.cancelled() else 0


def _collect_seldom() -> None:
    """Spare garbage collections: what is there by now stays, and need not be looked through."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def _quiet_uvicorn(http: HttpConfig) -> None:
    """Drop lines of uvicorn that are logged here already or not wanted.

    These are its start and end, requests that it cuts off, and paths of --disable-access-log-for-endpoints.
    """
    errors = logging.getLogger("uvicorn.error")
    errors.setLevel(logging.WARNING)  # its start and end are logged here
    errors.addFilter(lambda record: not _was_cut_off(record))  # uvicorn logs their number in another line
    if unlogged := http.disable_access_log_for_endpoints.split(","):
        logging.getLogger("uvicorn.access").addFilter(
            lambda record: without_prefix(_path_of(record), http.root_path) not in unlogged
        )


def _tracing(config: RouterConfig) -> Tracing | None:
    """The sender of traces, if --otlp-traces-endpoint is given.

    Raises:
        TracingMissing: the extra is not installed.
    """
    wanted = config.mesh.observability.otlp_traces_endpoint
    return None if wanted is None else Tracing(wanted, f"router-{config.front_end}")


def _shared_counts(config: RouterConfig) -> SharedCounts | None:
    """This router's counts, in the directory of its launcher; None without one."""
    directory = config.counts_directory
    return None if directory is None else SharedCounts(Path(directory), f"router-{config.front_end}")


async def _listen(
    listeners: list[socket.socket], http: HttpConfig, mesh: MeshClient, following: asyncio.Task[None]
) -> None:
    """Open the sockets and log their addresses.

    The successor of a router that died first waits until it knows the mesh.
    """
    if any(map(_had_others, listeners)):
        await _find_the_world(mesh, following)
    for listener in listeners:
        let_successors_in(listener)
        listener.listen(BACKLOG)  # before the line is logged: a client that reads it may connect at once
        logger.info("listening on %s", name_of(listener, http.scheme))


def _had_others(listener: socket.socket) -> bool:
    """Whether another router accepts here, or did: connections may wait in its queue."""
    return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


async def _find_the_world(mesh: MeshClient, following: asyncio.Task[None]) -> None:
    """Wait until an instance is known, for clients that a dead router left behind.

    They wait in the socket's queue, and must not get a 503 only because the new router has not heard of any
    instance yet.
    """
    deadline = time.monotonic() + ANSWER_TIMEOUT
    while not (mesh.healthy or following.done()) and time.monotonic() < deadline:  # noqa: ASYNC110 (health is no event)
        await asyncio.sleep(0.02)


def _tally(config: RouterConfig) -> Tally:
    """The tally that balances connections among routers; one without a launcher is alone.

    Raises:
        OSError: there is no space for its file.
    """
    if config.front_ends == 1 or config.counts_directory is None:
        return Tally(None, 0, 1)
    return Tally(Path(config.counts_directory) / CONNECTIONS, config.front_end, config.front_ends)


def _quotas(config: RouterConfig) -> Quotas:
    """Quotas shared by all routers of this endpoint.

    Raises:
        OSError: there is no space for their file.
    """
    directory = config.counts_directory
    return Quotas(
        config.http.key_limits,
        file=None if directory is None else Path(directory) / QUOTAS,
        front_end=config.front_end,
        front_ends=config.front_ends,
    )


def _app(
    config: RouterConfig,
    mesh: MeshClient,
    metrics: Metrics,
    quotas: Quotas,
    dashboard: Dashboard | None,
    tracing: Tracing | None,
    listeners: list[socket.socket],
    keys: MeshKeys | None,
    store: AnswerStore | None,
) -> tuple[ASGIApp, StoreWork | None, TextModels]:
    """Application with the admin API, its work on stored answers, and its models."""

    endpoint = make_app(mesh, config.http, metrics, quotas, dashboard, tracing, lambda: mesh.view, store)
    port = listeners[1].getsockname()[1] if len(listeners) > 1 else None

    async def command(wish: OperatorCommand) -> OperatorAnswer:
        return await ask(config.mesh.coordinator_endpoint, wish, COMMAND_TIMEOUT, keys)

    prefix = prefix_of(config.http.root_path)
    room = config.http.weight_transfer_dir
    admin = make_admin_app(
        mesh,
        metrics.faults_of_all,
        command,
        config.front_end,
        prefix,
        None if room is None else Path(room).absolute(),
    )
    adapters: ASGIApp | None = None
    if loads_adapters(os.environ):
        logger.warning("clients may load and unload adapters (VLLM_ALLOW_RUNTIME_LORA_UPDATING)")
        keys_of_clients = config.http.api_key
        adapters = KeyCheck(admin, keys_of_clients, Refusals()) if keys_of_clients else admin
    gate = AdminGate(
        endpoint,
        admin,
        port=port,
        keys=config.http.admin_api_key,
        adapters=adapters,
        serves_all=config.http.admin_port_serves_all,
    )
    work: StoreWork | None = endpoint.state.work
    return (RootPath(gate, prefix) if prefix else gate), work, endpoint.state.models


def _store(config: RouterConfig) -> AnswerStore | None:
    """The store of answers; None if it does not open."""
    directory, path = config.counts_directory, config.http.store_path
    place: Path | str
    if config.http.store_url is not None:
        place = config.http.store_url
    elif path is not None:
        place = Path(path)
    elif directory is not None:
        place = Path(directory) / ANSWERS
    else:
        return None
    most = config.http.store_max_bytes
    try:
        return AnswerStore(StoreDatabase(place, most_bytes=most, lasts=path is not None))
    except StoreUnusable as error:
        logger.error("answers are not stored: %s", error)
        return None


def _open_doors(config: RouterConfig, held: contextlib.ExitStack) -> list[socket.socket]:
    """Open the sockets of the endpoint, and of an admin API with its own port.

    Raises:
        OSError: a port cannot be bound.
    """
    http = config.http
    if config.http_descriptor is not None:
        given = (config.http_descriptor, config.admin_descriptor)
        found = [inherited(descriptor) for descriptor in given if descriptor is not None]
        return [held.enter_context(each) for each in found]
    door = bind(http.host, http.port) if http.uds is None else at_path(Path(http.uds).absolute())
    doors = [held.enter_context(door)]
    if http.admin_port is not None:
        doors.append(held.enter_context(bind(http.admin_host, http.admin_port, "--admin-port")))
    return doors


def _was_cut_off(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's log is about a request that its shutdown cancelled."""
    return record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)


def _path_of(record: logging.LogRecord) -> str:
    """The path in a line of uvicorn's access log, without the query.

    The line's arguments are client, method, path with query, version, status.
    """
    args = record.args
    return str(args[2]).partition("?")[0] if isinstance(args, tuple) and len(args) > 2 else ""


def _settings(app: ASGIApp, http: HttpConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=PatientProtocol,
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=not http.disable_access_log,
        backlog=BACKLOG,
        timeout_keep_alive=http.timeout_keep_alive,
        timeout_graceful_shutdown=math.ceil(http.shutdown_timeout + ERROR_TIMEOUT),
        ssl_keyfile=http.ssl_keyfile,
        ssl_certfile=http.ssl_certfile,
        ssl_ca_certs=http.ssl_ca_certs,
        ssl_cert_reqs=http.ssl_cert_reqs,
    )


async def _follow(mesh: MeshClient, server: uvicorn.Server) -> None:
    """Follow the mesh; ends by itself only if this router cannot join it.

    The server ends, too.
    """
    try:
        await mesh.run()
    except OtherProtocol as error:
        logger.error("the coordinator is of another version: %s", error)
    except KeyRefused as error:
        logger.error("%s", error)
    except Exception:  # started again, this router knows the world; as it is, it would answer without
        logger.exception("the connection to the mesh failed: this router ends")
    server.should_exit = True
