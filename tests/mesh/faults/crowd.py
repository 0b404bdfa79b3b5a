"""A crowd of bad clients: silent ones, ones that stall, leave, or send garbage.

    python -m tests.mesh.faults.crowd --clients 1000

starts a mesh, lets them at it all at once beside some that behave, and fails unless those are served and nothing
of the others is left: no block, no request, no connection, no memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil

from tests.mesh.clients.test_clients import metrics
from tests.mesh.harness import Ports, serve, wait_until

REQUEST_TIMEOUT = 5
"""Seconds that a client of the mesh may take to send its request."""
PATIENCE = 120.0
"""Seconds in which all of a crowd have to be gone."""
STALL = 12.0
"""Seconds for which stalling clients stall, unless they are cut off before."""
NOT_READING = REQUEST_TIMEOUT + 1.0
"""Seconds that a client that does not read stays connected.

The mesh cuts none of these off, and their answers are ready within a second.
"""
MOST_GROWTH = 64 * 1024**2
"""Bytes by which the router may grow after the first crowd: a thousand connections' buffers."""

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


def request(body: dict[str, Any], path: str = "/v1/completions", length: int | None = None) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % (len(data) if length is None else length) + data


def streamed(rng: random.Random, num_tokens: int) -> bytes:
    ids = [rng.randrange(16, 4000) for _ in range(20)]
    body = {"model": "lockstep-moe", "prompt": ids, "max_tokens": num_tokens, "ignore_eos": True}
    return request(body | {"stream": True, "stream_options": {"include_usage": True}})


async def says_nothing(reader: Reader, writer: Writer, rng: random.Random) -> None:
    await asyncio.wait_for(reader.read(), STALL)


async def stalls_in_the_head(reader: Reader, writer: Writer, rng: random.Random) -> None:
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
    await asyncio.wait_for(reader.read(), STALL)


async def stalls_in_the_body(reader: Reader, writer: Writer, rng: random.Random) -> None:
    writer.write(request({"prompt": "a"}, length=5000))
    await asyncio.wait_for(reader.read(), STALL)


async def leaves_in_the_body(reader: Reader, writer: Writer, rng: random.Random) -> None:
    writer.write(request({"prompt": "a"}, length=5000))
    await writer.drain()


async def leaves_in_the_stream(reader: Reader, writer: Writer, rng: random.Random) -> None:
    writer.write(streamed(rng, 1500))
    await asyncio.wait_for(reader.read(200), 60)


async def leaves_at_once(reader: Reader, writer: Writer, rng: random.Random) -> None:
    writer.write(streamed(rng, 1500))
    await writer.drain()


async def does_not_read(reader: Reader, writer: Writer, rng: random.Random) -> None:
    writer.write(streamed(rng, 30))
    await asyncio.sleep(NOT_READING)


async def sends_garbage(reader: Reader, writer: Writer, rng: random.Random) -> None:
    writer.write(rng.randbytes(rng.randrange(1, 5000)) + b"\r\n\r\n")
    await asyncio.wait_for(reader.read(), STALL)


async def sends_no_json(reader: Reader, writer: Writer, rng: random.Random) -> None:
    body = rng.randbytes(300)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 400"), answer[:100]


async def looks_at_the_page(reader: Reader, writer: Writer, rng: random.Random) -> None:
    writer.write(b"GET /dashboard/feed HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await asyncio.wait_for(reader.read(1000), 60)
    await asyncio.sleep(rng.random() * 3)


async def behaves(reader: Reader, writer: Writer, rng: random.Random) -> None:
    writer.write(streamed(rng, 16))
    answer = await asyncio.wait_for(reader.readuntil(b"data: [DONE]"), PATIENCE)
    assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
    assert b'"completion_tokens":16' in answer, answer[-500:]
    assert b'"error"' not in answer, answer[-500:]


KINDS: tuple[Callable[[Reader, Writer, random.Random], Coroutine[Any, Any, None]], ...] = (
    says_nothing, stalls_in_the_head, stalls_in_the_body, leaves_in_the_body, leaves_in_the_stream, leaves_at_once,
    does_not_read, sends_garbage, sends_no_json, looks_at_the_page, behaves,
)  # fmt: skip


async def one(port: int, index: int) -> tuple[str, str]:
    """Run the client of this index; returns its kind, and what went wrong.

    Problems are reported for clients that behave.
    """
    kind, rng = KINDS[index % len(KINDS)], random.Random(index)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError as error:
        return kind.__name__, f"no connection: {error}"
    try:
        await kind(reader, writer, rng)
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        if kind is behaves:
            return kind.__name__, f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(OSError):
            if rng.random() < 0.5:
                writer.transport.abort()  # a reset
            writer.close()
    return kind.__name__, ""


async def crowd(port: int, clients: int) -> list[tuple[str, str]]:
    return await asyncio.gather(*(one(port, index) for index in range(clients)))


def traces(ports: Ports, router: psutil.Process) -> dict[str, float]:
    """Requests and connections that are left: none, when all is well."""
    found = metrics(ports)
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    left = {name: sum(value for key, value in found.items() if key.startswith(name + "{")) for name in names}
    left["lockstep:requests_in_flight"] = found["lockstep:requests_in_flight"]
    served = [c for c in router.net_connections("tcp") if c.laddr and c.laddr.port == ports.http]
    left["connections"] = sum(connection.status not in ("LISTEN", "NONE") for connection in served)
    return {name: value for name, value in left.items() if value}


def run(ports: Ports, router: psutil.Process, clients: int) -> dict[str, Any]:
    """One crowd, and the wait until nothing of it is left.

    Fails if a client that behaved was not served.
    """
    began = time.monotonic()
    outcomes = asyncio.run(crowd(ports.http, clients))
    wrong = [outcome for outcome in outcomes if outcome[1]]
    assert not wrong, f"{len(wrong)} of {clients}: {wrong[:5]}"
    ended = time.monotonic()
    try:
        wait_until(lambda: not traces(ports, router), PATIENCE)
    except AssertionError:
        raise AssertionError(f"left after {PATIENCE:g} s: {traces(ports, router)}") from None
    return {
        "clients": dict(Counter(kind for kind, _ in outcomes)),
        "seconds": round(ended - began, 1),
        "clean_after": round(time.monotonic() - ended, 1),
        "rss_mib": round(router.memory_info().rss / 1024**2, 1),
        "descriptors": router.num_fds(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--crowds", type=int, default=3, help="one after another (default: 3)")
    args = parser.parse_args()
    ports = Ports()
    flags = [
        "--request-timeout",
        str(REQUEST_TIMEOUT),
        "--disable-access-log",
        "--num-gpu-blocks-override",
        "2000",
    ]
    with (
        tempfile.TemporaryDirectory() as place,
        serve(Path(place) / "log", "-dp", "2", *ports.head(), *flags) as command,
    ):
        command.wait_for("2 instances ready")
        router = command.child("Router")
        found = []
        for _ in range(args.crowds):
            found.append(run(ports, router, args.clients))
            print(json.dumps(found[-1]), flush=True)
        assert found[-1]["descriptors"] <= found[0]["descriptors"] + 5, found
        assert (found[-1]["rss_mib"] - found[0]["rss_mib"]) * 1024**2 < MOST_GROWTH, found
        assert "Traceback" not in command.log, command.log[-3000:]
        assert command.stop() == 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
