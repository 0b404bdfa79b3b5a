"""Operations under load, without the loss of a token.

Instances are killed and restarted, drained and added; one of two front ends is killed.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from coordinator.messages import State
from tests.mesh.faults.test_loss import crowd, crowd_of
from tests.mesh.harness import Command, Ports, free_port, serve, wait_until

pytestmark = pytest.mark.mesh

FLAGS = ["--dtype", "float32", "--num-gpu-blocks-override", "1000", "--max-num-seqs", "32"]
NUM_STREAMS = 12
CHUNK_FRAME = re.compile(rb"\r\n[0-9a-f]+\r\n")
"""Between two chunks of an HTTP body; events themselves have no carriage return."""
LONG = 600
"""Tokens of streams that must still run when something happens to them."""


class Operated(Ports):
    """A mesh of two instances behind two front ends, with its admin API."""

    command: Command
    undisturbed: list[list[int]]

    def __init__(self) -> None:
        super().__init__()
        self.admin = free_port()

    def ask(self, path: str, body: object = None) -> tuple[int, Any]:
        """Status and JSON of the admin API's answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.admin}/admin/{path}",
            None if body is None else json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def ready_ranks(self) -> list[int]:
        _, world = self.ask("world")
        return [instance["rank"] for instance in world["instances"] if instance["state"] == "ready"]

    def metric(self, name: str) -> float:
        """Value of a metric, summed over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=20) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def pinned(self, rank: int) -> tuple[int, str | None]:
        """Status and Retry-After of a request for one instance."""
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            b'{"prompt": "a", "max_tokens": 1}',
            {"content-type": "application/json", "x-data-parallel-rank": str(rank)},
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, None
        except urllib.error.HTTPError as error:
            return error.code, error.headers["retry-after"]

    def lockstep(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """A ``lockstep`` command, as a user gives it."""
        return subprocess.run(
            [
                sys.executable, "-P", "-c", "import sys; from router.launcher.serve import main; sys.exit(main())",
                *argv, *self.join(),
            ],
            capture_output=True,
            text=True,
            timeout=60,
        )  # fmt: skip


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    ports = Operated()
    log = tmp_path_factory.mktemp("operated") / "serve.log"
    flags = ["-dp", "2", "-asc", "2", "--restart", "--enable-eplb", "--admin-port", str(ports.admin), *FLAGS]
    with serve(log, *ports.head(), *flags) as command:
        command.wait_for("2 instances ready")
        ports.command = command
        ports.undisturbed = crowd_of(ports, NUM_STREAMS)
        yield ports
        assert command.stop() == 0
        assert "Traceback" not in command.log


def under_load(ports: Operated, rank: int, act: Callable[[], None]) -> list[list[int]]:
    """Token ids of streams; ``act`` is called when the instance of this rank runs some."""

    def once_they_run() -> None:
        running = f'vllm:num_requests_running{{engine="{rank}"'
        wait_until(lambda: ports.metric(running) >= NUM_STREAMS // 4, 20, "streams run")
        act()

    return asyncio.run(crowd(ports, once_they_run, NUM_STREAMS))


def under_steady_load(ports: Operated, act: Callable[[], None]) -> None:
    """New streams again and again until something has been done to the mesh.

    All must give what they should.
    """

    async def run() -> None:
        acting = asyncio.create_task(asyncio.to_thread(act))
        while not acting.done():
            assert await crowd(ports, count=NUM_STREAMS) == ports.undisturbed
        await acting

    asyncio.run(run())


def test_a_killed_instance_comes_back_under_its_rank(operated: Operated) -> None:
    victim = operated.command.child("Engine_1")
    pinned: set[tuple[int, str | None]] = set()

    def kill() -> None:
        victim.send_signal(signal.SIGKILL)
        wait_until(lambda: operated.ready_ranks() == [0], 30, "instance 1 is away")
        pinned.update(operated.pinned(1) for _ in range(4))  # to either front end

    assert under_load(operated, 1, kill) == operated.undisturbed
    assert (503, "1") in pinned
    assert (400, None) not in pinned, "it comes back: that is no fault of the request"
    assert operated.pinned(2) == (400, None)
    wait_until(lambda: operated.ready_ranks() == [0, 1], 30, "instance 1 is back")
    assert operated.command.child("Engine_1").pid != victim.pid
    # The launcher tells its routers what it did, a little later.
    wait_until(lambda: operated.ask("faults")[1]["restarts"] == {"engine": 1}, 10, "the restart is told")
    _, faults = operated.ask("faults")
    assert faults["detections"]["process_exit"] == 1
    assert sum(faults["resumes"].values()) > 0
    assert any("Engine_1 is started again" in fault["text"] for fault in faults["recent"])
    assert crowd_of(operated, NUM_STREAMS) == operated.undisturbed


class Streaming:
    """One stream, over a connection of its own."""

    def __init__(self, ports: Operated) -> None:
        self._ports = ports
        self.port = 0

    async def begin(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._ports.http)
        self.port = self._writer.get_extra_info("sockname")[1]
        body = json.dumps(
            {"prompt": "It was", "max_tokens": LONG, "temperature": 0, "stream": True, "ignore_eos": True}
        )
        self._writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
        )
        await self._reader.readuntil(b"data: {")

    async def end(self) -> str | None:
        """Read to the end; returns the text, None if the connection broke before."""
        try:
            rest = await self._reader.read(-1)
        except ConnectionResetError:
            return None
        finally:
            self._writer.close()
        events = CHUNK_FRAME.sub(b"", b"data: {" + rest).decode().split("\n\n")
        if "data: [DONE]" not in events:
            return None
        chunks = [json.loads(event[6:])["choices"][0] for event in events if event.startswith("data: {")]
        assert chunks[-1]["finish_reason"] == "length"
        return "".join(chunk["text"] for chunk in chunks)


async def streams_of(ports: Operated, routers: list[int], count: int) -> dict[int, list[Streaming]]:
    """Long streams, by the pid of the front end that has them."""
    streams = [Streaming(ports) for _ in range(count)]
    await asyncio.gather(*(stream.begin() for stream in streams))
    of_port = {
        connection.raddr.port: pid
        for pid in routers
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.raddr and connection.laddr.port == ports.http
    }
    return {pid: [stream for stream in streams if of_port[stream.port] == pid] for pid in routers}


def test_a_killed_front_end_takes_only_its_own_connections(operated: Operated) -> None:
    routers = [operated.command.child(f"Router_{number}").pid for number in (0, 1)]

    async def run() -> None:
        streams = await streams_of(operated, routers, 16)
        victim, survivor = sorted(routers, key=lambda pid: len(streams[pid]))
        assert streams[victim], f"both front ends take connections: {streams}"
        assert streams[survivor]
        ending = {pid: [asyncio.create_task(stream.end()) for stream in streams[pid]] for pid in routers}
        psutil.Process(victim).kill()
        killed_at = time.monotonic()
        expected = len(streams[survivor])
        while (held := await asyncio.to_thread(operated.metric, "vllm:num_requests_")) != expected:
            assert time.monotonic() - killed_at < 1.0, f"{held} requests are held for {expected} streams"
            await asyncio.sleep(0.05)
        assert await crowd(operated, count=1) == operated.undisturbed[:1], "new connections are taken"
        (text,) = set(await asyncio.gather(*ending[survivor]))
        assert text is not None, "untouched, and all alike"
        assert set(await asyncio.gather(*ending[victim])) == {None}

    before = operated.metric("vllm:request_success_total")
    asyncio.run(run())
    again = operated.command.child("Router_0").pid, operated.command.child("Router_1").pid
    assert set(again) != set(routers)
    wait_until(lambda: operated.metric("lockstep:requests_in_flight") == 0, 10)
    assert operated.metric("vllm:request_success_total") > before
    _, faults = operated.ask("faults")
    assert faults["restarts"]["router"] == 1


def test_scaling_and_draining_under_load_cost_no_token(operated: Operated) -> None:
    """From 2 instances to 3, 2 and 1, by command line and admin API."""
    outputs: list[str] = []

    def act() -> None:
        grown = operated.lockstep("scale", "3")
        assert grown.returncode == 0, grown.stderr
        outputs.append(grown.stdout)
        assert operated.ready_ranks() == [0, 1, 2]

    under_steady_load(operated, act)
    assert "starting instance 2" in outputs[0]

    def shrink() -> None:
        given_up = operated.lockstep("drain", "2", "--wait-timeout", "0.001")
        assert given_up.returncode == 1
        assert "lockstep drain: error: not done after 0." in given_up.stderr
        assert "instance 2 is " in given_up.stderr
        drained = operated.lockstep("drain", "2", "--timeout", "0")  # unless it has left meanwhile
        assert drained.returncode == 0 or "there is no instance 2" in drained.stderr, drained.stderr
        outputs.append(given_up.stdout + drained.stdout)
        status, answer = operated.ask("scale", {"n": 1})
        assert (status, answer["text"]) == (202, "draining instance 1")
        wait_until(lambda: operated.ready_ranks() == [0], 20)

    under_steady_load(operated, shrink)
    assert "instance 2 was asked to drain" in outputs[1]
    assert operated.view().waiting_for == "", "nobody waits for who was told to go"


def test_what_is_refused(operated: Operated) -> None:
    """Follows the test that leaves one instance."""
    assert operated.lockstep("scale", "1").returncode == 0
    last = operated.lockstep("drain", "0")
    assert (last.returncode, last.stderr) == (
        1,
        "lockstep drain: error: instance 0 is the last one that serves: add one first, or say --force\n",
    )
    nobody = operated.lockstep("drain", "5")
    assert "there is no instance 5; ranks now: 0" in nobody.stderr
    assert operated.ask("drain", {"rank": 0})[0] == 409
    assert operated.ready_ranks() == [0]
    with urllib.request.urlopen(f"{operated.url}/health") as healthy:
        assert healthy.status == 200
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{operated.url}/admin/world")


@pytest.mark.nightly
def test_emptied_by_force_and_without_its_fork_server_the_mesh_waits_for_others(operated: Operated) -> None:
    assert operated.lockstep("drain", "0", "--force").returncode == 0
    assert [member for member in operated.view().members if member.state is State.READY] == []
    operated.command.child("ForkServer").kill()
    grown = operated.lockstep("scale", "1")
    assert grown.returncode == 0, grown.stderr
    operated.command.wait_for("falling back to a normal process start for Engine_0")
    assert operated.ready_ranks() == [0]
    victim = operated.command.child("Engine_0")
    killed = under_load(operated, 0, lambda: victim.send_signal(signal.SIGKILL))
    assert killed == operated.undisturbed, "the only instance died, and its requests waited for its successor"
