#!/usr/bin/env python3
"""Plain TCP sockets between two processes: the least that an exchange costs.

    python examples/benchmarks/links/plain_sockets.py listen 198.18.78.1 7000
    python examples/benchmarks/links/plain_sockets.py connect 198.18.78.1 7000 --what ping --bytes 64

``ping`` is a message there and one back, and half of its time is printed; ``exchange`` is one in both
directions at once; ``stream`` is one direction as fast as it goes. The times are taken in C.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from parallel.compiler import compiled

WAITING = {"sleeping": 0, "looking": 1, "offering": 2}
"""How a process waits for bytes: in ``poll``, looking, or looking and offering its core."""
STREAMED = 1 << 20
"""Bytes of one send of a stream."""
ACCEPT_SECONDS = 30.0


@cache
def library() -> ctypes.CDLL:
    """The compiled ``plain_sockets.cpp``.

    Raises:
        OSError, subprocess.SubprocessError: as :func:`parallel.compiler.compiled`.
    """
    names = ("exchange_many", "ping_many")
    loaded = ctypes.CDLL(str(compiled(Path(__file__).with_suffix(".cpp"), [], symbols=names)))
    for name in names:
        getattr(loaded, name).restype = ctypes.c_int64
    return loaded


def exchange(sockets: Sequence[socket.socket], num_bytes: int, waiting: str, repeats: int) -> list[float]:
    """Seconds of each exchange of ``num_bytes`` with every peer, both directions at once.

    Raises:
        ConnectionError: a peer has closed its end.
    """
    files = (ctypes.c_int32 * len(sockets))(*(each.fileno() for each in sockets))
    give, take = ctypes.create_string_buffer(num_bytes), ctypes.create_string_buffer(num_bytes)
    seconds = (ctypes.c_double * repeats)()
    done = library().exchange_many(
        files,
        ctypes.c_int64(len(sockets)),
        give,
        take,
        ctypes.c_int64(num_bytes),
        ctypes.c_int64(WAITING[waiting]),
        ctypes.c_int64(repeats),
        seconds,
    )
    if done != 0:
        raise ConnectionError("a peer has closed its end")
    return list(seconds)


def ping(peer: socket.socket, num_bytes: int, waiting: str, repeats: int, *, echoes: bool) -> list[float]:
    """Seconds of each of ``repeats`` round trips of ``num_bytes``; one end ``echoes``.

    Raises:
        ConnectionError: the peer has closed its end.
    """
    seconds = (ctypes.c_double * repeats)()
    done = library().ping_many(
        ctypes.c_int32(peer.fileno()),
        ctypes.create_string_buffer(num_bytes),
        ctypes.c_int64(num_bytes),
        ctypes.c_int64(WAITING[waiting]),
        ctypes.c_int64(echoes),
        ctypes.c_int64(repeats),
        seconds,
    )
    if done != 0:
        raise ConnectionError("the peer has closed its end")
    return list(seconds)


def take_part(peer: socket.socket, asked: dict[str, Any], *, echoes: bool) -> list[float]:
    """One end of what is ``asked``; the seconds of each repeat."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    num_bytes, waiting, repeats = asked["bytes"], asked["waiting"], asked["repeats"]
    if asked["what"] == "ping":
        return ping(peer, num_bytes, waiting, repeats, echoes=echoes)
    if asked["what"] == "exchange":
        return exchange([peer], num_bytes, waiting, repeats)
    return [_stream(peer, num_bytes, receives=echoes) for _ in range(repeats)]


def _stream(peer: socket.socket, num_bytes: int, *, receives: bool) -> float:
    """Seconds until the other end has it all and says so."""
    began = time.perf_counter()
    if receives:
        left, room = num_bytes, bytearray(STREAMED)
        while left:
            count = peer.recv_into(room, min(left, STREAMED))
            if count == 0:
                raise ConnectionError("the peer has closed its end")
            left -= count
        peer.sendall(b"1")
    else:
        block = bytes(STREAMED)
        for sent in range(0, num_bytes, STREAMED):
            peer.sendall(memoryview(block)[: num_bytes - sent])
        peer.recv(1)
    return time.perf_counter() - began


def listen(host: str, port: int) -> None:
    """Serve one peer, then end."""
    with socket.create_server((host, port)) as listener:
        print("ready", flush=True)
        listener.settimeout(ACCEPT_SECONDS)
        peer, _ = listener.accept()
    with peer, peer.makefile("rb", buffering=0) as lines:
        while line := lines.readline():
            take_part(peer, json.loads(line), echoes=True)


def connect(host: str, port: int, asked: Sequence[dict[str, Any]]) -> list[list[float]]:
    """The seconds of each repeat of all that is asked, in turn."""
    with socket.create_connection((host, port), timeout=ACCEPT_SECONDS) as peer:
        peer.settimeout(None)
        found = []
        for each in asked:
            peer.sendall(json.dumps(each).encode() + b"\n")
            found.append(take_part(peer, each, echoes=False))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", choices=["listen", "connect"])
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--what", choices=["ping", "exchange", "stream"], default="ping")
    parser.add_argument("--bytes", type=int, nargs="+", default=[64])
    parser.add_argument("--waiting", choices=[*WAITING], default="looking")
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--json", action="store_true", help="print all seconds, a list per size")
    args = parser.parse_args()
    if args.role == "listen":
        listen(args.host, args.port)
        return
    shared = {"what": args.what, "waiting": args.waiting, "repeats": args.repeats}
    found = connect(args.host, args.port, [{**shared, "bytes": each} for each in args.bytes])
    if args.json:
        print(json.dumps(found))
        return
    for num_bytes, seconds in zip(args.bytes, found, strict=True):
        middle = statistics.median(seconds)
        rate = f"{8 * num_bytes / middle / 1e9:.2f} Gbit/s" if args.what == "stream" else ""
        print(f"{num_bytes} bytes: {1e6 * middle / (2 if args.what == 'ping' else 1):.1f} us {rate}")


if __name__ == "__main__":
    main()
