"""Gateways before a mesh: their programs, and their files with other ports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.deploy.files import DEPLOY, ROOT
from tests.mesh.harness import Command, Ports, free_port, serve, wait_until

GATEWAYS = DEPLOY / "gateways"
PEERS = Path(os.environ.get("PEERS", ROOT / "build" / "peers"))
"""Where examples/benchmarks/install_peers.sh puts programs of others."""
LISTENS = "8080"
"""Port of clients in each file.

Routers are at 8000 and 8001 there, and the picker at 9002.
"""


def program(name: str) -> str | None:
    """The path of a program of others, if it is installed here."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    beside = [Path(sys.executable).parent / name, *PEERS.glob(f"*/bin/{name}")]
    return found or next((str(path) for path in beside if path.exists()), None)


NONE: Mapping[str, str] = {}
COMMANDS = {
    "nginx": ("nginx.conf", ["-g", "daemon off;", "-c"]),
    "haproxy": ("haproxy.cfg", ["-f"]),
    "caddy": ("Caddyfile", ["run", "--adapter", "caddyfile", "--config"]),
    "envoy": ("envoy.yaml", ["--concurrency", "1", "--log-level", "warning", "--disable-hot-restart", "-c"]),
}
"""The file of each program, and its arguments before the file."""
CHECKS = {
    "nginx": ["-t", "-c"],
    "haproxy": ["-c", "-f"],
    "caddy": ["validate", "--adapter", "caddyfile", "--config"],
    "envoy": ["--mode", "validate", "-c"],
}
"""Arguments that only check a file."""


def with_ports(file: str, folder: Path, ports: dict[str, int]) -> Path:
    """A copy of a file with other ports, and with its temporary files in ``folder``."""
    text = (GATEWAYS / file).read_text()
    for old, new in ports.items():
        for before in (f"127.0.0.1:{old}", f"port_value: {old}", f'port: "{old}"'):
            text = text.replace(before, before.replace(old, str(new)))
    copy = folder / file
    copy.write_text(text.replace("/tmp/lockstep-nginx", str(folder)))
    return copy


@contextmanager
def gateway(
    name: str, folder: Path, ports: dict[str, int], file: str | None = None, changes: Mapping[str, str] = NONE
) -> Iterator[str]:
    """URL of a running gateway, with this or its own file; it is ended afterwards.

    ``changes``: more texts of the file to replace.
    """
    own_file, arguments = COMMANDS[name]
    listens = free_port()
    path = with_ports(file or own_file, folder, {LISTENS: listens, **ports})
    for old, new in changes.items():
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    found = program(name)
    assert found is not None
    with (folder / f"{name}.log").open("w+b") as log:
        child = subprocess.Popen(
            [found, *arguments, str(path)], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        with until_answered(child, f"http://127.0.0.1:{listens}", Path(log.name)) as url:
            yield url


@contextmanager
def until_answered(child: subprocess.Popen[bytes], url: str, log: Path) -> Iterator[str]:
    """The URL of a process before a mesh once it answers; it is ended afterwards."""
    try:

        def is_up() -> bool:
            assert child.poll() is None, log.read_text(errors="replace")
            return status(f"{url}/v1/models") == 200

        wait_until(is_up, 30, f"{url} answers")
        yield url
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()


def status(url: str, body: bytes | None = None) -> int:
    """Status of a request; 0 without an answer."""
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def metric(url: str, name: str) -> dict[str, float]:
    """Values of a metric of a router, by their labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    pairs = [line.rpartition(" ") for line in lines if line.startswith(f"{name}{{")]
    return {labels: float(value) for labels, _, value in pairs}


def by_engine(url: str, name: str) -> dict[str, float]:
    """The same, summed by instance."""
    found: dict[str, float] = {}
    for labels, value in metric(url, name).items():
        engine = labels.partition('engine="')[2].partition('"')[0]
        found[engine] = found.get(engine, 0.0) + value
    return found


class TwoRouters(Ports):
    """A mesh whose instances have two routers, each with a port of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.other_port = free_port()

    @property
    def urls(self) -> list[str]:
        return [self.url, f"http://127.0.0.1:{self.other_port}"]

    @property
    def ports(self) -> dict[str, int]:
        """For :func:`gateway`."""
        return {"8000": self.http, "8001": self.other_port}

    command: Command
    other: Command


@contextmanager
def two_routers(folder: Path, instances: int = 2, flags: Sequence[str] = ()) -> Iterator[TwoRouters]:
    """A mesh on the shipped model, one router of ``serve`` and one more."""
    mesh = TwoRouters()
    fixed = ["--num-gpu-blocks-override", "600", "--dtype", "float32", "--max-num-seqs", "64"]
    with serve(folder / "serve.log", "-dp", str(instances), *mesh.head(), *fixed, *flags) as command:
        command.wait_for(f"{instances} instances ready" if instances > 1 else "1 instance ready")
        mesh.command = command
        join = ["--port", str(mesh.other_port), *mesh.join()]
        with Command(folder / "router.log", "router", *join) as other:
            mesh.other = other
            wait_until(lambda: status(f"{mesh.urls[1]}/health") == 200, 30, "the second router is ready")
            yield mesh
