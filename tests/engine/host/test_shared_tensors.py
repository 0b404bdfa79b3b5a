"""Tensors shared by processes: bits, memory, what is believed, what a death leaves."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from engine.host import shared_tensors
from engine.host.shared_tensors import is_shared, share

NUM_BYTES = 8 << 20


def made(seed: int = 1, add: int = 0) -> list[torch.Tensor]:
    """The same tensors in each process, not where torch would put them."""
    numbers = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 100, (NUM_BYTES + 8,), generator=numbers, dtype=torch.uint8)[8:]
    whole[NUM_BYTES // 3] += add
    half = NUM_BYTES // 2
    return [
        whole[:half].view(torch.bfloat16).view(64, -1),
        whole[half : half + 4].view(torch.float32).view(()),
        whole[half + 4 : half + 104].view(4, 25),
        whole[half + 104 :].view(torch.float16),
    ]


def file_of(tensors: list[torch.Tensor]) -> str:
    """Beginning of the name of their file; models of other tests have others."""
    return f"/memfd:{shared_tensors._name_of(tensors)}"


def files(seed: int = 1) -> list[str]:
    """Files of these tensors that this process has."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(each))
        except OSError:
            continue
    return [each for each in found if each.startswith(file_of(made(seed)))]


def memory(kind: str) -> int:
    """Bytes of this process' mappings of such a file."""
    total, is_counted, name = 0, False, file_of(made())
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.partition(" ")[0].endswith(":"):
            is_counted = name in line
        elif is_counted and line.startswith(f"{kind}:"):
            total += int(line.split()[1]) << 10
    return total


def hold(pipe: Connection, add: int) -> None:
    """Share tensors until the other end closes."""
    tensors = made(add=add)
    share(tensors)
    pipe.send(sum(int(each.view(-1).view(torch.uint8).sum()) for each in tensors))  # all pages are read
    pipe.recv()


@pytest.fixture
def holder() -> tuple[multiprocessing.process.BaseProcess, Connection]:
    return start(0)


def start(add: int) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(theirs, add), daemon=True)
    process.start()
    assert ours.poll(60)
    ours.recv()
    return process, ours


def test_two_processes_have_the_bytes_once(
    holder: tuple[multiprocessing.process.BaseProcess, Connection],
) -> None:
    process, _ = holder
    wanted, tensors = made(), made()
    assert is_shared(tensors)
    share(tensors)
    assert all(map(torch.equal, tensors, wanted))
    assert all(each.data_ptr() % 64 == 0 for each in tensors)
    assert [each.shape for each in tensors] == [each.shape for each in wanted]
    assert memory("Rss") >= NUM_BYTES
    assert memory("Private_Clean") + memory("Private_Dirty") < NUM_BYTES // 50
    tensors[0][0, 0] = 7  # private from now on: the file is sealed
    third = made()
    share(third)
    assert torch.equal(third[0], wanted[0])
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert all(map(torch.equal, third, wanted)), "they outlive who made them"
    del third
    gc.collect()
    assert len(files()) == 1
    del tensors
    gc.collect()
    assert not files(), "nobody has it any more"


def test_other_bytes_below_the_same_name_are_not_taken() -> None:
    """The name is made of a sample alone."""
    process, pipe = start(add=1)
    wanted, tensors = made(), made()
    assert is_shared(tensors)
    share(tensors)
    assert all(map(torch.equal, tensors, wanted))
    pipe.close()
    process.join()
    assert len(files()) == 1


def test_a_file_that_may_still_be_written_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = made(seed=2)
    with monkeypatch.context() as unsealed:
        unsealed.setattr(shared_tensors, "SEALS", 0)
        share(tensors)
        assert len(files(seed=2)) == 1
    assert not is_shared(made(seed=2))
