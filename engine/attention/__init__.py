"""Attention over a paged KV cache: the contract in ``base``, one file per backend.

``make_attention`` picks the backend and loads only its file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from engine.attention.base import LayerShape, PagedAttention


def make_attention(
    layers: Sequence[LayerShape],
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> PagedAttention:
    """The KV cache of a model and its attention, on ``device``. Plain torch serves every device so far."""
    from engine.attention.torch_paged import TorchPagedAttention

    return TorchPagedAttention(
        layers, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device
    )
