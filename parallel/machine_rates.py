"""Rates of this machine: multiply-adds of a kind of kernels, and reading memory (no torch).

``native/machine_rates.cpp`` is compiled for the kind, as the kernels are. What tiles (AMX) multiply is not
measured: the rates of such a kind are those of its vectors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from parallel import compiler
from parallel.kernel_kinds import KernelKind, fastest, usable
from parallel.native_source import NativeLibrary, NativeSource

SOURCE = NativeSource(path=compiler.INCLUDE / "machine_rates.cpp", absent="rates of this machine: unknown,")
TYPES = "float32", "bfloat16", "int8"
"""Types of numbers whose multiply-adds are measured."""
ROUNDS = 100_000
"""Multiply-adds of each sum in one measurement: some milliseconds."""
TIMES = 12
"""Measurements of a rate, of which the best counts."""
LARGE = 1 << 28
"""Bytes that no cache holds."""
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class MachineRates(msgspec.Struct, frozen=True):
    """Rates of one core and of all together, in 1e9 operations or bytes a second."""

    kind: str
    """Kind of kernels; ``torch`` where this CPU runs none."""
    cores: int
    one_core: dict[str, float]
    """Operations by type; a multiply-add counts as two.

    No entry where vectors have no such instruction.
    """
    all_cores: dict[str, float]
    read_one_core: float
    read_all_cores: float
    caches: dict[str, int]
    """Bytes by level, such as ``L2``."""


class RateProbe:
    """Compiled loops whose rates are measured."""

    def __init__(self, opened: NativeLibrary) -> None:
        number = ctypes.c_int64
        self._multiply = {name: opened.bind(f"multiply_{name}", number) for name in TYPES}
        self._read = opened.bind("read_memory", number, number)

    def operations(self, name: str, threads: int) -> float:
        """Operations a second in a type of numbers; 0 if it is not measured."""
        return _best_rate(lambda _: int(self._multiply[name](ROUNDS)), threads)

    def reading(self, threads: int, num_bytes: int | None = None, times: int | None = None) -> float:
        """Bytes a second of a block that so many threads read again and again.

        A block that a cache holds is read at that cache's rate. None: one that no cache holds.
        """
        part = max((num_bytes or LARGE) // threads, 1 << 16) // mmap.PAGESIZE * mmap.PAGESIZE
        with mmap.mmap(-1, part * threads) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)  # as weights may be
            view = ctypes.c_char.from_buffer(memory)
            address = ctypes.addressof(view)
            ctypes.memset(address, 1, part * threads)  # untouched pages are one page of zeros
            try:
                return _best_rate(lambda index: int(self._read(address + index * part, part)), threads, times)
            finally:
                del view


def probe(kind: KernelKind | None) -> RateProbe | None:
    """The loops compiled for a kind of kernels; None for a reason that is logged."""
    return SOURCE.load(RateProbe, *([] if kind is None else kind.options(compiler.cpu_flags())))


def best_kind(asked: str = "") -> KernelKind | None:
    """The kind of kernels of that name, or the fastest, that this CPU runs."""
    return usable(asked, compiler.cpu_flags()) if asked else fastest(compiler.cpu_flags())


def measure_machine(asked: str = "") -> MachineRates | None:
    """Measure this machine with a kind of kernels, which takes seconds; None without a compiler."""
    kind = best_kind(asked)
    found = probe(kind)
    if found is None:
        return None
    cores = len(os.sched_getaffinity(0))
    one, together = (
        {name: round(rate / 1e9, 1) for name in TYPES if (rate := found.operations(name, threads))}
        for threads in (1, cores)
    )
    return MachineRates(
        kind="torch" if kind is None else kind.name,
        cores=cores,
        one_core=one,
        all_cores=together,
        read_one_core=round(found.reading(1) / 1e9, 1),
        read_all_cores=round(found.reading(cores) / 1e9, 1),
        caches=cache_sizes(),
    )


def cache_sizes(directory: Path = CACHES) -> dict[str, int]:
    """Bytes of the first core's caches by level, without those of instructions."""
    sizes: dict[str, int] = {}
    for each in sorted(directory.glob("index*")):
        level, kind, size = ((each / name).read_text().strip() for name in ("level", "type", "size"))
        found = re.fullmatch(r"(\d+)([KMG]?)", size)
        if kind != "Instruction" and found is not None:
            sizes[f"L{level}"] = int(found[1]) * UNITS[found[2]]
    return sizes


def _best_rate(work: Callable[[int], int], threads: int, times: int | None = None) -> float:
    """Units of work a second by threads at once, in the fastest of several measurements."""
    times = times or TIMES
    barrier = threading.Barrier(threads + 1)
    done, began, ended = [0] * threads, [0.0] * threads, [0.0] * threads

    cores = sorted(os.sched_getaffinity(0))

    def run(index: int) -> None:
        os.sched_setaffinity(
            0, {cores[index % len(cores)]}
        )  # of this thread: measurements are too short to spread
        for _ in range(times):
            barrier.wait()
            began[index] = time.perf_counter()
            done[index] = work(index)
            ended[index] = time.perf_counter()
            barrier.wait()

    workers = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(threads)]
    for worker in workers:
        worker.start()
    best = 0.0
    for _ in range(times):
        barrier.wait()
        barrier.wait()
        best = max(best, sum(done) / (max(ended) - min(began)))
    for worker in workers:
        worker.join()
    return best
