"""Names and CPU targets of precompiled kernels, for machines without a compiler (pure).

``lockstep kernels DIRECTORY`` fills a directory with one shared object per source and :class:`CpuTarget`.
:mod:`parallel.compiler` looks there first, where the environment names such a directory. A file's name holds
a digest of all that went into it, so a directory of another version is never taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from parallel.kernel_kinds import ROWS, SWITCHES, CpuTarget

DIRECTORY_VARIABLE = "LOCKSTEP_BUILT_KERNELS"
"""Environment variable: the directory of shared objects compiled before."""


TARGETS = tuple(target for kind in ROWS for target in kind.targets)
"""Targets from best to most basic; a CPU takes the first that it supports."""


def split_flags(flags: Iterable[str]) -> tuple[list[str], frozenset[str]]:
    """Options for the compiler, and features of the CPU that :data:`SWITCHES` among them turn off."""
    given = list(flags)
    off = frozenset(feature for feature, option in SWITCHES.items() if option in given)
    return [flag for flag in given if flag not in SWITCHES.values()], off


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
