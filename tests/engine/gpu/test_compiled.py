"""Kernels compile to machine code of devices that are not here.

The interpreter accepts more than the compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.attention import INTERPRET

EVERY = [
    (90, "bfloat16"),
    (90, "float16"),
    (90, "float32"),
    (80, "bfloat16"),
    (80, "float16"),
    (89, "bfloat16"),
    (100, "bfloat16"),
    (120, "bfloat16"),
]
CELL = 1500
"""Limit of one of these in seconds.

It takes minutes on a quiet machine.
"""


def compile_for(capability: int, dtype: str, shapes: list[str], cache: Path) -> None:
    """Run :mod:`tests.engine.gpu.compiled` in a process that has not loaded the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != INTERPRET}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.engine.gpu.compiled", str(capability), dtype, *shapes],
        env=environment | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=CELL,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(CELL + 60)
@pytest.mark.parametrize(("capability", "dtype"), EVERY)
def test_kernels_compile_for_devices_that_are_not_here(capability: int, dtype: str, tmp_path: Path) -> None:
    compile_for(capability, dtype, [], tmp_path)
