"""Kernels with AMX emulated in software, for tests on CPUs without it.

``python -m tests.engine.kernels.emulated_tiles`` prints the compiler's command: with it as ``CXX``, tests (and the
processes that they start) run the code for AMX.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from engine.kernels.core import library
from parallel import compiler
from parallel.kernel_kinds import KINDS

HEADER = Path(__file__).with_suffix(".hpp")
ABLE = KINDS["avx512"].needs <= compiler.cpu_flags() and shutil.which("g++") is not None
"""Whether this machine can run them: vectors are those of AVX-512."""


def command() -> str:
    """The compiler, told to include the header first.

    The digest is for the cache of compiled kernels, which does not see the header's text.
    """
    digest = hashlib.sha256(HEADER.read_bytes()).hexdigest()[:16]
    return shlex.join(["g++", "-include", str(HEADER), f"-DEMULATED_TILES=0x{digest}"])


@contextmanager
def emulated_tiles() -> Iterator[library.KernelLibrary]:
    """Kernels with emulated tiles.

    Meanwhile they are the ones that :func:`library.load` returns, and the CPU's features include AMX.
    """
    features = compiler.cpu_flags() | KINDS["amx"].needs
    with (
        mock.patch.dict(os.environ, {"CXX": command()}),
        mock.patch.object(compiler, "cpu_flags", return_value=features),
    ):
        os.environ.pop(library.OFF, None)
        library._load.cache_clear()
        try:
            kernels = library.load()
            assert kernels is not None
            assert kernels.has_tiles
            yield kernels
        finally:
            library._load.cache_clear()
    library.load()


if __name__ == "__main__":
    print(command())
