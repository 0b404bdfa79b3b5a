"""Ctrl-C while a command is still being loaded; another system than Linux."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from router.launcher import entry

PAUSED = """
import os, sys, time
class Pause:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.write(1, b".")
            time.sleep(60)
sys.meta_path.insert(0, Pause())
from router.launcher import entry
sys.exit(entry.serve())
"""
"""A console script that stays in the middle of loading one module."""


@pytest.mark.parametrize("module", ["msgspec", "uvloop", "router.launcher.supervisor"])
def test_ends_it_quietly(module: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PAUSED, module],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(1) == b"."
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert said == (b"", b"")
    assert process.returncode == 130


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN])
@pytest.mark.parametrize("script", [entry.serve, entry.lockstep])
def test_later_it_is_what_it_was(
    before: signal.Handlers, script: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def loaded() -> int:
        seen.append(signal.getsignal(signal.SIGINT))
        return 7

    monkeypatch.setattr("router.launcher.serve.main_serve", loaded)
    monkeypatch.setattr("router.launcher.serve.main", loaded)
    of_pytest = signal.signal(signal.SIGINT, before)
    try:
        assert script() == 7
    finally:
        signal.signal(signal.SIGINT, of_pytest)
    assert seen == [before]


ELSEWHERE = """
import os, sys
import psutil, uvloop  # of the system that they were built for
sys.platform = "darwin"
for name in ("sched_getaffinity", "eventfd", "memfd_create", "pidfd_open"):
    delattr(os, name)
from router.launcher import entry
sys.exit(entry.lockstep())
"""
"""Linux with less of what only Linux has."""


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (
            ["serve"],
            2,
            "serve: error: Lockstep runs on Linux only, and this is darwin: use Linux, or a container\n",
        ),
        (["doctor", "--json"], 1, "Lockstep runs on Linux only"),
    ],
)
def test_another_system_is_refused(argv: list[str], status: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", ELSEWHERE, *argv],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert done.returncode == status
