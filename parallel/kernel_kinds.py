"""Kinds of native kernels, one row each, and CPU targets of precompiled ones (pure).

A new kind is a row here, and a header of vectors that ``engine/kernels/core/vectors.hpp`` includes where the
compiler has its instructions. All else takes names, features and options from the rows.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from typing import Literal, NamedTuple

Kind = Literal["amx", "avx512", "avx512f", "avxvnni", "avx2", "neon"]
"""Name of a kind of native kernels."""
Architecture = Literal["x86_64", "aarch64"]
ARCHITECTURES: dict[str, Architecture] = {
    "x86_64": "x86_64",
    "AMD64": "x86_64",
    "aarch64": "aarch64",
    "arm64": "aarch64",
}
"""Architectures that have kernels, by the names that systems give the machine."""

SWITCHES = {
    "avx512f": "-mno-avx512f",
    "avx512_bf16": "-mno-avx512bf16",
    "avx_vnni": "-mno-avxvnni",
    "amx_tile": "-mno-amx-tile",
    "amx_bf16": "-mno-amx-bf16",
    "amx_int8": "-mno-amx-int8",
}
"""Compiler options that avoid a feature of the CPU which ``-march=native`` would use."""
AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
AVX2_NEEDS = frozenset({"avx2", "fma"})
AVXVNNI_NEEDS = AVX2_NEEDS | {"avx_vnni"}
AVX512F_NEEDS = AVX2_NEEDS | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
AVX512_NEEDS = AVX512F_NEEDS | {"avx512_bf16", "avx512_vnni"}
AVX2_TARGET = AVX2_NEEDS | {"bmi1", "bmi2", "f16c", "movbe", "abm"}
AVX512F_TARGET = AVX2_TARGET | AVX512F_NEEDS | {"avx512cd"}
AVX512_TARGET = AVX512F_TARGET | AVX512_NEEDS
VBMI = frozenset({"avx512vbmi", "avx512_vbmi2"})
VBMI_TARGET = AVX512_TARGET | VBMI
WIDE_VECTORS = ("-mprefer-vector-width=512",)
"""Option of compilers for x86-64: loops use registers as wide as the CPU has."""
AVX2_OPTIONS = ("-march=x86-64-v3", *WIDE_VECTORS)
AVX512F_OPTIONS = ("-march=x86-64-v4", *WIDE_VECTORS)
VNNI_OPTIONS = (*AVX512F_OPTIONS, "-mavx512vnni")
AVX512_OPTIONS = (*VNNI_OPTIONS, "-mavx512bf16")
WITH_VBMI = ("-mavx512vbmi", "-mavx512vbmi2")
VBMI_OPTIONS = (*AVX512_OPTIONS, *WITH_VBMI)
NEON_NEEDS = frozenset({"asimd"})
NEON_OPTIONS = ("-march=armv8-a",)


class CpuTarget(NamedTuple):
    """CPU target of precompiled kernels: compiler options and required CPU features."""

    name: str
    options: tuple[str, ...]
    """Options of the compiler, in place of ``-march=native``."""
    needs: frozenset[str]
    """Features of the CPU, as Linux names them."""


class KernelKind(NamedTuple):
    """Kind of native kernels."""

    name: Kind
    title: str
    """Name in logs."""
    architecture: Architecture
    needs: frozenset[str]
    """Features of the CPU, as Linux names them."""
    header: str
    """Header of its vectors, in ``engine/kernels/core``."""
    fallback: Kind | None
    """Kind for CPUs that lack a feature, and for other data types."""
    targets: tuple[CpuTarget, ...]
    """What ``lockstep kernels`` compiles for it, best first."""
    avoids: frozenset[str] = frozenset()
    """Features that the compiler must not use, because another kind has them."""

    def options(self, features: frozenset[str]) -> list[str]:
        """Compiler options beside ``-march=native`` on a CPU with these features."""
        return [SWITCHES[feature] for feature in sorted(self.avoids & features)]


ROWS = (
    KernelKind(
        name="amx",
        title="AMX",
        architecture="x86_64",
        needs=AVX512_NEEDS | AMX,
        header="vectors_avx512.hpp",
        fallback="avx512",
        targets=(
            CpuTarget("amx", (*VBMI_OPTIONS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), VBMI_TARGET | AMX),
        ),
    ),
    KernelKind(
        name="avx512",
        title="AVX-512",
        architecture="x86_64",
        needs=AVX512_NEEDS,
        header="vectors_avx512.hpp",
        fallback="avx512f",
        targets=(
            CpuTarget("avx512vbmi", VBMI_OPTIONS, VBMI_TARGET),
            CpuTarget("avx512", AVX512_OPTIONS, AVX512_TARGET),
        ),
    ),
    KernelKind(
        name="avx512f",
        title="AVX-512 without bfloat16",
        architecture="x86_64",
        needs=AVX512F_NEEDS,
        header="vectors_avx512.hpp",
        fallback="avx2",
        targets=(
            CpuTarget("avx512fvbmi", (*VNNI_OPTIONS, *WITH_VBMI), AVX512F_TARGET | VBMI | {"avx512_vnni"}),
            CpuTarget("avx512fvnni", VNNI_OPTIONS, AVX512F_TARGET | {"avx512_vnni"}),
            CpuTarget("avx512f", AVX512F_OPTIONS, AVX512F_TARGET),
        ),
        avoids=AMX | {"avx512_bf16"},
    ),
    KernelKind(
        name="avxvnni",
        title="AVX-VNNI",
        architecture="x86_64",
        needs=AVXVNNI_NEEDS,
        header="vectors_avxvnni.hpp",
        fallback="avx2",
        targets=(CpuTarget("avxvnni", (*AVX2_OPTIONS, "-mavxvnni"), AVX2_TARGET | AVXVNNI_NEEDS),),
        avoids=AMX | {"avx512f"},
    ),
    KernelKind(
        name="avx2",
        title="AVX2",
        architecture="x86_64",
        needs=AVX2_NEEDS,
        header="vectors_avx2.hpp",
        fallback=None,
        targets=(CpuTarget("avx2", AVX2_OPTIONS, AVX2_TARGET),),
        avoids=AMX | {"avx512f", "avx_vnni"},
    ),
    KernelKind(
        name="neon",
        title="NEON",
        architecture="aarch64",
        needs=NEON_NEEDS,
        header="vectors_neon.hpp",
        fallback=None,
        targets=(CpuTarget("neon", NEON_OPTIONS, NEON_NEEDS),),
    ),
)
KINDS: dict[str, KernelKind] = {row.name: row for row in ROWS}
"""Kinds by name; those of an architecture from the fastest on."""


def architecture() -> Architecture | None:
    """Architecture of this machine; None if it has no kernels."""
    return ARCHITECTURES.get(platform.machine())


def usable(asked: str, features: frozenset[str]) -> KernelKind | None:
    """Kind of kernels on a CPU with these features: the given one, or a fallback."""
    kind = KINDS.get(asked)
    while kind is not None and not kind.needs <= features:
        kind = None if kind.fallback is None else KINDS[kind.fallback]
    return kind


def fastest(features: frozenset[str]) -> KernelKind | None:
    """The fastest kind that a CPU of this machine's architecture with these features runs."""
    return next((row for row in ROWS if row.architecture == architecture() and row.needs <= features), None)


def _with_fallbacks(name: str) -> list[str]:
    kind = KINDS.get(name)
    found: list[str] = []
    while kind is not None:
        found.append(kind.name)
        kind = None if kind.fallback is None else KINDS[kind.fallback]
    return found


def common_kind(names: Iterable[str]) -> str | None:
    """The fastest kind that all of these are or fall back to, if any."""
    first, *others = (_with_fallbacks(name) for name in names)
    return next((name for name in first if all(name in found for found in others)), None)
