"""The security mechanism that a ZeroMQ listener requires, read from its greeting.

ZeroMQ does not tell a connecting socket why the other end hung up. The greeting that each side sends
first (ZMTP 3, https://rfc.zeromq.org/spec/23) names its security mechanism; with what we have ourselves,
that tells.
"""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit

GREETING_BYTES = 64
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
HALF_OF_OURS = SIGNATURE + b"\x03\x00"
"""First part of our ZMTP greeting, after which a listener sends all of its own.

At a mechanism it dislikes it may hang up before it names its own.
"""


async def mechanism_at(endpoint: str, timeout: float) -> str | None:
    """``NULL`` (none) or ``CURVE``; None if nothing that speaks ZMTP answers within ``timeout`` seconds."""
    address = urlsplit(endpoint)
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            try:
                writer.write(HALF_OF_OURS)
                greeting = await reader.readexactly(GREETING_BYTES)
            finally:
                writer.close()
        if greeting[0] == SIGNATURE[0] and greeting[9] == SIGNATURE[9]:
            return greeting[12:32].rstrip(b"\0").decode("ascii", errors="replace")
    return None
