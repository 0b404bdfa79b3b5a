"""Tensors shared by processes: bits, memory, what is believed, what a death leaves."""

from __future__ import annotations

import errno
import fcntl
import gc
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from engine.host import shared_tensors
from engine.host.shared_tensors import join, share

NUM_BYTES = 8 << 20
NO_PROGRAM = 8
"""MFD_NOEXEC_SEAL of Linux 6.3."""


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
    assert join(tensors)
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
    before = [each.data_ptr() for each in tensors]
    assert not join(tensors)
    assert before == [each.data_ptr() for each in tensors]
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
    assert not join(made(seed=2))


def test_seals_that_the_system_adds_are_no_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with vm.memfd_noexec, by which each new file is sealed against programs, too."""
    tensors = made(seed=3)
    with monkeypatch.context() as stricter:
        stricter.setattr(os, "MFD_CLOEXEC", os.MFD_CLOEXEC | NO_PROGRAM)
        try:
            share(tensors)
        except OSError as error:
            pytest.skip(f"no such flag in this system: {error}")
    assert len(files(seed=3)) == 1
    assert join(made(seed=3))


def test_memory_that_runs_short_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a signal; tensors stay, or are in a file that nobody changes."""
    tensors, wanted, files_written, write = made(seed=4), made(seed=4), list[int](), os.pwrite

    def fail(descriptor: int, numbers: memoryview, offset: int) -> int:
        if len(files_written) == 3:
            raise OSError(errno.ENOSPC, "no memory")
        files_written.append(descriptor)
        return write(descriptor, numbers[:NUM_BYTES], offset)

    with monkeypatch.context() as short:
        short.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="no memory"):
            share(tensors)
    assert all(map(torch.equal, tensors, wanted))
    (path,) = [each for each in Path("/proc/self/fd").iterdir() if is_file_of(each, wanted)]
    descriptor = os.open(path, os.O_RDONLY)
    assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & shared_tensors.SEALS == shared_tensors.SEALS
    os.close(descriptor)
    share(other := made(seed=4))
    assert all(map(torch.equal, other, wanted)), "the half that is there is not taken for all"


def is_file_of(path: Path, tensors: list[torch.Tensor]) -> bool:
    return path.is_symlink() and os.readlink(path).startswith(file_of(tensors))


def test_private_memory_goes_as_the_file_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a move takes one tensor more, not all of them again."""
    tensors, most, write = [torch.full((1 << 24,), number) for number in range(4)], 0, os.pwrite
    each = tensors[0].nbytes

    def private() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def note(descriptor: int, numbers: memoryview, offset: int) -> int:
        nonlocal most
        count = write(descriptor, numbers, offset)
        most = max(most, private() + os.fstat(descriptor).st_blocks * 512)
        return count

    before = private()
    monkeypatch.setattr(os, "pwrite", note)
    share(tensors)
    assert each <= most - before < 1.5 * each
    assert [int(tensor.sum()) for tensor in tensors] == [number << 24 for number in range(4)]
