"""The compiled kernels, disassembled: they have the instructions that their names claim."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from engine.kernels.core import library
from parallel import compiler
from parallel.kernel_kinds import KINDS

KERNELS = library.load()
AVX512 = KERNELS is not None and KERNELS.multiplies_bfloat16
pytestmark = [
    pytest.mark.skipif(KERNELS is None, reason="no AVX2, or no C++ compiler, here"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump (binutils) here"),
]
needs_avx512 = pytest.mark.skipif(not AVX512, reason="this CPU lacks AVX-512 with bfloat16 and VNNI")

MULTIPLY = re.compile(r"\bmultiply<(?:\w|\(|\)|::| )*::(BFloat16|Bytes), (\d+), \d>")
CODES = re.compile(
    r"\bmultiply_codes<(?:\w|\(|\)|::| )*::(FourBits|EightBits|FloatsOfEightBits), \w+, \w+, (\d+)>"
)
PANELS = re.compile(r"\bmultiply_panels<(?:\w|\(|\)|::| )*::(Bytes), (\d+), (\d), \w+>")
FLOATS = re.compile(r"\badd_products<(?:\w|\(|\)|::| )*::(BFloat16|Float), (\d+), (\w+)>")
TILES = {"tdpbf16ps", "tdpbusd"}


@cache
def functions(path: Path) -> dict[str, list[str]]:
    """Instructions with their operands by function, with its parameters."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", "--no-addresses", str(path)]
    written = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in written.splitlines():
        if line.startswith("<"):
            lines = found.setdefault(line[1:].removesuffix(">:"), [])
        elif line.startswith("\t"):
            lines.append(line.strip())
    return found


def count(lines: list[str], instruction: str) -> int:
    return sum(line.split(None, 1)[0] == instruction for line in lines)


def is_only_a_jump(lines: list[str]) -> bool:
    return lines[0].startswith("jmp")


def named(path: Path, pattern: re.Pattern[str]) -> dict[tuple[str, ...], list[str]]:
    """Functions by what a pattern finds in their names.

    Those that the compiler found to be the same as another one are left out.
    """
    names = ((pattern.search(name), lines) for name, lines in functions(path).items())
    found = {match.groups(): lines for match, lines in names if match and not is_only_a_jump(lines)}
    assert found, f"no function is called {pattern.pattern}: was it renamed?"
    return found


@needs_avx512
def test_rows_are_multiplied_by_dot_products() -> None:
    """A row and two panels are two instructions; no product is made of smaller ones."""
    dots = {"BFloat16": "vdpbf16ps", "Bytes": "vpdpbusd"}
    kinds = named(library.SOURCE.compiled(), MULTIPLY)
    assert {kind for kind, _ in kinds} == set(dots)
    for (kind, rows), lines in kinds.items():
        assert count(lines, dots[kind]) >= 2 * int(rows), (kind, rows)
        assert count(lines, "vpmaddwd") + count(lines, "vfmadd231ps") == 0, (kind, rows)


@needs_avx512
def test_codes_go_from_their_widening_right_into_dot_products() -> None:
    """Four bits are looked up in a table, eight are converted, floats are shifted."""
    converted = {"FourBits": "vpermps", "EightBits": "vcvtdq2ps", "FloatsOfEightBits": "vpsrad"}
    kinds = named(library.SOURCE.compiled(), CODES)
    assert {kind for kind, _ in kinds} == set(converted)
    for (kind, rows), lines in kinds.items():
        words = 4 if kind == "FourBits" else 2
        assert count(lines, "vdpbf16ps") >= 2 * words * int(rows), (kind, rows)
        assert count(lines, "vcvtne2ps2bf16") >= 2 * words, (kind, rows)
        assert count(lines, converted[kind]) >= 4 * words, (kind, rows)


def test_kernels_for_avx2_have_nothing_beyond_it() -> None:
    path = library.SOURCE.compiled(*KINDS["avx2"].options(compiler.cpu_flags()))
    for (kind, rows, panels), lines in named(path, PANELS).items():
        assert count(lines, "vpmaddwd") >= int(rows) * int(panels), (kind, rows)
    sums_of_floats = named(path, FLOATS)
    assert len(sums_of_floats) == 2 * 6 * 2
    for (kind, rows, asks), lines in sums_of_floats.items():
        sums = int(rows) * (4 if int(rows) <= 3 else 2)  # of eight outputs, which registers hold in a loop
        assert count(lines, "vfmadd231ps") == sums * (2 if kind == "BFloat16" else 2 + 1), (kind, rows)
        assert (count(lines, "prefetcht1") > 0) == (asks == "true"), (kind, rows)
    beyond = {"vdpbf16ps", "vpdpbusd", *TILES}
    for name, lines in functions(path).items():
        assert not any("%zmm" in line or line.split(None, 1)[0] in beyond for line in lines), name


def test_tiles_are_multiplied_where_the_machine_has_them() -> None:
    used = {
        line.split(None, 1)[0] for lines in functions(library.SOURCE.compiled()).values() for line in lines
    }
    has_tiles = KINDS["amx"].needs <= compiler.cpu_flags()
    assert TILES & used == (TILES if has_tiles else set())
