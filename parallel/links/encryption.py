"""Encryption of links by the kernel (kTLS), where the kernels of both hosts have it.

The keys come from the handshake of the link: one for each direction, and no other link has them. They follow
from the mesh's key and both nonces. So anybody who gets hold of the mesh's key later can read what was
recorded before: there is no forward secrecy. Records are those of TLS 1.3 with AES-128-GCM (RFC 8446 5.2,
linux/tls.h); the handshake of TLS is not used. A key serves as long as its group: 16 TB over one link leave
AES-GCM a margin of 2**-48.

Whether a host can is found out once, by sending through a connection to itself.

This has never run: no kernel with TLS was at hand. Tested are the derivation of keys, the layout of what the
kernel gets, the agreement of both sides, and that a kernel without TLS is found to be one.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from functools import cache

from parallel.links.handshake import Side

TCP_ULP, SOL_TLS, TLS_TX, TLS_RX = 31, 282, 1, 2
_TLS_1_3, _AES_GCM_128 = 0x0304, 51
_INFO = struct.Struct("=HH8s16s4s8s")
"""``struct tls12_crypto_info_aes_gcm_128``: version, cipher, iv, key, salt, number of the record."""
SECRET_BYTES = 16 + 4 + 8
"""Bytes of key, salt and iv; the last two are the nonce of TLS 1.3."""
_TRIAL = b"lockstep" * 64
_TRIAL_SECONDS = 1.0


def crypto_info(secret: bytes) -> bytes:
    """The kernel's TLS argument for one direction, from :data:`SECRET_BYTES` secret bytes."""
    key, salt, iv = secret[:16], secret[16:20], secret[20:SECRET_BYTES]
    return _INFO.pack(_TLS_1_3, _AES_GCM_128, iv, key, salt, bytes(8))


def directions(handshake: Side, *, connects: bool) -> tuple[bytes, bytes]:
    """The kernel's TLS arguments for sending and for receiving, on this side."""
    away = crypto_info(handshake.secret(b"to the side that accepts", SECRET_BYTES))
    back = crypto_info(handshake.secret(b"to the side that connects", SECRET_BYTES))
    return (away, back) if connects else (back, away)


def encrypt(connection: socket.socket, handshake: Side, *, connects: bool) -> None:
    """Encrypt both directions from the next byte on; ``connects``: this side made the connection.

    Raises:
        OSError: the kernel cannot.
    """
    _switch_on(connection, *directions(handshake, connects=connects))


def can_encrypt() -> bool:
    """Whether this host's kernel supports TLS encryption of sockets."""
    return not why_not()


@cache
def why_not() -> str:
    """Reason why this host's kernel cannot encrypt; empty if it can."""
    try:
        _try_it()
    except OSError as error:
        return f"the kernel of this host has no TLS ({error.strerror or error}; `modprobe tls` loads it)"
    return ""


def _switch_on(connection: socket.socket, sends: bytes, receives: bytes) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, TCP_ULP, b"tls")
    connection.setsockopt(SOL_TLS, TLS_TX, sends)
    connection.setsockopt(SOL_TLS, TLS_RX, receives)


def _try_it() -> None:
    """Test kernel TLS over a loopback pair; raises OSError if it fails."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(_TRIAL_SECONDS)
        one = stack.enter_context(socket.create_connection(listener.getsockname(), _TRIAL_SECONDS))
        two = stack.enter_context(listener.accept()[0])
        two.settimeout(_TRIAL_SECONDS)
        away, back = (crypto_info(bytes(range(start, start + SECRET_BYTES))) for start in (0, 100))
        _switch_on(one, away, back)
        _switch_on(two, back, away)
        for source, target in ((one, two), (two, one)):
            source.sendall(_TRIAL)
            found = b""
            while len(found) < len(_TRIAL):
                content = target.recv(len(_TRIAL) - len(found))
                if not content:
                    raise OSError("the connection ended")
                found += content
            if found != _TRIAL:
                raise OSError("what came out is not what went in")
