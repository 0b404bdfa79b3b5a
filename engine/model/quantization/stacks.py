"""Experts of a layer in one tensor, as GPT-OSS keeps them: a matrix for each.

The tensor is [experts, inputs, outputs]. What an expert has is read alone, so a worker reads only the bytes
of its own experts. Matrices are [outputs, inputs], as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from engine.model.errors import CheckpointError
from engine.model.quantization.formats import Format
from engine.model.quantization.matrices import DTYPE_NAMES, QuantizedMatrix, Stored, ranges_of
from engine.model.quantization.rounding import Rounding
from engine.model.quantization.weight_codes import Codes

BLOCKS, SCALES = "blocks", "scales"
"""Ends of the names of an MXFP4 tensor's two parts."""
BLOCK = 32
"""Numbers that share a scale."""
BLOCK_BYTES = BLOCK // 2
TWICE = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
"""Twice the numbers that floats of 4 bits (e2m1) stand for."""
_MIDDLE, _NO_NUMBER = 128, 255
_POWERS = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - _MIDDLE).float()
"""Half of what scales of 8 bits (e8m0) stand for."""
_POWERS[_NO_NUMBER] = torch.nan


def half_scales(exponents: torch.Tensor) -> torch.Tensor:
    """Half of each scale of 8 bits (e8m0), in float32: the factors of :data:`TWICE`."""
    return _POWERS.index_select(0, exponents.flatten().int()).view(exponents.shape)


class Matrix(Protocol):
    """A matrix of [outputs, inputs] that is read in parts, as :class:`.QuantizedMatrix` is."""

    shape: tuple[int, int]
    taken: list[tuple[slice, slice]]

    @property
    def rounding(self) -> Rounding | None: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...

    def read_codes(self, rows: slice, columns: slice) -> Codes | None: ...


class ExpertStack:
    """A tensor [experts, inputs, outputs], as safetensors shows one."""

    def __init__(self, name: str, matrices: Sequence[Matrix], dtype: torch.dtype) -> None:
        """``matrices``: of the experts, in their order, which give ``dtype``."""
        self._name, self._dtype = name, dtype
        self.matrices = matrices
        self._taken: list[int] | None = []
        """Experts that were read, in this order; None where a part of one was."""

    def __repr__(self) -> str:
        return f"<ExpertStack {self._name} {self.get_shape()}>"

    @property
    def taken(self) -> list[Matrix]:
        """Matrices of experts that were read, in this order.

        None if a part of one was, since its codes would have other groups.
        """
        return [self.matrices[number] for number in self._taken or ()]

    def get_shape(self) -> list[int]:
        outputs, inputs = self.matrices[0].shape
        return [len(self.matrices), inputs, outputs]

    def get_dtype(self) -> str:
        """The data type of the numbers that are given, as safetensors names it."""
        return DTYPE_NAMES[self._dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        given = index if isinstance(index, tuple) else (index,)
        experts, rest = slice(None), given
        if given and isinstance(given[0], slice):
            experts, rest = given[0], (slice(None), *given[1:])
        count, inputs, outputs = self.get_shape()
        numbers = range(count)[experts]
        whole = torch.empty(len(numbers), inputs, outputs, dtype=self._dtype)
        for place, number in enumerate(numbers):
            whole[place] = self.matrices[number][...].T
        found = whole[rest]
        if found.shape != whole.shape:
            self._taken = None
        elif self._taken is not None:
            self._taken += numbers
        return found


class Alternating:
    """Matrices of one shape as one, whose outputs are theirs in turn."""

    def __init__(self, parts: Sequence[Matrix]) -> None:
        self._parts = parts
        outputs, inputs = parts[0].shape
        self.shape = outputs * len(parts), inputs
        self.taken: list[tuple[slice, slice]] = []

    def __repr__(self) -> str:
        return f"<Alternating {self._parts}>"

    @property
    def rounding(self) -> None:
        """Activations stay as they are."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, columns = ranges_of(index, self.shape)
        self.taken.append((rows, columns))
        return _in_turn([part[:, columns] for part in self._parts])[rows]

    def read_codes(self, rows: slice, columns: slice) -> Codes | None:
        """See :meth:`.QuantizedMatrix.read_codes`."""
        every = slice(0, self._parts[0].shape[0])
        known = [codes for part in self._parts if (codes := part.read_codes(every, columns)) is not None]
        if len(known) < len(self._parts) or len({each.kind for each in known}) > 1:
            return None
        if any(each.zeros is not None for each in known):
            return None
        codes, scales = (_in_turn([getattr(each, name) for each in known]) for name in ("codes", "scales"))
        return replace(known[0], codes=codes, scales=scales).rows(rows)


def _in_turn(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([*parts], dim=1).flatten(0, 1)


class Mxfp4Matrix(QuantizedMatrix):
    """One expert of an MXFP4 tensor: blocks [experts, outputs, blocks, 16 bytes], and their scales."""

    LAYOUT = "mxfp4"
    CODES = BLOCKS
    SCALES = SCALES

    def __init__(
        self, name: str, parts: Mapping[str, Stored], form: Format, dtype: torch.dtype, expert: int
    ) -> None:
        self._expert = slice(expert, expert + 1)
        super().__init__(name, parts, form, dtype)

    def read_codes(self, rows: slice, columns: slice) -> Codes | None:
        """See the base."""
        found = super().read_codes(rows, columns)
        return None if found is None else replace(found, is_float=True)

    def _find_shape(self) -> tuple[int, int]:
        _, outputs, blocks, size = self._shape_of(BLOCKS, 4)
        if size != BLOCK_BYTES or self._parts[BLOCKS].get_dtype() != "U8":
            raise self._refuse(f"blocks have {size} numbers: {BLOCK_BYTES} bytes are expected")
        return outputs, blocks * BLOCK

    def _check(self) -> None:
        experts, outputs, blocks, _ = self._shape_of(BLOCKS, 4)
        scales = self._shape_of(SCALES, 3)
        if scales != [experts, outputs, blocks]:
            raise self._refuse(f"scales have the shape {scales} for blocks of {[experts, outputs, blocks]}")
        if self._parts[SCALES].get_dtype() != "U8":
            raise self._refuse("scales are no exponents of 8 bits")

    def _code_bits(self) -> int:
        return 4

    def _group_size(self) -> int:
        return BLOCK

    def _part(self, part: str, rows: slice, columns: slice) -> torch.Tensor:
        """Whole blocks of these outputs and inputs."""
        blocks = slice(columns.start // BLOCK, -(-columns.stop // BLOCK))
        return self._parts[part][self._expert, rows, blocks][0]

    def _codes(self, rows: slice, columns: slice) -> torch.Tensor:
        blocks = self._part(BLOCKS, rows, columns)
        places = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-3)
        first = columns.start // BLOCK * BLOCK
        wanted = places[:, columns.start - first : columns.stop - first]
        return TWICE.index_select(0, wanted.flatten().int()).view(wanted.shape)

    def _scales(self, rows: slice, columns: slice, every: int) -> torch.Tensor:
        stored = self._part(SCALES, rows, columns)
        scales = self._checked_scales(half_scales(stored))
        return scales[:, self._group_of(columns, BLOCK, every) - columns.start // BLOCK]

    def _zeros(self, rows: slice, columns: slice, every: int) -> None:
        return None


def mxfp4_stacks(
    names: Mapping[str, Any], form: Format, dtype: torch.dtype
) -> Iterator[tuple[str, ExpertStack]]:
    """Stacks by the names of their parameters.

    ``names``: those of all tensors, and the files that have them.

    Raises:
        CheckpointError: a part is missing, or does not fit.
    """
    for name, home in names.items():
        owner, _, last = name.rpartition("_")
        if last not in (BLOCKS, SCALES):
            continue
        parts = {each: names[f"{owner}_{each}"] for each in (BLOCKS, SCALES) if f"{owner}_{each}" in names}
        if BLOCKS not in parts:
            raise CheckpointError(
                f"{owner} is quantised and lacks blocks: the checkpoint is not whole, download it again"
            )
        if last == BLOCKS:
            stored = {each: file.get_slice(f"{owner}_{each}") for each, file in parts.items()}
            shape = home.get_slice(name).get_shape()
            matrices = [Mxfp4Matrix(owner, stored, form, dtype, expert) for expert in range(shape[0])]
            yield owner, ExpertStack(owner, matrices, dtype)
