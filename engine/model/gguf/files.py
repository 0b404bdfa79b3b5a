"""The weights of a GGUF file under transformers' names, as safetensors shows a file.

Matrices are widened by the gguf package, a range of rows at a time, computed in float32 and rounded once to
the model's data type. Q8_0, Q4_0 and MXFP4 are codes and scales, too: ``code * scale``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from engine.model.errors import CheckpointError
from engine.model.gguf.names import Recipe, recipes_of
from engine.model.gguf.reading import TensorEntry, read_header
from engine.model.quantization.matrices import DTYPE_NAMES, Stored, ranges_of
from engine.model.quantization.stacks import TWICE, Alternating, ExpertStack, Matrix, half_scales
from engine.model.quantization.view import CodedFiles
from engine.model.quantization.weight_codes import Codes

Bytes = npt.NDArray[np.uint8]
CODE_BITS = {"Q8_0": 8, "Q4_0": 4, "MXFP4": 4}
"""Bits of a code, by types whose numbers are codes times a scale."""
SCALE_BYTES = {"Q8_0": 2, "Q4_0": 2, "MXFP4": 1}
"""Bytes with which such a block begins: its scale, in float16, or an exponent."""


class GgufFiles(CodedFiles):
    """A GGUF file, as safetensors shows one."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        """All tensors are given in ``dtype``."""
        header = read_header(path)
        content: Bytes = np.memmap(path, mode="r", dtype=np.uint8)
        self._tensors: dict[str, Stored] = {}
        self.matrices: dict[str, GgufMatrix] = {}  # type: ignore[assignment]
        self.stacks: dict[str, ExpertStack] = {}
        for name, recipe in recipes_of(header).items():
            sources = [_Source(header.tensors[each], content) for each in recipe.tensors]
            if recipe.is_turned:
                self._tensors[name] = self.stacks[name] = _stack(name, recipe, sources, dtype)
            elif len(sources) > 1:
                self._tensors[name] = _Biases(name, sources, dtype)
            elif len(sources[0].entry.shape) == 1:
                self._tensors[name] = _Vector(name, recipe, sources[0], dtype)
            else:
                self._tensors[name] = self.matrices[name] = GgufMatrix(name, recipe, sources[0], dtype)

    def __repr__(self) -> str:
        return f"<GgufFiles with {len(self._tensors)} tensors>"

    def keys(self) -> list[str]:
        return [*self._tensors]

    def get_slice(self, name: str) -> Stored:
        return self._tensors[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name][...]


class _Source:
    """Numbers of a tensor of the file, by rows along its last dimension."""

    def __init__(self, entry: TensorEntry, content: Bytes) -> None:
        self.entry = entry
        bytes_of = content[entry.begin : entry.begin + entry.num_bytes]
        self._rows = bytes_of.reshape(-1, entry.row_bytes)
        self._type = GGMLQuantizationType[entry.type.name]

    def blocks(self, rows: Any, columns: slice) -> Bytes:
        """Whole blocks [rows, blocks, bytes] that have these columns."""
        low, high = self.block_range(columns)
        size = self.entry.type.num_bytes
        found = self._rows[rows, low * size : high * size]
        return np.ascontiguousarray(found).reshape(len(found), high - low, size)

    def block_range(self, columns: slice) -> tuple[int, int]:
        """The blocks that have these columns."""
        each = self.entry.type.numbers
        return columns.start // each, -(-columns.stop // each)

    def numbers(self, rows: Any, columns: slice) -> npt.NDArray[np.float32]:
        """Numbers [rows, columns].

        Raises:
            CheckpointError: one is infinite, or none.
        """
        blocks, (low, _) = self.blocks(rows, columns), self.block_range(columns)
        first = low * self.entry.type.numbers
        widened = dequantize(blocks.reshape(len(blocks), -1), self._type)
        found: npt.NDArray[np.float32] = widened.reshape(len(blocks), -1)[
            :, columns.start - first : columns.stop - first
        ].astype(np.float32, copy=False)
        if not np.isfinite(found).all():
            raise CheckpointError(
                f"{self.entry.name} has numbers that are infinite or none: the file is broken, get it again"
            )
        return found


class GgufMatrix:
    """A matrix of [outputs, inputs], as :class:`.QuantizedMatrix` is one."""

    def __init__(self, name: str, recipe: Recipe, source: _Source, dtype: torch.dtype) -> None:
        self._name, self._recipe, self._source, self._dtype = name, recipe, source, dtype
        self.shape: tuple[int, int] = source.entry.shape[-2:]  # type: ignore[assignment]
        self.taken: list[tuple[slice, slice]] = []
        """Ranges of outputs and inputs that were read, in this order."""

    def __repr__(self) -> str:
        return f"<GgufMatrix {self._name} {list(self.shape)} {self._source.entry.type.name}>"

    def get_shape(self) -> list[int]:
        """Outputs and inputs."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """The data type of the numbers that are given, as safetensors names it."""
        return DTYPE_NAMES[self._dtype]

    @property
    def rounding(self) -> None:
        """Activations stay as they are."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Weights of a range of outputs and inputs."""
        rows, columns = ranges_of(index, self.shape)
        self.taken.append((rows, columns))
        return _rounded(self._source.numbers(self._rows(rows), columns), self._dtype)

    def read_codes(self, rows: slice, columns: slice) -> Codes | None:
        """A part as codes; None where there are none, or a block is cut."""
        kind = self._source.entry.type
        bits = CODE_BITS.get(kind.name, 0)
        if not bits or columns.start % kind.numbers or columns.stop % kind.numbers:
            return None
        blocks = self._source.blocks(self._rows(rows), columns)
        begin = SCALE_BYTES[kind.name]
        stored, is_float = blocks[..., begin:], begin == 1
        if is_float:
            scales = half_scales(torch.from_numpy(blocks[..., 0].copy())).numpy()
        else:
            scales = blocks[..., :begin].copy().view("<f2")[..., 0].astype(np.float32)
        if bits == 8:
            codes = stored.view(np.int8)
        else:  # the first half of a block is in the lower halves of its bytes
            places = np.concatenate([stored & 15, stored >> 4], axis=-1)
            codes = TWICE.numpy()[places] if is_float else places.astype(np.int8) - 8
        flat = torch.from_numpy(codes.reshape(len(blocks), -1).copy())
        return Codes(flat, torch.from_numpy(scales.copy()), None, bits, is_float)

    def _rows(self, rows: slice) -> Any:
        """Rows of the source."""
        first = (self._recipe.expert or 0) * self.shape[0]
        if self._recipe.heads:
            return _turned(self.shape[0], self._recipe.heads)[rows]
        return slice(first + rows.start, first + rows.stop)


class _Vector:
    """Numbers of one dimension."""

    def __init__(self, name: str, recipe: Recipe, source: _Source, dtype: torch.dtype) -> None:
        self._name, self._recipe, self._source, self._dtype = name, recipe, source, dtype

    def __repr__(self) -> str:
        return f"<_Vector {self._name} {self.get_shape()}>"

    def get_shape(self) -> list[int]:
        return list(self._source.entry.shape)

    def get_dtype(self) -> str:
        return DTYPE_NAMES[self._dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        (size,) = self._source.entry.shape
        numbers = self._source.numbers(slice(0, 1), slice(0, size))[0]
        if self._recipe.heads:
            numbers = numbers[_turned(size, self._recipe.heads)]
        return _rounded(numbers - np.float32(self._recipe.minus), self._dtype)[index]


def _stack(name: str, recipe: Recipe, sources: list[_Source], dtype: torch.dtype) -> ExpertStack:
    """Stack of all experts' matrices, as GPT-OSS has them."""
    _check_shapes(name, sources)
    experts: list[Matrix] = []
    for number in range(sources[0].entry.shape[0]):
        one = replace(recipe, expert=number)
        parts = [GgufMatrix(name, one, source, dtype) for source in sources]
        experts.append(parts[0] if len(parts) == 1 else Alternating(parts))
    return ExpertStack(name, experts, dtype)


def _check_shapes(name: str, sources: list[_Source]) -> None:
    if len({each.entry.shape for each in sources}) > 1:
        raise CheckpointError(
            f"{name}: {' and '.join(each.entry.name for each in sources)} have different shapes"
        )


class _Biases:
    """Biases [experts, outputs] of all experts; those of several tensors alternate."""

    def __init__(self, name: str, sources: list[_Source], dtype: torch.dtype) -> None:
        _check_shapes(name, sources)
        self._name, self._sources, self._dtype = name, sources, dtype
        experts, outputs = sources[0].entry.shape
        self._shape = [experts, outputs * len(sources)]

    def __repr__(self) -> str:
        return f"<_Biases {self._name} {self._shape}>"

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return DTYPE_NAMES[self._dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        experts, outputs = self._sources[0].entry.shape
        found = [each.numbers(slice(0, experts), slice(0, outputs)) for each in self._sources]
        return _rounded(np.stack(found, axis=-1).reshape(experts, -1), self._dtype)[index]


def _rounded(numbers: npt.NDArray[np.float32], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.array(numbers, order="C")).to(dtype)


def _turned(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """Row of the file for each output of heads, whose halves stand alternately there."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
