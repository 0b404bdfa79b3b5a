"""Quantised matrix of a checkpoint, read a part at a time and widened.

A matrix of [outputs, inputs] is stored as codes, scales and sometimes zero points; a weight is
``(code - zero) * scale``, computed in float32 and rounded once. :mod:`engine.model.quantization.layouts` has
a class for each layout. They look like the slices of safetensors, so that a worker reads its own rows or
columns only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from engine.model.errors import CheckpointError
from engine.model.quantization.formats import Format, Layout
from engine.model.quantization.rounding import Rounding
from engine.model.quantization.weight_codes import FLOAT8, Codes, widened

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_CODE_DTYPES = ("I8", "F8_E4M3")


class Stored(Protocol):
    """A tensor of a file, read when it is indexed, as safetensors gives it."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


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
        """Rounding of activations before the product; None: not at all, or codes forbid it."""
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
