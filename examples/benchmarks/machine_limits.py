#!/usr/bin/env python3
"""Current memory bandwidth and rate of multiply-adds of the machine, as JSON.

GB/s of reading memory with all threads, and GFLOP/s of the best kind of native kernels in bfloat16, or in
float32 where its vectors have no instruction for that (:mod:`parallel.machine_rates`).

Benchmarks run this before and after, in a process of its own: compare two runs only where these agree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this is not installed

from parallel.machine_rates import measure_machine


def measure() -> dict[str, float]:
    rates = measure_machine(os.environ.get("LOCKSTEP_NATIVE_KERNELS", "").replace("0", ""))
    if rates is None:
        raise SystemExit("there is no C++ compiler here, by which the limits are measured")
    products = rates.all_cores.get("bfloat16", rates.all_cores["float32"])
    return {
        "read_gb_per_s": rates.read_all_cores,
        "bf16_gflop_per_s": round(products),
        "load_average": os.getloadavg()[0],
    }


def calibrate() -> dict[str, float]:
    """Run :func:`measure` in a separate process.

    No threads or memory of it stay in this one.
    """
    found = subprocess.run([sys.executable, __file__], check=True, stdout=subprocess.PIPE, timeout=120)
    numbers: dict[str, float] = json.loads(found.stdout)
    return numbers


if __name__ == "__main__":
    print(json.dumps(measure()))
