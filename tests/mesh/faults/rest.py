"""A mesh at rest holds nothing of ended requests or of dead instances."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from coordinator.messages import State, View
from tests.mesh.clients.test_clients import assert_idle, metrics
from tests.mesh.harness import wait_until
from tests.mesh.spread_mesh import SpreadMesh

NUM_EXPERTS, NUM_LAYERS = 8, 6
"""Number of experts of the shipped model."""
SETTLES = 120.0
"""Seconds that a joining instance may take to load."""
MORE_MEMORY = 48 * 2**20
"""Bytes by which a process may grow after its first minute.

Caches fill, and allocators keep what they had.
"""
MORE_DESCRIPTORS = 64
"""Descriptors by which a process may grow.

Each other instance of a group costs about eleven; an instance that began alone may end with four or five others.
"""
MORE_THREADS = 8


@dataclass
class Size:
    """What a process holds."""

    memory: int
    """Bytes that are its own."""
    descriptors: int
    threads: int

    def __str__(self) -> str:
        return f"{self.memory / 2**20:.0f} MiB, {self.descriptors} descriptors, {self.threads} threads"


class Growth:
    """Follows the processes of a mesh, each from when it has served for a while."""

    def __init__(self, warm_up: float, fills: Mapping[str, int]) -> None:
        """``warm_up``: seconds of service after which a process should grow no more.

        ``fills``: bytes by process title that may still come, from room reserved at the start and used bit by bit.
        """
        self._warm_up = warm_up
        self._fills = fills
        self._serves_since: dict[psutil.Process, float] = {}
        self._first: dict[psutil.Process, Size] = {}

    def table(self) -> list[dict[str, Any]]:
        """Processes that are alive: what each held first, and holds now."""
        return [
            {"name": name, "before": str(before), "after": str(after)}
            for name, before, after in self._alive()
        ]

    def memory(self) -> dict[str, int]:
        """MiB that each of them holds now."""
        return {name: after.memory // 2**20 for name, _, after in self._alive()}

    def look(self, mesh: SpreadMesh, view: View) -> None:
        """To be called now and then, with the newest view."""
        serving = {member.pid for member in view.members if member.state is State.READY}
        now = time.monotonic()
        for command in mesh.commands:
            for process in command.family(itself=True):
                with contextlib.suppress(psutil.Error):
                    if process in self._first or ("Engine" in _title(process) and process.pid not in serving):
                        continue
                    since = self._serves_since.setdefault(process, now)
                    if now - since >= self._warm_up:
                        self._first[process] = _size(process)

    def problems(self) -> list[str]:
        """Processes that are alive and have grown."""
        return [
            f"{name} grew from {before} to {after}"
            for name, before, after in self._alive()
            if after.memory - before.memory > MORE_MEMORY + self._filled_by(name)
            or after.descriptors - before.descriptors > MORE_DESCRIPTORS
            or after.threads - before.threads > MORE_THREADS
        ]

    def _filled_by(self, name: str) -> int:
        return max((room for title, room in self._fills.items() if title in name), default=0)

    def _alive(self) -> Iterator[tuple[str, Size, Size]]:
        """Name of each live process, with what it held first and holds now."""
        for process, before in self._first.items():
            with contextlib.suppress(psutil.Error):
                yield f"{_title(process)} (pid {process.pid})", before, _size(process)


def _title(process: psutil.Process) -> str:
    return " ".join(" ".join(process.cmdline()).split()).removeprefix("lockstep: ")


def _size(process: psutil.Process) -> Size:
    return Size(process.memory_full_info().uss, process.num_fds(), process.num_threads())


REPORTED = 0.5
"""Seconds in which a router hears of the last step."""


def assert_at_rest(mesh: SpreadMesh, copies: int | None = None, *, shares_experts: bool = True) -> None:
    """No request, no block (also none that is lent), no change under way.

    Each expert in one place, or so many ``copies`` in each layer, of which one may be left out; all in the newest
    epoch, asleep. Instances that share no experts are in no group, and have no epoch.
    """
    assert_idle(mesh)

    def settled() -> bool:
        view = mesh.view()
        if not shares_experts:
            return {member.state for member in view.members} == {State.READY}
        found = metrics(mesh)
        epochs = {value for name, value in found.items() if name.startswith("lockstep:instance_epoch")}
        names = [name for name in found if name.startswith("lockstep:expert_tokens_total")]
        experts = names if copies is None else {name.split('expert="')[1] for name in names}
        balance = view.balance
        held = sum(balance.held.values()) if balance is not None and copies is not None else 0
        return (
            {member.state for member in view.members} == {State.READY}
            and epochs == {view.epoch}
            and len(experts) == NUM_EXPERTS
            and NUM_LAYERS * max(0, (copies or 0) - 1) <= held <= NUM_LAYERS * (copies or 0)
        )

    wait_until(settled, SETTLES, "all instances serve" + " in one epoch" * shares_experts)
    time.sleep(REPORTED)
    before = steps(mesh)
    time.sleep(1.0)
    assert steps(mesh) == before, "an idle mesh takes no steps"


def steps(mesh: SpreadMesh) -> dict[str, float]:
    """Number of steps in lockstep of each instance, by metric."""
    return {name: value for name, value in metrics(mesh).items() if name.startswith("lockstep:steps_total")}
