"""Instances with several workers in a mesh, as seen by clients, ``serve`` and kernel."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from coordinator.process.process import EXIT_WORKER_LOST
from tests.mesh.faults.test_loss import NUM_TOKENS, crowd
from tests.mesh.harness import Command, Ports, serve, wait_until

pytestmark = pytest.mark.mesh


def workers(command: Command, rank: int) -> list[psutil.Process]:
    """Worker processes of one instance, which are descendants of ``serve``."""
    title = f"lockstep: Worker_{rank}_"
    return [member for member in command.family() if " ".join(member.cmdline()).startswith(title)]


def gone(processes: list[psutil.Process]) -> bool:
    return all(not each.is_running() or each.status() == psutil.STATUS_ZOMBIE for each in processes)


def test_an_instance_ends_with_its_worker_and_a_worker_with_its_instance(tmp_path: Path) -> None:
    ports = Ports()
    flags = ["--dtype", "float32", "--num-gpu-blocks-override", "400", "--max-num-seqs", "32"]
    with serve(tmp_path / "log", "-dp", "2", "-tp", "2", *ports.head(), *flags) as command:
        command.wait_for("2 instances ready")
        assert "Worker_0_PP0_TP1" in command.log, "the table of processes names the workers"
        first, second = workers(command, 0), workers(command, 1)
        assert (len(first), len(second)) == (2, 2)
        undisturbed = asyncio.run(crowd(ports, count=6))
        assert all(len(ids) == NUM_TOKENS for ids in undisturbed)
        killed_at = 0.0

        def kill() -> None:
            nonlocal killed_at
            wait_until(lambda: ports.view().members[0].load.running > 1, 20, "instance 0 works")
            killed_at = time.monotonic()
            first[1].kill()

        disturbed = asyncio.run(crowd(ports, kill, count=6))
        assert disturbed == undisturbed, "its streams went on at the other instance"
        command.wait_for(f"ended with status {EXIT_WORKER_LOST}", 5)
        assert "lost a worker: Worker_0_PP0_TP1" in command.log
        assert "was killed by signal 9" in command.log
        assert gone(first)
        # The engine itself, so that it can tell its workers nothing.
        os.kill(command.child("Engine_1").pid, signal.SIGKILL)
        wait_until(lambda: gone(second), 1.0, "no worker outlives its engine")
        assert command.end(20) != 0


def test_a_size_that_does_not_divide_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with serve(tmp_path / "log", "-tp", "4", *Ports().head()) as command:
        assert command.end(20) == 2, command.log
        assert "6 attention heads and 2 KV heads cannot be divided by 4. Sizes that do: 1, 2, 6" in " ".join(
            command.log.split()
        )
