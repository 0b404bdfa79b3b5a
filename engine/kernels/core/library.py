"""Compiles ``step.cpp`` at first use, keeps the result in a cache, and loads it.

Nothing here is needed to serve: without a compiler or the instructions, :func:`load` logs why and returns
None, and the model runs on torch's own operators.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from functools import cache
from pathlib import Path

from parallel import compiler
from parallel.kernel_kinds import AVX2_NEEDS, KINDS, ROWS, Kind, architecture, fastest, usable
from parallel.native_source import NativeLibrary, NativeSource

logger = logging.getLogger(__name__)

KERNELS = Path(__file__).parents[1]
OFF = "LOCKSTEP_NATIVE_KERNELS"
"""Environment variable: a kind of kernels, or 0 for torch's operators."""

SOURCE = NativeSource(
    path=KERNELS / "step.cpp",
    headers=(
        *(KERNELS / "operations.def", KERNELS),
        *(compiler.INCLUDE / name for name in ("links.hpp", "waiting.hpp")),
    ),
    flags=(
        "-fopenmp",
        *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # warnings about gcc's own intrinsics
    ),
    needs=next((row.needs for row in ROWS[::-1] if row.architecture == architecture()), AVX2_NEEDS),
    off=OFF,
    absent="native kernels: off,",
    instead="; steps run on torch's own operators",
)


class KernelLibrary:
    """The compiled kernels."""

    def __init__(self, opened: NativeLibrary) -> None:
        self.call, self.text, self.check_bytes = opened.call, opened.text, opened.check_bytes
        self._without_tiles = KINDS[self.text("vectors")]
        self.has_avx512 = self._without_tiles.header == KINDS["avx512"].header
        """Whether vectors are those of AVX-512."""
        self.multiplies_bfloat16 = self._without_tiles.name == "avx512"
        """Whether it has instructions for products of bfloat16."""
        self.compresses = bool(self.call("can_compress"))
        """Whether this CPU has the instructions for weights in 12 bits."""
        self.has_tiles = False
        self.use_tiles(_asked() not in KINDS or _asked() == "amx")
        self.key = f"{opened.path.stem} {self.has_tiles}"
        """Name of source and CPU kind: instances with equal keys compute equal bits."""
        self.version = _version(self.text("compiler").encode())
        """Digest of the sources, the compiler and the C library.

        The CPU is no part of it: kernels of one kind do the same operations on all that have them.
        """

    def kind(self, *, bfloat16: bool) -> Kind:
        """The kind of kernels that compute in a data type: AMX multiplies bfloat16 only."""
        return "amx" if self.has_tiles and bfloat16 else self._without_tiles.name

    def use_tiles(self, wanted: bool) -> None:
        """Switch products of bfloat16 to AMX, where the CPU has it, or away from it.

        To be called between two steps.
        """
        self.has_tiles = self.call("use_tiles", int(wanted)) != 0


_chosen: Kind | None = None
"""Kind of kernels that :func:`choose` was called with.

None: the one that the environment names, else the fastest.
"""


def choose(kind: Kind | None) -> None:
    """Use kernels of this kind; None for the fastest. To be called before :func:`load`."""
    global _chosen
    _chosen = kind


def why_not(kind: Kind) -> str | None:
    """Reason why this CPU cannot run kernels of a kind; None if it can."""
    flags = compiler.cpu_flags()
    missing = KINDS[kind].needs - flags
    if not missing:
        return None
    able = [row.name for row in ROWS if row.needs <= flags]
    return f"this CPU lacks {', '.join(sorted(missing))}: use {', '.join([*able, 'torch'])} or auto"


def _asked() -> str:
    """The kind that is asked for, ``0`` for none; empty: the fastest."""
    return _chosen or os.environ.get(OFF, "")


def _version(compiled_by: bytes) -> str:
    digest = hashlib.sha256(compiled_by)
    for path in SOURCE.files():
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()[:16]} {os.confstr('CS_GNU_LIBC_VERSION')}"


def begin_build() -> None:
    """Compile in the background, so that the kernels are ready when the weights are."""
    threading.Thread(target=load, name="kernels", daemon=True).start()


_lock = threading.Lock()
_loaded: KernelLibrary | None = None


def load() -> KernelLibrary | None:
    """The kernels, compiled first if need be; None where there are none.

    The reason for None is logged once.
    """
    global _loaded
    with _lock:
        _loaded = _load(_asked())
        return _loaded


def loaded() -> KernelLibrary | None:
    """The kernels if they are loaded already; never compiles."""
    return _loaded


def opened(kind: Kind | None = None) -> KernelLibrary:
    """The kernels of a kind, or of the fastest; raises as :meth:`NativeSource.open` does."""
    flags = compiler.cpu_flags()
    found = fastest(flags) if kind is None else KINDS[kind]
    return KernelLibrary(SOURCE.open(*([] if found is None else found.options(flags))))


@cache
def _load(asked: str) -> KernelLibrary | None:
    able = [row.name for row in ROWS if row.architecture == architecture()]
    if asked not in ("", "0", *able):
        logger.warning("%s=%s is not known here: there are %s, and 0 for none", OFF, asked, ", ".join(able))
    kind = usable(asked, compiler.cpu_flags()) or fastest(compiler.cpu_flags())
    options = [] if kind is None else kind.options(compiler.cpu_flags())
    return SOURCE.load(KernelLibrary, *options, asked=asked)
