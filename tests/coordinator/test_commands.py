"""How a command finds the coordinator."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from coordinator.commands import REFUSED_PATIENCE, find_view
from router.launcher.entry import INTERRUPTED
from router.launcher.serve import main
from router.tools.operate import main_drain, main_role, main_scale


def test_nobody_there_is_said_soon(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unheard:  # bound, so that nobody else comes to listen there
        unheard.bind(("127.0.0.1", 0))
        port = unheard.getsockname()[1]
        for command, *rest in ((main_scale,), (main_drain,), (main_role, "decode")):
            began = time.monotonic()
            assert command(["1", *rest, "-dpp", str(port)]) == 1
            assert time.monotonic() - began < REFUSED_PATIENCE + 5.0, "and not the 10 s of an answer"
            assert f"no answer from a coordinator at tcp://127.0.0.1:{port}" in capsys.readouterr().err


def test_an_address_that_is_none_is_said_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(find_view("tcp://no.such.host.invalid:1", 60.0))
    assert time.monotonic() - began < 30.0


def test_silence_is_given_its_time() -> None:
    """As of a coordinator that is stopped, or behind a slow network."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            asyncio.run(find_view(f"tcp://127.0.0.1:{silent.getsockname()[1]}", 1.0))
        assert time.monotonic() - began >= 1.0


def test_an_interrupted_command_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("router.tools.operate._carry_out", interrupted)
    monkeypatch.setattr("router.launcher.serve.resolve", interrupted)
    assert main(["scale", "2"]) == INTERRUPTED
    assert main(["serve"]) == INTERRUPTED
