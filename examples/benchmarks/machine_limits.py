#!/usr/bin/env python3
"""Current memory bandwidth and matrix rate of the machine, as JSON.

GB/s of reading a GiB with all threads, and GFLOP/s of a product of two bfloat16 matrices of 1024 x 1024.

Benchmarks run this before and after, in a process of its own: compare two runs only where these agree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

READS, PRODUCTS = 4, 20


def measure(threads: int) -> dict[str, float]:
    import torch

    torch.set_num_threads(threads)
    block = torch.ones(1 << 28, dtype=torch.float32)
    one = torch.ones(1024, 1024, dtype=torch.bfloat16)
    return {
        "read_gb_per_s": round(block.nbytes / best_of(READS, block.sum) / 1e9, 1),
        "bf16_gflop_per_s": round(2 * 1024**3 / best_of(PRODUCTS, lambda: one @ one) / 1e9),
        "load_average": os.getloadavg()[0],
    }


def best_of(times: int, action: Callable[[], object]) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def calibrate() -> dict[str, float]:
    """Run :func:`measure` in a separate process.

    No threads or memory of it stay in this one.
    """
    found = subprocess.run([sys.executable, __file__], check=True, stdout=subprocess.PIPE, timeout=120)
    numbers: dict[str, float] = json.loads(found.stdout)
    return numbers


if __name__ == "__main__":
    print(json.dumps(measure(os.cpu_count() or 1)))
