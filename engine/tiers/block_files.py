"""Files of KV blocks and other pieces below one directory (no threads).

A piece's path has the model, the numerics class and the layout of its cache, and its name. So instances that
cannot use each other's blocks never look at each other's files, and a directory is shared by all of them. A
file is written under another name first. What is torn or changed all the same is found by its digest.

Nothing is read from folders or files that other users can have changed (:mod:`engine.tiers.own_folders`).
Nothing is deleted but files with names that are made here, in folders that have the mark of this module. A
mesh whose key is a file of its operator has folders and digests of its own, made with that key.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from engine.pieces.kinds import HASH_BYTES
from engine.pieces.pool import BlockHash
from engine.tiers.own_folders import NotOwn, open_file, opened, opened_in
from engine.transfers.checksums import crc32, read_checked
from engine.transfers.messages import CRC, DIGEST_BYTES, digest_of_crc
from parallel.caches import is_own
from parallel.links.keys import LinkKey

MAGIC = b"LSKVBLK1"
HEADER = struct.Struct(f"<8sQ{DIGEST_BYTES}s")
"""Magic, bytes of the block, digest."""
SUFFIX, UNFINISHED = ".kv", ".tmp"
MARK = ".lockstep-kv-blocks"
"""An empty file in each cache's folder; without it no file there is deleted."""
MARK_BYTES = 6
"""Random bytes in the names of an instance's unfinished files."""
PART = re.compile(r"[0-9a-f]{2}")
"""Folder of a part of a cache's files: the begin of their names."""
MADE = re.compile(
    rf"([0-9a-f]{{{2 * HASH_BYTES}}})\{SUFFIX}"
    rf"|\.([0-9a-f]{{{2 * HASH_BYTES}}})-[0-9a-f]{{{2 * MARK_BYTES}}}\{UNFINISHED}"
)
"""All names of files that are made in such a folder, whole or unfinished."""
MOST_PARTS = 512
"""Parts of a block that one system call writes."""
KEPT = 0.9
"""Fraction of the size bound kept when a directory has outgrown it."""


class WrongBlock(Exception):
    """Error: a file does not hold the block that its name says."""


@dataclass(frozen=True)
class BlockFile:
    """File of a piece below the directory, of any cache."""

    path: str
    """Path of the file, relative to the directory."""
    num_bytes: int
    used_at: float
    """Time of the file's last use: written or read."""


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


def file_bytes(piece_bytes: int) -> int:
    """Bytes of the file of a piece."""
    return HEADER.size + piece_bytes


def folder_of(model: str, numerics: str, identity: str) -> str:
    """Folder of all caches with one identity, below the directory."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', model).strip('.-') or 'model'}/{numerics}-{identity}"


class BlockFiles:
    """The files of one cache, and the directory that they share with those of others."""

    def __init__(self, root: Path, folder: str, identity: str, key: LinkKey | None = None) -> None:
        """``key``: a secret of the mesh, for digests; None: anyone can make them."""
        self._root = root
        model, cache = folder.split("/")
        self._folder = model, cache if key is None else f"{cache}-{key.proof(b'folder')[:4].hex()}"
        self._identity = identity
        self._key = key
        self._mark = os.urandom(MARK_BYTES).hex()
        """Part of the names of this instance's unfinished files."""
        self._listed: dict[str, tuple[int, set[BlockHash]]] = {}
        """Names in each folder, and when that had changed last."""

    def __repr__(self) -> str:
        return f"<BlockFiles in {self.folder}>"

    @property
    def root(self) -> Path:
        """The directory of all caches."""
        return self._root

    @property
    def folder(self) -> Path:
        """The folder of this cache."""
        return self._root.joinpath(*self._folder)

    def prepare(self) -> None:
        """Make the folder, with its mark.

        Raises:
            NotOwn: others can have changed it, or a folder above it, or it holds files without a mark.
            OSError: nothing can be written there.
        """
        with contextlib.suppress(FileExistsError):
            self._root.mkdir(mode=0o700, parents=True)
        create = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with opened(self._root, *self._folder, makes=True) as folder:
            if not _is_marked(folder):
                if os.listdir(folder) and not _is_marked(folder):  # another instance may just have made it
                    reason = f"has files but no {MARK}, so Lockstep has not made it: empty or rename it"
                    raise NotOwn(errno.EPERM, reason, str(self.folder))
                os.close(os.open(MARK, create, 0o600, dir_fd=folder))
            probe = f".{self._mark}{UNFINISHED}"
            os.close(os.open(probe, create | os.O_EXCL, 0o600, dir_fd=folder))
            os.unlink(probe, dir_fd=folder)

    def path(self, name: BlockHash) -> Path:
        text = name.hex()
        return self.folder / text[:2] / f"{text}{SUFFIX}"

    def read(self, name: BlockHash, parts: Sequence[memoryview]) -> None:
        """Fill the parts of a block from its file, which counts as used now.

        Raises:
            FileNotFoundError: there is none.
            WrongBlock: it has another size, or its bytes are not those that were written.
            NotOwn: others can have changed it, or it is no regular file.
            OSError: it cannot be read.
        """
        path, size = self.path(name), sum(part.nbytes for part in parts)
        with self._part_of(name) as folder:
            descriptor = open_file(folder, path.name, path)
        try:
            if os.fstat(descriptor).st_size != file_bytes(size):
                raise WrongBlock(f"{path} has another size")
            header = os.pread(descriptor, HEADER.size, 0)
            if len(header) != HEADER.size:
                raise WrongBlock(f"{path} became shorter while it was read")
            magic, num_bytes, digest = HEADER.unpack(header)
            if (magic, num_bytes) != (MAGIC, size):
                raise WrongBlock(f"{path} is no file of a block")
            num_read, crc = read_checked(descriptor, HEADER.size, parts)
            if num_read != size:
                raise WrongBlock(f"{path} became shorter while it was read")
            if not hmac.compare_digest(self._digest(name, crc, parts), digest):
                raise WrongBlock(f"{path} has another digest than its bytes")
            with contextlib.suppress(OSError):
                os.utime(descriptor)
        finally:
            os.close(descriptor)

    def write(self, name: BlockHash, parts: Sequence[memoryview]) -> None:
        """Write a block's file, which is there whole or not at all.

        Raises:
            OSError: it cannot be written; nothing is left of it.
        """
        crc = crc32(parts) if self._key is None else 0
        header = HEADER.pack(MAGIC, sum(part.nbytes for part in parts), self._digest(name, crc, parts))
        whole = [memoryview(header), *parts]
        try:
            self._write(name, whole)
        except FileNotFoundError:  # somebody has deleted the folder
            self.prepare()
            self._write(name, whole)

    def drop(self, name: BlockHash) -> None:
        """Delete a block's file; another instance may have done it."""
        with contextlib.suppress(OSError), self._part_of(name) as folder:
            os.unlink(f"{name.hex()}{SUFFIX}", dir_fd=folder)

    def names(self) -> set[BlockHash]:
        """Names of all blocks that have a file; only folders that changed are read again."""
        found: set[BlockHash] = set()
        with contextlib.suppress(FileNotFoundError), opened(self._root, *self._folder) as folder:
            for entry in _folders(folder):
                if PART.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        changed = entry.stat(follow_symlinks=False).st_mtime_ns
                        before = self._listed.get(entry.name)
                        if before is None or before[0] != changed:
                            before = self._listed[entry.name] = changed, self._names_in(folder, entry.name)
                        found |= before[1]
        return found

    def all_files(self) -> Iterator[BlockFile]:
        """Files of blocks of all caches below the directory, unfinished ones, too.

        Those of folders that have no mark, or that others can have changed, are left out.
        """
        with opened(self._root) as root:
            for model in _folders(root):
                with contextlib.suppress(OSError), self._below(root, model.name) as above:
                    for cache in _folders(above):
                        with contextlib.suppress(OSError):
                            yield from self._files_of(above, model.name, cache.name)

    def trim(self, most_bytes: int) -> tuple[int, int]:
        """Delete the files used least lately, where all together are too large.

        Returns how many were deleted, and the bytes of the rest.
        """
        files = list(self.all_files())
        dropped = files_to_drop(files, most_bytes)
        left = sum(each.num_bytes for each in files) - sum(each.num_bytes for each in dropped)
        return self._delete(dropped), left

    def clear(self) -> int:
        """Delete all files of this cache; returns how many there were."""
        files: list[BlockFile] = []
        with contextlib.suppress(OSError), opened(self._root, self._folder[0]) as above:
            files += self._files_of(above, *self._folder)
        self._listed.clear()
        return self._delete(files)

    # ---- helpers

    def _digest(self, name: BlockHash, crc: int, parts: Sequence[memoryview]) -> bytes:
        """The digest in a block's file.

        With a key it is an HMAC of all bytes, else it hangs on their CRC.
        """
        size = sum(part.nbytes for part in parts)
        if self._key is None:
            return digest_of_crc(self._identity, name, crc, size)
        digest = hmac.new(self._key.secret, self._identity.encode() + name, "sha256")
        digest.update(CRC.pack(0, size))
        for part in parts:
            digest.update(part)
        return digest.digest()[:DIGEST_BYTES]

    @contextlib.contextmanager
    def _part_of(self, name: BlockHash, *, makes: bool = False) -> Iterator[int]:
        """The folder of a block's file, open.

        ``makes``: it is made where it lacks, but not those above it.
        """
        with opened(self._root, *self._folder) as cache:
            part = name.hex()[:2]
            with opened_in(cache, part, self.folder / part, makes=makes) as found:
                yield found

    def _write(self, name: BlockHash, whole: Sequence[memoryview]) -> None:
        unfinished = f".{name.hex()}-{self._mark}{UNFINISHED}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._part_of(name, makes=True) as folder:
            try:
                descriptor = os.open(unfinished, flags, 0o600, dir_fd=folder)
                try:
                    _write_all(descriptor, whole)
                finally:
                    os.close(descriptor)
                os.replace(unfinished, f"{name.hex()}{SUFFIX}", src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished, dir_fd=folder)
                raise

    def _below(self, above: int, *names: str) -> AbstractContextManager[int]:
        """A folder in an open one; ``names`` lead to it from the directory."""
        return opened_in(above, names[-1], self._root.joinpath(*names))

    def _names_in(self, cache: int, part: str) -> set[BlockHash]:
        """Blocks that have a file in a part of this cache."""
        with self._below(cache, *self._folder, part) as folder, os.scandir(folder) as entries:
            return {
                bytes.fromhex(made[1])
                for each in entries
                if (made := MADE.fullmatch(each.name))
                and made[1]
                and made[1].startswith(part)
                and each.is_file(follow_symlinks=False)
            }

    def _files_of(self, above: int, model: str, cache: str) -> Iterator[BlockFile]:
        """All files that were made here for one cache, whose folder is marked."""
        with self._below(above, model, cache) as folder:
            for part in _folders(folder) if _is_marked(folder) else ():
                if PART.fullmatch(part.name):
                    with contextlib.suppress(OSError), self._below(folder, model, cache, part.name) as last:
                        yield from _made_in(last, f"{model}/{cache}/{part.name}")

    def _delete(self, files: Sequence[BlockFile]) -> int:
        """Delete files that were listed; returns how many there were."""
        count, paths = 0, sorted(each.path for each in files)
        for folder, group in groupby(paths, lambda path: path.rpartition("/")[0]):
            with contextlib.suppress(OSError), opened(self._root, *folder.split("/")) as found:
                for path in group:
                    with contextlib.suppress(OSError):
                        os.unlink(path.rpartition("/")[2], dir_fd=found)
                        count += 1
        return count


def _folders(above: int) -> list[os.DirEntry[str]]:
    """The folders in an open one; links are left out."""
    with os.scandir(above) as entries:
        return [each for each in entries if each.is_dir(follow_symlinks=False)]


def _is_marked(folder: int) -> bool:
    """Whether this module has made an open folder."""
    with contextlib.suppress(OSError):
        return is_own(os.stat(MARK, dir_fd=folder, follow_symlinks=False))
    return False


def _made_in(folder: int, path: str) -> Iterator[BlockFile]:
    """Files of an open folder that have names that are made here, and nobody else's."""
    part = path.rpartition("/")[2]
    with os.scandir(folder) as entries:
        for entry in entries:
            made = MADE.fullmatch(entry.name)
            if made and (made[1] or made[2]).startswith(part) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    if is_own(found):
                        yield BlockFile(f"{path}/{entry.name}", found.st_size, found.st_mtime)


def _write_all(descriptor: int, parts: Sequence[memoryview]) -> None:
    for first in range(0, len(parts), MOST_PARTS):
        left = list(parts[first : first + MOST_PARTS])
        while left:
            written = os.writev(descriptor, left)
            while left and written >= left[0].nbytes:
                written -= left.pop(0).nbytes
            if left:
                left[0] = left[0][written:]
