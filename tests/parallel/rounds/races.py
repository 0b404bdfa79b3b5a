"""Programs in C++ under ThreadSanitizer, which knows the order of memory that C++ promises.

It keeps to that promise whatever the CPU, so it finds on x86-64 what only a weaker CPU would show.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

FLAGS = ("-std=c++17", "-O1", "-g", "-w", "-fsanitize=thread", "-pthread")
ONE_LAYOUT = ("setarch", "-R")
"""Command prefix for addresses that are not random: some versions of ThreadSanitizer need that."""


def run(program: Path, folder: Path, *includes: Path) -> str:
    """What a program prints, compiled for ThreadSanitizer into a folder; fails at the first race."""
    if shutil.which("g++") is None or shutil.which("setarch") is None:
        pytest.skip("no g++ or setarch here")
    built = folder / program.stem
    if (problem := _compiled(program, built, includes)) and _compiled(_empty(folder), built, ()):
        pytest.skip("g++ has no ThreadSanitizer here")
    assert problem is None, problem
    done = subprocess.run([*ONE_LAYOUT, str(built)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[:3000]
    return done.stdout


def _compiled(program: Path, built: Path, includes: tuple[Path, ...]) -> str | None:
    """The errors of the compiler; None if there are none."""
    command = ["g++", *FLAGS, *(f"-I{each}" for each in includes), str(program), "-o", str(built)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr[:3000] if done.returncode else None


def _empty(folder: Path) -> Path:
    program = folder / "empty.cpp"
    program.write_text("int main() {}\n")
    return program
