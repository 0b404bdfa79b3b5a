"""The key that the ends of a link prove to each other."""

from __future__ import annotations

import hashlib
import hmac
import secrets

KEY_BYTES = 32


class LinkKey:
    """A secret of all processes of one mesh, derived from the mesh's key."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        """A key of :data:`KEY_BYTES` bytes.

        Raises:
            ValueError: it has another length.
        """
        if len(secret) != KEY_BYTES:
            raise ValueError(f"a key of links has {KEY_BYTES} bytes, not {len(secret)}")
        self._secret = secret

    def __repr__(self) -> str:
        """Text for logs, without the secret."""
        return "<LinkKey>"

    @classmethod
    def derive(cls, secret: bytes) -> LinkKey:
        """The key of a mesh's links, from a secret that all its processes have."""
        return cls(hmac.digest(secret, b"lockstep: key of links, 1", hashlib.sha256))

    @classmethod
    def generate(cls) -> LinkKey:
        """A new key, from the system's random numbers."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @property
    def secret(self) -> bytes:
        """The raw secret bytes, only for a private channel."""
        return self._secret

    def proof(self, label: bytes, *parts: bytes) -> bytes:
        """HMAC-SHA256 over a label and these parts, each with its length before it: 32 bytes."""
        return _authenticated(self._secret, label, *parts)

    def expand(self, label: bytes, salt: bytes, num_bytes: int) -> bytes:
        """Secret bytes for one purpose: HKDF with SHA-256 (RFC 5869), ``label`` as its info."""
        return expand(self._secret, label, salt, num_bytes)


def expand(secret: bytes, info: bytes, salt: bytes, num_bytes: int) -> bytes:
    """HKDF with SHA-256: extract, then expand (RFC 5869 2.2, 2.3)."""
    pseudorandom = hmac.digest(salt, secret, hashlib.sha256)
    blocks, block = b"", b""
    for number in range(1, -(-num_bytes // hashlib.sha256().digest_size) + 1):
        block = hmac.digest(pseudorandom, block + info + bytes([number]), hashlib.sha256)
        blocks += block
    return blocks[:num_bytes]


NO_KEY = LinkKey(bytes(KEY_BYTES))
"""Key of a mesh without one: it proves nothing.

Versions, purposes and sizes are compared all the same.
"""


def _authenticated(secret: bytes, *parts: bytes) -> bytes:
    content = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(secret, content, hashlib.sha256)
