"""Encryption of links by the kernel (kTLS), where both hosts have it.

The keys come from the handshake of the link: one for each direction, and no other link has them. They follow
from the mesh's key and both nonces: with the mesh's key, recorded traffic can be read later. Records are
those of TLS 1.3 with AES-128-GCM (RFC 8446 5.2, linux/tls.h). The handshake of TLS is not used.

Whether a host's kernel can is found out once, by sending through a connection to itself. No machine on which
this was written has such a kernel: only the refusal, the keys and their layout have been tested.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
from functools import cache

from parallel.links.handshake import Side

logger = logging.getLogger(__name__)

TCP_ULP, SOL_TLS, TLS_TX, TLS_RX = 31, 282, 1, 2
_TLS_1_3, _AES_GCM_128 = 0x0304, 51
_INFO = struct.Struct("=HH8s16s4s8s")
"""``struct tls12_crypto_info_aes_gcm_128``: version, cipher, iv, key, salt, number of the record."""
_SECRET_BYTES = 16 + 4 + 8  # key, salt, iv
_TRIAL = b"lockstep" * 64


def crypto_info(secret: bytes) -> bytes:
    """What the kernel takes for one direction, from :data:`_SECRET_BYTES` bytes of secret."""
    key, salt, iv = secret[:16], secret[16:20], secret[20:28]
    return _INFO.pack(_TLS_1_3, _AES_GCM_128, iv, key, salt, bytes(8))


def encrypt(connection: socket.socket, handshake: Side, *, connects: bool) -> None:
    """Encrypt both directions from the next byte on; ``connects``: this side made the connection.

    Raises:
        OSError: the kernel cannot.
    """
    away = crypto_info(handshake.secret(b"to the side that accepts", _SECRET_BYTES))
    back = crypto_info(handshake.secret(b"to the side that connects", _SECRET_BYTES))
    _switch_on(connection, away if connects else back, back if connects else away)


def _switch_on(connection: socket.socket, sends: bytes, receives: bytes) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, TCP_ULP, b"tls")
    connection.setsockopt(SOL_TLS, TLS_TX, sends)
    connection.setsockopt(SOL_TLS, TLS_RX, receives)


@cache
def can_encrypt() -> bool:
    """Whether this host's kernel can; the log says why not."""
    try:
        _try_it()
    except OSError as error:
        logger.info(
            "links between hosts are authenticated, not encrypted: the kernel has no TLS (%s; modprobe tls)",
            error.strerror or error,
        )
        return False
    logger.info("links between hosts are encrypted by the kernel, where the other host's can, too")
    return True


def _try_it() -> None:
    """Send through an encrypted connection, both ways.

    Raises:
        OSError: the kernel cannot, or what comes out is not what went in.
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        one = stack.enter_context(socket.create_connection(listener.getsockname(), 1.0))
        two = stack.enter_context(listener.accept()[0])
        two.settimeout(1.0)
        first, second = (
            crypto_info(bytes(range(_SECRET_BYTES))),
            crypto_info(bytes(range(1, _SECRET_BYTES + 1))),
        )
        _switch_on(one, first, second)
        _switch_on(two, second, first)
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
