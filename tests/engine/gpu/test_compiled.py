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

SHAPES = (
    "qwen3-0.6b", "qwen3-30b-a3b", "llama-3-70b", "gemma-2-9b", "gpt-oss-20b", "odd", "apart", "one kv head",
)  # fmt: skip
FEW = ("odd", "one kv head")
"""For types and devices that differ little from one with all shapes."""
CELLS = [(capability, "bfloat16", shape) for capability in (80, 90, 100, 120) for shape in SHAPES] + [
    (capability, dtype, shape)
    for capability, dtype in ((90, "float16"), (90, "float32"), (80, "float16"), (89, "bfloat16"))
    for shape in FEW
]
LIMIT = 900
"""Seconds for the kernels of one shape; an idle core takes two minutes."""


def compile_for(capability: int, dtype: str, shape: str, cache: Path) -> None:
    """Run :mod:`tests.engine.gpu.compiled` in a process that has not loaded the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != INTERPRET}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.engine.gpu.compiled", str(capability), dtype, shape],
        env=environment | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize(("capability", "dtype", "shape"), CELLS)
def test_kernels_compile_for_devices_that_are_not_here(
    capability: int, dtype: str, shape: str, tmp_path: Path
) -> None:
    compile_for(capability, dtype, shape, tmp_path)
