"""Tensors whose bytes processes of one host share, in one sealed file in memory.

The file is in no directory: it is a memfd, which others open through /proc while a process has it mapped. So
nothing is left behind, however processes end. Its name only says where to look: all bytes are compared with
a process' own before they take their place, and nobody can change them, since the file is sealed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import mmap
import os
from collections.abc import Iterator, Sequence

import torch

ALIGNMENT = 64
"""Bytes; tensors begin at a multiple, as those do that torch makes."""
FILE_NAME = "lockstep-weights"
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
SAMPLE = 64
"""Bytes at begin, middle and end of each tensor, for the name of the file."""


def is_shared(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a process of this host seems to share the bytes of these contiguous tensors."""
    for descriptor in _found(_name_of(tensors), _size_of(tensors)):
        os.close(descriptor)
        return True
    return False


def share(tensors: Sequence[torch.Tensor]) -> None:
    """Move contiguous tensors to a file that another process shares, or to a new one.

    What is written to them afterwards is this process' own.

    Raises:
        OSError: there are no such files here, or no memory.
    """
    if not tensors:
        return
    name, size = _name_of(tensors), _size_of(tensors)
    for descriptor in _found(name, size):
        places = _places(tensors, _mapped(descriptor, size))
        if all(map(torch.equal, map(_bytes_of, tensors), places)):
            break
    else:
        places = _places(tensors, _mapped(_filled(tensors, name, size), size))
    for tensor, place in zip(tensors, places, strict=True):
        tensor.data = place.view(tensor.dtype).view(tensor.shape)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _offsets(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where each tensor begins in the file, and where the file ends."""
    sizes = (-(-each.nbytes // ALIGNMENT) * ALIGNMENT for each in tensors)
    return [*itertools.accumulate(sizes, initial=0)]


def _size_of(tensors: Sequence[torch.Tensor]) -> int:
    return _offsets(tensors)[-1]


def _places(tensors: Sequence[torch.Tensor], memory: mmap.mmap) -> list[torch.Tensor]:
    """The bytes of each tensor in the file."""
    return [
        torch.frombuffer(memory, dtype=torch.uint8, count=each.nbytes, offset=offset)
        for each, offset in zip(tensors, _offsets(tensors), strict=False)
    ]


def _name_of(tensors: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        found = _bytes_of(tensor)
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for begin in (0, max(0, len(found) // 2 - SAMPLE), max(0, len(found) - SAMPLE)):
            digest.update(found[begin : begin + SAMPLE].numpy().tobytes())
    return f"{FILE_NAME}-{digest.hexdigest()[:32]}"


def _filled(tensors: Sequence[torch.Tensor], name: str, size: int) -> int:
    """Descriptor of a new sealed file with the bytes of tensors."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        _fill(tensors, mmap.mmap(descriptor, size))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)  # an error while it can be written anywhere
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _fill(tensors: Sequence[torch.Tensor], memory: mmap.mmap) -> None:
    """Copy the bytes of tensors to memory, which is mapped no longer then."""
    for tensor, place in zip(tensors, _places(tensors, memory), strict=True):
        place.copy_(_bytes_of(tensor))


def _found(name: str, size: int) -> Iterator[int]:
    """Descriptors of sealed files of this name and size; the caller closes each."""
    seen = set()
    for path in _open_files():
        with contextlib.suppress(OSError):  # closed meanwhile, or another user's
            if not os.readlink(path).startswith(f"/memfd:{name}"):
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            status = os.fstat(descriptor)
            is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) == SEALS
            if status.st_ino in seen or status.st_size != size or not is_sealed:
                os.close(descriptor)
                continue
            seen.add(status.st_ino)
            yield descriptor


def _open_files() -> Iterator[str]:
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for each in os.listdir(f"/proc/{process}/fd"):
                yield f"/proc/{process}/fd/{each}"


def _mapped(descriptor: int, size: int) -> mmap.mmap:
    """A file's memory; its pages are shared until they are written to.

    It keeps a descriptor of its own, by which others find the file until the last tensor is gone.
    """
    try:
        protection = mmap.PROT_READ | mmap.PROT_WRITE  # tensors are written to in place, if ever
        return mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, protection)
    finally:
        os.close(descriptor)
