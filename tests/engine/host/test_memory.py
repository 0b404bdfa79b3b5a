from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from engine.__main__ import main
from engine.host import memory
from engine.host.memory import Untouched, available_memory, is_out_of_memory, most_memory, spare_memory, turn
from engine.pieces.pool import PiecePool
from engine.step import Step
from parallel.control_groups import MemoryLimit

ROOT = Path(__file__).parents[3]


def test_a_container_leaves_what_its_limits_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [MemoryLimit(1_000_000, 900_000, 200_000), MemoryLimit(2_000_000, 1_800_000, 0)]
    monkeypatch.setattr(memory, "memory_limits", lambda: limits)
    assert (available_memory(), most_memory()) == (200_000, 1_000_000)
    limits[0] = MemoryLimit(1_000_000, 2_000_000, 0)
    assert available_memory() == 0


def test_without_a_limit_it_is_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    most = psutil.virtual_memory().total
    for limits in ([], [MemoryLimit(10**18, 5, 0)]):
        monkeypatch.setattr(memory, "memory_limits", lambda limits=limits: limits)
        assert 0 < available_memory() <= most_memory() == most


def test_processes_take_memory_one_after_the_other(caplog: pytest.LogCaptureFixture) -> None:
    """However the one before ends."""
    holds = "import os; from engine.host.memory import turn\nwith turn(): print(1, flush=True); input(); os._exit(0)"
    with subprocess.Popen(
        [sys.executable, "-c", holds], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with turn(patience=0.1):
            assert "another instance has taken memory for 0 s; going on" in caplog.text
        caplog.clear()
        threading.Timer(0.2, other.kill).start()
        with turn(patience=60.0):
            assert other.wait(10) < 0
            assert caplog.text == ""


def test_processes_take_memory_of_one_device_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other devices, and the host's memory, are not waited for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    holds = (
        "from engine.host.memory import turn\n"
        "with turn(devices=['GPU-a/b', '1']): print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holds], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with turn(patience=0.0), turn(patience=0.0, devices=["0", "2"]):
            assert caplog.text == ""
        for devices in (["1"], ["0", "1"], ["GPU-a/b"]):
            with turn(patience=0.0, devices=devices):
                assert caplog.text.count("going on") == 1
            caplog.clear()
        other.kill()
        other.wait(10)
        with turn(patience=0.0, devices=["1", "GPU-a/b"]):
            assert caplog.text == ""


def test_a_cache_that_fills_takes_nothing_from_what_is_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has touched, the system does not count as available any more."""
    num_blocks, block_bytes = 100, 1000
    pool, cache = PiecePool(num_blocks), Untouched(num_blocks, block_bytes)
    touched: set[int] = set()
    monkeypatch.setattr(memory, "available_memory", lambda: 1_000_000 - len(touched) * block_bytes)
    spare = spare_memory(cache)
    assert 0 < spare < 900_000, "the cache will be filled"
    held: list[list[int]] = []
    for count in (0, 10, 30, 5, 60, 70, 100):
        while pool.num_free < count:
            pool.release(held.pop())
        blocks = pool.take(count)
        assert blocks is not None
        held.append(blocks)
        touched |= set(blocks)
        cache.note(Step(slots=[3], starts=[0], counts=[count], new_blocks={0: blocks}))
        cache.note(Step(slots=[3], starts=[count], counts=[1]))
        assert spare_memory(cache) == spare
    assert repr(cache) == "<Untouched 0 of 100 blocks>"


TORCHS = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes."


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError(TORCHS)]
)
def test_too_little_memory_is_said_however_it_shows(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(_instance: object) -> None:
        raise error

    monkeypatch.setattr("engine.lifecycle.instance.InstanceProcess.run", run)
    monkeypatch.setattr("coordinator.process.process.set_up", lambda *_args: None)
    assert main([]) == 1
    assert "out of memory (" in caplog.text
    assert "leave less room for the KV cache" in caplog.text


def test_other_errors_are_not_taken_for_it() -> None:
    assert not is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))
    assert not is_out_of_memory(RuntimeError("a shape does not fit"))
