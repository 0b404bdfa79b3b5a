"""A coordinator's name that comes to mean another address, as that of a pod does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import asyncio, sys
import zmq, zmq.asyncio
from coordinator.member_connection import Watcher

def mean(address):
    with open("/etc/hosts", "w") as file:
        file.write(f"127.0.0.1 localhost\\n{address} coordinator.test\\n")

def listen(context, address, port):
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.IPV6, 1)
    host = f"[{address}]" if ":" in address else address
    return socket, socket.bind_to_random_port(f"tcp://{host}") if not port else socket.bind(f"tcp://{host}:{port}")

async def main(before, after):
    context = zmq.asyncio.Context()
    mean(before)
    socket, port = listen(context, before, 0)
    watcher = Watcher(f"tcp://coordinator.test:{port}", "test")
    running = asyncio.create_task(watcher.run(lambda view: None))
    await asyncio.wait_for(socket.recv_multipart(), 10)
    socket.close(linger=0)
    mean(after)
    socket, _ = listen(context, after, port)
    await asyncio.wait_for(socket.recv_multipart(), 20)
    print("found again", flush=True)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    socket.close(linger=0)

asyncio.run(main(*sys.argv[1:]))
"""
IN_A_NAMESPACE = 'cp /etc/hosts "$0" && mount --bind "$0" /etc/hosts && exec "$@"'


@pytest.mark.mesh
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
@pytest.mark.parametrize(
    "addresses", [("127.0.0.2", "127.0.0.3"), ("::1", "127.0.0.2"), ("127.0.0.2", "::1")]
)
def test_a_name_is_resolved_again_when_the_connection_is_lost(
    addresses: tuple[str, str], tmp_path: Path
) -> None:
    own_hosts = ["unshare", "--mount", "sh", "-c", IN_A_NAMESPACE, str(tmp_path / "hosts")]
    found = subprocess.run(
        [*own_hosts, sys.executable, "-c", SCRIPT, *addresses],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    if "mount" in found.stderr and "permission denied" in found.stderr.lower():
        pytest.skip("no namespaces here")
    assert found.stdout == "found again\n", found.stderr
