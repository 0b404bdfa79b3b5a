"""The digest of a checkpoint's weights, made once per host in a thread (no torch).

It is made while the weights are read, so that both need the disk once. It is kept in the user's cache under
the state of each file, so later starts and other processes of the host need not make it again. Of several
that want it at once, one makes it, and the others wait for that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from engine.model.checkpoint import CheckpointError
from engine.model.weight_digest import DIGEST_BYTES, VERSION, whole_digest
from engine.model.weight_set import weight_files
from parallel.caches import own_directory

logger = logging.getLogger(__name__)

FOLDER = "digests"
MOST_KEPT = 256
"""Digests that a user's cache keeps."""
SETTLED = 2.0
"""Seconds after a change in which a file's time may hide another one."""
LARGE = 1 << 30
"""Bytes of weights for which :data:`SETTLED` is waited for.

Then they are hashed once, and not by each process.
"""
LOOK = 0.02
"""Seconds between two tries to get the lock of a digest."""
LEAST_PATIENCE = 30.0
"""Least seconds to wait while another process makes a digest."""
SLOWEST = 100e6
"""Bytes per second of a process that is not waited for any more."""
WORD_INTERVAL = 2.0
"""Seconds between two reports of progress."""
WRITTEN = re.compile(rb"[0-9a-f]{%d}" % (2 * DIGEST_BYTES))

FileState = tuple[int, int, int, int, int]
"""Device, inode, bytes, and nanoseconds of the last change of content and of anything."""


class HostDigest:
    """The digest of one checkpoint's weights, while a thread makes it."""

    def __init__(self, directory: Path) -> None:
        """Starts to make the digest, in a thread.

        Raises:
            CheckpointError, OSError: files of weights are missing.
        """
        self.directory = directory
        self._files = weight_files(directory)
        self.states = states_of(self._files)
        self._num_bytes = sum(size for _, _, size, _, _ in self.states)
        self._passed = 0
        self._digest = ""
        self._error: Exception | None = None
        self._done = threading.Event()
        self.pid = os.getpid()
        threading.Thread(target=self._run, name="weights-digest", daemon=True).start()

    def __repr__(self) -> str:
        return f"<HostDigest of {self.directory}: {self._digest or f'{self._passed} bytes'}>"

    def result(self, tell: Callable[[str], None] = lambda text: None) -> str:
        """The digest, as soon as it is made; ``tell`` is sent the progress.

        To be called once the weights are read: they must be those of the digest.

        Raises:
            CheckpointError: the files cannot be read, or changed meanwhile.
        """
        while not self._done.wait(WORD_INTERVAL):
            tell(f"hashing weights: {self._passed / 2**30:.1f} of {self._num_bytes / 2**30:.1f} GiB")
        try:
            if self._error is not None:
                raise self._error
            if states_of(self._files) != self.states:
                raise CheckpointError(
                    f"the weights in {self.directory} changed while they were read: start again"
                )
        except (OSError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"the weights in {self.directory} cannot be hashed: {error}") from error
        return self._digest

    def _run(self) -> None:
        try:
            self._digest = self._made_once()
        except Exception as error:  # noqa: BLE001 (raised again where the result is wanted)
            self._error = error
        finally:
            self._done.set()

    def _made_once(self) -> str:
        """The digest of this host's cache, made and kept if it is not there."""
        if self._num_bytes >= LARGE:
            time.sleep(min(max(0.0, seconds_to_settle(self.states)), SETTLED))  # some clocks are ahead
        is_settled = seconds_to_settle(self.states) <= 0
        patience = max(LEAST_PATIENCE, self._num_bytes / SLOWEST)
        with contextlib.ExitStack() as stack:
            entry = -1
            try:
                path = own_directory(FOLDER) / _key(self.states)
                entry = stack.enter_context(_locked(path, time.monotonic() + patience))
                if is_settled and WRITTEN.fullmatch(found := os.pread(entry, 1024, 0)):
                    os.utime(entry)
                    return found.decode()
            except OSError as error:
                logger.info("the digest of the weights is not kept: %s", error)
            began = time.monotonic()
            made = whole_digest(self._files, self._pass)
            logger.debug("%d bytes of weights hashed in %.2f s", self._num_bytes, time.monotonic() - began)
            if entry >= 0 and is_settled and states_of(self._files) == self.states:
                with contextlib.suppress(OSError):  # the disk is full
                    os.pwrite(entry, made.encode(), 0)
                    _drop_oldest(path.parent)
            return made

    def _pass(self, num_bytes: int) -> None:
        self._passed += num_bytes


_newest: HostDigest | None = None
_choosing = threading.Lock()


def host_digest(directory: Path) -> HostDigest:
    """The digest of a checkpoint's weights, begun by the first call in this process.

    Raises:
        CheckpointError, OSError: files of weights are missing.
    """
    global _newest
    with _choosing:
        found = _newest
        is_same = (
            found is not None
            and found.pid == os.getpid()  # else a process was forked, without the thread
            and found.directory == directory
            and found.states == states_of(weight_files(directory))
        )
        if found is None or not is_same:
            found = _newest = HostDigest(directory)
        return found


def states_of(files: Sequence[Path]) -> tuple[FileState, ...]:
    """Size, inode and times of files, equal while they are unchanged."""
    stats = [path.stat() for path in files]
    return tuple((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats)


def seconds_to_settle(states: Sequence[FileState]) -> float:
    """Seconds until a later change of these files would show in their times.

    0 or less: it would now.
    """
    newest = max((max(changed, touched) for *_, changed, touched in states), default=0)
    return newest / 1e9 + SETTLED - time.time()


def _key(states: Sequence[FileState]) -> str:
    return hashlib.blake2b(msgspec.json.encode((VERSION, states)), digest_size=16).hexdigest()


@contextlib.contextmanager
def _locked(path: Path, deadline: float) -> Iterator[int]:
    """A file of the cache, made if it is not there, and locked.

    Raises:
        OSError: it cannot be made, or somebody else has it until the deadline.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(errno.ETIMEDOUT, "another process takes too long to make it") from None
                time.sleep(LOOK)
        yield descriptor
    finally:
        os.close(descriptor)


def _drop_oldest(folder: Path) -> None:
    """Delete the digests used least lately, where there are too many."""
    with os.scandir(folder) as entries:
        kept = [(each.stat().st_mtime_ns, each.path) for each in entries]
    for _, path in sorted(kept)[: max(0, len(kept) - MOST_KEPT)]:
        os.unlink(path)
