"""Cross-compiled code for ARM64: bits of kernels, and instructions that order memory.

Kernels for ARM64 and for AVX2 print equal digests of what they make of the same made-up numbers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.kernels.core import library
from parallel import compiler
from parallel.kernel_kinds import KINDS

CROSS, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
ROOT = Path("/usr/aarch64-linux-gnu")
"""The C library that the cross compiler brings."""
DRIVER = Path(__file__).with_name("bits.cpp")

pytestmark = [
    pytest.mark.skipif(
        not all(map(shutil.which, (CROSS, QEMU, "g++"))), reason=f"no g++, {CROSS} or {QEMU} (qemu-user) here"
    ),
    pytest.mark.skipif(
        not KINDS["avx2"].needs <= compiler.cpu_flags(), reason="this CPU has no AVX2 to compare with"
    ),
    pytest.mark.timeout(600),  # two compilations of a minute each, on a busy machine of few cores
]


def built(command: list[str], to: Path) -> list[str]:
    """The command that runs a driver, compiled by this command."""
    compile_with(*command, "-O2", str(DRIVER), "-o", str(to))
    return [str(to)]


def compile_with(*command: str) -> None:
    options = ["-std=c++17", "-fopenmp", f"-I{compiler.INCLUDE}", f"-I{library.KERNELS}"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]


def printed(command: list[str]) -> list[str]:
    """The lines that a driver prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_neon_has_the_bits_of_avx2(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        for_avx2 = pool.submit(built, ["g++", "-march=x86-64-v3"], tmp_path / "avx2")
        for_neon = pool.submit(built, [CROSS, "-march=armv8-a"], tmp_path / "neon")
    expected = printed(for_avx2.result())
    found = printed([QEMU, "-L", str(ROOT), "-cpu", "max", *for_neon.result()])
    assert len(expected) > 60
    assert found == expected


def test_all_kernels_compile_for_arm64() -> None:
    compile_with(CROSS, "-march=armv8-a", "-fsyntax-only", str(library.SOURCE.path))


def test_collectives_publish_and_wait_by_ordered_instructions(tmp_path: Path) -> None:
    written = tmp_path / "collectives.s"
    compile_with(
        CROSS, "-march=armv8-a", "-O3", "-S", str(compiler.INCLUDE / "collectives.cpp"), "-o", str(written)
    )
    functions = re.findall(r"^(lockstep_\w+):\n(.*?)^\t\.size", written.read_text(), re.MULTILINE | re.DOTALL)
    used = {
        name: set(re.findall(r"^\t(dmb\tish|stlr|ldar)\b", body, re.MULTILINE)) for name, body in functions
    }
    assert used["lockstep_fence"] == {"dmb\tish"}
    assert "ldar" in set().union(*used.values())
    for name in ("send", "receive", "broadcast", "all_gather_ints", "all_gather_view", "all_to_all_views"):
        assert "stlr" in used[f"lockstep_{name}"], name
