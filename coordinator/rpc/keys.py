"""The key of a mesh: it admits members, keeps others out, and encrypts all traffic.

A process that can read its file is a member. One file holds two CURVE key pairs (the elliptic-curve security
of ZeroMQ, https://rfc.zeromq.org/spec/26): the one of every socket that binds, and the one of every socket
that connects. Both ends prove theirs. The file has the two secret halves; the public ones follow from them.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from parallel.links.keys import KEY_BYTES, LinkKey

FORMAT = "lockstep-mesh-key-1"
"""Format mark of a key file: first word of its key line."""
HEADING = (
    "# The key of a Lockstep mesh, made by `lockstep keygen`. Anyone who can read this file is a member:\n"
    "# copy it to the hosts of the mesh in a safe way, readable only by the user that runs Lockstep.\n"
)
LARGEST_FILE = 4096
"""Maximum size of a key file in bytes."""

FORBIDDEN_MODE = stat.S_IRWXO | stat.S_IWGRP
"""Permission bits that a key file must not have: those of other users.

A group may read it, as containers' mounted secrets need.
"""


class KeyFileError(ValueError):
    """A key file that cannot be used or written; the message says what to do."""


class MeshKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Both key pairs of a mesh, as ZeroMQ takes them (Z85)."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    def __repr__(self) -> str:
        """Text for logs, without the secrets."""
        return f"<MeshKeys {self.server_public[:8].decode()}>"


def generate() -> MeshKeys:
    """New keys, from the system's random numbers."""
    return _of_secrets(zmq.curve_keypair()[1], zmq.curve_keypair()[1])


def _of_secrets(server: bytes, client: bytes) -> MeshKeys:
    return MeshKeys(
        server_public=zmq.curve_public(server),
        server_secret=server,
        client_public=zmq.curve_public(client),
        client_secret=client,
    )


def link_key(keys: MeshKeys) -> LinkKey:
    """Key of the links that carry tensors, derived from both secrets; it gives neither away."""
    return LinkKey.derive(z85.decode(keys.server_secret) + z85.decode(keys.client_secret))


def file_key(keys: MeshKeys) -> LinkKey:
    """Key of the digests of KV blocks in files, derived like that of links."""
    return LinkKey(link_key(keys).expand(b"lockstep: key of KV blocks in files, 1", b"", KEY_BYTES))


def text_of(keys: MeshKeys) -> str:
    """The content of a key file."""
    server, client = z85.decode(keys.server_secret).hex(), z85.decode(keys.client_secret).hex()
    return f"{HEADING}{FORMAT} {server} {client}\n"


def write(keys: MeshKeys, path: Path, *, force: bool = False) -> None:
    """Write a key file with mode 0600, whole or not at all.

    Raises:
        KeyFileError: it exists and ``force`` is not given, or it cannot be written.
    """
    try:
        if path.is_dir():
            raise KeyFileError(f"{path} is a directory: name a file, in it or elsewhere")
        handle, temporary = tempfile.mkstemp(prefix=".mesh-key-", dir=path.parent)  # mode 0600
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text_of(keys))
            if force:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)  # unlike a rename, never over a file that is there
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    except FileExistsError:
        raise KeyFileError(
            f"{path} exists: another key would lock its holders out of the mesh; --force replaces it"
        ) from None
    except OSError as error:
        raise KeyFileError(f"{path} cannot be written: {error.strerror}") from error


def load(path: Path) -> MeshKeys:
    """Read a key file.

    Raises:
        KeyFileError: it is missing, open to others, or no key file.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        raise KeyFileError(
            f"there is no file {path}: make one with `lockstep keygen {path}`, once for the whole mesh"
        ) from None
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from error
    if mode & FORBIDDEN_MODE:
        raise KeyFileError(
            f"{path} has mode {stat.S_IMODE(mode):04o}, so other users can get at the key: chmod 600 {path}"
        )
    return _parse(path, content)


def _parse(path: Path, content: bytes) -> MeshKeys:
    lines = content.decode("ascii", errors="replace").splitlines()
    words = " ".join(line for line in lines if not line.startswith("#")).split()
    try:
        if len(content) > LARGEST_FILE or len(words) != 3 or words[0] != FORMAT:
            raise ValueError
        server, client = (bytes.fromhex(word) for word in words[1:])
        if len(server) != 32 or len(client) != 32:
            raise ValueError
    except ValueError:
        raise KeyFileError(
            f"{path} is no mesh key of this version: copy the file that `lockstep keygen` wrote as it is"
        ) from None
    return _of_secrets(z85.encode(server), z85.encode(client))
