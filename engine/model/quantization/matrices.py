"""Quantised matrices, read a part at a time in the data type of the model.

A matrix of [outputs, inputs] is stored as codes, scales and sometimes zero points; a weight is
``(code - zero) * scale``, computed in float32 and rounded once. Each class reads the parts of one layout.
They look like the slices of safetensors, so that a worker reads its own rows or columns only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from engine.model.errors import CheckpointError
from engine.model.quantization.codes import AWQ_ORDER, WORD_BITS, unpacked, word_range
from engine.model.quantization.formats import Format, Layout
from engine.model.quantization.rounding import MOST_INPUTS, WORD_INPUTS, Rounding

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_CODE_DTYPES = ("I8", "F8_E4M3")
FLOAT8 = torch.float8_e4m3fn
AT_ONCE = 1 << 18
"""Numbers that are computed with at once: in float32 they stay in a cache."""


def few_rows(shape: tuple[int, ...]) -> Iterator[slice]:
    """Rows of a matrix, some at a time."""
    outputs, inputs = shape
    step = max(1, AT_ONCE // max(1, inputs))
    return (slice(begin, begin + step) for begin in range(0, outputs, step))


def widened(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    dtype: torch.dtype,
    order: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weights of codes [outputs, inputs]; scales and zeros are [outputs, groups].

    ``order``: the group of each input, where it does not follow from its place.
    """
    weights = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    groups = scales.shape[-1] if order is None else len(order)

    def of_inputs(values: torch.Tensor, rows: slice) -> torch.Tensor:
        return (values[rows] if order is None else values[rows].index_select(-1, order))[..., None]

    for rows in few_rows(codes.shape):
        numbers = _as_float(codes[rows])
        grouped = numbers.unflatten(-1, (groups, codes.shape[-1] // max(1, groups)))
        if zeros is not None:
            grouped -= of_inputs(zeros, rows)
        grouped *= of_inputs(scales, rows)
        weights[rows] = numbers
    return weights


_FLOATS = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
"""Numbers of all codes that are floats: five times as fast as torch's own conversion."""


def _as_float(codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype != FLOAT8 or codes.device.type != "cpu":
        return codes.float()
    places = codes.contiguous().view(torch.uint8).flatten().int()
    return _FLOATS.index_select(0, places).view(codes.shape)


def _same(found: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether two tensors have equal numbers.

    They are compared as words where they can be, in a seventh of the time.
    """
    each = torch.int64.itemsize // weights.itemsize
    has_words = weights.is_contiguous() and not (weights.shape[-1] % each or weights.storage_offset() % each)
    if has_words and torch.equal(found.view(torch.int64), weights.view(torch.int64)):
        return True
    return bool(torch.equal(found, weights))


class Stored(Protocol):
    """A tensor of a file, read when it is indexed, as safetensors gives it."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class Codes:
    """A matrix, or a stack of them; a weight is ``(code - zero) * scale``."""

    codes: torch.Tensor
    """int8 [..., outputs, inputs], from ``-2 ** (bits - 1)`` on.

    Or, of floats: the bits of those of 8 bits, or twice those of 4 bits, which are whole numbers.
    """
    scales: torch.Tensor
    """float32 [..., outputs, groups]; groups are of neighbours, or as ``order`` says."""
    zeros: torch.Tensor | None
    """float32 like the scales; None: all are 0."""
    bits: int
    is_float: bool = False
    """Whether codes are floats (float8_e4m3fn, or e2m1 with 4 bits)."""
    rounding: Rounding | None = None
    """How activations are rounded before they are multiplied; None: not at all."""
    order: torch.Tensor | None = None
    """int32 [..., inputs]: the group of each input; None: groups are of neighbours."""

    @property
    def kind(self) -> tuple[int, ...]:
        """Properties that codes must share to be joined."""
        shape = self.scales.shape[-1], self.codes.shape[-1], self.codes.dim()
        return self.bits, self.is_float, self.order is None, *shape

    def has_order_of(self, other: Codes) -> bool:
        """Whether groups are of the same inputs."""
        if self.order is None or other.order is None:
            return self.order is other.order
        return bool(torch.equal(self.order, other.order))

    def of(self, number: int) -> Codes:
        """One matrix of a stack."""
        zeros, order = (None if each is None else each[number] for each in (self.zeros, self.order))
        return replace(self, codes=self.codes[number], scales=self.scales[number], zeros=zeros, order=order)

    def to(self, device: torch.device) -> Codes:
        """The same codes on another device."""
        zeros, order = (None if each is None else each.to(device) for each in (self.zeros, self.order))
        codes, scales = self.codes.to(device), self.scales.to(device)
        return replace(self, codes=codes, scales=scales, zeros=zeros, order=order)

    def product(self, x: torch.Tensor, parts: int = 1) -> torch.Tensor:
        """Product of rows [..., inputs], rounded as these weights want: float32 [..., outputs]."""
        assert self.rounding is not None
        return self.rounding.product(x, self.codes, self.scales[:, 0], parts)

    def rows(self, rows: slice) -> Codes:
        """Codes of some outputs."""
        zeros = None if self.zeros is None else self.zeros[..., rows, :]
        return replace(self, codes=self.codes[..., rows, :], scales=self.scales[..., rows, :], zeros=zeros)

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """Weights that the codes stand for."""
        if self.order is not None and self.codes.dim() > 2:
            return torch.stack([self.of(number).widened(dtype) for number in range(len(self.codes))])
        codes = self.codes.view(FLOAT8) if self.is_float and self.bits == 8 else self.codes
        flat = (None if each is None else each.flatten(0, -2) for each in (self.scales, self.zeros))
        scales, zeros = flat
        assert scales is not None
        return widened(codes.flatten(0, -2), scales, zeros, dtype, self.order).view(codes.shape)

    def gives(self, weights: torch.Tensor) -> bool:
        """Whether these weights are what the codes stand for, to the bit."""
        if self.codes.shape != weights.shape:
            return False
        if weights.dim() > 2:
            return all(self.of(number).gives(each) for number, each in enumerate(weights))
        some = few_rows(weights.shape)
        return all(_same(self.rows(rows).widened(weights.dtype), weights[rows]) for rows in some)


class QuantizedMatrix(ABC):
    """A matrix of [outputs, inputs] in parts; a subclass for each layout."""

    LAYOUT: Layout
    CODES: str
    """The part that every matrix of this layout has."""
    SCALES: str
    NEEDS: tuple[str, ...] = ()
    """Further parts without which it cannot be read."""

    def __init__(self, name: str, parts: Mapping[str, Stored], form: Format, dtype: torch.dtype) -> None:
        """``parts`` by their last names, such as ``weight_scale``; ``name`` is for errors.

        Raises:
            CheckpointError: a part is missing, or of a shape that does not fit.
        """
        self._name, self._parts, self._dtype, self._form = name, parts, dtype, form
        for part in (self.SCALES, *self.NEEDS):
            if part not in parts:
                raise CheckpointError(
                    f"{name} is quantised and lacks {part}: the checkpoint is not whole, download it again"
                )
        self.shape = self._find_shape()
        """Outputs and inputs."""
        self._check()
        self.taken: list[tuple[slice, slice]] = []
        """Ranges of outputs and inputs that were read, in this order."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name} {list(self.shape)}>"

    def get_shape(self) -> list[int]:
        """Outputs and inputs."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """The data type of the numbers that are given, as safetensors names it."""
        return DTYPE_NAMES[self._dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Weights of a range of outputs and inputs.

        Raises:
            CheckpointError: a scale is no number.
        """
        rows, columns = ranges_of(index, self.shape)
        self.taken.append((rows, columns))
        order = self._order(columns)
        scales, zeros = self._factors(rows, columns, self._inputs_each(columns) or 1, order)
        return widened(self._codes(rows, columns), scales, zeros, self._dtype, order)

    def read_codes(self, rows: slice, columns: slice) -> Codes | None:
        """A part of the matrix as codes.

        None where it has none of 4 or 8 bits, or where a group of neighbours is cut.
        """
        bits, size, order = self._code_bits(), self._inputs_each(columns), self._order(columns)
        if not bits or (not size and order is None):
            return None
        stored = self._codes(rows, columns)
        scales, zeros = self._factors(rows, columns, size, order)
        scales = scales.contiguous()
        if stored.dtype == FLOAT8:
            return Codes(stored.contiguous().view(torch.int8), scales, None, bits, is_float=True)
        middle = self._middle(bits)
        codes = (stored - middle if middle else stored).contiguous().view(torch.int8)
        if zeros is not None:
            zeros = zeros - middle
            zeros = zeros.contiguous() if bool(zeros.any()) else None
        rounding = self.rounding if scales.shape[1] == 1 and zeros is None else None
        return Codes(codes, scales, zeros, bits, rounding=rounding, order=order)

    def _factors(
        self, rows: slice, columns: slice, every: int, order: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales and zero points of all groups, if these have an order.

        Else those of every so many inputs.
        """
        if order is None:
            return self._scales(rows, columns, every), self._zeros(rows, columns, every)
        return self._of_all_groups(rows)

    def _inputs_each(self, columns: slice) -> int:
        """Inputs of a range that share a scale; 0 if a group is cut."""
        size = self._group_size()
        if size and (columns.start % size or columns.stop % size):
            if columns.start // size != (columns.stop - 1) // size:
                return 0
            size = columns.stop - columns.start
        return size

    @property
    def rounding(self) -> Rounding | None:
        """How activations are rounded before they are multiplied, if the codes allow it."""
        return None

    def _order(self, columns: slice) -> torch.Tensor | None:
        """int32: the group of each of these inputs; None where groups are of neighbours."""
        return None

    def _of_all_groups(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales and zero points [outputs, groups] where groups have an order."""
        raise NotImplementedError

    @abstractmethod
    def _code_bits(self) -> int:
        """Bits of a code; 0 where codes are no whole numbers."""

    @abstractmethod
    def _group_size(self) -> int:
        """Inputs of a group; 0 where groups are not of neighbours."""

    def _middle(self, bits: int) -> int:
        """Number subtracted from codes that are stored without a sign."""
        return 0

    @abstractmethod
    def _find_shape(self) -> tuple[int, int]: ...

    @abstractmethod
    def _check(self) -> None: ...

    @abstractmethod
    def _codes(self, rows: slice, columns: slice) -> torch.Tensor:
        """Codes as int8, uint8 or floats of 8 bits."""

    @abstractmethod
    def _scales(self, rows: slice, columns: slice, every: int) -> torch.Tensor:
        """Scales of each ``every``-th input: float32 [outputs, inputs / every]."""

    @abstractmethod
    def _zeros(self, rows: slice, columns: slice, every: int) -> torch.Tensor | None:
        """Zero points of the same inputs, as they are stored: float32."""

    # ---- for all layouts

    def _refuse(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._name}: {problem}. The checkpoint is broken: download it again")

    def _shape_of(self, part: str, dimensions: int) -> list[int]:
        shape = list(self._parts[part].get_shape())
        if len(shape) != dimensions:
            raise self._refuse(f"{part} has the shape {shape}, {dimensions} dimension(s) are expected")
        return shape

    def _checked_scales(self, scales: torch.Tensor) -> torch.Tensor:
        scales = scales.float()
        if not bool(torch.isfinite(scales).all()):
            raise self._refuse(f"{self.SCALES} has a scale that is no number")
        return scales

    def _group_of(self, columns: slice, size: int, every: int = 1) -> torch.Tensor:
        """The group of each ``every``-th input, with groups of neighbours."""
        return torch.arange(columns.start, columns.stop, every) // size

    def _check_groups(self, groups: int, inputs: int) -> int:
        """Inputs of a group."""
        self._compare_groups(groups, inputs)
        if groups < 1 or inputs % groups:
            raise self._refuse(f"{inputs} inputs are not {groups} groups of one size")
        return inputs // groups

    def _compare_groups(self, groups: int, inputs: int, *, may_be_short: bool = False) -> None:
        """Compare groups with config.json; ``may_be_short``: the last one may have fewer inputs."""
        sizes = self._form.group_sizes
        fits = (groups == -(-inputs // size) and (may_be_short or inputs % size == 0) for size in sizes)
        if groups > 1 and sizes and not any(fits):
            said = " or ".join(map(str, sizes))
            raise CheckpointError(
                f"{self._name}: {inputs} inputs are not {groups} groups of {said}, as config.json says: "
                "only such are read that divide inputs. Quantise with such a group_size, or download it again"
            )


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


def is_code(stored: Stored) -> bool:
    """Whether a tensor called ``weight`` holds codes, not weights."""
    return stored.get_dtype() in _CODE_DTYPES


def ranges_of(index: Any, shape: tuple[int, int]) -> tuple[slice, slice]:
    """The ranges of outputs and inputs that an index means.

    Raises:
        TypeError: it is another index than ranges.
    """
    given = index if isinstance(index, tuple) else (index,)
    if Ellipsis in given:
        at = given.index(Ellipsis)
        given = (*given[:at], *(slice(None),) * (3 - len(given)), *given[at + 1 :])
    ranges = []
    for each, size in zip((*given, slice(None), slice(None))[:2], shape, strict=True):
        if not isinstance(each, slice):
            raise TypeError(f"a quantised matrix is read by ranges, not by {each!r}")
        start, stop, step = each.indices(size)
        if step != 1:
            raise TypeError("a quantised matrix is read without gaps")
        ranges.append(slice(start, max(start, stop)))
    return ranges[0], ranges[1]
