"""Whether the ports of a mesh are free, and which processes hold the others."""

from __future__ import annotations

import errno
import os
import socket

import psutil

from coordinator.addresses import is_ipv6
from router.tools.doctor.findings import Finding, broken, ok, warning

AREA = "ports"
HELLO = b"lockstep"
LOOPBACK_TIMEOUT = 5.0


def check_port(what: str, host: str, port: int, flag: str) -> Finding:
    """Finding about a port, bound as its owner would; ``flag`` chooses another."""
    family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            return _not_free(what, host, port, flag, error)
    return ok(AREA, what, f"{host}:{port} is free")


def _not_free(what: str, host: str, port: int, flag: str, error: OSError) -> Finding:
    address = f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        holder = _holder(port)
        if holder is None:
            fix = f"choose another port with {flag}, or find who holds it as root: ss -ltnp"
            return broken(AREA, what, f"{address} is in use by a process of another user", fix)
        text = f"{address} is held by {_named(holder)}"
        if _title(holder).startswith("lockstep:"):
            fix = f"nothing, if that mesh is wanted; else choose another port with {flag}, or end it"
            return warning(AREA, what, text, fix)
        return broken(AREA, what, text, f"choose another port with {flag}, or end that process")
    if error.errno == errno.EACCES:
        fix = f"choose a port above 1023 with {flag}"
        return broken(AREA, what, f"{address} may not be bound by this user", fix)
    fix = "give an address of this host"
    return broken(AREA, what, f"{address} cannot be bound: {error.strerror}", fix)


def _holder(port: int) -> psutil.Process | None:
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.pid
            if listens and connection.laddr and connection.laddr.port == port:
                return psutil.Process(connection.pid)
    except psutil.Error:
        pass
    return None


def _title(holder: psutil.Process) -> str:
    try:
        return " ".join(holder.cmdline()).strip() or holder.name()  # a title set later is padded
    except psutil.Error:
        return "?"


def _named(holder: psutil.Process) -> str:
    return f"pid {holder.pid} ({_title(holder)[:60]})"


def check_loopback() -> Finding:
    """Finding about loopback: processes of this host must reach each other there."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(LOOPBACK_TIMEOUT)
            address = server.getsockname()
            with socket.create_connection(address, LOOPBACK_TIMEOUT) as client:
                accepted, _ = server.accept()
                with accepted:
                    client.sendall(HELLO)
                    accepted.settimeout(LOOPBACK_TIMEOUT)
                    if accepted.recv(len(HELLO)) == HELLO:
                        return ok(AREA, "loopback", "127.0.0.1 works")
    except OSError as error:
        fix = "ip link set lo up; look for a firewall on loopback"
        reason = error.strerror or os.strerror(error.errno or 0)
        return broken(AREA, "loopback", f"127.0.0.1 does not work: {reason}", fix)
    return broken(AREA, "loopback", "127.0.0.1 loses what is sent", "look for a firewall on loopback")
