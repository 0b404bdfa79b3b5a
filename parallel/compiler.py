"""Compiles C++ files of Lockstep at first use and caches the results.

This module loads no torch. Where there is no compiler, shared objects that were compiled before are taken
from a directory (:mod:`parallel.built_kernels`).

Nothing that is compiled is needed to serve: each caller has another way, and logs why it is taken.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from parallel import built_kernels
from parallel.built_kernels import DIRECTORY_VARIABLE
from parallel.caches import is_trusted, own_directory
from parallel.kernel_kinds import NEON_OPTIONS, WIDE_VECTORS, CpuTarget, architecture

logger = logging.getLogger(__name__)

COMPILE = ("-O3", "-std=c++17", "-fPIC", "-shared")
AT_HWCAP, AT_HWCAP2 = 16, 26
ARM_FEATURES = {
    "asimd": (AT_HWCAP, 1),
    "crc32": (AT_HWCAP, 7),
    "asimddp": (AT_HWCAP, 20),
    "i8mm": (AT_HWCAP2, 13),
    "bf16": (AT_HWCAP2, 14),
}
"""Features of ARM64 CPUs: a word of the auxiliary vector, and a bit of it."""
ELF_HEADER = 64
"""Bytes of an ELF header."""
TIMEOUT = 300.0
"""Timeout of a compilation at start, in seconds.

It takes a few, and a minute or two on a busy machine.
"""
TIMEOUT_AHEAD = 1200.0
"""Timeout in seconds of a compilation ahead of use, as when building an image.

The machine may be a busy one.
"""
INCLUDE = Path(__file__).parent / "native"
"""Directory of headers that other packages may use."""


def compiled(
    source: Path, headers: Sequence[Path], flags: Sequence[str] = (), symbols: Sequence[str] = ()
) -> Path:
    """The shared object of a source file on this kind of CPU.

    One that was compiled before is taken first (:mod:`parallel.built_kernels`); else the one in the cache.
    ``headers`` are all that it includes from here. One in the cache is made anew if others can write to it,
    or if it lacks one of ``symbols``. It is also made anew if it cannot be loaded (a full disk or a crash cut
    it short).

    Raises:
        OSError: there is no compiler, or no room for the result, or the cache is not this user's own.
        subprocess.SubprocessError: the compiler fails, or takes more than :data:`TIMEOUT`.
    """
    if _ahead is not None:
        return _build_ahead(*_ahead, source, headers, flags)
    if (built := _built_before(source, headers, flags, symbols)) is not None:
        return built
    compiler = _compiler()
    options = [*COMPILE, *native_options(), *flags]
    what = [*(each.read_text() for each in (source, *headers)), *compiler, *options, *sorted(cpu_flags())]
    key = hashlib.sha256("\0".join(what).encode())
    directory = own_directory("kernels")
    path = directory / f"{source.stem}-{key.hexdigest()[:16]}.so"
    if _can_be_loaded(path, symbols):
        return path
    with (directory / "lock").open("w") as lock:  # several processes start at once; one compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _can_be_loaded(path, symbols):
            logger.info("compiling %s (once, a few seconds)", source.name)
            for left in (
                *directory.glob("*.[0-9]*"),
                *directory.glob("cc*"),
            ):  # by processes that were killed
                left.unlink(missing_ok=True)
            fresh = path.with_suffix(f".{os.getpid()}")
            try:
                _run([*compiler, *options, f"-I{INCLUDE}", str(source), "-o", str(fresh)], directory)
                with fresh.open("rb") as made:
                    os.fchmod(made.fileno(), 0o755)  # whatever the umask
                    os.fsync(made.fileno())  # or the name may outlive a crash, and what it names not
                fresh.rename(path)
            finally:
                fresh.unlink(missing_ok=True)
    return path


_ahead: tuple[Path, CpuTarget] | None = None
"""Output directory and target while compiling ahead of use; None otherwise."""


@contextlib.contextmanager
def ahead(directory: Path, target: CpuTarget) -> Iterator[None]:
    """Context in which kernels are compiled ahead, for another CPU, into a directory."""
    global _ahead
    _ahead = (directory, target)
    try:
        yield
    finally:
        _ahead = None


def _build_ahead(
    directory: Path, target: CpuTarget, source: Path, headers: Sequence[Path], flags: Sequence[str]
) -> Path:
    """Compile a source file for a target ahead of use; returns the shared object.

    It is not loaded, since it may not run on this CPU.
    """
    path = directory / built_kernels.file_name(target, source, headers, flags)
    fresh = path.with_suffix(f".{os.getpid()}")
    options = [*COMPILE, *target.options, *built_kernels.split_flags(flags)[0], f"-I{INCLUDE}"]
    try:
        _run([*_compiler(), *options, str(source), "-o", str(fresh)], directory, TIMEOUT_AHEAD)
        fresh.chmod(0o755)
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)
    return path


def _built_before(
    source: Path, headers: Sequence[Path], flags: Sequence[str], symbols: Sequence[str]
) -> Path | None:
    """The shared object for this CPU in the directory of the environment, if any."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    target = built_kernels.target_for(cpu_flags(), flags) if named else None
    if not named or target is None:
        return None
    path = Path(named) / built_kernels.file_name(target, source, headers, flags)
    if _can_be_loaded(path, symbols):
        return path
    logger.warning("%s=%s has no %s: %s is compiled", DIRECTORY_VARIABLE, named, path.name, source.name)
    return None


def _run(command: list[str], directory: Path, timeout: float = TIMEOUT) -> None:
    """Run a compiler that does not outlive this process.

    It has children of its own, so it gets a group. Its temporary files are in a ``directory`` that is known
    to be writable.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(directory)},
    ) as running:

        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGTERM)  # at which it removes its temporary files

        atexit.register(end)
        try:
            _, said = running.communicate(timeout=timeout)
        finally:
            atexit.unregister(end)
            if running.poll() is None:
                end()
    if running.returncode != 0:
        raise subprocess.CalledProcessError(running.returncode, command, stderr=said)


def _can_be_loaded(path: Path, symbols: Sequence[str]) -> bool:
    if not os.path.lexists(path):
        return False
    try:
        if not is_trusted(path):  # to load it runs what is in it
            raise OSError("others than this user and root can have written it")
        if not _is_whole(path):  # else to load it may end this process
            raise OSError("a part of it is missing")
        content = path.read_bytes()
        if missing := [name for name in symbols if f"\0{name}\0".encode() not in content]:
            raise OSError(f"it has no {missing[0]}")  # looked for in the file: what was loaded stays
        ctypes.CDLL(str(path))
    except OSError as error:
        logger.warning("%s cannot be loaded and is made anew: %s", path, error)
        return False
    return True


def _is_whole(path: Path) -> bool:
    """Whether an ELF file is complete, up to its section table at the end."""
    with path.open("rb") as file:
        header = file.read(ELF_HEADER)
    if len(header) < ELF_HEADER:
        return False
    (table,), (size, number) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return bool(table + size * number <= path.stat().st_size)


def _compiler() -> list[str]:
    """The command of a C++ compiler: CXX (with arguments, if any), else g++ or clang++.

    Raises:
        OSError: there is none.
    """
    asked = os.environ.get("CXX", "").strip()
    with contextlib.suppress(ValueError):  # quotes that do not end: no command either
        command = shlex.split(asked)
        if command and (path := shutil.which(command[0])):
            return [path, *command[1:]]
    path = shutil.which("g++") or shutil.which("clang++")
    if path is None:
        raise OSError("no C++ compiler was found" + f" (nor CXX={asked})" * bool(asked) + ": install g++")
    if asked:
        logger.warning("CXX=%s: there is no such command; %s is taken", asked, path)
    return [path]


@cache
def cpu_flags() -> frozenset[str]:
    """Features of the CPU, as Linux names them."""
    if architecture() == "aarch64":  # an emulated CPU has these, too, and the host's in /proc
        find = ctypes.CDLL(None).getauxval
        find.argtypes, find.restype = (ctypes.c_ulong,), ctypes.c_ulong
        return frozenset(name for name, (word, bit) in ARM_FEATURES.items() if find(word) >> bit & 1)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), ":")
    return frozenset(flags.partition(":")[2].split())


def native_options() -> tuple[str, ...]:
    """Compiler options for this CPU.

    On ARM64 there are none for all that it has: no kernel is faster by it, and not every compiler can tell.
    """
    if architecture() == "aarch64":
        return NEON_OPTIONS
    return ("-march=native", *(WIDE_VECTORS if architecture() == "x86_64" else ()))


def reason(error: Exception) -> str:
    """Why :func:`compiled` gave up, in one line."""
    if isinstance(error, subprocess.CalledProcessError):
        said: bytes = error.stderr
        lines = said.decode(errors="replace").strip().split("\n")
        first = next((line for line in lines if "error" in line), lines[0])[:200]
        return "the compiler failed: " + (first or f"exit status {error.returncode}")
    if isinstance(error, subprocess.TimeoutExpired):
        return (
            f"the compiler took over {error.timeout:g} s: start again when the machine is less busy, or "
            f"compile ahead (lockstep kernels DIRECTORY, then {DIRECTORY_VARIABLE}=DIRECTORY)"
        )
    return str(error)
