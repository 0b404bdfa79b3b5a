"""Quantisation of a plain checkpoint while it is read (``--quantization``).

The scale of an output, or of a group of inputs, brings the greatest weight to the end of the range. Only
what a worker reads is looked at: its rows, in their full width where one scale is for a whole row.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from engine.config.quantization import OnlineName
from engine.model.errors import CheckpointError
from engine.model.quantization.formats import online_format
from engine.model.quantization.matrices import QuantizedMatrix, Stored, ranges_of
from engine.model.quantization.rounding import MOST_INPUTS, WORD_INPUTS, Rounding
from engine.model.quantization.view import WEIGHT, QuantizedFiles
from engine.model.quantization.weight_codes import FLOAT8, few_rows

IN_LAYERS = re.compile(r"(^|\.)layers?\.\d+\.")
"""Matrices outside of layers, which are embeddings and heads, stay as they are."""
KEPT = {"gate", "router", "wg", "shared_expert_gate", "kv_b_proj"}
"""Names of modules that stay as they are.

They are routers, whose choices a rounding would turn, and what is used by its parts.
"""
STACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj|gate_and_up_proj)$")
PLAIN_DTYPES = ("BF16", "F16", "F32")
GROUP_SIZES = (128, 64, 32)
"""Inputs that share a scale, with 4 bits: the first of these that divides them."""
LEAST_SIZE = 32
"""Outputs and inputs of the smallest matrix that is quantised."""
SPARE_BITS = 19
"""Lowest bits of a scale that are 0, with 4 bits.

Products of such scales and codes are bfloat16, so that kernels without AVX-512 have nothing to round.
"""
BLOCK = 128
"""Outputs and inputs of a block."""
LARGEST_FLOAT8 = 448.0


class OnlineFiles(QuantizedFiles):
    """The files of a plain checkpoint, whose matrices are quantised when they are read."""

    def __init__(self, files: Sequence[Any], name: OnlineName, dtype: torch.dtype) -> None:
        """``name``: see :data:`engine.config.quantization.ONLINE`.

        Raises:
            CheckpointError: there is nothing to quantise, or it is laid out in another way.
        """
        self._kind = KINDS[name]
        super().__init__(files, online_format(name), dtype)

    def _find(self) -> Iterator[tuple[str, QuantizedMatrix]]:
        for name, home in self._homes.items():
            if STACKED.search(name):
                raise CheckpointError(
                    f"{name} holds all experts of a layer, which --quantization does not take apart: leave "
                    "it out, or save the checkpoint with one tensor for each expert"
                )
            owner, _, last = name.rpartition(".")
            if last != WEIGHT or not IN_LAYERS.search(name) or owner.rpartition(".")[2] in KEPT:
                continue
            stored: Stored = home.get_slice(name)
            shape = stored.get_shape()
            if len(shape) == 2 and min(shape) >= LEAST_SIZE and stored.get_dtype() in PLAIN_DTYPES:
                yield name, self._kind(name, {WEIGHT: stored}, self._form, self._dtype)


class _OnlineMatrix(QuantizedMatrix):
    """A plain matrix, of which codes are made."""

    LAYOUT = "online"
    CODES = SCALES = WEIGHT
    CODE_DTYPE = torch.int8

    def _find_shape(self) -> tuple[int, int]:
        outputs, inputs = self._shape_of(WEIGHT, 2)
        return outputs, inputs

    def _check(self) -> None:
        self._size = self._find_size()
        self._found: dict[tuple[int, int], torch.Tensor] = {}
        """Scales by range of outputs."""

    def _find_size(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1]

    def _group_size(self) -> int:
        return self._size

    def _code_bits(self) -> int:
        return 8

    @abstractmethod
    def _scale_of(self, numbers: torch.Tensor) -> torch.Tensor:
        """The scale of numbers along the last dimension, which stays, with one number."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        """See the base.

        Of whole rows, scales and weights are made while a few are in a cache.
        """
        rows, columns = ranges_of(index, self.shape)
        if torch.int8 != self.CODE_DTYPE or columns != slice(0, self.shape[1]) or rows.start == rows.stop:
            return super().__getitem__(index)
        self.taken.append((rows, columns))
        weights = self._parts[WEIGHT][rows, :]
        wide, found = torch.empty(weights.shape, dtype=self._dtype), []
        for some in few_rows(weights.shape):
            numbers = weights[some].float().unflatten(-1, (-1, self._size))
            found.append(scales := self._scale_of(numbers))
            wide[some] = self._round(numbers, scales).mul_(scales).flatten(-2)
        self._found[rows.start, rows.stop] = self._checked_scales(torch.cat(found)[..., 0])
        return wide

    def _codes(self, rows: slice, columns: slice) -> torch.Tensor:
        weights = self._parts[WEIGHT][rows, columns]
        size = self._inputs_each(columns) or 1
        scales = self._scales(rows, columns, size)[..., None]
        codes = torch.empty(weights.shape, dtype=self.CODE_DTYPE)
        for some in few_rows(weights.shape):
            numbers = weights[some].float().unflatten(-1, (-1, size))
            codes[some] = self._round(numbers, scales[some]).flatten(-2)
        return codes

    def _round(self, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Numbers that codes can hold; 0 where the scale is."""
        return self._rounded(numbers.div(scales.where(scales != 0, torch.inf)))

    def _rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        """Weights rounded to numbers that codes can hold."""
        return numbers.round_().clamp_(*self._range()).add_(0)  # no zero below 0, which no code is

    def _range(self) -> tuple[int, int]:
        return -127, 127

    def _scales(self, rows: slice, columns: slice, every: int) -> torch.Tensor:
        key = rows.start, rows.stop
        if key not in self._found:
            self._found[key] = self._checked_scales(self._scales_of(rows))
        return self._found[key][:, self._group_of(columns, self._size, every)]

    def _scales_of(self, rows: slice) -> torch.Tensor:
        """Scales [outputs, groups] of a range of outputs."""
        weights = self._parts[WEIGHT][rows, :]
        some = (weights[few].float().unflatten(-1, (-1, self._size)) for few in few_rows(weights.shape))
        found = [self._scale_of(numbers)[..., 0] for numbers in some]
        return torch.cat(found) if found else weights.new_zeros(0, self.shape[1] // self._size).float()

    def _zeros(self, rows: slice, columns: slice, every: int) -> torch.Tensor | None:
        return None


class _Int8(_OnlineMatrix):
    """8 bits, one scale for an output."""

    def _scale_of(self, numbers: torch.Tensor) -> torch.Tensor:
        return _largest(numbers) / 127


class _Int8Rounded(_Int8):
    """8 bits, one scale for an output; activations are rounded by row, too."""

    @property
    def rounding(self) -> Rounding | None:
        inputs = self.shape[1]
        return Rounding() if inputs % WORD_INPUTS == 0 and inputs <= MOST_INPUTS else None


class _Int4(_OnlineMatrix):
    """4 bits, one scale for a group of inputs, whose greatest number becomes -8.

    Of two with other signs it is the one below 0. Scales are rounded to the nearest of 5 significant bits.
    """

    def _find_size(self) -> int:
        return next((size for size in GROUP_SIZES if self.shape[1] % size == 0), self.shape[1])

    def _code_bits(self) -> int:
        return 4

    def _range(self) -> tuple[int, int]:
        return -8, 7

    def _scale_of(self, numbers: torch.Tensor) -> torch.Tensor:
        least, most = _ends(numbers)
        bits = torch.where(-least >= most, least, most).div_(-8).view(torch.int32)
        bits += (1 << (SPARE_BITS - 1)) - 1 + (bits >> SPARE_BITS & 1)
        return (bits >> SPARE_BITS << SPARE_BITS).view(torch.float32)


class _Float8(_OnlineMatrix):
    """Floats of 8 bits, one scale for an output."""

    CODE_DTYPE = FLOAT8

    def _rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.clamp_(-LARGEST_FLOAT8, LARGEST_FLOAT8)

    def _scale_of(self, numbers: torch.Tensor) -> torch.Tensor:
        return _largest(numbers) / LARGEST_FLOAT8


class _Float8Blocks(_Float8):
    """Floats of 8 bits, one scale for a block, as DeepSeek publishes them."""

    def _find_size(self) -> int:
        return BLOCK

    def _scales_of(self, rows: slice) -> torch.Tensor:
        outputs, inputs = self.shape
        low = rows.start // BLOCK * BLOCK
        whole = self._parts[WEIGHT][low : min(outputs, -(-rows.stop // BLOCK) * BLOCK), :].float()
        padded = torch.nn.functional.pad(whole, (0, -inputs % BLOCK, 0, -len(whole) % BLOCK))
        blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(1, 2).flatten(2)
        scales = self._scale_of(blocks)[..., 0]
        return scales[torch.arange(rows.start, rows.stop) // BLOCK - low // BLOCK]


KINDS: dict[OnlineName, Callable[..., QuantizedMatrix]] = {
    "int8_per_channel_weight_only": _Int8,
    "int8": _Int8Rounded,
    "int4": _Int4,
    "fp8_per_channel": _Float8,
    "fp8_per_block": _Float8Blocks,
}


def _ends(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest number along the last dimension, which stays.

    Two passes take a tenth of the time of torch's ``aminmax``.
    """
    return numbers.amin(-1, keepdim=True), numbers.amax(-1, keepdim=True)


def _largest(numbers: torch.Tensor) -> torch.Tensor:
    """The greatest size of a number."""
    least, most = _ends(numbers)
    return torch.maximum(most, -least)
