"""Listening sockets of the HTTP door, bound before anything else is done.

``serve`` opens them and its front ends inherit them: all accept from one queue, so what waits there when one
of them dies is taken by another, or by its successor.
"""

from __future__ import annotations

import errno
import socket


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A socket bound to an address; it does not listen yet.

    Raises:
        OSError: the port is in use or not ours to take; the message says so, and which ``flag`` changes it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = {
            errno.EADDRINUSE: f"is in use: choose another with {flag}",
            errno.EACCES: f"may not be bound by this user: choose one above 1023 with {flag}",
            errno.EADDRNOTAVAIL: f"is no address of this machine: check {flag.replace('port', 'host')}",
        }.get(error.errno or 0, f"cannot be bound: {error}")
        raise OSError(error.errno, f"port {port} on {host} {reason}") from error
    listener.set_inheritable(True)
    return listener


def inherited(descriptor: int) -> socket.socket:
    """A socket that the launcher bound and passed on.

    Raises:
        OSError: the descriptor is no open socket.
    """
    return socket.socket(fileno=descriptor)
