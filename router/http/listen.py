"""Listening sockets of the router, for TCP or at a path, bound before anything else.

``serve`` opens them and its routers inherit them: all accept from one queue, so what waits there when one
of them dies is taken by another, or by its successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from coordinator.addresses import is_ipv6
from coordinator.config import url

UNIX_SOCKETS = Path("/proc/net/unix")
HEALTH_INTERVAL = 0.02
"""Seconds between two checks whether the endpoint takes requests."""


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A socket bound to an address.

    It does not listen yet, and nobody else can bind its port meanwhile.

    Raises:
        OSError: the port is in use or not ours to take; the message says so, and which ``flag`` changes it.
    """
    family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        _bind(listener, host, port)
    except UnicodeError as error:  # of a name that can be none
        listener.close()
        raise OSError(
            errno.EINVAL, f"{host!r} is no address: check {flag.replace('port', 'host')}"
        ) from error
    except OSError as error:
        listener.close()
        reason = {
            errno.EADDRINUSE: f"is in use: choose another with {flag}",
            errno.EACCES: f"may not be bound by this user: choose one above 1023 with {flag}",
            errno.EADDRNOTAVAIL: f"is no address of this machine: check {flag.replace('port', 'host')}",
        }.get(error.errno or 0, f"cannot be bound: {error}")
        raise OSError(error.errno, f"port {port} on {host} {reason}") from error
    return listener


def _bind(listener: socket.socket, host: str, port: int) -> None:
    """Bind a port, first without SO_REUSEADDR.

    With that option two sockets can both be bound while neither listens, and the second one to listen would
    fail late. The option is for what is left of an earlier server's connections.
    """
    try:
        listener.bind((host, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))


@contextlib.contextmanager
def at_path(path: Path) -> Iterator[socket.socket]:
    """A Unix socket bound to a path, which is free again afterwards.

    Who may connect there is decided by the umask and by the directory. A socket that a dead server left there
    is taken away.

    Raises:
        OSError: the path cannot be used; the message has the reason.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _bind_at(listener, path)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"--uds {path} cannot be bound: {reason}") from error
    bound = path.stat()
    try:
        with listener:
            yield listener
    finally:
        with contextlib.suppress(OSError):
            if os.path.samestat(path.stat(), bound):  # else another server is there by now
                path.unlink()


def _bind_at(listener: socket.socket, path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "a file that is no socket is there: choose another path")
        if _is_held(path):
            raise OSError(errno.EADDRINUSE, "another server is there: choose another path")
        path.unlink()
    listener.bind(str(path))


def _is_held(path: Path) -> bool:
    """Whether a process listens at the path, or has bound it and will.

    The kernel lists the latter, of this network namespace.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            name = b" " + os.fsencode(path)  # others' names may be any bytes
            return any(line.endswith(name) for line in UNIX_SOCKETS.read_bytes().split(b"\n"))
        except OSError:
            return True
    return True


def let_successors_in(listener: socket.socket) -> None:
    """Let the next server bind this port; called before the socket listens.

    Connections inherit the option; without it their remains would keep the port occupied.
    """
    if listener.family != socket.AF_UNIX:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def inherited(descriptor: int) -> socket.socket:
    """A socket that the launcher bound and passed on.

    Raises:
        OSError: the descriptor is no open socket.
    """
    return socket.socket(fileno=descriptor)


def name_of(listener: socket.socket, scheme: str) -> str:
    """Address of a listening socket, for log lines."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    return url(scheme, *listener.getsockname()[:2])


async def wait_for_health(
    host: str, port: int, *, tls: bool, timeout: float, path: str | None = None
) -> bool:
    """Wait until ``GET /health`` returns 200; False if it has not within ``timeout`` seconds.

    ``path``: of a Unix socket to ask at instead.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                if await _is_healthy(host, port, tls, path):
                    return True
        await asyncio.sleep(HEALTH_INTERVAL)
    return False


async def _is_healthy(host: str, port: int, tls: bool, path: str | None) -> bool:
    context = None
    if tls:  # it is our own endpoint; whose name is on its certificate does not matter
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if path is not None:
        name = "localhost" if tls else None
        reader, writer = await asyncio.open_unix_connection(path, ssl=context, server_hostname=name)
    else:
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return (await reader.readline()).split()[1:2] == [b"200"]
    finally:
        writer.close()
