"""Layouts of quantised matrices: a class for each way in which checkpoints store them."""

from __future__ import annotations

from functools import cached_property

import torch

from engine.model.errors import CheckpointError
from engine.model.quantization.codes import AWQ_ORDER, WORD_BITS, unpacked, word_range
from engine.model.quantization.formats import Layout
from engine.model.quantization.matrices import QuantizedMatrix
from engine.model.quantization.rounding import MOST_INPUTS, WORD_INPUTS, Rounding


class _WithGrid(QuantizedMatrix):
    """A matrix with one scale for a range of outputs and a range of inputs."""

    def _check(self) -> None:
        outputs, inputs = self.shape
        grid = self._grid()
        if self._form.block is not None and len(self._parts[self.SCALES].get_shape()) > 1:
            high, wide = self._form.block
            if grid == (-(-outputs // high), -(-inputs // wide)):
                self._rows_each, self._columns_each = high, wide
                return
            if grid[1] != 1:
                raise self._refuse(
                    f"{self.SCALES} has the shape {list(grid)}, which does not fit {outputs} x {inputs} in "
                    f"blocks of {high} x {wide}"
                )
        if grid[0] not in (1, outputs):
            raise self._refuse(f"{self.SCALES} has the shape {list(grid)} for {outputs} outputs")
        self._rows_each = outputs if grid[0] == 1 else 1
        self._columns_each = self._check_groups(grid[1], inputs)

    def _grid(self) -> tuple[int, int]:
        shape = list(self._parts[self.SCALES].get_shape())
        if len(shape) > 2:
            raise self._refuse(f"{self.SCALES} has the shape {shape}: two dimensions at most are expected")
        first, second = (*shape, 1, 1)[:2]
        return first, second

    def _scales(self, rows: slice, columns: slice, every: int) -> torch.Tensor:
        return self._checked_scales(self._spread(self.SCALES, rows, columns, every))

    def _spread(self, part: str, rows: slice, columns: slice, every: int) -> torch.Tensor:
        """Values of a part with one for each range, for every ``every``-th weight."""
        stored = self._parts[part]
        values = stored[...] if len(stored.get_shape()) < 2 else None
        if values is not None:
            values = values.reshape(-1, 1)
            low, left = 0, 0
        else:
            low, left = rows.start // self._rows_each, columns.start // self._columns_each
            high, right = -(-rows.stop // self._rows_each), -(-columns.stop // self._columns_each)
            values = stored[low:high, left:right]
        return self._expand(values, rows, columns, every, (low, left))

    def _expand(
        self, values: torch.Tensor, rows: slice, columns: slice, every: int, first: tuple[int, int]
    ) -> torch.Tensor:
        """Values for these weights; ``first``: row and column that values begin with."""
        of_columns = self._group_of(columns, self._columns_each, every) - first[1]
        return values[self._row_groups(rows) - first[0]][:, of_columns]

    def _row_groups(self, rows: slice) -> torch.Tensor:
        """The row of the scales for each output."""
        return torch.arange(rows.start, rows.stop) // self._rows_each

    def _group_size(self) -> int:
        return self._columns_each


class ScaledMatrix(_WithGrid):
    """Matrix of int8 or float8 numbers with scales."""

    LAYOUT: Layout = "scaled"
    CODES = "weight"
    SCALES = "weight_scale"

    def _find_shape(self) -> tuple[int, int]:
        outputs, inputs = self._shape_of(self.CODES, 2)
        return outputs, inputs

    def _codes(self, rows: slice, columns: slice) -> torch.Tensor:
        return self._parts[self.CODES][rows, columns]

    def _check(self) -> None:
        super()._check()
        zeros = self._parts.get("weight_zero_point")
        if zeros is not None and list(zeros.get_shape()) != list(self._parts[self.SCALES].get_shape()):
            raise self._refuse(f"weight_zero_point has not the shape of {self.SCALES}")

    def _code_bits(self) -> int:
        return 8

    def _zeros(self, rows: slice, columns: slice, every: int) -> torch.Tensor | None:
        if "weight_zero_point" not in self._parts:
            return None
        return self._spread("weight_zero_point", rows, columns, every).float()

    @cached_property
    def rounding(self) -> Rounding | None:
        """See the base; from config.json, and the scale of activations if there is one."""
        activations = self._form.activations_of(self._name.removesuffix(".weight"))
        inputs = self.shape[1]
        is_fit = inputs % WORD_INPUTS == 0 and inputs <= MOST_INPUTS and self._columns_each == inputs
        if activations is None or not is_fit or self._parts[self.CODES].get_dtype() != "I8":
            return None
        if activations.is_dynamic:
            return Rounding(is_symmetric=activations.is_symmetric)
        scale, zero = self._of_activations("input_scale"), 0.0
        if scale is None or not 0 < scale < float("inf"):
            raise self._refuse("input_scale, of the activations, is missing or is no number above 0")
        if not activations.is_symmetric:
            zero = self._of_activations("input_zero_point") or 0.0
        return Rounding(scale, int(zero))

    def _of_activations(self, part: str) -> float | None:
        """A number that all activations of this matrix share, such as a scale."""
        if part not in self._parts:
            return None
        values = self._parts[part][...].float().flatten()
        if values.numel() != 1:
            raise self._refuse(f"{part} has {values.numel()} numbers: one is expected")
        return float(values[0])


class PackedMatrix(_WithGrid):
    """Matrix of compressed-tensors' ``pack-quantized``: words along the inputs."""

    LAYOUT: Layout = "packed"
    CODES = "weight_packed"
    SCALES = "weight_scale"
    NEEDS = ("weight_shape",)

    def _find_shape(self) -> tuple[int, int]:
        said = [int(each) for each in self._parts["weight_shape"][...].flatten()]
        rows, words = self._shape_of(self.CODES, 2)
        if len(said) != 2 or said[0] != rows or said[1] < 1:
            raise self._refuse(f"weight_shape says {said}, and weight_packed has {rows} outputs")
        fitting = [bits for bits in (4, 8) if -(-said[1] * bits // WORD_BITS) == words]
        if not fitting:
            raise CheckpointError(
                f"{self._name}: {said[1]} inputs in {words} words: only numbers of 4 and 8 bits are read"
            )
        self._bits = fitting[0]
        return said[0], said[1]

    def _check(self) -> None:
        super()._check()
        self._has_order = False
        if "weight_g_idx" in self._parts:
            if self._shape_of("weight_g_idx", 1) != [self.shape[1]]:
                raise self._refuse("weight_g_idx has not one group for each input")
            groups = self._parts["weight_g_idx"][...]
            self._has_order = int(groups[0]) >= 0  # -1: in no other order
            if self._has_order and not 0 <= int(groups.min()) <= int(groups.max()) < self._grid()[1]:
                raise self._refuse(f"weight_g_idx names a group that none of its {self._grid()[1]} is")
        if "weight_zero_point" in self._parts:
            outputs, groups_each = self._grid()
            packed = [-(-outputs * self._bits // WORD_BITS), groups_each]
            if self._shape_of("weight_zero_point", 2) != packed:
                raise self._refuse(f"weight_zero_point does not fit scales of {outputs} x {groups_each}")

    def _codes(self, rows: slice, columns: slice) -> torch.Tensor:
        words, among = word_range(columns, self._bits)
        numbers = unpacked(self._parts[self.CODES][rows, words], self._bits)[:, among]
        return (numbers - (1 << (self._bits - 1))).contiguous().view(torch.int8)

    def _zeros(self, rows: slice, columns: slice, every: int) -> torch.Tensor | None:
        zeros = self._zeros_of_all_groups(rows)
        return None if zeros is None else zeros[:, self._group_of(columns, self._columns_each, every)]

    def _zeros_of_all_groups(self, rows: slice) -> torch.Tensor | None:
        if "weight_zero_point" not in self._parts:
            return None
        # Packed along the outputs: a word holds those of some neighbours.
        low = rows.start // self._rows_each
        high = -(-rows.stop // self._rows_each)
        words, among = word_range(slice(low, high), self._bits)
        stored = self._parts["weight_zero_point"][words, :]
        zeros = unpacked(stored.T, self._bits)[:, among].T.float() - (1 << (self._bits - 1))
        return zeros[self._row_groups(rows) - low]

    def _of_all_groups(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        low, high = rows.start // self._rows_each, -(-rows.stop // self._rows_each)
        stored = self._checked_scales(self._parts[self.SCALES][low:high, :])
        return stored[self._row_groups(rows) - low], self._zeros_of_all_groups(rows)

    def _order(self, columns: slice) -> torch.Tensor | None:
        return self._parts["weight_g_idx"][columns].int() if self._has_order else None

    def _code_bits(self) -> int:
        return self._bits

    def _group_size(self) -> int:
        return 0 if self._has_order else self._columns_each


class _Transposed(QuantizedMatrix):
    """Matrix stored with inputs first: scales [groups, outputs], zero points in words."""

    CODES = "qweight"
    SCALES = "scales"
    NEEDS = ("qzeros",)
    ORDER: tuple[int, ...] | None = None

    def _check(self) -> None:
        outputs, inputs = self.shape
        each = WORD_BITS // self._form.bits
        groups, width = self._shape_of(self.SCALES, 2)
        if width != outputs or self._shape_of("qzeros", 2) != [groups, -(-outputs // each)]:
            raise self._refuse(f"scales and qzeros do not fit {outputs} outputs in {groups} groups")
        self._num_groups = groups
        if "g_idx" in self._parts:
            self._compare_groups(groups, inputs, may_be_short=True)
            if self._shape_of("g_idx", 1) != [inputs]:
                raise self._refuse("g_idx has not one group for each input")
        else:
            self._size = self._check_groups(groups, inputs)

    def _code_bits(self) -> int:
        return self._form.bits

    def _middle(self, bits: int) -> int:
        return 1 << (bits - 1)

    def _group_size(self) -> int:
        return self._neighbours

    @cached_property
    def _neighbours(self) -> int:
        """Inputs of a group; 0 where groups are not of neighbours."""
        inputs = self.shape[1]
        if inputs % self._num_groups:
            return 0
        size = inputs // self._num_groups
        every = slice(0, inputs)
        return size if torch.equal(self._groups(every), self._group_of(every, size)) else 0

    def _groups(self, columns: slice) -> torch.Tensor:
        if "g_idx" not in self._parts:
            return self._group_of(columns, self._size)
        groups = self._parts["g_idx"][columns].long()
        if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < self._num_groups:
            raise self._refuse(f"g_idx names a group that none of its {self._num_groups} is")
        return groups

    def _order(self, columns: slice) -> torch.Tensor | None:
        return None if self._neighbours else self._groups(columns).int()

    def _scales(self, rows: slice, columns: slice, every: int) -> torch.Tensor:
        return self._of_all_groups(rows)[0][:, self._groups(columns)[::every]]

    def _zeros(self, rows: slice, columns: slice, every: int) -> torch.Tensor | None:
        return self._zeros_of_all_groups(rows)[:, self._groups(columns)[::every]]

    def _of_all_groups(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        scales = self._checked_scales(self._parts[self.SCALES][:, rows])
        return scales.T, self._zeros_of_all_groups(rows)

    def _zeros_of_all_groups(self, rows: slice) -> torch.Tensor:
        words, among = word_range(rows, self._form.bits)
        zeros = unpacked(self._parts["qzeros"][:, words], self._form.bits, self.ORDER)[:, among]
        return (zeros.float() + self._form.zero_offset).T


class GptqMatrix(_Transposed):
    """Matrix of GPTQ: words along the inputs."""

    LAYOUT: Layout = "gptq"

    def _find_shape(self) -> tuple[int, int]:
        words, outputs = self._shape_of(self.CODES, 2)
        return outputs, words * WORD_BITS // self._form.bits

    def _codes(self, rows: slice, columns: slice) -> torch.Tensor:
        words, among = word_range(columns, self._form.bits)
        return unpacked(self._parts[self.CODES][words, rows].T, self._form.bits)[:, among]


class AwqMatrix(_Transposed):
    """Matrix of AWQ: words along the outputs, in AWQ's order."""

    LAYOUT: Layout = "awq"
    ORDER = AWQ_ORDER

    def _find_shape(self) -> tuple[int, int]:
        inputs, words = self._shape_of(self.CODES, 2)
        return words * WORD_BITS // self._form.bits, inputs

    def _codes(self, rows: slice, columns: slice) -> torch.Tensor:
        words, among = word_range(rows, self._form.bits)
        return unpacked(self._parts[self.CODES][columns, words], self._form.bits, AWQ_ORDER)[:, among].T


class InverseScaledMatrix(ScaledMatrix):
    """Matrix of DeepSeek's fp8, whose scales are called ``weight_scale_inv``."""

    SCALES = "weight_scale_inv"


KINDS: tuple[type[QuantizedMatrix], ...] = (
    InverseScaledMatrix,
    ScaledMatrix,
    PackedMatrix,
    GptqMatrix,
    AwqMatrix,
)
FURTHER_PARTS = frozenset(
    {
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "qzeros",
        "g_idx",
        "weight_scale_inv",
        "weight_scale",
        "input_scale",
        "input_zero_point",
    }
)
"""Last names of tensors that belong to a quantised matrix, beside its codes and scales."""
