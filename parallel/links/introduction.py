"""The handshake of the side that connects, over a blocking socket."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import time

from parallel.links.handshake import HANDSHAKE_SECONDS, Connecting, Offer
from parallel.links.keys import LinkKey


def introduce(
    connection: socket.socket, offer: Offer, key: LinkKey | None, seconds: float = HANDSHAKE_SECONDS
) -> Connecting:
    """Run the connecting side's handshake: mutual proof of the mesh's key.

    The connection has another timeout afterwards. Its user closes it, after an error, too.

    Raises:
        parallel.links.handshake.Refused: one side does not take the other; the text says why.
        TimeoutError: it took longer than ``seconds``.
        OSError: the connection broke, or was closed by the other side.
    """
    deadline = time.monotonic() + seconds
    handshake = Connecting(offer, key)
    _send(connection, handshake.hello, deadline)
    while not handshake.is_done:
        _set_timeout(connection, deadline)
        content = connection.recv(handshake.wanted)
        if not content:
            raise ConnectionResetError("it closed the connection in the handshake")
        answer = handshake.feed(content)
        if answer:
            _send(connection, answer, deadline)
    return handshake


def mtu_hole(connection: socket.socket, handshake: Connecting) -> str:
    """Diagnosis of lost large packets (MTU) after a handshake timeout; empty if none."""
    unacknowledged = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
    if unacknowledged or handshake.has_answer:
        direction = "there" if unacknowledged else "from there"
        return (
            f"small packets pass on the way {direction} and large ones do not. Something takes smaller "
            "packets than these interfaces' MTU, and does not say so: find the largest that passes (ping "
            "-M do -s 1472 ADDRESS), and set it on both (ip link set DEVICE mtu BYTES)"
        )
    return ""


def _send(connection: socket.socket, content: bytes, deadline: float) -> None:
    _set_timeout(connection, deadline)
    connection.sendall(content)


def _set_timeout(connection: socket.socket, deadline: float) -> None:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the handshake took too long")
    connection.settimeout(remaining)
