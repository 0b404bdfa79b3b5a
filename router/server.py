"""The router process: one HTTP server in front of one mesh client, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from coordinator import process
from coordinator.rpc import OtherProtocol
from router.app import make_app
from router.client import MeshClient
from router.config import RouterConfig
from router.metrics import Metrics

logger = logging.getLogger(__name__)

BACKLOG = 2048


class PatientProtocol(HttpToolsProtocol):
    """Closes a connection on which no whole request head arrives in time; uvicorn would wait for ever."""

    head_timeout = 60.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(self.head_timeout, self._close_if_silent)

    def _close_if_silent(self) -> None:
        no_request_yet: bool = getattr(self, "cycle", None) is None
        if no_request_yet and not self.transport.is_closing():
            self.transport.close()


def bind(host: str, port: int) -> socket.socket:
    """The listening socket, bound before anything else is done.

    Raises:
        OSError: the port is in use or not ours to take; the message says so.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = {
            errno.EADDRINUSE: "is in use: choose another with --port",
            errno.EACCES: "may not be bound by this user: choose one above 1023 with --port",
            errno.EADDRNOTAVAIL: "is no address of this machine: check --host",
        }.get(error.errno or 0, f"cannot be bound: {error}")
        raise OSError(error.errno, f"port {port} on {host} {reason}") from error
    listener.set_inheritable(True)
    return listener


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would raise them again after its end, and nothing of ours would run."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


async def serve(config: RouterConfig) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status."""
    http = config.http
    try:
        listener = bind(http.host, http.port)
    except OSError as error:
        logger.error("%s", error.strerror)
        return process.EXIT_FAILED
    mesh = MeshClient(
        config.mesh.coordinator_endpoint,
        model_directory=Path(http.tokenizer) if http.tokenizer else None,
    )
    PatientProtocol.head_timeout = http.request_timeout
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its start and end are said here
    server = _Server(
        uvicorn.Config(
            make_app(
                mesh,
                http,
                Metrics(mesh, reports=mesh.reports, epoch=mesh.epoch, instances=mesh.instances_by_state),
            ),
            http=PatientProtocol,
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=not http.disable_access_log,
            backlog=BACKLOG,
            timeout_graceful_shutdown=max(1, round(http.shutdown_timeout)),
        )
    )
    following = asyncio.create_task(_follow(mesh, server))
    logger.info("listening on http://%s:%d", *listener.getsockname()[:2])
    try:
        await server.serve(sockets=[listener])
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
    logger.info("ends")
    return 0


async def _follow(mesh: MeshClient, server: uvicorn.Server) -> None:
    try:
        await mesh.run()
    except OtherProtocol as error:
        logger.error("the coordinator is of another version: %s", error)
        server.should_exit = True
