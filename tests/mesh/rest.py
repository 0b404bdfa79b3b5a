"""What a mesh may hold when all is over: nothing that the requests and the dead have left behind."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import psutil

from coordinator.messages import State
from tests.mesh.harness import wait_until
from tests.mesh.spread_mesh import SpreadMesh
from tests.mesh.test_clients import assert_idle, metrics

NUM_EXPERTS = 8
"""Of the shipped model."""
SETTLES = 120.0
"""Seconds that somebody who is about to join may take to load."""
MORE_MEMORY = 48 * 2**20
"""Bytes by which a process may grow after its first minute: caches fill, allocators keep what they had."""
MORE_DESCRIPTORS = 24
MORE_THREADS = 8


@dataclass
class Size:
    """What a process holds."""

    memory: int
    """Bytes that are its own."""
    descriptors: int
    threads: int


@dataclass
class Growth:
    """Follows the processes of a mesh; :meth:`problems` tells who has grown."""

    first: dict[psutil.Process, Size] = field(default_factory=dict)
    newest: dict[psutil.Process, Size] = field(default_factory=dict)
    names: dict[psutil.Process, str] = field(default_factory=dict)

    def look(self, mesh: SpreadMesh, *, first: bool) -> None:
        """``first``: what each has now is what it is measured by."""
        for command in mesh.commands:
            for process in command.family(itself=True):
                try:
                    size = Size(process.memory_full_info().uss, process.num_fds(), process.num_threads())
                    self.names[process] = " ".join(process.cmdline())
                except psutil.Error:
                    continue
                self.newest[process] = size
                if first:
                    self.first.setdefault(process, size)

    def problems(self) -> list[str]:
        """Of those that are alive, and were at the first look."""
        found = []
        for process, before in self.first.items():
            after = self.newest[process]
            grown = (
                after.memory - before.memory > MORE_MEMORY
                or after.descriptors - before.descriptors > MORE_DESCRIPTORS
                or after.threads - before.threads > MORE_THREADS
            )
            if grown and process.is_running():
                found.append(f"{self.names[process]} (pid {process.pid}) grew from {before} to {after}")
        return found

    def __str__(self) -> str:
        alive = [process for process in self.first if process.is_running()]
        return "; ".join(
            f"{self.names[process]}: {(self.newest[process].memory - self.first[process].memory) / 2**20:+.0f} MiB, "
            f"{self.newest[process].descriptors - self.first[process].descriptors:+d} descriptors"
            for process in alive
        )


def assert_at_rest(mesh: SpreadMesh) -> None:
    """No request, no block, no change under way; each expert in one place; all in the newest epoch, asleep."""
    assert_idle(mesh)

    def settled() -> bool:
        view, found = mesh.view(), metrics(mesh)
        epochs = {value for name, value in found.items() if name.startswith("lockstep:instance_epoch")}
        experts = [name for name in found if name.startswith("lockstep:expert_tokens_total")]
        return (
            {member.state for member in view.members} == {State.READY}
            and epochs == {view.epoch}
            and len(experts) == NUM_EXPERTS
        )

    wait_until(settled, SETTLES, "all instances serve in one epoch")
    before = steps(mesh)
    time.sleep(1.0)
    assert steps(mesh) == before, "an idle mesh takes no steps"


def steps(mesh: SpreadMesh) -> dict[str, float]:
    """Of each instance, in lockstep."""
    return {name: value for name, value in metrics(mesh).items() if name.startswith("lockstep:steps_total")}
