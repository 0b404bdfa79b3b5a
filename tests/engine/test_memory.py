from __future__ import annotations

import errno
from pathlib import Path

import psutil
import pytest

from engine import memory
from engine.__main__ import main
from engine.blocks import BlockPool
from engine.memory import Untouched, available_memory, is_out_of_memory, spare_memory
from engine.step import Step


def cgroup(directory: Path, **files: str) -> Path:
    for name, content in files.items():
        (directory / f"memory.{name}").write_text(content)
    return directory


def test_a_container_leaves_what_its_limit_leaves(tmp_path: Path) -> None:
    limited = cgroup(
        tmp_path,
        max="1000000\n",
        current="900000\n",
        stat="anon 700000\ninactive_file 150000\nactive_file 50000\n",
    )
    assert available_memory(limited) == 300_000
    assert available_memory(cgroup(tmp_path, current="2000000\n")) == 0


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    most = psutil.virtual_memory().total
    for directory in (tmp_path, cgroup(tmp_path, max="max\n", current="5\n"), cgroup(tmp_path, max="9" * 18)):
        assert 0 < available_memory(directory) <= most


def test_a_cache_that_fills_takes_nothing_from_what_is_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has touched, the system does not count as available any more."""
    num_blocks, block_bytes = 100, 1000
    pool, cache = BlockPool(num_blocks), Untouched(num_blocks, block_bytes)
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

    monkeypatch.setattr("engine.instance.Instance.run", run)
    monkeypatch.setattr("coordinator.process.set_up", lambda *_args: None)
    assert main([]) == 1
    assert "out of memory (" in caplog.text
    assert "leave less room for the KV cache" in caplog.text


def test_other_errors_are_not_taken_for_it() -> None:
    assert not is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))
    assert not is_out_of_memory(RuntimeError("a shape does not fit"))
