"""Notifications to a service manager such as systemd: ready, status, stopping, watchdog.

The protocol is one datagram of ``NAME=value`` lines to the socket that ``NOTIFY_SOCKET`` names
(sd_notify(3)). Without that variable nothing is sent. ``LOCKSTEP_PROGRESS_FILE`` names a file for probes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from coordinator.messages import Member, State

LONGEST_PAUSE = 1.0
"""Seconds after which a change of the status is sent at the latest."""
PINGS_PER_PERIOD = 3
"""Pings within the service manager's watchdog period, so that a late one does no harm."""
STALL_LIMIT = 60.0
"""Seconds with work and without a step, after which an instance makes no progress."""


class LauncherStatus(msgspec.Struct, frozen=True):
    """State of the launcher's processes for a service manager."""

    ready: bool
    """Whether the mesh serves (headless: the local instances do)."""
    stopping: bool
    members: Sequence[Member] = ()
    """The local instances, as the coordinator last reported them."""


def makes_progress(progress: LauncherStatus) -> bool:
    """Whether a watchdog ping is due (pure).

    False only if all local instances have work and take no steps. Without a report nothing is known, so a
    coordinator that is away is no reason for a restart.
    """
    serving = [member for member in progress.members if member.state in (State.READY, State.DRAINING)]
    return not serving or any(member.load.stalled_for < STALL_LIMIT for member in serving)


def status_line(progress: LauncherStatus) -> str:
    """Status line for ``systemctl status`` (pure)."""
    if progress.stopping:
        return "stopping: requests finish"
    serving = sum(member.state is State.READY for member in progress.members)
    running = sum(member.load.running for member in progress.members)
    waiting = sum(member.load.waiting for member in progress.members)
    counts = f"{serving} of {len(progress.members)} local instances ready"
    return (
        f"{counts}, {running} requests running, {waiting} waiting"
        if progress.ready
        else f"starting: {counts}"
    )


class ProgressFile:
    """File that exists while the mesh serves, touched while it makes progress.

    Probes that run commands, as those of Kubernetes, look at it where there is no endpoint to ask.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def __repr__(self) -> str:
        return f"<ProgressFile {self._path}>"

    def tell(self, progress: LauncherStatus) -> None:
        """Make, touch or remove the file."""
        with contextlib.suppress(OSError):  # a full disk, or no such directory: the probe then fails
            if progress.stopping or not progress.ready:
                self._path.unlink(missing_ok=True)
            elif makes_progress(progress):
                self._path.touch()


class ServiceManager:
    """Sends readiness, status and watchdog pings to a service manager."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """``variables``: the environment of this process."""
        name = variables.get("NOTIFY_SOCKET", "")
        self._address = f"\0{name[1:]}" if name.startswith("@") else name
        self._period = _watchdog_seconds(variables)
        self._said: list[str] = []
        file = variables.get("LOCKSTEP_PROGRESS_FILE", "")
        self._file = ProgressFile(file) if file else None

    def __repr__(self) -> str:
        return f"<ServiceManager at {self._address!r}, watchdog {self._period}>"

    async def keep(self, progress: Callable[[], LauncherStatus]) -> None:
        """Send what changes, and pings while there is progress, until cancelled."""
        if not self._address and self._file is None:
            return
        while True:
            self.tell(progress())
            pause = LONGEST_PAUSE
            if self._period is not None:
                pause = min(pause, self._period / PINGS_PER_PERIOD)
            await asyncio.sleep(pause)

    def tell(self, progress: LauncherStatus) -> None:
        """Send what has changed since the last call, and a ping if there is progress."""
        if self._file is not None:
            self._file.tell(progress)
        lines = [f"STATUS={status_line(progress)}"]
        if progress.ready:
            lines.append("READY=1")
        if progress.stopping:
            lines.append("STOPPING=1")
        changed = [line for line in lines if line not in self._said]
        self._said = lines
        if self._period is not None and makes_progress(progress):
            changed.append("WATCHDOG=1")
        if changed and self._address:
            self._send("\n".join(changed))

    def _send(self, text: str) -> None:
        with (
            contextlib.suppress(OSError),  # it is away, or its queue is full: the next one comes soon
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out,
        ):
            out.setblocking(False)
            out.sendto(text.encode(), self._address)


def _watchdog_seconds(variables: Mapping[str, str]) -> float | None:
    """Seconds within which a ping is due; None if this process is to send none."""
    microseconds, pid = variables.get("WATCHDOG_USEC", ""), variables.get("WATCHDOG_PID", "")
    if pid not in ("", str(os.getpid())) or not microseconds.isdecimal() or not int(microseconds):
        return None
    return int(microseconds) / 1e6
