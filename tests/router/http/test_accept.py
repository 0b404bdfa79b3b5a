"""Front ends share a listening socket: evenly, and without loss when one dies."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from router.http.accept import Tally, most_files
from router.http.listen import bind, let_successors_in
from tests.waiting import until

FRONT_END = """
import asyncio, pathlib, socket, sys, uvloop
from router.http.accept import Acceptor, Tally

class Says(asyncio.Protocol):
    def connection_made(self, transport):
        open_ones.add(self)
        self.transport = transport
        transport.write(sys.argv[2].encode())
    def connection_lost(self, error):
        open_ones.discard(self)

open_ones = set()

async def main():
    listener = socket.socket(fileno=int(sys.argv[1]))
    tally = Tally(pathlib.Path(sys.argv[3]), int(sys.argv[2]), 2)
    acceptor = Acceptor(listener, Says, lambda: len(open_ones), tally, 128)
    print("listens", flush=True)
    await asyncio.sleep(60)

uvloop.run(main())
"""


def start(listener: socket.socket, number: int, file: Path) -> subprocess.Popen[bytes]:
    started = subprocess.Popen(
        [sys.executable, "-P", "-c", FRONT_END, str(listener.fileno()), str(number), str(file)],
        stdout=subprocess.PIPE,
        pass_fds=[listener.fileno()],
    )
    assert started.stdout is not None
    assert started.stdout.readline() == b"listens\n"
    return started


def test_a_port_that_is_bound_is_taken_though_nobody_listens() -> None:
    """The second of two simultaneous starts fails at bind, not later at listen."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} on 127.0.0.1 is in use: choose another with --port"):
            bind("127.0.0.1", port)
        let_successors_in(first)
        first.listen()
        client = socket.create_connection(("127.0.0.1", port))
        served, _ = first.accept()
        served.close()  # first, so that the connection stays in TIME_WAIT
        client.close()
    bind("127.0.0.1", port).close()


def test_a_tally_is_shared(tmp_path: Path) -> None:
    one, two = (Tally(tmp_path / "connections", number, 2) for number in (0, 1))
    assert not one.is_ahead()
    one.tell(3)
    assert one.is_ahead()
    assert not two.is_ahead()
    two.tell(3)
    assert not one.is_ahead()
    assert repr(one) == "<Tally of 0: [3, 3]>"
    Tally(tmp_path / "connections", 0, 2)
    assert two.is_ahead(), "a new process begins with none"


def test_connections_are_spread_and_none_waits_for_a_dead_front_end(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        front_ends = [start(listener, number, tmp_path / "connections") for number in (0, 1)]
        address = listener.getsockname()

        async def callers(count: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter, int]]:
            """As many at once; each with the number of the front end that has it."""
            opened = await asyncio.gather(*(asyncio.open_connection(*address) for _ in range(count)))
            return [(reader, writer, int(await reader.readexactly(1))) for reader, writer in opened]

        async def run() -> None:
            first = await callers(40)
            spread = Counter(number for _, _, number in first)
            assert min(spread[0], spread[1]) >= 10, spread
            os.kill(front_ends[0].pid, signal.SIGKILL)
            async with asyncio.timeout(5):
                second = await callers(20)
            assert {number for _, _, number in second} == {1}
            for reader, _, number in first:
                if number == 0:
                    assert await reader.read() == b""
            for _, writer, _ in (*first, *second):
                writer.close()

        try:
            asyncio.run(run())
        finally:
            for front_end in front_ends:
                front_end.kill()
                front_end.communicate()


@pytest.mark.parametrize(
    ("limit", "most"), [(65536, 61440), (1024, 960), (300, 236), (100, 75), (resource.RLIM_INFINITY, 2**62)]
)
def test_some_files_are_kept_back_from_connections(limit: int, most: int) -> None:
    assert most_files(limit) == most


def test_a_lone_front_end_answers_more_clients_than_it_has_files(tmp_path: Path) -> None:
    """Clients without a file wait until others have gone; libuv would close their connections."""
    log = tmp_path / "log"
    with log.open("w") as output:
        router = subprocess.Popen(
            [
                "sh",
                "-c",
                'ulimit -n 120; exec "$@"',
                "sh",
                sys.executable,
                "-P",
                "-m",
                "router",
                "--port",
                "0",
            ],
            stdout=output,
            stderr=output,
        )
    try:
        until(lambda: "listening on" in log.read_text(), 30)
        found = re.search(r"listening on http://127.0.0.1:(\d+)", log.read_text())
        assert found is not None
        port = int(found[1])

        async def call() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = await reader.readuntil(b"}")
            await asyncio.sleep(0.3)  # with its connection open
            writer.close()
            return answer

        async def run() -> list[bytes]:
            async with asyncio.timeout(30):
                return await asyncio.gather(*(call() for _ in range(250)))

        answers = asyncio.run(run())
        assert all(answer.startswith(b"HTTP/1.1 200 OK") for answer in answers)
        waits = "connections wait until others end (1 so far): too many files are open"
        until(lambda: waits in log.read_text())
    finally:
        router.terminate()
        assert router.wait(20) == 0
