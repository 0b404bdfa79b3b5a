"""Files of KV blocks below one directory (no threads).

A block's path has the model, the numerics class and the layout of its cache, and its name. So instances that
cannot use each other's blocks never look at each other's files, and a directory is shared by all of them. A
file is written under another name first. What is torn or changed all the same is found by its digest.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.scheduling.blocks import HASH_BYTES, BlockHash
from engine.transfers.checksums import read_checked
from engine.transfers.messages import DIGEST_BYTES, digest_of_crc, digest_of_parts

MAGIC = b"LSKVBLK1"
HEADER = struct.Struct(f"<8sQ{DIGEST_BYTES}s")
"""Magic, bytes of the block, digest."""
SUFFIX, UNFINISHED = ".kv", ".tmp"
MOST_PARTS = 512
"""Parts of a block that one system call writes."""
KEPT = 0.9
"""Part of the bound that is kept when a directory has outgrown it."""


class WrongBlock(Exception):
    """A file does not hold the block that its name says."""


@dataclass(frozen=True)
class BlockFile:
    """One file of a directory, of whichever cache."""

    path: str
    num_bytes: int
    used_at: float
    """When it was written, or read last."""


def files_to_drop(files: Sequence[BlockFile], most_bytes: int) -> list[BlockFile]:
    """The files used least lately; without them the rest is well below a bound (pure)."""
    left = sum(each.num_bytes for each in files)
    if left <= most_bytes:
        return []
    dropped = []
    for each in sorted(files, key=lambda file: file.used_at):
        if left <= KEPT * most_bytes:
            break
        dropped.append(each)
        left -= each.num_bytes
    return dropped


def folder_of(model: str, numerics: str, identity: str) -> str:
    """Folder of all caches with one identity, below the directory."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', model).strip('.-') or 'model'}/{numerics}-{identity}"


class BlockFiles:
    """The files of one cache, and the directory that they share with those of others."""

    def __init__(self, root: Path, folder: str, identity: str, block_bytes: int) -> None:
        self._root = root
        self._folder = root / folder
        self._identity = identity
        self._block_bytes = block_bytes
        self._mark = os.urandom(6).hex()
        """Part of the names of this instance's unfinished files."""
        self._listed: dict[str, tuple[int, set[BlockHash]]] = {}
        """Names in each folder, and when that had changed last."""

    def __repr__(self) -> str:
        return f"<BlockFiles in {self._folder}>"

    @property
    def file_bytes(self) -> int:
        """Bytes of one file."""
        return HEADER.size + self._block_bytes

    def prepare(self) -> None:
        """Make the folder.

        Raises:
            OSError: nothing can be written there.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        probe = self._folder / f".{self._mark}{UNFINISHED}"
        probe.write_bytes(b"")
        probe.unlink()

    def path(self, name: BlockHash) -> Path:
        text = name.hex()
        return self._folder / text[:2] / f"{text}{SUFFIX}"

    def read(self, name: BlockHash, parts: Sequence[memoryview]) -> None:
        """Fill the parts of a block from its file, which counts as used now.

        Raises:
            FileNotFoundError: there is none.
            WrongBlock: it is another size, or its bytes are not those that were written.
            OSError: it cannot be read.
        """
        descriptor = os.open(path := self.path(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != self.file_bytes:
                raise WrongBlock(f"{path} has another size")
            header = os.pread(descriptor, HEADER.size, 0)
            if len(header) != HEADER.size:
                raise WrongBlock(f"{path} became shorter while it was read")
            magic, num_bytes, digest = HEADER.unpack(header)
            if (magic, num_bytes) != (MAGIC, self._block_bytes):
                raise WrongBlock(f"{path} is no file of a block")
            num_read, crc = read_checked(descriptor, HEADER.size, parts)
        finally:
            os.close(descriptor)
        if num_read != self._block_bytes:
            raise WrongBlock(f"{path} became shorter while it was read")
        if digest_of_crc(self._identity, name, crc, num_read) != digest:
            raise WrongBlock(f"{path} has another digest than its bytes")
        with contextlib.suppress(OSError):
            os.utime(path)

    def write(self, name: BlockHash, parts: Sequence[memoryview]) -> None:
        """Write a block's file, which is there whole or not at all.

        Raises:
            OSError: it cannot be written; nothing is left of it.
        """
        header = HEADER.pack(MAGIC, self._block_bytes, digest_of_parts(self._identity, name, parts))
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{name.hex()}-{self._mark}{UNFINISHED}")
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                _write_all(descriptor, [memoryview(header), *parts])
            finally:
                os.close(descriptor)
            unfinished.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def drop(self, name: BlockHash) -> None:
        """Delete a block's file; another instance may have done it."""
        with contextlib.suppress(OSError):
            self.path(name).unlink()

    def names(self) -> set[BlockHash]:
        """Names of all blocks that have a file; only folders that changed are read again."""
        found: set[BlockHash] = set()
        for entry in _entries(self._folder):
            with contextlib.suppress(OSError):
                changed = os.stat(entry.path).st_mtime_ns
                before = self._listed.get(entry.name)
                if before is None or before[0] != changed:
                    listed = {name for each in _entries(entry.path) if (name := _name_of(each.name))}
                    before = self._listed[entry.name] = changed, listed
                found |= before[1]
        return found

    def all_files(self) -> Iterator[BlockFile]:
        """Files of blocks of all caches below the directory, unfinished ones, too."""
        for model in _entries(self._root):
            for cache in _entries(model.path):
                for part in _entries(cache.path):
                    for entry in _entries(part.path):
                        if entry.name.endswith((SUFFIX, UNFINISHED)):
                            with contextlib.suppress(OSError):
                                found = entry.stat(follow_symlinks=False)
                                yield BlockFile(entry.path, found.st_size, found.st_mtime)

    def trim(self, most_bytes: int) -> tuple[int, int]:
        """Delete the files used least lately, where all together are too large.

        Returns how many were deleted, and the bytes of the rest.
        """
        files = list(self.all_files())
        dropped = files_to_drop(files, most_bytes)
        for each in dropped:
            with contextlib.suppress(OSError):
                os.unlink(each.path)
        return len(dropped), sum(each.num_bytes for each in files) - sum(each.num_bytes for each in dropped)

    def clear(self) -> int:
        """Delete all files of this cache; returns how many there were."""
        count = 0
        for part in _entries(self._folder):
            for entry in _entries(part.path):
                if entry.name.endswith((SUFFIX, UNFINISHED)):
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
                        count += 1
        self._listed.clear()
        return count


def _entries(path: str | Path) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing where there is none, or it is a file."""
    try:
        with os.scandir(path) as found:
            return list(found)
    except OSError:
        return []


def _name_of(file: str) -> BlockHash | None:
    """The block that a file is of; None for any other file."""
    text = file.removesuffix(SUFFIX)
    if text == file or len(text) != 2 * HASH_BYTES:
        return None
    try:
        return bytes.fromhex(text)
    except ValueError:
        return None


def _write_all(descriptor: int, parts: Sequence[memoryview]) -> None:
    for first in range(0, len(parts), MOST_PARTS):
        left = list(parts[first : first + MOST_PARTS])
        while left:
            written = os.writev(descriptor, left)
            while left and written >= left[0].nbytes:
                written -= left.pop(0).nbytes
            if left:
                left[0] = left[0][written:]
