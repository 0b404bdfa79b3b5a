"""Kernels in Triton's interpreter on tensors whose heads lie more than 2^31 numbers apart.

They run in a process of their own: an address that has overflown ends it.
"""

from __future__ import annotations

import os
import subprocess
import sys

HEADS = """
import torch
STRIDE = (1 << 30) + 64
room = torch.empty(2 * STRIDE + 64, dtype=torch.float16)  # of which hardly any page is touched
heads = room.as_strided((3, 1, 8), (STRIDE, 8, 1))
for head in range(3):
    heads[head] = head + 1
keys, values = torch.zeros(2, 4, 3, 8, dtype=torch.float16)
slots = torch.tensor([2])
"""
STORE = """
from engine.attention.triton_kernels import store
store[(1, 3)](heads, heads, keys, values, slots, STRIDE, 8, STRIDE, 8,
    KV_HEADS=3, KEY_DIM=8, VALUE_DIM=8, BLOCK_K=8, BLOCK_V=8)
assert keys[2, :, 0].tolist() == values[2, :, 0].tolist() == [1, 2, 3]
"""
ROTATE = """
from engine.gpu.fused_kernels import rotate_and_store
cosines, sines = torch.ones(1, 8), torch.zeros(1, 8)
turned = torch.zeros(1, 3, 8, dtype=torch.float16)
rotate_and_store[(1, 6)](heads, heads, heads, cosines, sines, turned, keys, values, slots,
    cosines, cosines, 0.0, STRIDE, 8, STRIDE, 8, STRIDE, 8, 8,
    HEADS=3, KV_HEADS=3, DIM=8, VALUE_DIM=8, BLOCK=4, BLOCK_V=8, NORMED=False, PLUS_ONE=False)
assert keys[2, :, 0].tolist() == values[2, :, 0].tolist() == turned[0, :, 0].tolist() == [1, 2, 3]
"""


def test_offsets_of_heads_do_not_overflow() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HEADS + STORE + ROTATE],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
