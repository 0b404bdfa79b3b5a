"""Tensors of keys and values in blocks, shared by the torch and Triton backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import torch

from engine.attention.base import AttentionUse, LayerShape


@dataclass(eq=False, repr=False)
class PagedTensors:
    """The KV cache of one model on one device.

    Each layer has tensors [slots, kv_heads, dim]; slot = block * block_size + offset. Backends add their
    attention over it.
    """

    layers: Sequence[LayerShape]
    _: KW_ONLY
    num_blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    memory: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None
    """Gives tensors of zeros; None: in memory of this process, or on the device."""
    keys: list[torch.Tensor] = field(init=False)
    values: list[torch.Tensor] = field(init=False)
    index_keys: dict[int, torch.Tensor] = field(init=False)
    """By layer with an indexer: keys [slots, dim]."""
    use: AttentionUse = field(init=False, default_factory=AttentionUse)

    def allocate(self, num_blocks: int, dtype: torch.dtype) -> None:
        """Make the tensors, of so many blocks and this data type."""
        slots = num_blocks * self.block_size
        self.keys = [self.zeros((slots, each.kv_heads, each.key_dim), dtype) for each in self.layers]
        self.values = [self.zeros((slots, each.kv_heads, each.value_dim), dtype) for each in self.layers]
        self.index_keys = {
            number: self.zeros((slots, each.index_dim), self.dtype)
            for number, each in enumerate(self.layers)
            if each.index_dim
        }

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory for a part of the cache."""
        return zeros(shape, dtype, self.device) if self.memory is None else self.memory(shape, dtype)

    @property
    def stored(self) -> list[torch.Tensor]:
        """Tensors of keys, values and indexers' keys, each beginning with the first block."""
        return [*self.keys, *self.values, *self.index_keys.values()]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed memory, since masked values are still multiplied by 0.

    0 * NaN is NaN. On CPU the pages come from calloc, so that a large cache costs neither time nor memory
    until it is written.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
