"""Ed25519 keys that sign capsules, as PEM files and as JSON web keys (RFC 8037).

The ``cryptography`` package (extra ``sign``) is imported where a key is used.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from coordinator.distribution import install_extra
from router.signing.canonical import canonical

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ALGORITHM = "Ed25519"
KEYS_PATH = "/.well-known/lockstep-keys.json"
"""Where a router publishes its keys."""
MOST_KEY_BYTES = 1 << 16
"""Largest file of a key."""


class SigningKeyError(ValueError):
    """Unusable key; the message has what to do."""


class PublicKey(msgspec.Struct, frozen=True, kw_only=True):
    """Public key of capsules, as a JSON web key."""

    kty: str = "OKP"
    crv: str = ALGORITHM
    x: str
    """The key's 32 bytes in base64url."""
    kid: str
    """Its name: the thumbprint of RFC 7638."""


class PublicKeys(msgspec.Struct, frozen=True):
    """Body of ``GET /.well-known/lockstep-keys.json``."""

    keys: list[PublicKey]


class CapsuleSignature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Signature of a capsule: of the canonical form of all its other fields."""

    algorithm: str
    key: str
    """Name of the key, its ``kid``."""
    value: str
    """64 bytes in base64url."""


class CapsuleKey:
    """Private key of a mesh, by which its routers sign capsules."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        x = encoded(key.public_key().public_bytes_raw())
        self.public = PublicKey(x=x, kid=thumbprint(x))

    def __repr__(self) -> str:
        return f"<CapsuleKey {self.public.kid}>"

    @classmethod
    def read(cls, file: str) -> CapsuleKey:
        """The key in a PEM file, as ``openssl genpkey -algorithm ed25519`` writes it.

        Raises:
            SigningKeyError: the file cannot be read, or the package for keys is missing.
        """
        try:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
            from cryptography.hazmat.primitives.serialization import load_pem_private_key
        except ImportError as error:
            raise SigningKeyError(f"--capsule-key needs {install_extra('sign')}") from error
        try:
            with Path(file).open("rb") as opened:
                key = load_pem_private_key(opened.read(MOST_KEY_BYTES), None)
        except OSError as error:
            raise SigningKeyError(f"--capsule-key {file}: {error.strerror or error}") from error
        except (ValueError, TypeError) as error:
            raise SigningKeyError(f"--capsule-key {file} is no PEM file of a private key: {error}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise SigningKeyError(
                f"--capsule-key {file} is no Ed25519 key: make one with openssl genpkey -algorithm ed25519"
            )
        return cls(key)

    def sign(self, fields: Mapping[str, object]) -> CapsuleSignature:
        """Signature of a capsule's other fields."""
        return CapsuleSignature(ALGORITHM, self.public.kid, encoded(self._key.sign(canonical(fields))))


def signature_problem(fields: Mapping[str, object], keys: PublicKeys) -> str | None:
    """Why a capsule is not signed by one of these keys; None if it is."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if fields.get("signature") is None:
        return "the capsule is not signed"
    try:
        signature = msgspec.convert(fields["signature"], CapsuleSignature)
    except msgspec.ValidationError as error:
        return f"the capsule's signature cannot be read: {error}"
    key = next((each for each in keys.keys if each.kid == signature.key), None)
    if key is None or signature.algorithm != ALGORITHM:
        known = ", ".join(each.kid for each in keys.keys) or "none"
        return f"the capsule is signed by key {signature.key[:64]}, and the given keys are {known}"
    rest = {name: value for name, value in fields.items() if name != "signature"}
    try:
        public = Ed25519PublicKey.from_public_bytes(decoded(key.x))
        public.verify(decoded(signature.value), canonical(rest))
    except (InvalidSignature, ValueError):
        return f"the capsule's signature is not that of key {key.kid}: it was changed after it was signed"
    return None


def thumbprint(x: str) -> str:
    """Name of a public key by RFC 7638."""
    fields = {"crv": ALGORITHM, "kty": "OKP", "x": x}
    return encoded(hashlib.sha256(canonical(fields)).digest())


def encoded(data: bytes) -> str:
    """Bytes in base64url, without padding."""
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def decoded(text: str) -> bytes:
    """Bytes from base64url."""
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
