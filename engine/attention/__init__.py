"""Attention over a paged KV cache: the contract in ``base``, one file per backend.

``make_attention`` loads only the file of the backend that is asked for.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from engine.attention.base import LayerShape, PagedAttention
    from engine.attention.kv_codes import KVCodes

Backend = Literal["TORCH_SDPA", "TORCH_FIXED", "TRITON_ATTN", "TRITON_FIXED"]
"""Ways to compute attention over the KV cache.

Gathered contexts on any device, the same in blocks of fixed size on a CPU, or blocks read where they are, by
tiles of any size or of one. TORCH_SDPA and TRITON_ATTN are vLLM's names.
"""

INTERPRET = "TRITON_INTERPRET"
"""Environment variable that makes Triton run kernels on the CPU if it is 1.

It goes number by number: far too slow to serve, good for tests.
"""


def make_attention(
    layers: Sequence[LayerShape],
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    backend: Backend = "TORCH_SDPA",
    programs: int | None = None,
    codes: KVCodes | None = None,
    memory: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
) -> PagedAttention:
    """The KV cache of a model and its attention on ``device``, by a suitable backend.

    ``programs``: how many of them keep the device busy, for TRITON_ATTN; None: chosen for the device.
    ``codes``: what keys and values are kept as, None for numbers; TRITON_ATTN has none. ``memory``: gives
    tensors of zeros on a CPU; None: in memory of this process.
    """
    if backend in ("TRITON_ATTN", "TRITON_FIXED"):
        assert codes is None, "codes are refused where the backend is chosen"
        from engine.attention.triton_paged import TritonPagedAttention

        return TritonPagedAttention(
            layers,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            device=device,
            programs=programs,
            fixed=backend == "TRITON_FIXED",
        )
    if backend == "TORCH_FIXED":
        from engine.attention.fixed_paged import FixedPagedAttention as PlainAttention
    else:
        from engine.attention.torch_paged import TorchPagedAttention as PlainAttention  # type: ignore[assignment]
    return PlainAttention(
        layers,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=dtype,
        device=device,
        codes=codes,
        memory=memory,
    )


def why_not_triton(device: torch.device) -> str | None:
    """Reason why TRITON_ATTN cannot run on a device; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Python finds no triton, which torch's CUDA builds bring with them: pip install triton"
    if device.type != "cuda" and os.environ.get(INTERPRET) != "1":
        return f"it needs a CUDA device (or {INTERPRET}=1, for tests), and this is {device}"
    return None
