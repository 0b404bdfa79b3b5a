"""The table of native kernels' kinds: rows fit each other, the sources and the compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from parallel.kernel_kinds import KINDS, ROWS, SWITCHES, KernelKind, architecture, common_kind, usable

CORE = Path(__file__).parents[2] / "engine/kernels/core"


@pytest.mark.parametrize("kind", ROWS, ids=lambda row: row.name)
def test_a_kind_falls_back_to_one_that_needs_less(kind: KernelKind) -> None:
    later = ROWS[ROWS.index(kind) + 1 :]
    if kind.fallback is None:
        assert not any(row.architecture == kind.architecture for row in later), "the last of its architecture"
    else:
        fallback = KINDS[kind.fallback]
        assert fallback in later
        assert fallback.architecture == kind.architecture
        assert fallback.needs < kind.needs


@pytest.mark.parametrize("kind", ROWS, ids=lambda row: row.name)
def test_a_kind_has_targets_and_a_header_of_vectors(kind: KernelKind) -> None:
    assert (CORE / kind.header).is_file()
    vectors = (CORE / "vectors.hpp").read_text()
    named = kind.name if kind.name != "amx" else "avx512"
    assert f'#define LOCKSTEP_VECTORS "{named}"\n#include "{kind.header}"\n' in vectors
    assert kind.targets
    assert all(kind.needs <= target.needs for target in kind.targets)
    assert not any(kind.avoids & target.needs for target in kind.targets)


@pytest.mark.skipif(shutil.which("g++") is None or architecture() != "x86_64", reason="no g++ for x86-64")
def test_the_compiler_knows_each_switch() -> None:
    command = ["g++", *SWITCHES.values(), "-x", "c++", "-fsyntax-only", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_a_cpu_lacks_is_replaced_by_what_it_has() -> None:
    old, new = KINDS["avx2"].needs, KINDS["amx"].needs
    for asked in ("amx", "avx512", "avx512f", "avx2"):
        for features, found in ((old, "avx2"), (new, asked)):
            kind = usable(asked, features)
            assert kind is not None
            assert kind.name == found
    without = KINDS["avx512"].needs - {"avx512_bf16", "avx512_vnni"}
    least = usable("amx", without)
    assert least is not None
    assert least.name == "avx512f", "Skylake to Ice Lake, and machines that hide bfloat16"
    assert usable("amx", frozenset({"sse2"})) is None
    assert usable("", new) is None


def test_the_kind_in_common_is_one_that_all_have() -> None:
    assert common_kind(["amx", "avx512", "amx"]) == "avx512"
    assert common_kind(["avx2", "amx"]) == "avx2"
    assert common_kind(["avx512f", "amx", "avx512"]) == "avx512f"
    assert common_kind(["avxvnni", "avx512"]) == "avx2", "a CPU with AVX-512 may lack AVX-VNNI"
    assert common_kind(["amx"]) == "amx"
    assert common_kind(["amx", "torch"]) is None
