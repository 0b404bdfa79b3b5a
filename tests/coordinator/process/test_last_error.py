"""The last error of a process, as its launcher reads it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.process.last_error import MOST_BYTES, VARIABLE, LastError, LastErrorHandler

CHILD = """
import logging
from coordinator.process import process
process.set_up("child", "info")
logging.error("first")
logging.getLogger("engine").error("refused:\\n  --dtype is %s\\x1b[2J", "float16")
logging.warning("that is no error")
raise SystemExit(3)
"""


@pytest.fixture
def log() -> logging.Logger:
    log = logging.Logger("child")
    log.addHandler(LastErrorHandler())
    return log


def test_the_last_error_of_a_process_outlives_it() -> None:
    with LastError() as last:
        child = subprocess.run([sys.executable, "-c", CHILD], env={**os.environ, **last.environment})
        assert child.returncode == 3
        assert last.read() == "refused: --dtype is float16 [2J"


def test_an_error_that_nobody_expected_has_its_cause(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LastError() as last:
        assert last.read() == ""
        monkeypatch.setenv(VARIABLE, last.environment[VARIABLE])
        log.error("x" * 2 * MOST_BYTES)
        assert last.read() == "x" * MOST_BYTES
        try:
            raise KeyError("model_type")
        except KeyError:
            log.exception("it ends")
        assert last.read() == "it ends: KeyError: 'model_type'"


def test_another_file_that_has_the_number_by_now_is_left_alone(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_text("kept")
    with LastError() as last:
        _, device, inode = last.environment[VARIABLE].rsplit(":", 2)
    monkeypatch.setenv(VARIABLE, f"{other}:{device}:{inode}")
    log.error("not here")
    assert other.read_text() == "kept"
    monkeypatch.setenv(VARIABLE, f"{tmp_path / 'away'}:1:2")
    log.error("nor there")


def test_without_a_file_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", fails)
    with LastError() as last:
        assert (last.environment, last.read()) == ({}, "")
