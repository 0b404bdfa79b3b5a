"""Requirements of Triton's kernels: the package, a C compiler, Python's headers."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import msgspec

from router.tools.doctor.findings import Finding, note, ok

AREA = "installation"
COMPILERS = ("cc", "gcc", "clang")
"""Compilers that Triton looks for where the variable CC names none."""


class TritonFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Requirements of Triton that this host has."""

    package: bool
    compiler: str
    """C compiler that Triton would use; empty if there is none."""
    headers: bool
    """Whether Python.h is there."""


def read_triton(environment: Mapping[str, str]) -> TritonFacts:
    """Read what Triton would find at its first launch of a kernel."""
    named = environment.get("CC", "")
    found = named or next((name for name in COMPILERS if shutil.which(name) is not None), "")
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return TritonFacts(
        package=importlib.util.find_spec("triton") is not None, compiler=found, headers=headers.exists()
    )


def check_triton(facts: TritonFacts, has_gpu: bool) -> list[Finding]:
    """Whether the fast kernels of a GPU can run; nothing where there is no GPU."""
    if not has_gpu:
        return []
    missing = [
        (not facts.package, "the package triton", "pip install 'lockstep-mesh[cuda]'"),
        (not facts.compiler, "a C compiler", "install gcc, or name one in CC"),
        (not facts.headers, "Python.h", "install Python's headers, such as python3-dev"),
    ]
    lacks = [(what, fix) for is_missing, what, fix in missing if is_missing]
    if not lacks:
        return [ok(AREA, "triton", f"its kernels can be compiled, with {facts.compiler}")]
    what = " and ".join(each for each, _ in lacks)
    text = f"without {what} Triton compiles nothing: steps run on torch's operators, without graphs"
    return [note(AREA, "triton", text, "; ".join(fix for _, fix in lacks))]
