"""The key of a mesh on one host whose user named none: its head makes it, the user's other processes find it.

The head hands the key down to its own processes by descriptor. Others (headless instances, ``lockstep``
commands) find it in a file of mode 0600 in a directory of mode 0700, named by the coordinator's address. The
head holds a lock on that file, which ends with its process: a file without a lock is of a mesh that has
ended, and nobody uses it. A new head at this address takes the key over, so that instances that live on know
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from coordinator import keys
from coordinator.addresses import is_loopback
from coordinator.config import MeshConfig
from coordinator.greeting import mechanism_at
from coordinator.keys import KeyFileError, MeshKeys

logger = logging.getLogger(__name__)

PLACES = ("/tmp", "/var/tmp", "/dev/shm")
"""Where the directory may be when there is none of the user's session."""
HANDED_DOWN = "/proc/self/fd/"
FIRST_DESCRIPTOR = 200
"""Of the file that children inherit: libraries have none of such a number open."""
TURN_TIMEOUT = 5.0
"""Seconds that a head waits for the one before it to end."""
LOOK_INTERVAL = 0.1
"""Seconds between two looks for a key."""
SAY_INTERVAL = 5.0
"""Seconds between two lines about what is waited for."""
GREETING_TIMEOUT = 1.0
"""Seconds to learn whether a coordinator asks for a key."""

_published: dict[Path, MeshKeys] = {}
"""The files of this process: to open and close one would end its lock."""


class NoKey(Exception):
    """This process can have no key of the mesh; the message says why and what to do."""


class TooLate(NoKey):
    """No coordinator came in time."""


def is_own(mesh: MeshConfig) -> bool:
    """Whether the mesh is one of this host only, and its user said nothing about keys."""
    return mesh.mesh_key_file is None and not mesh.insecure_mesh and is_loopback(mesh.data_parallel_address)


# ---- the head


@contextlib.contextmanager
def publish(mesh: MeshConfig, *, remove: bool = False) -> Iterator[MeshKeys]:
    """The key of the mesh with this coordinator, in its file as long as this lasts, and with ``remove`` no
    longer. Without a place for the file, only processes that inherit the key have it."""
    directory = _directory_to_write()
    if directory is None:
        logger.warning(
            "no directory for the key of this mesh (none of %s is there for this user alone): others can "
            "join it only if all are given --mesh-key-file; or set XDG_RUNTIME_DIR",
            ", ".join(str(each) for each in _directories()),
        )
        yield keys.generate()
        return
    path = directory / _name(mesh)
    with contextlib.ExitStack() as held:
        found = _take_over(path) or keys.generate()
        if (descriptor := _write(path, found)) is not None:
            held.callback(os.close, descriptor)
            _published[path] = found
            held.callback(_published.pop, path)
            if remove:
                held.callback(path.unlink, missing_ok=True)
        yield found


def _take_over(path: Path) -> MeshKeys | None:
    """The key of a mesh that was at this address before, if its file is in order."""
    with contextlib.suppress(KeyFileError):
        return _checked(path)
    return None


def _write(path: Path, found: MeshKeys) -> int | None:
    """The file, with a lock of this process, and the descriptor that holds it; None if another process that
    lives has it. It then has the coordinator's port as well, which the coordinator will say."""
    deadline = time.monotonic() + TURN_TIMEOUT
    while _is_held(path):
        if time.monotonic() > deadline:
            logger.warning("%s is held by another mesh of this user", path)
            return None
        time.sleep(LOOK_INTERVAL)
    handle, temporary = tempfile.mkstemp(prefix=".key-", dir=path.parent)  # mode 0600
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(handle, keys.text_of(found).encode())
        os.replace(temporary, path)
    except BaseException:
        os.close(handle)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    return handle


def hand_down(found: MeshKeys) -> int:
    """A descriptor for children, of a file in memory that has the key: :func:`handed_down` is its path."""
    made = os.memfd_create("lockstep-mesh-key")
    os.fchmod(made, 0o600)
    os.write(made, keys.text_of(found).encode())
    descriptor = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
    os.close(made)
    return descriptor


def handed_down(descriptor: int) -> str:
    """What a child that inherits this descriptor is given as ``--mesh-key-file``."""
    return f"{HANDED_DOWN}{descriptor}"


def descriptors(mesh: MeshConfig) -> tuple[int, ...]:
    """What a child with these settings has to inherit for its key."""
    path = mesh.mesh_key_file or ""
    return (int(path.removeprefix(HANDED_DOWN)),) if path.startswith(HANDED_DOWN) else ()


# ---- the others


def find(mesh: MeshConfig) -> MeshKeys | None:
    """The key of the mesh with this coordinator, which lives; None if there is none for this user.

    Raises:
        KeyFileError: there is a file that cannot be trusted.
    """
    for directory in _directories():
        path = directory / _name(mesh)
        if path in _published:
            return _published[path]
        if _is_usable(directory) and _is_held(path):
            return _checked(path)
    return None


def wait(mesh: MeshConfig, timeout: float) -> MeshKeys:
    """The same for a process that may be earlier than its head.

    Raises:
        NoKey: the coordinator that answers is not this user's, or has no key.
        TooLate: none came within ``timeout`` seconds.
        KeyFileError: as above.
    """
    began = said_at = time.monotonic()
    while True:
        found = find(mesh)
        if found is not None:
            return found
        mechanism = _mechanism_of(mesh)
        if mechanism is not None and (found := find(mesh)) is None:
            raise NoKey(_why_not(mesh, mechanism))
        now = time.monotonic()
        if now - began > timeout:
            raise TooLate(f"gave up after {now - began:.0f} s of waiting for {_whom(mesh)}")
        if now - said_at >= SAY_INTERVAL:
            said_at = now
            logger.info("waiting for %s (%.0f s of at most %.0f s)", _whom(mesh), now - began, timeout)
        time.sleep(LOOK_INTERVAL)


def _mechanism_of(mesh: MeshConfig) -> str | None:
    """What the coordinator asks of its peers, None if none answers. The caller may run an event loop."""
    with ThreadPoolExecutor(1) as pool:
        asked = mechanism_at(mesh.coordinator_endpoint, GREETING_TIMEOUT)
        return pool.submit(asyncio.run, asked).result()


def _whom(mesh: MeshConfig) -> str:
    return f"the coordinator at {mesh.coordinator_endpoint}"


def _why_not(mesh: MeshConfig, mechanism: str) -> str:
    if mechanism == "CURVE":
        return (
            f"{_whom(mesh)} takes only peers with the key of its mesh, and this user has none for it: start "
            "this as the user that started it, with the same XDG_RUNTIME_DIR, or give both the same "
            "--mesh-key-file"
        )
    return (
        f"{_whom(mesh)} was started without a mesh key, so any user of this host can be behind it: start it "
        "with one, or give --insecure-mesh here, too"
    )


# ---- files


def _name(mesh: MeshConfig) -> str:
    """Loopback addresses mean something in one network namespace: containers may share the directory."""
    address = mesh.data_parallel_address
    address = "127.0.0.1" if address == "localhost" else address
    return f"mesh-{address}-{mesh.data_parallel_rpc_port}-{_network()}.key"


def _network() -> int:
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/net").st_ino
    return 0


def _directories() -> list[Path]:
    """Where key files of this user may be, the best place first: that of the session, which no other user can
    enter."""
    user = os.geteuid()
    session = [os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{user}"]
    found = [Path(each) / "lockstep" for each in session if each]
    shared = [os.environ.get("TMPDIR"), *PLACES]
    found += [Path(each) / f"lockstep-{user}" for each in shared if each]
    return [each for each in dict.fromkeys(found) if each.is_absolute()]


def _directory_to_write() -> Path | None:
    for directory in _directories():
        with contextlib.suppress(OSError):
            if directory.parent.is_dir():
                directory.mkdir(mode=0o700, exist_ok=True)
                if _is_usable(directory) and os.access(directory, os.W_OK | os.X_OK):
                    return directory
    return None


def _is_usable(directory: Path) -> bool:
    """Whether this is a directory of this user, which nobody else can enter: in a place that all can write
    to, another user may have made it first."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    private = not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and private


def _is_held(path: Path) -> bool:
    """Whether the process that published a file lives."""
    try:
        with path.open("rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _checked(path: Path) -> MeshKeys:
    """The key in a file of this user. (That of a mesh that ends may go meanwhile: then there is none.)"""
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_uid != os.geteuid():
            raise KeyFileError(f"{path} belongs to another user: remove it")
    return keys.load(path)
