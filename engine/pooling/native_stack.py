"""Layers of a pooling model on the native kernels, over packed texts.

Keys and values of a layer are needed while it is computed alone, so all layers share one cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from engine.attention.base import PackedRows
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.core import library
from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.decoder import DecoderModel
from engine.kernels.encoder import place_of_layers, recognise_layers
from engine.kernels.program import Program
from engine.model.quantization.attached import forget_codes
from engine.pooling.packed_attention import BOUNDS

logger = logging.getLogger(__name__)

BLOCK_SIZE = 16
"""Tokens of a block of the cache."""
TOGETHER = 1024
"""Tokens that go through all layers together, if they are of several texts.

So many keep the products busy, and what the layers hand on stays in the cache of the CPU.
"""


class _Layers(torch.nn.Module):  # type: ignore[misc]
    """Stands in the place of all layers of a model."""

    def __init__(self, stack: NativeStack, like: Any) -> None:
        super().__init__()
        self._stack = stack
        self.attention_type = getattr(like, "attention_type", None)
        """Kind of the first layer, by which some models choose a mask."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """[1, tokens, width] states behind all layers."""
        lengths = [end - begin for begin, end in BOUNDS.of_call]
        return self._stack.compute(hidden_states[0], lengths)[None]


class NativeStack:
    """Computes all layers of a base model."""

    def __init__(self, base: Any, program: Program, decoder: DecoderModel) -> None:
        self._program, self._dtype = program, decoder.dtype
        self._matrices = decoder.matrices()
        self._owner, self._name = place_of_layers(base)
        self._own_layers: Any = getattr(self._owner, self._name)
        """The model's own layers; None once they are let go."""
        self._num_blocks = 0
        self._nothing = np.zeros(0, dtype=np.int64)

    def __repr__(self) -> str:
        return f"<NativeStack {self._program!r}>"

    @classmethod
    def of(cls, base: Any, dtype: torch.dtype, *, sees_all: bool) -> NativeStack | None:
        """Layers of a base model, laid out anew; None, and logged, without kernels for them."""
        kernels = library.load()
        if kernels is None:
            return None
        try:
            decoder = recognise_layers(base, dtype, sees_all=sees_all)
            return cls(base, Program(kernels, decoder), decoder)
        except Exception as error:  # noqa: BLE001 (a model's code may raise anything; torch can compute it)
            level = logging.DEBUG if isinstance(error, NotRecognised) else logging.INFO
            logger.log(level, "pooling: native layers: off, %s: %s", type(error).__name__, error)
            return None

    @property
    def windows(self) -> set[int]:
        """Windows of layers that have one."""
        return {shape.window for shape in self._program.cached if shape.window}

    def put_in(self) -> None:
        """Compute the model's layers from now on."""
        made = torch.nn.ModuleList([_Layers(self, self._own_layers[0])])
        setattr(self._owner, self._name, made)

    def take_out(self) -> None:
        """Leave the layers to the model's own code again."""
        setattr(self._owner, self._name, self._own_layers)

    def let_go(self) -> None:
        """Free the model's own weights, which are laid out here."""
        for each in [*self._matrices, *self._own_layers.parameters()]:
            forget_codes(each)
        for each in self._matrices:
            each.data = each.data.new_empty(0)
        self._matrices, self._own_layers = [], None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that are laid out."""
        return self._program.weight_bytes

    @property
    def kind(self) -> str:
        """Kind of the kernels."""
        return self._program.kind

    @property
    def version(self) -> str:
        """See :attr:`engine.kernels.core.library.KernelLibrary.version`."""
        return self._program.version

    def compute(self, hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """[tokens, width] states behind all layers, of texts of these lengths.

        ``hidden``: [tokens, width] what the layers begin with, texts of one token first.
        """
        out = torch.empty_like(hidden)
        begin = 0
        for some in _pieces(lengths):
            end = begin + sum(some)
            out[begin:end] = self._compute(hidden[begin:end], np.array(some, dtype=np.int64))
            begin = end
        return out

    def clear(self) -> None:
        """Forget keys and values: numbers that are not finite must not reach another text."""
        self._num_blocks = 0

    def _compute(self, hidden: torch.Tensor, counts: np.ndarray[Any, Any]) -> torch.Tensor:
        blocks = -(-counts // BLOCK_SIZE)
        first = np.cumsum(blocks) - blocks
        self._make_room(int(blocks.sum()))
        width = np.arange(blocks.max())
        offsets = np.cumsum(counts) - counts
        rows = PackedRows(
            starts=np.zeros(len(counts), dtype=np.int64),
            counts=counts,
            block_tables=np.minimum(first[:, None] + width, self._num_blocks - 1).astype(np.int32),
            positions=np.arange(int(counts.sum())) - np.repeat(offsets, counts),
            num_single=int((counts == 1).sum()),
        )
        ids = np.zeros(len(hidden), dtype=np.int64)
        return self._program.forward(rows, ids, self._nothing, hidden[None])[0]

    def _make_room(self, num_blocks: int) -> None:
        if num_blocks <= self._num_blocks:
            return
        self._num_blocks = max(64, 1 << (num_blocks - 1).bit_length())
        shapes = self._program.cached
        made = {
            shape: NativeCache([shape], num_blocks=self._num_blocks, block_size=BLOCK_SIZE, dtype=self._dtype)
            for shape in {*shapes}
        }
        cache = made[shapes[0]]
        cache.keys, cache.values = (
            [getattr(made[shape], part)[0] for shape in shapes] for part in ("keys", "values")
        )
        cache.scales = [None for _ in shapes]
        self._program.use(cache)


def _pieces(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Lengths of texts that are computed together, in order."""
    some: list[int] = []
    for length in lengths:
        if some and sum(some) + length > TOGETHER:
            yield some
            some = []
        some.append(length)
    if some:
        yield some
