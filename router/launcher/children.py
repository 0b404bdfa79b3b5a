"""Registry of one launcher's child processes: running, about to start, or ended."""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from collections import deque

from coordinator.messages import Member, State, View
from router.launcher.child_process import ChildProcess
from router.launcher.launch import ProcessSpec
from router.launcher.scaling import free_number

REMEMBERED_PROCESSES = 256
"""Processes whose names and pids are kept after their end.

The mesh's view may still show them.
"""


class Children:
    """Registry of the launcher's child processes, joined with the newest view of the mesh."""

    def __init__(self) -> None:
        self.running: dict[int, ChildProcess] = {}
        """Child processes by their key in the process table."""
        self.coming: dict[int, ProcessSpec] = {}
        """Processes that are being forked, or wait to be started again, by key."""
        self.has_view = asyncio.Event()
        """Set once the coordinator has sent a view of the mesh."""
        self._view: View | None = None
        self._names: deque[str] = deque(maxlen=REMEMBERED_PROCESSES)
        self._ended_pids: deque[int] = deque(maxlen=REMEMBERED_PROCESSES)
        self._ended_names: deque[str] = deque(maxlen=REMEMBERED_PROCESSES)

    def __repr__(self) -> str:
        return " ".join(f"{child.spec.name}:{child.process.pid}" for child in self.running.values())

    @property
    def ranks(self) -> list[int]:
        """Ranks of local instances that run, or soon will, and are not leaving."""
        running = [child.rank for child in self.of_role("engine") if child.stays]
        soon = [spec.rank for spec in self._coming_instances()]
        return sorted(rank for rank in (*running, *soon) if rank is not None)

    @property
    def leaving(self) -> list[str]:
        """Names of local instances that are leaving or have ended, perhaps unknown to the mesh."""
        retired = [child.instance or child.name for child in self.of_role("engine") if child.retired]
        return [*retired, *self._ended_names]

    @property
    def num_serving(self) -> int:
        """Number of local instances that have become ready."""
        return sum(child.began is not None for child in self.of_role("engine"))

    @property
    def pids(self) -> list[int]:
        """Process ids of all local processes that run."""
        return [child.process.pid for child in self.running.values()]

    @property
    def members(self) -> list[Member]:
        """Local instances in the newest view of the mesh."""
        members = self._view.members if self._view else []
        return [member for member in members if member.instance in self._names]

    @property
    def has_instances(self) -> bool:
        """Whether a local instance runs or is about to."""
        return bool(self.of_role("engine") or self._coming_instances())

    def of_role(self, role: str) -> list[ChildProcess]:
        """Running processes of one role: coordinator, engine or router."""
        return [child for child in self.running.values() if child.spec.role == role]

    def new_name(self) -> str:
        """Name under which the next process registers with the mesh."""
        self._names.append(uuid.uuid4().hex[:12])
        return self._names[-1]

    def has_started(self, instance: str) -> bool:
        """Whether this launcher started the instance of this name."""
        return instance in self._names

    def remove(self, child: ChildProcess) -> None:
        """Take out a process that ended."""
        self.running.pop(child.key, None)
        self._ended_pids.append(child.process.pid)
        self._ended_names.append(child.name)

    def learn(self, view: View) -> list[ChildProcess]:
        """Take ranks and names of local instances from a view.

        Returns those that have just become ready.
        """
        self._view = view
        self.has_view.set()
        here = socket.gethostname()
        of_pid = {child.process.pid: child for child in self.of_role("engine")}
        of_name = {child.name: child for child in of_pid.values()}
        now_ready = []
        for child in of_pid.values():
            child.is_member = False
        for member in view.members:
            ours = of_name.get(member.instance) or (of_pid.get(member.pid) if member.host == here else None)
            if ours is not None:
                ours.rank, ours.instance, ours.is_member = member.rank, member.instance, True
                ours.retired = ours.retired or not member.state.stays
                if member.state is State.READY and ours.began is None:
                    ours.began = time.monotonic()
                    now_ready.append(ours)
        return now_ready

    def free_number(self, room: int) -> int:
        """Number for one more local instance; ``room``: how many can have devices of their own."""
        running = self.of_role("engine")
        staying = [child.spec.number for child in running if child.stays]
        staying += [spec.number for spec in self._coming_instances()]
        return free_number(staying, [child.spec.number for child in running if not child.stays], room)

    def others_serve(self) -> bool:
        """Whether an instance of another launcher is ready, as far as is known."""
        here = socket.gethostname()
        members = self._view.members if self._view else []
        return any(
            member.state is State.READY
            and member.instance not in self._ended_names
            and (member.host != here or member.pid not in self._ended_pids)
            for member in members
        )

    def _coming_instances(self) -> list[ProcessSpec]:
        return [spec for spec in self.coming.values() if spec.role == "engine"]
