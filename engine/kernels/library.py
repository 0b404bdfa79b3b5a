"""Compiles ``step.cpp`` at first use, keeps the result in a cache, and loads it.

Nothing here is needed to serve: without a compiler or the instructions, :func:`load` says why and returns
None, and the model runs on torch's own operators.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import threading
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("step.cpp")
SOURCES = [SOURCE, *sorted(SOURCE.parent.glob("*.hpp"))]
NEEDED_FLAGS = {"avx512f", "avx512bw", "avx512vl", "avx512_bf16"}
COMPILE = (
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-march=native", "-mprefer-vector-width=512"),
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # said of gcc's own intrinsics
)
COMPILE_TIMEOUT = 120.0
"""Seconds; it takes about four."""
OFF = "LOCKSTEP_NATIVE_KERNELS"
"""Environment variable: 0 keeps to torch's own operators, avx512 does without AMX."""


class Library:
    """The compiled kernels."""

    def __init__(self, path: Path) -> None:
        self._loaded = ctypes.CDLL(str(path))
        self._run = self._loaded.lockstep_run
        self._run.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
        ]
        self._run.restype = ctypes.c_int64
        self.operation_bytes = int(self._loaded.lockstep_operation_bytes())
        self.step_bytes = int(self._loaded.lockstep_step_bytes())
        self.exchange_bytes = int(self._loaded.lockstep_exchange_bytes())
        self._use_tiles = self._loaded.lockstep_use_tiles
        self._use_tiles.argtypes, self._use_tiles.restype = [ctypes.c_int64], ctypes.c_int64
        self.has_tiles = False
        self.use_tiles(os.environ.get(OFF) != "avx512")
        self.key = f"{path.stem} {self.has_tiles}"
        """Names the source and the kind of CPU: instances with the same compute the same bits."""

    def use_tiles(self, wanted: bool) -> None:
        """Multiply matrices of bfloat16 with AMX, where the CPU has it, or without. Between two steps."""
        self.has_tiles = self._use_tiles(int(wanted)) != 0

    def run(self, operations: int, count: int, step: int, element: int, threads: int) -> bool:
        """Addresses of the operations and of the step; ``element`` 0 for float32, 1 for bfloat16. False if
        the step was given up."""
        return int(self._run(operations, count, step, element, threads)) == 0


def begin_build() -> None:
    """Compile in the background, so that the kernels are ready when the weights are."""
    threading.Thread(target=load, name="kernels", daemon=True).start()


_lock = threading.Lock()


def load() -> Library | None:
    """The kernels, compiled first if need be; None (and a line in the log, once) where there are none."""
    with _lock:
        return _load()


@cache
def _load() -> Library | None:
    if os.environ.get(OFF) == "0":
        logger.info("native kernels: off (%s=0)", OFF)
        return None
    missing = NEEDED_FLAGS - _cpu_flags()
    if missing:
        logger.info("native kernels: off, this CPU lacks %s", ", ".join(sorted(missing)))
        return None
    try:
        return Library(_compiled())
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("native kernels: off, %s; steps run on torch's own operators", _reason(error))
        return None


def _compiled() -> Path:
    """The shared object of this source on this kind of CPU."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        raise OSError("no C++ compiler was found (install g++)")
    what = [*(source.read_text() for source in SOURCES), compiler, *COMPILE, *sorted(_cpu_flags())]
    key = hashlib.sha256("\0".join(what).encode())
    directory = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lockstep" / "kernels"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step-{key.hexdigest()[:16]}.so"
    with (directory / "lock").open("w") as lock:  # several instances start at once; one compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            logger.info("compiling the native kernels (once, a few seconds)")
            fresh = path.with_suffix(f".{os.getpid()}")
            subprocess.run(
                [compiler, *COMPILE, str(SOURCE), "-o", str(fresh)],
                check=True,
                capture_output=True,
                timeout=COMPILE_TIMEOUT,
            )
            fresh.rename(path)
    return path


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    flags = next((line for line in lines if line.startswith("flags")), ":")
    return set(flags.partition(":")[2].split())


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        said: bytes = error.stderr
        return "the compiler failed: " + said.decode(errors="replace").strip().split("\n")[0][:200]
    return str(error)
