"""Checks of the endpoint's TLS certificate and key files.

OpenSSL names none of them, and asks a terminal for the passphrase of a key.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from router.config import HttpConfig


def tls_problem(config: HttpConfig) -> str | None:
    """Why the endpoint cannot use its TLS files; None if it can or has none."""
    if config.ssl_keyfile is None or config.ssl_certfile is None:
        return None
    key, chain = ("--ssl-keyfile", config.ssl_keyfile), ("--ssl-certfile", config.ssl_certfile)
    authorities = None if config.ssl_ca_certs is None else ("--ssl-ca-certs", config.ssl_ca_certs)
    files = [file for file in (key, chain, authorities) if file is not None]
    unreadable = next(filter(None, (_unreadable(*file) for file in files)), None)
    no_certificate = (_no_certificate(*file) for file in files[1:])
    return unreadable or next(filter(None, no_certificate), None) or pair_problem(key, chain)


def pair_problem(key: tuple[str, str], chain: tuple[str, str]) -> str | None:
    """Why a private key does not go with a certificate; None if it does.

    Each is a name for people and a path. The certificate is one.
    """
    context, asked = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), []

    def passphrase() -> str:
        asked.append(key)
        return ""

    try:
        context.load_cert_chain(chain[1], key[1], passphrase)
    except (ssl.SSLError, OSError) as error:
        named = " ".join(key)
        if asked:
            return f"{named} has a passphrase: give the key without (openssl pkey -in {key[1]})"
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            return f"{named} is not the key of {' '.join(chain)}: another pair was meant for one of them"
        return f"{named} is no private key in PEM: {_reason(error)}"
    return None


def _unreadable(flag: str, path: str) -> str | None:
    try:
        with Path(path).open("rb") as file:
            file.read(1)
    except OSError as error:
        return f"{flag} {path} cannot be read: {error.strerror}"
    return None


def _no_certificate(flag: str, path: str) -> str | None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        return f"{flag} {path} is no certificate in PEM: {_reason(error)}"
    return None


def _reason(error: Exception) -> str:
    """OpenSSL's reason in words."""
    reason = getattr(error, "reason", None)
    return str(reason).lower().replace("_", " ") if reason else str(error)
