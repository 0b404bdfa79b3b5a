"""End of a launcher's processes: role by role, with time for their requests."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Collection, Sequence

import msgspec

from router.launcher.child_process import ChildProcess
from router.launcher.children import Children

STOP_TIMEOUT = 10.0
"""Seconds for a process to end after SIGTERM before SIGTERM is repeated.

The time that flags give to its requests comes on top.
"""
KILL_TIMEOUT = 3.0
"""Seconds between the repeated SIGTERM and SIGKILL."""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True):
    """Order and time limits in which processes end; the endpoint's sockets close first."""

    drain_timeout: float = 0.0
    """Seconds that instances of a headless launcher may take to finish their requests."""
    shutdown_timeout: float = 0.0
    """Seconds that routers may take to finish their requests."""
    sockets: Sequence[socket.socket] = ()
    """Listening sockets that restarted routers inherit."""

    def log_line(self, roles: Collection[str], *, is_ready: bool) -> str:
        """Log line of an end on request, with the time left to requests."""
        if not is_ready:
            return "shutting down before the mesh is ready"
        if "router" in roles:
            return (
                f"shutting down: requests may run for {self.shutdown_timeout:g} s more (--shutdown-timeout)"
            )
        if "engine" in roles:
            return f"shutting down: instances drain for at most {self.drain_timeout:g} s (--drain-timeout)"
        return "shutting down"

    async def end_all(self, children: Children, roles: Collection[str]) -> None:
        """End routers first, so that no request comes in; the coordinator last."""
        for listener in self.sockets:
            listener.close()
        for role in ("router", "engine", "coordinator"):
            leaving = children.of_role(role)
            for child in leaving:
                child.send_signal(signal.SIGTERM)
            await _wait_for(leaving, self.patience(role, is_head="router" in roles))

    def patience(self, role: str, *, is_head: bool) -> float:
        """Seconds until processes of a role are signalled again; ``is_head``: there are routers as well."""
        drains = role == "engine" and not is_head
        requests = self.drain_timeout if drains else self.shutdown_timeout if role == "router" else 0.0
        return STOP_TIMEOUT + requests


async def _wait_for(children: list[ChildProcess], patience: float) -> None:
    if not children:
        return
    ended = asyncio.gather(*(child.ended() for child in children))
    for last_resort in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(ended), patience)
            return
        for child in children:
            child.send_signal(last_resort)
        patience = KILL_TIMEOUT
    await ended
