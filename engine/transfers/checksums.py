"""CRC-32 of KV blocks: zlib's value, faster where the CPU multiplies without carries.

``checksums.cpp`` is compiled in the background at the first start. Until it is there, and where there is no
compiler or no such CPU, zlib computes the same value.
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import threading
import zlib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from parallel import compiler

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("checksums.cpp")
NEEDED_FLAGS = {"pclmulqdq", "sse4_1"}
SYMBOLS = ("lockstep_crc32_kind", "lockstep_crc32", "lockstep_read_checked")
TABLE, NARROW, WIDE = range(3)
"""Kinds of instructions: none, products of 64 bits, four of those at once."""
MOST_PARTS = 512
"""Parts that one system call reads, without the library."""

Buffer = bytes | bytearray | memoryview
Spans = npt.NDArray[np.int64]
"""[parts, 2]: address and bytes of each."""


class Parts(list[memoryview]):
    """Buffers one after the other, with their spans, which take long to find."""

    def __init__(self, parts: Iterable[memoryview], spans: Spans) -> None:
        super().__init__(parts)
        self.spans = spans


class Library:
    """The compiled checksums."""

    def __init__(self, loaded: ctypes.CDLL, kind: int | None = None) -> None:
        """``kind``: the best one of this CPU, if it is not given."""
        number, address = ctypes.c_int64, ctypes.c_void_p
        self._crc32 = loaded.lockstep_crc32
        self._crc32.argtypes = [number, ctypes.c_uint32, address, number]
        self._crc32.restype = ctypes.c_uint32
        self._read = loaded.lockstep_read_checked
        self._read.argtypes = [number, ctypes.c_int, number, address, number, address]
        self._read.restype = number
        loaded.lockstep_crc32_kind.restype = number
        self.best_kind = int(loaded.lockstep_crc32_kind())
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


_loaded: Library | None = None


def begin_build() -> None:
    """Compile or load in the background."""
    threading.Thread(target=load, name="checksums", daemon=True).start()


def compiled() -> Path:
    """The shared object of :data:`SOURCE`; raises as :func:`parallel.compiler.compiled` does."""
    return compiler.compiled(SOURCE, [], symbols=SYMBOLS)


@cache
def load() -> Library | None:
    """The library, compiled first if need be; None for a reason that is logged."""
    global _loaded
    if missing := NEEDED_FLAGS - compiler.cpu_flags():
        logger.info("checksums by zlib: this CPU lacks %s", ", ".join(sorted(missing)))
        return None
    try:
        library = Library(ctypes.CDLL(str(compiled())))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        logger.warning("checksums by zlib: %s", compiler.reason(error))
        return None
    _loaded = library
    return library


def spans_of(parts: Sequence[Buffer]) -> Spans:
    """Where the bytes of buffers are; they must outlive what is done with the result."""
    if isinstance(parts, Parts):
        return parts.spans
    found = [
        (array.__array_interface__["data"][0], array.size)
        for array in (np.frombuffer(part, dtype=np.uint8) for part in parts if len(part))
    ]
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def crc32(parts: Sequence[Buffer]) -> int:
    """The CRC of buffers one after the other."""
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
