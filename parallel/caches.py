"""Cache directories of this user, safe against other users of the host."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_directory(name: str) -> Path:
    """Path of this user's cache directory for one kind of files.

    It may not exist yet.

    Raises:
        OSError: this user has no home.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "lockstep" / name
    except RuntimeError as error:  # a user id without a name, as in some containers
        raise OSError(f"there is no place for a cache: set HOME or XDG_CACHE_HOME ({error})") from error


def own_directory(name: str) -> Path:
    """A cache directory that exists, and that only this user (or root) can write to.

    Raises:
        OSError: it belongs to somebody else, or cannot be made.
    """
    directory = cache_directory(name)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = f"{error.strerror}: set XDG_CACHE_HOME to a directory that can be written to"
        raise OSError(error.errno, why, error.filename) from error
    found = directory.stat()
    if found.st_uid == os.geteuid() and found.st_mode & OTHERS_WRITE:
        directory.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS_WRITE)  # the umask's doing
    if not is_trusted(directory):
        raise OSError(
            f"{directory} can be written to by other users: set XDG_CACHE_HOME to a directory of your own"
        )
    return directory


def is_trusted(path: Path) -> bool:
    """Whether only this user or root can have written a file, or a directory's names.

    Raises:
        OSError: it is not there.
    """
    return is_own(path.lstat())


def is_own(found: os.stat_result) -> bool:
    """Whether only this user or root can write to a file or directory."""
    kind_is_plain = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
    return kind_is_plain and found.st_uid in (0, os.geteuid()) and not found.st_mode & OTHERS_WRITE


def made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """Path of a cache entry; ``make`` fills its directory atomically if missing.

    It is filled elsewhere, and put in its place at once: another process may do the same meanwhile.

    Raises:
        OSError: it cannot be made.
    """
    if directory.is_dir():
        return directory
    with tempfile.TemporaryDirectory(dir=directory.parent) as beside:
        target = Path(beside) / "made"
        target.mkdir()
        make(target)
        try:
            target.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise
    return directory
