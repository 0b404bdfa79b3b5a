"""Compiles ``step.cpp`` at first use, keeps the result in a cache, and loads it.

Nothing here is needed to serve: without a compiler or the instructions, :func:`load` logs why and returns
None, and the model runs on torch's own operators.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import subprocess
import threading
from functools import cache
from pathlib import Path
from typing import Literal

from parallel import compiler

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parents[1] / "step.cpp"
NEEDED_FLAGS = {"avx2", "fma"}
AVX512_FLAGS = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"}
FLAGS = (
    *("-fopenmp", "-mprefer-vector-width=512"),
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # warnings about gcc's own intrinsics
)
OFF = "LOCKSTEP_NATIVE_KERNELS"
"""Environment variable: 0 turns native kernels off, avx512 turns AMX off, avx2 both."""
BEYOND_AVX2 = {
    "avx512f": "-mno-avx512f",
    "amx_tile": "-mno-amx-tile",
    "amx_bf16": "-mno-amx-bf16",
    "amx_int8": "-mno-amx-int8",
}
"""What a CPU may have, and the option of the compiler that does without."""

Kind = Literal["amx", "avx512", "avx2"]
KIND_FLAGS: dict[Kind, set[str]] = {
    "avx2": NEEDED_FLAGS,
    "avx512": NEEDED_FLAGS | AVX512_FLAGS,
    "amx": NEEDED_FLAGS | AVX512_FLAGS | {"amx_tile", "amx_bf16", "amx_int8"},
}
"""Features of the CPU that each kind of kernels needs, as Linux names them."""

KINDS = ("operation", "step", "exchange", "linkage", "peer", "draw", "shape", "routing", "rounding")
"""Structures passed to the kernels, which know their sizes."""
CALLS = (
    *("run", "has_arrived", "use_tiles", "survey", "compress", "draw", "shape", "logprobs", "contestants"),
    *("has_avx512", "can_compress", "compiler"),
)
SYMBOLS = tuple(f"lockstep_{name}" for name in (*CALLS, *(f"{kind}_bytes" for kind in KINDS)))
"""All functions called in the library."""


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
        self.sizes = tuple(int(self._loaded[f"lockstep_{kind}_bytes"]()) for kind in KINDS)
        """Bytes of the structures in :data:`KINDS`."""
        self._use_tiles = self._loaded.lockstep_use_tiles
        self._use_tiles.argtypes, self._use_tiles.restype = [ctypes.c_int64], ctypes.c_int64
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._survey, self._compress = self._loaded.lockstep_survey, self._loaded.lockstep_compress
        self._survey.argtypes, self._survey.restype = [address, number, address, address, number], number
        self._compress.argtypes = [address, number, address, address, address, address, number]
        self._compress.restype = None
        self._draw, self._shape = self._loaded.lockstep_draw, self._loaded.lockstep_shape
        self._draw.argtypes = [address, number, number, address, address, address, number]
        self._shape.argtypes = [address, number, number, address, number, number]
        self._logprobs = self._loaded.lockstep_logprobs
        self._logprobs.argtypes = [address, number, number, address, number, address, number]
        self._contestants = self._loaded.lockstep_contestants
        self._contestants.argtypes = [address, number, number, number, address, address, address, number]
        self._draw.restype = self._contestants.restype = self._shape.restype = self._logprobs.restype = None
        self._has_arrived = self._loaded.lockstep_has_arrived
        self._has_arrived.argtypes, self._has_arrived.restype = [address, number, address, number], number
        self.has_avx512 = bool(self._loaded.lockstep_has_avx512())
        """Whether vectors are those of AVX-512, which multiplies bfloat16, or of AVX2."""
        self.compresses = bool(self._loaded.lockstep_can_compress())
        """Whether this CPU has the instructions for weights in 12 bits."""
        self.has_tiles = False
        self.use_tiles(_asked() not in ("avx512", "avx2"))
        self.key = f"{path.stem} {self.has_tiles}"
        """Name of source and CPU kind: instances with equal keys compute equal bits."""
        self._loaded.lockstep_compiler.restype = ctypes.c_char_p
        self.version = _version(self._loaded.lockstep_compiler())
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
        self.has_tiles = self._use_tiles(int(wanted)) != 0

    def survey(self, weights: int, tiles: int, uppers: int, begins: int, threads: int) -> int:
        """Fill in what :meth:`compress` needs to know; returns the number of patches."""
        return int(self._survey(weights, tiles, uppers, begins, threads))

    def compress(
        self, weights: int, tiles: int, uppers: int, begins: int, patches: int, out: int, threads: int
    ) -> None:
        """Write the tiles in 12 bits a weight, and the patches.

        All are addresses but ``tiles``.
        """
        self._compress(weights, tiles, uppers, begins, patches, out, threads)

    def draw(
        self, logits: int, rows: int, width: int, draws: int, positions: int, out: int, threads: int
    ) -> None:
        """See :func:`engine.kernels.choosing.logits.draw`; addresses of arrays."""
        self._draw(logits, rows, width, draws, positions, out, threads)

    def contestants(
        self,
        logits: int,
        rows: int,
        width: int,
        first: int,
        draws: int,
        positions: int,
        out: int,
        threads: int,
    ) -> None:
        """See :func:`engine.kernels.choosing.logits.contestants`; addresses of arrays."""
        self._contestants(logits, rows, width, first, draws, positions, out, threads)

    def shape(self, logits: int, width: int, first: int, shapes: int, count: int, threads: int) -> None:
        """See :func:`engine.kernels.choosing.logits.penalise`; addresses of arrays."""
        self._shape(logits, width, first, shapes, count, threads)

    def logprobs(
        self, logits: int, rows: int, width: int, targets: int, num_top: int, out: int, threads: int
    ) -> None:
        """See :func:`engine.kernels.choosing.logits.logprobs`; addresses of arrays."""
        self._logprobs(logits, rows, width, targets, num_top, out, threads)

    def run(self, operations: int, count: int, step: int, element: int, threads: int) -> bool:
        """Run ``count`` operations of a step; False if the step was given up.

        ``operations`` and ``step`` are addresses; ``element`` is 0 for float32, 1 for bfloat16.
        """
        return int(self._run(operations, count, step, element, threads)) == 0

    def has_arrived(self, exchange: int, rank: int, word: int, target: int) -> bool:
        """Whether a word of a member has risen to ``target``.

        What has come from it over its link is taken first.
        """
        return bool(self._has_arrived(exchange, rank, word, target))


_chosen: Kind | None = None
"""Kind of kernels that :func:`choose` was called with.

None: the one that the environment names, else the fastest.
"""


def choose(kind: Kind | None) -> None:
    """Use kernels of this kind; None for the fastest. To be called before :func:`load`."""
    global _chosen
    _chosen = kind


def why_not(kind: Kind) -> str | None:
    """What this CPU lacks for kernels of a kind, for people; None if nothing."""
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
    for path in (SOURCE, *_headers()):
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()[:16]} {os.confstr('CS_GNU_LIBC_VERSION')}"


def _headers() -> list[Path]:
    shared = (compiler.INCLUDE / name for name in ("links.hpp", "waiting.hpp"))
    return [*sorted(SOURCE.parent.rglob("*.hpp")), *shared]


def begin_build() -> None:
    """Compile in the background, so that the kernels are ready when the weights are."""
    threading.Thread(target=load, name="kernels", daemon=True).start()


_lock = threading.Lock()
_loaded: Library | None = None


def load() -> Library | None:
    """The kernels, compiled first if need be; None where there are none.

    The reason for None is logged once.
    """
    global _loaded
    with _lock:
        _loaded = _load(_asked())
        return _loaded


def loaded() -> Library | None:
    """The kernels, if they were loaded before; never takes long."""
    return _loaded


def compiled(*, avx2: bool = False) -> Path:
    """The kernels for this CPU, or for AVX2 alone.

    Raises:
        OSError: there is no compiler, or no room for the result.
        subprocess.SubprocessError: the compiler fails, or takes too long.
    """
    without = [option for flag, option in BEYOND_AVX2.items() if avx2 and flag in compiler.cpu_flags()]
    return compiler.compiled(SOURCE, _headers(), [*FLAGS, *without], SYMBOLS)


@cache
def _load(asked: str) -> Library | None:
    if asked == "0":
        logger.info("native kernels: off (%s=0)", OFF)
        return None
    missing = NEEDED_FLAGS - compiler.cpu_flags()
    if missing:
        logger.info("native kernels: off, this CPU lacks %s", ", ".join(sorted(missing)))
        return None
    try:
        return Library(compiled(avx2=asked == "avx2"))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        logger.warning("native kernels: off, %s; steps run on torch's own operators", compiler.reason(error))
        return None
