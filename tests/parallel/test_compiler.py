"""Which compiler is taken, with real compilers."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
from pathlib import Path

import pytest

from parallel import compiler

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "seven.cpp"
    path.write_text('extern "C" int seven() { return NUMBER; }\n')
    return path


@pytest.mark.parametrize(
    ("asked", "warning"),
    [
        (None, ""),
        ("", ""),
        ("env g++", ""),
        ("g++ -O1", ""),
        ("/nowhere/g++-4", "CXX=/nowhere/g++-4: there is no such command; "),
        ("'g++", "CXX='g++: there is no such command; "),
    ],
)
def test_cxx_is_a_command_with_arguments_or_another_is_taken(
    asked: str | None,
    warning: str,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if asked is not None:
        monkeypatch.setenv("CXX", asked)
    assert ctypes.CDLL(str(compiler.compiled(source, [], ["-DNUMBER=7"]))).seven() == 7
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == bool(warning)
    assert warning in "".join(said)


def test_arguments_of_cxx_make_another_file(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for number in (7, 8):
        monkeypatch.setenv("CXX", f"g++ -DNUMBER={number}")
        made.append(ctypes.CDLL(str(compiler.compiled(source, []))).seven())
    assert made == [7, 8]


def test_without_any_the_one_that_was_asked_for_is_named(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "ccache g++")
    with pytest.raises(OSError, match=r"no C\+\+ compiler was found \(nor CXX=ccache g\+\+\): install g\+\+"):
        compiler.compiled(source, [])


def test_a_file_that_was_cut_short_is_made_anew(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = compiler.compiled(source, [], ["-DNUMBER=7"])
    path.write_bytes(b"")
    assert compiler.compiled(source, [], ["-DNUMBER=7"]) == path
    assert ctypes.CDLL(str(path)).seven() == 7
    assert f"{path} cannot be loaded and is made anew: " in caplog.text


def test_a_compiler_that_is_killed_is_told_and_leaves_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    killed.write_text('#!/bin/sh\nfor last; do :; done\necho half >"$last"\nkill -9 $$\n')
    killed.chmod(0o755)
    monkeypatch.setenv("CXX", str(killed))
    with pytest.raises(subprocess.CalledProcessError) as caught:
        compiler.compiled(source, [])
    assert compiler.reason(caught.value) == "the compiler failed: exit status -9"
    assert [each.name for each in (tmp_path / "cache").rglob("*") if each.is_file()] == ["lock"]
