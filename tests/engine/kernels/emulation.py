"""Kernels with instructions emulated in software, for tests on CPUs without them.

``python -m tests.engine.kernels.emulation NAME`` prints the compiler's command for ``tiles`` (AMX), ``wide``
(AVX-512) or ``vnni`` (AVX-VNNI). With it as ``CXX``, tests and the processes that they start run the code for
these instructions; for ``vnni`` also with ``LOCKSTEP_NATIVE_KERNELS=avx2``.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from engine.kernels.core import library
from parallel import compiler
from parallel.kernel_kinds import KINDS, Kind
from tests.nightly import NIGHTLY


@dataclass(frozen=True)
class Emulation:
    """A header that takes the place of the compiler's intrinsics for some instructions."""

    kind: Kind
    """The kind of kernels that has these instructions."""
    on: Kind
    """The kind whose instructions are all that the rest needs."""
    header: Path
    level: str = "-O1"
    """How much the compiler optimizes; ``-O3`` takes twice the time.

    Sums of products may have other bits: with ``-O1`` alone no product and sum become one instruction.
    """

    @property
    def is_possible(self) -> bool:
        """Whether this machine can compile and run it."""
        return KINDS[self.on].needs <= compiler.cpu_flags() and shutil.which("g++") is not None

    def compiler(self) -> list[str]:
        """The compiler for the CPU's own instructions.

        Of several levels the last one holds, so a shell puts it behind those that kernels are compiled with.
        """
        return ["sh", "-c", f'exec g++ "$@" {self.level}', "g++"]

    def command(self) -> str:
        """The compiler, told to include the header first.

        The digest is for the cache of compiled kernels, which does not see the header's text.
        """
        digest = hashlib.sha256(self.header.read_bytes()).hexdigest()[:16]
        header = ["-include", str(self.header), "-Wno-psabi", f"-DEMULATED=0x{digest}"]
        return shlex.join([*self.compiler(), *header])

    def for_each_push(self) -> AbstractContextManager[library.KernelLibrary]:
        """Kernels of the kind; emulated at night, and where the CPU lacks its instructions.

        Emulated ones take three times as long to compile.
        """
        return self.kernels(emulates=NIGHTLY or not KINDS[self.kind].needs <= compiler.cpu_flags())

    @contextmanager
    def kernels(self, *, emulates: bool = True) -> Iterator[library.KernelLibrary]:
        """Kernels of the kind, emulated or with the CPU's own instructions for it.

        Meanwhile they are the ones that :func:`library.load` returns, and the CPU's features include it.
        """
        features = compiler.cpu_flags() | KINDS[self.kind].needs
        command = self.command() if emulates else shlex.join(self.compiler())
        with (
            mock.patch.dict(os.environ, {"CXX": command, library.OFF: self.kind}),
            mock.patch.object(compiler, "cpu_flags", return_value=features),
            mock.patch.object(compiler, "TIMEOUT", compiler.TIMEOUT_AHEAD),
        ):
            library._load.cache_clear()
            try:
                kernels = library.load()
                assert kernels is not None
                assert kernels.kind(bfloat16=True) == self.kind
                yield kernels
            finally:
                library._load.cache_clear()
        library.load()


TILES = Emulation(
    "amx", "avx512", Path(__file__).with_name("emulated_tiles.hpp"), "-O1 -fexpensive-optimizations"
)
"""Tiles of AMX."""
WIDE = Emulation("avx512f", "avx2", Path(__file__).with_name("emulated_avx512.hpp"))
"""Vectors of AVX-512, without its products of bfloat16 and of bytes."""
VNNI = Emulation("avxvnni", "avx2", Path(__file__).with_name("emulated_vnni.hpp"))
"""The product of bytes of AVX-VNNI."""


if __name__ == "__main__":
    print({"tiles": TILES, "wide": WIDE, "vnni": VNNI}[sys.argv[1]].command())
