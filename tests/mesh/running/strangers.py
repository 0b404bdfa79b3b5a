"""A process without the mesh's key that connects to every port of its host's address.

    python -m tests.mesh.running.strangers

It says nothing, sends garbage, a handshake without a key, one with another key, or one that was recorded, in turn.
Prints for each port how often it connected when its standard input ends.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

from parallel.links.handshake import Accepting, Connecting, HandshakeVerdict, Offer
from parallel.links.keys import LinkKey

MOST_OPEN = 300
PAUSE = 0.002
LISTENS = "0A"
KEY = LinkKey.derive(b"no key of this mesh")


def recorded() -> bytes:
    """All that a side sent that was accepted elsewhere."""
    one, other = Connecting(Offer("meeting"), KEY), Accepting(lambda _: HandshakeVerdict.ACCEPTED, KEY)
    answer = other.feed(one.hello[: other.wanted])
    other.feed(one.hello[-other.wanted :])
    return one.hello + one.feed(answer)


def words() -> Iterator[bytes]:
    offer = Offer("meeting")
    yield from itertools.cycle(
        [
            b"",
            b"\xff" * 5000,
            b"GET / HTTP/1.1\r\n\r\n",
            Connecting(offer, None).hello,
            Connecting(offer, KEY).hello,
            recorded(),
        ]
    )


def ports() -> Iterator[tuple[str, int]]:
    """Where anything listens here, over version 4 of IP; not on loopback, where HTTP is."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        row = line.split()
        address, _, port = row[1].partition(":")
        host = socket.inet_ntoa(bytes.fromhex(address)[::-1])
        if row[3] == LISTENS and not host.startswith("127."):
            yield host, int(port, 16)


def main() -> None:
    opened: deque[socket.socket] = deque()
    counts: Counter[tuple[str, int]] = Counter()
    said = words()
    while not select.select([sys.stdin], [], [], 0)[0]:
        for where in list(ports()):
            connection = socket.socket()
            opened.append(connection)
            connection.settimeout(0.2)
            with contextlib.suppress(OSError):
                connection.connect(where)
                connection.sendall(next(said))
                counts[where] += 1
            if len(opened) > MOST_OPEN:
                opened.popleft().close()
            time.sleep(PAUSE)
    for (host, port), count in counts.items():
        print(f"{host}:{port} {count}")
    for connection in opened:
        connection.close()


if __name__ == "__main__":
    main()
