from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mesh.harness import Command, Ports, serve


@pytest.fixture(scope="session", autouse=True)
def with_a_terminal() -> Iterator[None]:
    """Let children heed SIGHUP, also if the tests run under nohup."""
    before = signal.getsignal(signal.SIGHUP)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where instances have their KV caches: on the host, or on a pretended device."""
    place: str = request.param
    if place == "device":
        folder = Path(__file__).parent
        monkeypatch.setenv("PYTHONPATH", f"{folder / 'pretended_gpu'}:{folder.parents[1]}")
    return place


class Mesh(Ports):
    """A running mesh of two instances on the shipped model."""

    command: Command


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """`serve -dp 2` in float32, with a KV cache small enough that its use shows."""
    ports = Mesh()
    log: Path = tmp_path_factory.mktemp("mesh") / "serve.log"
    flags = ["--num-gpu-blocks-override", "600", "--dtype", "float32", "--max-num-seqs", "64"]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with serve(log, "-dp", "2", *ports.head(), *flags, "--request-timeout", "5") as command:
        command.wait_for("2 instances ready")
        ports.command = command
        yield ports
        assert command.stop() == 0
        assert "Traceback" not in command.log
