"""Compiles ``step.cpp`` at first use, keeps the result in a cache, and loads it.

Nothing here is needed to serve: without a compiler or the instructions, :func:`load` logs why and returns
None, and the model runs on torch's own operators.
"""

from __future__ import annotations

import hashlib
import os
import threading
from functools import cache
from pathlib import Path
from typing import Literal

from parallel import compiler
from parallel.native_source import NativeLibrary, NativeSource

KERNELS = Path(__file__).parents[1]
NEEDED_FLAGS = {"avx2", "fma"}
AVX512_FLAGS = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"}
OFF = "LOCKSTEP_NATIVE_KERNELS"
"""Environment variable: 0 turns native kernels off, avx512 turns AMX off, avx2 both."""
BEYOND_AVX2 = {
    "avx512f": "-mno-avx512f",
    "amx_tile": "-mno-amx-tile",
    "amx_bf16": "-mno-amx-bf16",
    "amx_int8": "-mno-amx-int8",
}
"""CPU features beyond AVX2, and the compiler option that avoids each."""

Kind = Literal["amx", "avx512", "avx2"]
KIND_FLAGS: dict[Kind, set[str]] = {
    "avx2": NEEDED_FLAGS,
    "avx512": NEEDED_FLAGS | AVX512_FLAGS,
    "amx": NEEDED_FLAGS | AVX512_FLAGS | {"amx_tile", "amx_bf16", "amx_int8"},
}
"""Features of the CPU that each kind of kernels needs, as Linux names them."""

SOURCE = NativeSource(
    path=KERNELS / "step.cpp",
    headers=(
        *(KERNELS / "operations.def", KERNELS),
        *(compiler.INCLUDE / name for name in ("links.hpp", "waiting.hpp")),
    ),
    flags=(
        "-fopenmp",
        *(("-mprefer-vector-width=512",) if compiler.is_x86() else ()),
        *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # warnings about gcc's own intrinsics
    ),
    needs=frozenset(NEEDED_FLAGS),
    off=OFF,
    absent="native kernels: off,",
    instead="; steps run on torch's own operators",
)


class KernelLibrary:
    """The compiled kernels."""

    def __init__(self, opened: NativeLibrary) -> None:
        self.call, self.text, self.check_bytes = opened.call, opened.text, opened.check_bytes
        self.has_avx512 = bool(self.call("has_avx512"))
        """Whether vectors are those of AVX-512, which multiplies bfloat16, or of AVX2."""
        self.compresses = bool(self.call("can_compress"))
        """Whether this CPU has the instructions for weights in 12 bits."""
        self.has_tiles = False
        self.use_tiles(_asked() not in ("avx512", "avx2"))
        self.key = f"{opened.path.stem} {self.has_tiles}"
        """Name of source and CPU kind: instances with equal keys compute equal bits."""
        self.version = _version(self.text("compiler").encode())
        """Digest of the sources, the compiler and the C library.

        The CPU is no part of it: kernels of one kind do the same operations on all that have them.
        """

    def kind(self, *, bfloat16: bool) -> Kind:
        """The kind of kernels that compute in a data type: AMX multiplies bfloat16 only."""
        if not self.has_avx512:
            return "avx2"
        return "amx" if self.has_tiles and bfloat16 else "avx512"

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
    missing = KIND_FLAGS[kind] - flags
    if not missing:
        return None
    able = [each for each, needed in KIND_FLAGS.items() if needed <= flags]
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


def opened(*, avx2: bool = False) -> KernelLibrary:
    """Load the kernels for this CPU, or for AVX2 alone; raises as :meth:`NativeSource.open` does."""
    return KernelLibrary(SOURCE.open(*avx2_flags() if avx2 else ()))


def avx2_flags() -> list[str]:
    """Options of the compiler that turn off what this CPU has beyond AVX2."""
    return [option for flag, option in BEYOND_AVX2.items() if flag in compiler.cpu_flags()]


@cache
def _load(asked: str) -> KernelLibrary | None:
    return SOURCE.load(KernelLibrary, *avx2_flags() if asked == "avx2" else (), asked=asked)
