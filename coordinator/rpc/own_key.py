"""Automatic key of a mesh on one host, where the user gave none.

All processes of a user at one address share it.

The first of them makes it: a file of mode 0600 in a directory of mode 0700, named by the coordinator's
address. The others find it there, in whatever order they start. The file stays when a mesh ends, as the key
of this user's next mesh at that address. So it cannot be the wrong one, and instances that outlive their head
know the key of the next. ``serve`` hands the key down to its own processes by descriptor, which nothing that
happens to the file changes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
from pathlib import Path

from coordinator.addresses import is_loopback
from coordinator.config import MeshAddressConfig
from coordinator.rpc import keys
from coordinator.rpc.keys import KeyFileError, MeshKeys

logger = logging.getLogger(__name__)

PLACES = ("/tmp", "/var/tmp", "/dev/shm")
"""Fallback directories for keys where the user has no session directory."""
HANDED_DOWN = "/proc/self/fd/"
FIRST_DESCRIPTOR = 200
"""The least number of the descriptor that children inherit: libraries have none so high open."""


def is_own(mesh: MeshAddressConfig) -> bool:
    """Whether the mesh is on this host only and no option about keys is set."""
    return mesh.mesh_key_file is None and not mesh.insecure_mesh and is_loopback(mesh.data_parallel_address)


def is_lasting(mesh: MeshAddressConfig) -> bool:
    """Whether the key is a file of an operator, which later meshes have, too.

    One that is made here may be another after a restart of the host, at another port or in a new container.
    """
    return mesh.mesh_key_file is not None and not mesh.mesh_key_file.startswith(HANDED_DOWN)


def find(mesh: MeshAddressConfig) -> MeshKeys | None:
    """The key of this user's mesh with this coordinator, or None if none was made.

    Raises:
        KeyFileError: there is a file that cannot be trusted or used.
    """
    for directory in _directories():
        path = directory / _name(mesh)
        if _is_usable(directory) and path.exists():
            if path.lstat().st_uid != os.geteuid():
                raise KeyFileError(f"{path} belongs to another user: remove it")
            return keys.load(path)
    return None


def obtain(mesh: MeshAddressConfig) -> MeshKeys:
    """The key of this user's mesh with this coordinator, made if there is none.

    Without a place for the file, this process and those that inherit the key are alone with it.

    Raises:
        KeyFileError: as above.
    """
    found = find(mesh)
    if found is not None:
        return found
    made = keys.generate()
    for directory in _directories():
        path = directory / _name(mesh)
        if not _is_writable(directory):
            continue
        try:
            keys.write(made, path)
        except KeyFileError as error:
            if path.exists():
                return keys.load(path)  # another process was faster
            logger.debug("the key of this mesh goes to another place: %s", error)
        else:
            logger.debug("the key of this mesh is in %s, for processes of this user", path)
            return made
    logger.warning(
        "no directory for the key of this mesh (none of %s is private to this user and has room): others "
        "can join it only if all are given --mesh-key-file; or set XDG_RUNTIME_DIR",
        ", ".join(map(str, _directories())),
    )
    return made


# ---- children


def hand_down(found: MeshKeys) -> int:
    """A descriptor for children of an in-memory file with the key; :func:`handed_down` is its path."""
    made = os.memfd_create("lockstep-mesh-key")
    os.fchmod(made, 0o600)
    os.write(made, keys.text_of(found).encode())
    descriptor = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
    os.close(made)
    return descriptor


def handed_down(descriptor: int) -> str:
    """``--mesh-key-file`` value for a child that inherits this descriptor."""
    return f"{HANDED_DOWN}{descriptor}"


def descriptors(mesh: MeshAddressConfig) -> tuple[int, ...]:
    """File descriptors that a child must inherit to read its key."""
    path = mesh.mesh_key_file or ""
    return (int(path.removeprefix(HANDED_DOWN)),) if path.startswith(HANDED_DOWN) else ()


# ---- files


def _name(mesh: MeshAddressConfig) -> str:
    """File name of a mesh's key: coordinator address, port and network namespace."""
    address = mesh.data_parallel_address
    address = "127.0.0.1" if address == "localhost" else address
    return f"mesh-{address}-{mesh.data_parallel_rpc_port}-{_network()}.key"


def _network() -> int:
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/net").st_ino
    return 0


def _directories() -> list[Path]:
    """Candidate directories for this user's key files, best first.

    That is the session's, which no other user can enter; the last is that of TMPDIR, which may differ from
    terminal to terminal.
    """
    user = os.geteuid()
    session = [os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{user}"]
    found = [Path(each) / "lockstep" for each in session if each]
    found += [Path(each) / f"lockstep-{user}" for each in (*PLACES, os.environ.get("TMPDIR")) if each]
    return [each for each in dict.fromkeys(found) if each.is_absolute()]


def _is_writable(directory: Path) -> bool:
    """Whether a key can be put into a directory, made if it is missing."""
    with contextlib.suppress(OSError):
        if directory.parent.is_dir():
            directory.mkdir(mode=0o700, exist_ok=True)
            return _is_usable(directory) and os.access(directory, os.W_OK | os.X_OK)
    return False


def _is_usable(directory: Path) -> bool:
    """Whether this is a directory of this user, which nobody else can enter.

    In a place that all can write to, another user may have made it first.
    """
    try:
        found = directory.lstat()
    except OSError:
        return False
    private = not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and private
