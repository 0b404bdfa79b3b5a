"""KV cache of a live instance, changed from outside through the memory that outlives it.

With ``--enable-kv-inheritance`` the cache lies in an unnamed file that this user can open by ``/proc``. The
table beside it names the blocks. So faults of memory are planted without any code in the instance.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from engine.inheritance.shared_cache import is_cache
from engine.inheritance.table import ENTRY_BYTES, HEADER_BYTES, Table, unpacked
from engine.pieces.pool import hash_block

BLOCK_SIZE = 16
EXPONENT_BIT = 0x02
"""Bit of a bfloat16's upper byte: the number becomes 16 times as large, or small."""


def names_of(prompt: Sequence[int]) -> list[bytes]:
    """Names of a prompt's full blocks."""
    names: list[bytes] = []
    for start in range(0, (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
        names.append(hash_block(names[-1] if names else None, prompt[start : start + BLOCK_SIZE]))
    return names


class PlantedCache:
    """Blocks of one instance's cache, by name."""

    def __init__(self, instance: psutil.Process) -> None:
        links = [link for link in Path(f"/proc/{instance.pid}/fd").iterdir() if is_cache(str(link))]
        assert len({link.stat().st_ino for link in links}) == 1
        self._path = links[0]

    def flip(self, name: bytes) -> None:
        """Flip one bit of a block: of its first number."""

        def changed(part: bytes) -> bytes:
            return part[:1] + bytes([part[1] ^ EXPONENT_BIT]) + part[2:]

        self._change(name, lambda parts: [changed(parts[0]), *parts[1:]])

    def halve(self, name: bytes) -> None:
        """Leave the second half of each part as if it had not been written."""
        self._change(
            name, lambda parts: [part[: len(part) // 2] + bytes(len(part) - len(part) // 2) for part in parts]
        )

    def put_under(self, name: bytes, other: bytes) -> None:
        """Have one block's content under the name of another."""
        content = self._change(other, lambda parts: parts)
        self._change(name, lambda _: content)

    def _change(self, name: bytes, change: Callable[[list[bytes]], list[bytes]]) -> list[bytes]:
        """Replace the content of a block; returns what it was."""
        file = os.open(self._path, os.O_RDWR)
        try:
            header = unpacked(os.pread(file, HEADER_BYTES, 0))
            assert header is not None
            table = bytearray(os.pread(file, header.num_slots * ENTRY_BYTES, HEADER_BYTES))
            places = header.parts_of(Table(memoryview(table), header.owner).read()[name])
            parts = [os.pread(file, size, begin) for begin, size in places]
            for (begin, _), part in zip(places, change(parts), strict=True):
                assert os.pwrite(file, part, begin) == len(part)
        finally:
            os.close(file)
        return parts
