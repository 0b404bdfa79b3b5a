"""Memory for what every step reads."""

from __future__ import annotations

import gc
import mmap
import weakref
from pathlib import Path

import pytest
import torch

from engine.kernels.core import pages
from engine.kernels.core.pages import CHUNK, HUGE, VARIABLE, Arena, mapped


def test_tensors_are_zero_apart_and_aligned() -> None:
    arena = Arena()
    given = [arena.zeros((3, number), torch.bfloat16) for number in (1, 7, 0, 500, CHUNK // 64)]
    given += [arena.zeros((CHUNK,), torch.uint8), arena.zeros((2, 2), torch.float32)]
    for number, tensor in enumerate(given):
        assert tensor.data_ptr() % pages.ALIGNMENT == 0 or not tensor.numel()
        assert not tensor.any()
        tensor.fill_(number + 1)
    for number, tensor in enumerate(given):
        assert (tensor == number + 1).all()


def test_a_chunk_is_free_when_all_that_share_it_are_gone() -> None:
    arena = Arena()
    first, second = (arena.zeros((CHUNK // 16,), torch.uint8) for _ in range(2))
    chunk = weakref.ref(arena._chunk)
    assert first.data_ptr() + len(first) == second.data_ptr()
    del arena, first
    gc.collect()
    assert int(second.sum()) == 0
    del second
    gc.collect()
    assert chunk() is None


def _huge_kib(address: int) -> int:
    """KiB of huge pages in the mapping that has this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (head := line.split(" ", 1)[0]) and not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            inside = begin <= address < end
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    return 0


def test_they_are_huge_pages_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not hasattr(mmap, "MADV_HUGEPAGE") or not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this kernel gives out no huge pages")
    memory = mapped(8 * HUGE).fill_(1)
    if not _huge_kib(memory.data_ptr()):
        pytest.skip("this kernel has no huge pages left")
    assert memory.data_ptr() % HUGE == 0
    monkeypatch.setenv(VARIABLE, "0")
    if "[madvise]" in setting.read_text():
        assert not _huge_kib(mapped(8 * HUGE).fill_(1).data_ptr())
