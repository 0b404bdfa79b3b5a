"""Number of OpenMP threads of the calling thread alone; torch sets the process's."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from pathlib import Path

LIBRARIES = re.compile(r"/\S*lib(?:gomp|omp|iomp5)[^/\s]*\.so\S*")
"""Runtimes of OpenMP among the files that a process has mapped."""


@functools.cache
def _setters() -> list[Callable[[int], None]]:
    """``omp_set_num_threads`` of each runtime that is loaded."""
    try:
        mapped = set(LIBRARIES.findall(Path("/proc/self/maps").read_text()))
        return [ctypes.CDLL(path).omp_set_num_threads for path in sorted(mapped)]
    except (OSError, AttributeError):  # not Linux, or a runtime of another kind
        return []


def compute_with(threads: int) -> None:
    """Let loops that the calling thread begins run on so many threads."""
    for set_threads in _setters():
        set_threads(threads)
