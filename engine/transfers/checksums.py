"""CRC-32 of KV blocks: zlib's value, faster where the CPU multiplies without carries.

``checksums.cpp`` is compiled in the background at the first start. Until it is there, and where there is no
compiler or no such CPU, zlib computes the same value.
"""

from __future__ import annotations

import ctypes
import os
import threading
import zlib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from parallel.kernel_kinds import architecture
from parallel.native_source import NativeLibrary, NativeSource

SOURCE = NativeSource(
    path=Path(__file__).with_name("checksums.cpp"),
    needs=frozenset({"crc32"} if architecture() == "aarch64" else {"pclmulqdq", "sse4_1"}),
    absent="checksums by zlib:",
)
TABLE, NARROW, WIDE = range(3)
"""Kinds of instructions: none, products of 64 bits, four of those at once."""
MOST_PARTS = 512
"""Parts that one system call reads, without the library."""

Buffer = bytes | bytearray | memoryview
Spans = npt.NDArray[np.int64]
"""[parts, 2]: address and bytes of each."""


class Parts(list[memoryview]):
    """Buffers one after the other, with their spans: finding these takes long."""

    def __init__(self, parts: Iterable[memoryview], spans: Spans) -> None:
        super().__init__(parts)
        self.spans = spans


class ChecksumLibrary:
    """CRC-32 functions of the compiled library."""

    def __init__(self, opened: NativeLibrary, kind: int | None = None) -> None:
        """``kind``: the best one of this CPU, if it is not given."""
        number, address = ctypes.c_int64, ctypes.c_void_p
        self._crc32 = opened.bind("crc32", number, ctypes.c_uint32, address, number, result=ctypes.c_uint32)
        self._read = opened.bind("read_checked", number, ctypes.c_int, number, address, number, address)
        self.best_kind = opened.call("crc32_kind")
        """The best kind that this CPU has."""
        self.kind = self.best_kind if kind is None else kind

    def crc32(self, spans: Spans, before: int = 0) -> int:
        """The CRC of spans one after the other, behind what has the CRC ``before``."""
        return int(self._crc32(self.kind, before, spans.ctypes.data, len(spans)))

    def read(self, descriptor: int, offset: int, spans: Spans) -> tuple[int, int]:
        """Fill spans from a file; returns how many bytes were there, and their CRC.

        Raises:
            OSError: they cannot be read.
        """
        crc = ctypes.c_uint32()
        found = self._read(self.kind, descriptor, offset, spans.ctypes.data, len(spans), ctypes.byref(crc))
        if found < 0:
            raise OSError(-found, os.strerror(-found))
        return int(found), crc.value


_loaded: ChecksumLibrary | None = None


def begin_build() -> None:
    """Compile or load the checksum library in the background."""
    threading.Thread(target=load, name="checksums", daemon=True).start()


@cache
def load() -> ChecksumLibrary | None:
    """Checksum library, compiled first if need be; None for a reason that is logged."""
    global _loaded
    if (library := SOURCE.load(ChecksumLibrary)) is not None:
        _loaded = library
    return library


def spans_of(parts: Sequence[Buffer]) -> Spans:
    """Addresses and sizes of buffers, which must outlive what is done with these."""
    if isinstance(parts, Parts):
        return parts.spans
    found = [
        (array.__array_interface__["data"][0], array.size)
        for array in (np.frombuffer(part, dtype=np.uint8) for part in parts if len(part))
    ]
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def crc32(parts: Sequence[Buffer]) -> int:
    """CRC-32 of buffers one after the other."""
    if (library := _loaded) is not None:
        return library.crc32(spans_of(parts))
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


def read_checked(descriptor: int, offset: int, parts: Sequence[memoryview]) -> tuple[int, int]:
    """Fill buffers from a file; returns how many bytes were there, and their CRC.

    The library checks what it has just read, while that is in the core's cache.

    Raises:
        OSError: they cannot be read.
    """
    if (library := _loaded) is not None:
        return library.read(descriptor, offset, spans_of(parts))
    total = crc = 0
    for first in range(0, len(parts), MOST_PARTS):
        some = parts[first : first + MOST_PARTS]
        found = os.preadv(descriptor, some, offset + total)
        total += found
        if found != sum(each.nbytes for each in some):
            break
        for part in some:
            crc = zlib.crc32(part, crc)
    return total, crc
