"""Names and CPU targets of precompiled kernels, for machines without a compiler (pure).

``lockstep kernels DIRECTORY`` fills a directory with one shared object per source and :class:`CpuTarget`.
:mod:`parallel.compiler` looks there first, where the environment names such a directory. A file's name holds
a digest of all that went into it, so a directory of another version is never taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

DIRECTORY_VARIABLE = "LOCKSTEP_BUILT_KERNELS"
"""Environment variable: the directory of shared objects compiled before."""


class CpuTarget(NamedTuple):
    """CPU target of precompiled kernels: compiler options and required CPU features."""

    name: str
    options: tuple[str, ...]
    """Options of the compiler, in place of ``-march=native``."""
    needs: frozenset[str]
    """Features of the CPU, as Linux names them."""


AVX2_NEEDS = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"})
AVX512_NEEDS = AVX2_NEEDS | {
    *("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"),
}
VBMI_NEEDS = AVX512_NEEDS | {"avx512vbmi", "avx512_vbmi2"}
AMX_NEEDS = VBMI_NEEDS | {"amx_tile", "amx_bf16", "amx_int8"}

AVX512_OPTIONS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
VBMI_OPTIONS = (*AVX512_OPTIONS, "-mavx512vbmi", "-mavx512vbmi2")

TARGETS = (
    CpuTarget("amx", (*VBMI_OPTIONS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), AMX_NEEDS),
    CpuTarget("avx512vbmi", VBMI_OPTIONS, VBMI_NEEDS),
    CpuTarget("avx512", AVX512_OPTIONS, AVX512_NEEDS),
    CpuTarget("avx2", ("-march=x86-64-v3",), AVX2_NEEDS),
)
"""Targets from best to most basic; a CPU takes the first that it supports."""


def split_flags(flags: Iterable[str]) -> tuple[list[str], frozenset[str]]:
    """Options for the compiler, and features of the CPU that ``-mno-...`` options turn off."""
    kept, off = [], set()
    for flag in flags:
        if flag.startswith("-mno-"):
            off.add(flag.removeprefix("-mno-").replace("-", "_"))
        else:
            kept.append(flag)
    return kept, frozenset(off)


def target_for(features: frozenset[str], flags: Iterable[str]) -> CpuTarget | None:
    """The best target that a CPU with these features can run, if any."""
    usable = features - split_flags(flags)[1]
    return next((target for target in TARGETS if target.needs <= usable), None)


def file_name(target: CpuTarget, source: Path, headers: Sequence[Path], flags: Iterable[str]) -> str:
    """The name of a shared object, with a digest of its sources and options.

    The compiler is no part of the digest: the machine that looks for the file may have another one, or none.
    """
    content = [*(each.read_text() for each in (source, *headers)), *target.options, *split_flags(flags)[0]]
    digest = hashlib.sha256("\0".join(content).encode()).hexdigest()
    return f"{source.stem}-{target.name}-{digest[:16]}.so"
