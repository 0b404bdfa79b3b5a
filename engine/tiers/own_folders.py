"""Opens folders and files that nobody but this user or root can have changed.

Each step down is made from the descriptor of the folder above, and follows no link. What was opened is
checked, never its path. So another user can neither put a file of their own in the way, nor lead a deletion
elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from parallel.caches import is_own

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class NotOwn(PermissionError):
    """A folder or file that others can have changed; ``strerror`` has what to do."""


@contextlib.contextmanager
def opened(root: Path, *names: str, makes: bool = False) -> Iterator[int]:
    """The descriptor of a folder some steps below a directory.

    ``makes``: folders that lack are made. The directory itself may be a link, since its operator named it.

    Raises:
        NotOwn: the directory, or a folder on the way, can be changed by others.
        OSError: one is not there, is no folder or cannot be made.
    """
    found = os.open(root, FOLDER)
    try:
        _check(found, root)
        for number, name in enumerate(names, 1):
            above, found = found, _step(found, name, root.joinpath(*names[:number]), makes=makes)
            os.close(above)
        yield found
    finally:
        os.close(found)


@contextlib.contextmanager
def opened_in(above: int, name: str, path: Path, *, makes: bool = False) -> Iterator[int]:
    """The descriptor of a folder in an open one; raises as :func:`opened` does."""
    found = _step(above, name, path, makes=makes)
    try:
        yield found
    finally:
        os.close(found)


def open_file(above: int, name: str, path: Path) -> int:
    """A descriptor to read a regular file of an open folder.

    A FIFO or device is not opened: that could block for ever, or do something.

    Raises:
        NotOwn: it can be changed by others, or is no regular file.
        OSError: it is not there, or cannot be read.
    """
    if not stat.S_ISREG(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
        raise NotOwn(errno.EPERM, "is no regular file", str(path))
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    found = os.open(name, flags, dir_fd=above)
    try:
        if not stat.S_ISREG(_check(found, path).st_mode):
            raise NotOwn(errno.EPERM, "is no regular file", str(path))
    except BaseException:
        os.close(found)
        raise
    return found


def _step(above: int, name: str, path: Path, *, makes: bool) -> int:
    if makes:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=above)
    found = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=above)
    try:
        _check(found, path)
    except BaseException:
        os.close(found)
        raise
    return found


def _check(descriptor: int, path: Path) -> os.stat_result:
    found = os.fstat(descriptor)
    if not is_own(found):
        mode, user = stat.S_IMODE(found.st_mode), found.st_uid
        reason = f"can be changed by others (user {user}, mode {mode:04o}): have it belong to user"
        raise NotOwn(errno.EPERM, f"{reason} {os.geteuid()}, and chmod go-w it", str(path))
    return found
