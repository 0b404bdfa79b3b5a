"""The picker's certificate for TLS: given files, or one that it signs itself.

Gateways do not verify it: the protocol asks for encryption, and network policies decide who connects.
"""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from coordinator.distribution import install_extra
from router.http.tls import pair_problem

LIFE = datetime.timedelta(days=3650)
"""Lifetime of a self-signed certificate."""


class CertificateError(Exception):
    """Missing or unusable certificate; the message says what to do."""


def certificate(directory: Path | None, host: str) -> tuple[bytes, bytes]:
    """Private key and certificate chain in PEM, from files or self-signed.

    Raises:
        CertificateError: a file cannot be read, or there is no library to make one.
    """
    if directory is None:
        return self_signed(host)
    files = directory / "tls.key", directory / "tls.crt"
    try:
        key, chain = (file.read_bytes() for file in files)
        if problem := pair_problem(*(("--cert-path:", str(file)) for file in files)):
            raise CertificateError(problem)
        return key, chain
    except OSError as error:
        raise CertificateError(f"--cert-path: {error.filename}: {error.strerror}") from error


def self_signed(host: str) -> tuple[bytes, bytes]:
    """New private key with a self-signed certificate for this host.

    Raises:
        CertificateError: the library is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise CertificateError(
            f"--secure-serving without --cert-path needs cryptography: {install_extra('epp')}"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "lockstep-epp")])
    now = datetime.datetime.now(datetime.UTC)
    names: list[x509.GeneralName] = [x509.DNSName("localhost")]
    try:
        names.append(x509.IPAddress(ipaddress.ip_address(host)))
    except ValueError:
        names.append(x509.DNSName(host))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + LIFE)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, made.public_bytes(serialization.Encoding.PEM)
