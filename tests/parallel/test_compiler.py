"""Which compiler is taken, and what is loaded of its results, with real compilers."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from parallel import compiler
from parallel.native_source import NativeLibrary, NativeSource

ROOT = Path(__file__).parents[2]

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


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_file_that_was_cut_short_is_made_anew(
    share: float, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = compiler.compiled(source, [], ["-DNUMBER=7"])
    content = path.read_bytes()
    path.unlink()  # what is loaded stays whole
    path.write_bytes(content[: int(share * len(content))])
    assert compiler.compiled(source, [], ["-DNUMBER=7"]) == path
    assert ctypes.CDLL(str(path)).seven() == 7
    assert f"{path} cannot be loaded and is made anew: " in caplog.text


def foreign(path: Path) -> None:
    """Replace a library by another program's, which leaves a mark when it is loaded."""
    source = path.with_name("foreign.cpp")
    source.write_text(
        '#include <cstdlib>\n__attribute__((constructor)) static void loaded() { setenv("FOREIGN", "1", 1); }\n'
    )
    path.unlink(missing_ok=True)
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    source.unlink()


def was_loaded() -> bool:
    """Whether the library left its mark in the process's environment, as C sees it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return getenv(b"FOREIGN") is not None


@pytest.mark.parametrize("write", [0o020, 0o002])
def test_a_library_that_others_can_write_to_is_not_loaded(
    write: int, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = compiler.compiled(source, [], ["-DNUMBER=7"])
    foreign(path)
    path.chmod(0o755 | write)
    assert compiler.compiled(source, [], ["-DNUMBER=7"]) == path
    assert ctypes.CDLL(str(path)).seven() == 7
    assert "others than this user and root can have written it" in caplog.text
    assert not was_loaded()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_library_of_another_user_is_not_loaded(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = compiler.compiled(source, [], ["-DNUMBER=7"])
    foreign(path)
    os.chown(path, 12345, 12345)
    assert ctypes.CDLL(str(compiler.compiled(source, [], ["-DNUMBER=7"]))).seven() == 7
    assert "others than this user and root can have written it" in caplog.text
    assert not was_loaded()
    os.chown(path.parent, 12345, 12345)
    with pytest.raises(OSError, match="set XDG_CACHE_HOME to a directory of your own"):
        compiler.compiled(source, [], ["-DNUMBER=7"])


def test_a_library_without_our_symbols_is_made_anew(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = compiler.compiled(source, [], ["-DNUMBER=7"])
    foreign(path)
    assert compiler.compiled(source, [], ["-DNUMBER=7"], ["seven"]) == path
    assert ctypes.CDLL(str(path)).seven() == 7
    assert f"{path} cannot be loaded and is made anew: it has no seven" in caplog.text
    assert not was_loaded()


def test_the_cache_is_closed_to_others_whatever_the_umask(source: Path) -> None:
    before = os.umask(0)
    try:
        path = compiler.compiled(source, [], ["-DNUMBER=7"])
        path.parent.chmod(0o777)
        made = path.stat().st_ino
        assert compiler.compiled(source, [], ["-DNUMBER=7"]).stat().st_ino == made, "it is trusted"
    finally:
        os.umask(before)
    assert (path.stat().st_mode | path.parent.stat().st_mode) & 0o022 == 0


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
    left = tmp_path / "cache" / "lockstep" / "kernels" / "seven-0.123"
    left.write_text("half")  # by one that was killed together with its compiler
    with pytest.raises(subprocess.CalledProcessError):
        compiler.compiled(source, [])
    assert [each.name for each in (tmp_path / "cache").rglob("*") if each.is_file()] == ["lock"]


def test_a_compiler_that_takes_too_long_is_ended_and_the_line_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        compiler._run(["sh", "-c", "sleep 60 && : -o a-long-command.so"], tmp_path, 0.2)
    line = compiler.reason(caught.value)
    assert line.startswith("the compiler took over 0.2 s: start again when the machine is less busy")
    assert "lockstep kernels DIRECTORY" in line
    assert "sleep" not in line


def test_the_line_that_says_what_is_wrong_is_told(source: Path) -> None:
    source.write_text('#include "missing.hpp"\n')
    source.with_name("missing.hpp").write_text("#include <nowhere>\n")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        compiler.compiled(source, [])
    assert "fatal error: nowhere: No such file" in compiler.reason(caught.value)


def test_a_compiler_does_not_outlive_its_process(source: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text(
        f'#!/bin/sh\nsleep 60 &\necho $! >"{tmp_path}/new"\nmv "{tmp_path}/new" "{tmp_path}/pid"\nwait\n'
    )
    slow.chmod(0o755)
    program = (
        "import atexit, threading; from pathlib import Path; from parallel import compiler\n"
        f"source, pid = Path({str(source)!r}), Path({str(tmp_path / 'pid')!r})\n"
        "before = atexit._ncallbacks()\n"
        "threading.Thread(target=compiler.compiled, args=(source, []), daemon=True).start()\n"
        "while not pid.exists() or atexit._ncallbacks() == before: pass\n"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "CXX": str(slow)},
    )
    child = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 10.0
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < until, "what the compiler had started goes on"


TEXT = """
#include <cstdint>
#include "high.hpp"
struct Pair { int64_t first, second; };
extern "C" {
int64_t lockstep_pair_bytes() { return sizeof(Pair); }
const char* lockstep_name() { return "seven"; }
}
extern "C" double lockstep_half(double whole) { return whole / 2; }
"""
HEADER = '#include <cstdint>\nextern "C" int64_t lockstep_high(int64_t bits) { return int64_t(1) << bits; }\n'


class Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_int64), ("second", ctypes.c_int64))


class Single(ctypes.Structure):
    _fields_ = (("first", ctypes.c_int64),)


@pytest.fixture
def native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NativeSource:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SEVENS", raising=False)
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "seven.cpp").write_text(TEXT)
    (folder / "high.hpp").write_text(HEADER)
    return NativeSource(
        path=folder / "seven.cpp",
        headers=(folder,),
        structs={"pair": Pair},
        off="SEVENS",
        absent="sevens: off,",
        instead="; sixes are used",
    )


def test_functions_are_found_in_the_sources_and_keep_their_types(native: NativeSource) -> None:
    assert set(native.symbols()) == {f"lockstep_{name}" for name in ("pair_bytes", "name", "half", "high")}
    library = native.open()
    assert library.call("high", 40) == 1 << 40, "numbers of 64 bits come back whole"
    assert library.text("name") == "seven"
    half = library.bind("half", ctypes.c_double, result=ctypes.c_double)
    assert half(3.0) == 1.5
    assert getattr(library._loaded, "lockstep_half") is half, "it is kept, so its types are"  # noqa: B009


@pytest.mark.parametrize(
    ("change", "value", "line"),
    [
        ({}, "0", "sevens: off (SEVENS=0)"),
        ({"needs": frozenset({"fma", "tea", "soup"})}, "", "sevens: off, this CPU lacks soup, tea"),
        ({"structs": {"pair": Single}}, "", "has 16 bytes in seven-"),
        ({"flags": ("-nonsense",)}, "", "sevens: off, the compiler failed: "),
        ({"headers": ()}, "", None),
    ],
)
def test_what_cannot_be_used_is_logged(
    native: NativeSource,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: dict[str, object],
    value: str,
    line: str | None,
) -> None:
    monkeypatch.setattr(compiler, "cpu_flags", lambda: frozenset({"fma"}))
    monkeypatch.setenv("SEVENS", value)
    caplog.set_level("INFO", "parallel.native_source")
    found = replace(native, **change).load(_itself)  # type: ignore[arg-type]
    said = [record.getMessage() for record in caplog.records if record.name == "parallel.native_source"]
    assert (found is None) == (line is not None)
    assert len(said) == (line is not None)
    if line is not None:
        assert line in said[0]
        assert said[0].startswith("sevens: off")
        assert said[0].endswith("; sixes are used") == (caplog.records[-1].levelname == "WARNING")


def _itself(library: NativeLibrary) -> NativeLibrary:
    return library
