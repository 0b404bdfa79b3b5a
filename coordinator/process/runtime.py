"""Temporary directories for files that processes of one ``serve`` share.

The process that makes a directory holds a lock on it, which the kernel releases when that process ends,
however it ends. So the next one finds the directories of those that were killed, and takes them away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

PREFIX = "lockstep-run-"
MARK = "lockstep"
"""Name of the file that marks our directories; others are never removed."""
PLACES = ("/tmp", "/var/tmp", "/dev/shm")
ROOM = 256 * 1024
"""Free bytes that a file system must have for later files."""
NO_FILES: Mapping[str, int] = MappingProxyType({})
MOST_TRIES = 100
"""Attempts at making a directory.

Another process may take a new one for a leftover before it is locked.
"""


def places() -> list[Path]:
    """Candidate parents of the temporary directory, best first.

    The session's directory ends with the session, and what was started with nohup goes on: so it comes last
    but for memory.
    """
    session = os.environ.get("XDG_RUNTIME_DIR")
    named = [os.environ.get("TMPDIR"), *PLACES[:2], session, PLACES[2]]
    return [Path(each) for each in dict.fromkeys(named) if each and Path(each).is_absolute()]


@contextlib.contextmanager
def runtime_directory(files: Mapping[str, int] = NO_FILES) -> Iterator[Path]:
    """Context with a new temporary directory of this user, removed at the end.

    ``files``: bytes by name of files that are there from the start, with their space taken.

    Raises:
        OSError: there is no place for it.
    """
    path, lock = _made_somewhere(files)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            _remove(path)
        os.close(lock)


def open_reserved(file: Path, num_bytes: int) -> int:
    """Descriptor of a file with its space reserved, for memory mapping.

    A store to a mapped page for which the disk has no space would end the process (SIGBUS).

    Raises:
        OSError: there is no space.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise OSError(error.errno, error.strerror, str(file)) from error
    return descriptor


def sweep(parent: Path) -> None:
    """Remove temporary directories that killed processes of this user left."""
    with contextlib.suppress(OSError):
        for path in parent.glob(f"{PREFIX}*"):
            if (lock := _lock(path)) is not None:
                with contextlib.suppress(OSError):
                    if (path / MARK).is_file():
                        _remove(path)
                    else:
                        path.rmdir()  # of one that was killed before; else there is something in it
                os.close(lock)


def _made_somewhere(files: Mapping[str, int]) -> tuple[Path, int]:
    """A new directory in the first place that has room, and its lock's descriptor."""
    found = places()
    for place in found:
        with contextlib.suppress(OSError):
            sweep(place)  # what is taken away there may be the room
            _check(place)
            path, lock = _made(place)
            try:
                for name, num_bytes in files.items():
                    os.close(open_reserved(path / name, num_bytes))
            except OSError:
                _remove(path)
                os.close(lock)
                raise
            return path, lock
    listed = ", ".join(map(str, found))
    raise OSError(
        errno.ENOENT,
        f"no place for files that processes share: none of {listed} can be written and has "
        f"{(ROOM + sum(files.values())) // 1024} KiB left; set TMPDIR",
    )


def _check(place: Path) -> None:
    """Check that files there can be written and locked: some network filesystems have no locks.

    Raises:
        OSError: they cannot.
    """
    with tempfile.TemporaryFile(dir=place) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(file.fileno(), 0, ROOM)


def _made(parent: Path) -> tuple[Path, int]:
    """A new directory, and the descriptor that holds its lock."""
    for _ in range(MOST_TRIES):
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        if (lock := _lock(path)) is not None:  # else it was taken for left over in between
            (path / MARK).touch()
            return path, lock
        with contextlib.suppress(OSError):
            path.rmdir()
    raise OSError(errno.EAGAIN, f"directories in {parent} are removed as soon as they are made")


def _lock(path: Path) -> int | None:
    """The descriptor that holds the lock of a directory.

    None if somebody else has it, or owns the directory, or it is none (any more).
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
    os.close(descriptor)
    return None


def _remove(path: Path) -> None:
    """Remove a temporary directory and its files; it has no subdirectories of ours."""
    for file in path.iterdir():
        if not stat.S_ISDIR(file.lstat().st_mode):
            file.unlink(missing_ok=True)
    path.rmdir()
