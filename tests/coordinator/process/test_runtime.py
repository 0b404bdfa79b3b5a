"""Directories of processes that run, and what is left of those that were killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.process import runtime
from coordinator.process.runtime import MARK, PREFIX, places, runtime_directory, sweep

HOLDER = """
import sys
from coordinator.process.runtime import runtime_directory
with runtime_directory() as path:
    (path / "counts").write_text("1")
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def hold() -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a directory, and the directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.communicate("", timeout=20)


def test_it_is_this_users_alone_and_goes_with_its_owner(here: Path) -> None:
    with runtime_directory() as path:
        assert path.parent == here
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "file").write_text("a")
    assert list(here.iterdir()) == []


def test_what_was_left_by_a_killed_process_is_taken_away_by_the_next(here: Path) -> None:
    killed, left = hold()
    alive, held = hold()
    killed.kill()
    killed.communicate()
    assert (left / "counts").exists()
    with runtime_directory() as path:
        assert sorted(here.iterdir()) == sorted((path, held)), "and nothing of those that run"
    assert (held / "counts").exists()
    end(alive)
    assert list(here.iterdir()) == []


def test_nothing_else_is_taken_away(here: Path) -> None:
    named = here / f"{PREFIX}mine"
    named.mkdir()
    (named / "thesis.tex").write_text("a")
    target = here / "target"
    target.mkdir()
    (target / MARK).touch()
    (here / f"{PREFIX}link").symlink_to(target)
    deep = here / f"{PREFIX}deep"
    (deep / "below").mkdir(parents=True)
    (deep / MARK).touch()
    (deep / "below" / "file").touch()
    sweep(here)
    assert (named / "thesis.tex").exists()
    assert (target / MARK).exists()
    assert (deep / "below" / "file").exists()


def test_the_next_place_is_taken_where_one_cannot_be_written(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = here / "session"
    session.mkdir()
    monkeypatch.setenv("TMPDIR", str(here / "nowhere"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    monkeypatch.setattr(runtime, "PLACES", ("/proc", "/sys", "/proc"))  # where nobody can make a file
    with runtime_directory() as path:
        assert path.parent == session
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    refused = pytest.raises(
        OSError, match=r"none of .*nowhere, /proc, /sys can be written and has .* KiB left"
    )
    with refused, runtime_directory():
        pass


def test_the_session_comes_after_what_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    monkeypatch.setenv("TMPDIR", "relative")
    assert list(map(str, places())) == ["/tmp", "/var/tmp", "/run/user/1", "/dev/shm"]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("TMPDIR", "/dev/shm")
    assert list(map(str, places())) == ["/dev/shm", "/tmp", "/var/tmp"]


def test_many_at_once_do_not_take_each_others(here: Path) -> None:
    held = [hold() for _ in range(8)]
    assert len({path for _, path in held}) == 8
    assert all((path / "counts").exists() for _, path in held)
    for process, _ in held:
        end(process)
    assert os.listdir(here) == []
