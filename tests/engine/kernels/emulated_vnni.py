"""Kernels with AVX-VNNI emulated in software, for tests on CPUs without it.

``python -m tests.engine.kernels.emulated_vnni`` prints the compiler's command: with it as ``CXX``, and with
``LOCKSTEP_NATIVE_KERNELS=avx2``, tests (and the processes that they start) run the code for AVX-VNNI.
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
ABLE = KINDS["avx2"].needs <= compiler.cpu_flags() and shutil.which("g++") is not None
"""Whether this machine can run them: all but one instruction are those of AVX2."""


def command() -> str:
    """The compiler, told to include the header first.

    The digest is for the cache of compiled kernels, which does not see the header's text.
    """
    digest = hashlib.sha256(HEADER.read_bytes()).hexdigest()[:16]
    return shlex.join(["g++", "-include", str(HEADER), f"-DEMULATED_VNNI=0x{digest}"])


@contextmanager
def emulated_vnni() -> Iterator[library.KernelLibrary]:
    """Kernels with emulated products of bytes.

    Meanwhile they are the ones that :func:`library.load` returns, and the CPU's features include AVX-VNNI.
    """
    features = compiler.cpu_flags() | KINDS["avxvnni"].needs
    with (
        mock.patch.dict(os.environ, {"CXX": command(), library.OFF: "avxvnni"}),
        mock.patch.object(compiler, "cpu_flags", return_value=features),
    ):
        library._load.cache_clear()
        try:
            kernels = library.load()
            assert kernels is not None
            assert kernels.kind(bfloat16=True) == "avxvnni"
            yield kernels
        finally:
            library._load.cache_clear()
    library.load()


if __name__ == "__main__":
    print(command())
