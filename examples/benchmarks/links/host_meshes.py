"""Meshes over two network namespaces, started as on two hosts, and load for them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.process.process import PARENT_VARIABLE
from coordinator.rpc import keys
from examples.benchmarks.links.netns import Network

START_TIMEOUT = 120.0
STOP_TIMEOUT = 20.0
FIRST_PORT = 8100
FIRST_RPC_PORT = 62400
FIRST_MASTER_PORT = 29600
MEASURE_TIMEOUT = 600.0


@dataclass(frozen=True)
class Layout:
    """How a model lies on two hosts."""

    flags: tuple[str, ...]
    """For both hosts."""
    nodes: bool
    """One instance over both, by ``--nnodes``; else one instance each."""

    def commands(self, network: Network, index: int, key: Path) -> tuple[list[str], list[str]]:
        """Arguments of ``serve`` on the head and on the other host."""
        address = network.ends[0].address
        rpc = str(FIRST_RPC_PORT + index)
        port = ["--port", str(FIRST_PORT + index), "-dpp", rpc]
        mesh = ["--mesh-key-file", str(key), *self.flags]
        if self.nodes:
            mesh += [
                "--nnodes",
                "2",
                "--master-addr",
                address,
                "--master-port",
                str(FIRST_MASTER_PORT + index),
            ]
            return [*mesh, *port, "--node-rank", "0"], [*mesh, "--node-rank", "1"]
        mesh += ["-dpa", address, "-dpl", "1"]
        return [*mesh, *port], [*mesh, "-dpp", rpc, "--headless", "-dpr", "1"]


LAYOUTS = {
    "ep": Layout(("-dp", "2", "-ep"), nodes=False),
    "tp": Layout(("-tp", "2"), nodes=True),
    "pp": Layout(("-pp", "2"), nodes=True),
    "independent": Layout(("-dp", "2", "--no-enable-expert-parallel"), nodes=False),
}
"""Layouts by the name in the tables."""


@contextlib.contextmanager
def mesh_on_both(
    network: Network, directory: Path, index: int, layout: Layout, flags: Sequence[str]
) -> Iterator[str]:
    """Start a mesh over both ends; gives its base URL on the head.

    ``flags`` are for both hosts. Logs are in ``directory``.

    Raises:
        OSError: it does not start.
    """
    key = directory / f"mesh-{index}.key"
    key.unlink(missing_ok=True)  # of an earlier run with the same --logs
    keys.write(keys.generate(), key)
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    with contextlib.ExitStack() as stack:
        running = []
        for end, command in zip(network.ends, layout.commands(network, index, key), strict=True):
            log = directory / f"mesh-{index}-{end.name}.log"
            serve = [sys.executable, "-P", "-m", "router.launcher.serve", "--disable-access-log"]
            with log.open("wb") as file:
                child = subprocess.Popen(
                    [*end.prefix, *serve, *flags, *command], stdout=file, stderr=file, env=environment
                )
            stack.callback(_end, child)
            running.append((child, log))
        deadline = time.monotonic() + START_TIMEOUT
        while "ready at" not in running[0][1].read_text(errors="replace"):
            ended = any(child.poll() is not None for child, _ in running)
            if ended or time.monotonic() > deadline:
                said = "\n".join(log.read_text(errors="replace")[-3000:] for _, log in running)
                raise OSError(f"serve does not start:\n{said}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{FIRST_PORT + index}"


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def measured(network: Network, asked: dict[str, Any]) -> dict[str, Any]:
    """One load on a mesh, sent from the head; see :func:`examples.benchmarks.bench_lockstep.measure`.

    Beside what that returns, this has the bytes on the link in both directions: ``device_bytes``, whatever
    they are for, ``wire_bytes`` with all headers, and the ``emulator_core`` that the link itself took.
    ``link_bytes``, of tensors between members alone, are the mesh's own count, if it has one.
    """
    network.counts()
    before = [end.bytes_sent() for end in network.ends]
    shown = network.ends[0].run(
        *(sys.executable, str(Path(__file__).with_name("bench_hosts.py")), "--measure", json.dumps(asked)),
        timeout=MEASURE_TIMEOUT,
    )
    after = [end.bytes_sent() for end in network.ends]
    counts = network.counts()
    run: dict[str, Any] = json.loads(shown.splitlines()[-1])
    run["device_bytes"] = sum(after) - sum(before)
    if counts:
        run["wire_bytes"] = sum(each["wire_bytes"] for each in counts["directions"])
        run["dropped"] = sum(each["dropped"] for each in counts["directions"])
        run["late_p50_us"] = max(each["late_ns"]["p50"] for each in counts["directions"]) / 1e3
        run["emulator_core"] = counts["processor_seconds"] / counts["seconds"]
    return run
