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
import struct
from collections.abc import Iterator, Sequence

import torch

ALIGNMENT = 64
"""Bytes; tensors begin at a multiple, as those do that torch makes."""
FILE_NAME = "lockstep-weights"
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
SAMPLE = 64
"""Bytes at begin, middle and end of each tensor, for the name of the file."""
ROW = struct.Struct("<QQ16s")
"""Entry at the end of a file: begin, bytes and sample's digest of a tensor."""
COUNT = struct.Struct("<Q")
"""Number of rows, behind them."""
WRITTEN_AT_ONCE = 1 << 30
"""Bytes written at once; the system takes less than 2 GiB."""


def join(tensors: Sequence[torch.Tensor]) -> bool:
    """Move contiguous tensors to the file of a process that has the same bytes.

    Returns whether there is one. What is written to them afterwards is this process' own.

    Raises:
        OSError: the file cannot be mapped.
    """
    for descriptor in _found(_name_of(tensors), size := _size_of(tensors)):
        places = _places(tensors, _mapped(descriptor, size))
        if all(map(torch.equal, map(_bytes_of, tensors), places)):
            for tensor, place in zip(tensors, places, strict=True):
                _put(tensor, place)
            return True
    return False


def share(tensors: Sequence[torch.Tensor]) -> None:
    """Move contiguous tensors as :func:`join` does, or to a new file.

    Each leaves its memory when its bytes are in the new file.

    Raises:
        OSError: there are no such files here, or no memory. Some tensors may be in one.
    """
    if tensors and not join(tensors):
        _move(tensors, _name_of(tensors), _size_of(tensors))


class SharedBytes:
    """Tensors in the files of this host, which are found one by one.

    It keeps the files until the last reference to it and to its tensors is gone.
    """

    def __init__(self) -> None:
        self._places: dict[bytes, list[torch.Tensor]] = {}
        for descriptor in _found(FILE_NAME, None):
            size = os.fstat(descriptor).st_size
            if size >= COUNT.size:
                self._add(_mapped(descriptor, size), size)
            else:
                os.close(descriptor)

    def __repr__(self) -> str:
        return f"<SharedBytes of {len(self._places)} tensors>"

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The bytes of a contiguous tensor in a file; None where no file has them."""
        own = _bytes_of(tensor)
        found = self._places.get(_sample_of(own), [])
        return next((each for each in found if torch.equal(each, own)), None)

    def bytes_to_come(self, samples: Sequence[tuple[int, bytes]]) -> int:
        """Bytes of tensors that are not there, and of the largest other one.

        ``samples``: bytes and :func:`sample_digest` of each.
        """
        shared = [num_bytes for num_bytes, digest in samples if digest in self._places]
        return sum(num_bytes for num_bytes, _ in samples) - sum(shared) + max(shared, default=0)

    def _add(self, memory: mmap.mmap, size: int) -> None:
        (count,) = COUNT.unpack_from(memory, size - COUNT.size)
        first = size - COUNT.size - count * ROW.size
        for number in range(count if first >= 0 else 0):
            begin, num_bytes, digest = ROW.unpack_from(memory, first + number * ROW.size)
            if 0 < num_bytes <= first - begin:
                place = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=begin)
                self._places.setdefault(digest, []).append(place)


def sample_places(num_bytes: int) -> list[tuple[int, int]]:
    """Begins and ends of the parts of a tensor that its sample is made of."""
    begins = (0, max(0, num_bytes // 2 - SAMPLE), max(0, num_bytes - SAMPLE))
    return [(begin, min(begin + SAMPLE, num_bytes)) for begin in begins]


def sample_digest(num_bytes: int, parts: Sequence[bytes]) -> bytes:
    """Digest of the parts at :func:`sample_places` of a tensor."""
    return hashlib.sha256(b"".join([COUNT.pack(num_bytes), *parts])).digest()[:16]


def sample_of(tensor: torch.Tensor) -> tuple[int, bytes]:
    """Bytes and :func:`sample_digest` of a contiguous tensor."""
    return tensor.nbytes, _sample_of(_bytes_of(tensor))


def _sample_of(own: torch.Tensor) -> bytes:
    parts = [own[begin:end].numpy().tobytes() for begin, end in sample_places(len(own))]
    return sample_digest(len(own), parts)


def _put(tensor: torch.Tensor, place: torch.Tensor) -> None:
    tensor.data = place.view(tensor.dtype).view(tensor.shape)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _offsets(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where each tensor begins in the file, and where the file ends."""
    sizes = (-(-each.nbytes // ALIGNMENT) * ALIGNMENT for each in tensors)
    return [*itertools.accumulate(sizes, initial=0)]


def _size_of(tensors: Sequence[torch.Tensor]) -> int:
    return _offsets(tensors)[-1] + len(tensors) * ROW.size + COUNT.size


def _places(tensors: Sequence[torch.Tensor], memory: mmap.mmap) -> list[torch.Tensor]:
    """The bytes of each tensor in the file."""
    return [
        torch.frombuffer(memory, dtype=torch.uint8, count=each.nbytes, offset=offset)
        for each, offset in zip(tensors, _offsets(tensors), strict=False)
    ]


def _rows(tensors: Sequence[torch.Tensor]) -> bytes:
    """The end of the file."""
    rows = [
        ROW.pack(offset, each.nbytes, _sample_of(_bytes_of(each)))
        for each, offset in zip(tensors, _offsets(tensors), strict=False)
    ]
    return b"".join([*rows, COUNT.pack(len(rows))])


def _name_of(tensors: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256(_rows(tensors))
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    return f"{FILE_NAME}-{digest.hexdigest()[:32]}"


def _move(tensors: Sequence[torch.Tensor], name: str, size: int) -> None:
    """Move tensors to a new file, which is sealed then."""
    rows, offsets = _rows(tensors), _offsets(tensors)
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        places = _places(tensors, _mapped(os.dup(descriptor), size))
        for tensor, offset, place in zip(tensors, offsets, places, strict=False):
            _write(descriptor, memoryview(_bytes_of(tensor).numpy()), offset)
            _put(tensor, place)
        _write(descriptor, memoryview(rows), offsets[-1])
    finally:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        os.close(descriptor)


def _write(descriptor: int, numbers: memoryview, offset: int) -> None:
    """Write to a file.

    With a mapping missing memory would be a signal, not an error.
    """
    written = 0
    while written < len(numbers):
        written += os.pwrite(descriptor, numbers[written : written + WRITTEN_AT_ONCE], offset + written)


def _found(name: str, size: int | None) -> Iterator[int]:
    """Descriptors of sealed files whose names begin so.

    The caller closes each. ``size``: None for any.
    """
    seen = set()
    for path in _open_files():
        with contextlib.suppress(OSError):  # closed meanwhile, or another user's
            if not os.readlink(path).startswith(f"/memfd:{name}"):
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            status = os.fstat(descriptor)
            is_sealed = (
                fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
            )  # the system may add its own
            if status.st_ino in seen or size not in (None, status.st_size) or not is_sealed:
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
