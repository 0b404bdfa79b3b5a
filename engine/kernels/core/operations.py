"""Arrays of operations and of a step, laid out as ``step.cpp`` reads them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from engine.kernels.core.library import KernelLibrary

ELEMENT = {torch.float32: 0, torch.bfloat16: 1}

ADD, AS_FLOAT, SELECTED, COMPRESSED, TO_CHOOSE, CENTRED, NORM_LAST = 1, 2, 4, 8, 16, 32, 64
QUANTIZED, WIDE, ROUNDED, QUERIES_ONLY, WITHIN, ACTIVATED = 128, 256, 512, 1024, 2048, 4096
SEES_ALL = 8192
"""Flags of operations.

They add to what is there; write float32; compute the selected rows only; read compressed weights; run only if
tokens are chosen; have norms around the mean, or norms behind the rotation; read codes of weights; multiply
float32 whatever the step's type; multiply inputs that were rounded to 8 bits; have queries, but no keys and
values; have values that are the end of keys, or gates that are what they open; apply SiLU to sums; have
queries that see keys on both sides.
"""

_OPERATION = np.dtype(
    [(name, np.float64 if name in ("number", "cap") else np.int64) for name in (
        "kind", "into", "out", "weights", "more", "extra", "n", "k", "flags", "number", "a", "b", "c", "d",
        "cap", "factors", "scales", "codes", "width", "shared", "groups", "step_in", "step_out", "added"
    )]
)  # fmt: skip
_STEP = np.dtype(
    [(name, np.int64) for name in (
        "tokens", "selected", "num_tasks", "table_width", "block_size", "ids", "slots", "chosen", "positions",
        "angles", "starts", "counts", "offsets", "tables", "tasks", "seconds", "choose", "apart",
        "num_chosen_tasks", "chosen_tasks", "draws", "rows", "states", "fills", "num_runs", "num_chosen_runs",
        "runs", "chosen_runs", "adapters", "chosen_adapters", "order", "chosen_order", "given",
        "num_given", "turned", "own_angles", "sees", "windows_see"
    )]
)  # fmt: skip


class OperationKind(enum.IntEnum):
    """Kinds of operations, in the order of ``operations.def``.

    The kernel of each describes what it does with its fields.
    """

    EMBED = 0
    NORM = 1
    LINEAR = 2
    QKV = 3
    ATTEND = 4
    GATED = 5
    ROUTE = 6
    SORT = 7
    EXPERTS_UP = 8
    EXPERTS_DOWN = 9
    COMBINE = 10
    SELECT = 11
    OFFER = 12
    MEET = 13
    RETURN = 14
    HOME = 15
    CHOOSE = 16
    GATHER = 17
    SUM = 18
    BEST_OF_ALL = 19
    LOOK = 20
    CAP = 21
    WIDEN = 22
    ROUND = 23
    SQUARES = 24
    CLEAR = 25
    SCALE = 26
    INPUTS = 27
    TIMES = 28
    GATED_NORM = 29
    SSD_ROWS = 30
    CONV = 31
    DELTA_ROWS = 32
    ADAPT = 33
    ADAPT_EXPERTS = 34
    ADD_GIVEN = 35


class RecordedWeights:
    """Packed weights that the kernels read through a record of addresses."""

    flag: int
    """Flag of operations that read such weights."""
    record: np.ndarray[Any, Any]
    """The addresses, as the operation reads them."""


class StepArguments:
    """Arguments of one step; keeps the arrays that they point to alive."""

    def __init__(self, **fields: Any) -> None:
        self._kept: dict[str, Any] = {}
        self.array = np.zeros((), dtype=_STEP)
        self.put(**fields)

    def put(self, **fields: Any) -> None:
        """Set some of them."""
        self._kept |= fields
        for name, value in fields.items():
            self.array[name] = _address(value)

    def keep(self, value: Any) -> None:
        """Keep alive what an array of addresses points to."""
        self._kept[""] = value

    def array_of(self, name: str) -> Any:
        """The array that an argument points to; None without one."""
        return self._kept.get(name)


class OperationList:
    """A list of operations; what they point to lives as long as the list."""

    def __init__(self, room: int) -> None:
        self._array = np.zeros(room, dtype=_OPERATION)
        self._count = 0
        self._kept: list[Any] = []

    def __len__(self) -> int:
        return self._count

    def add(self, kind: OperationKind, **fields: Any) -> None:
        """Append an operation. Tensors are passed by address and must be contiguous."""
        row = self._array[self._count]
        row["kind"] = kind
        for name, value in fields.items():
            row[name] = _address(value)
            self._kept.append(value)
        if isinstance(weights := fields.get("weights"), RecordedWeights):
            row["flags"] |= weights.flag
        self._count += 1

    def keep(self, *values: Any) -> None:
        """Keep what a record points to as long as the list."""
        self._kept += values

    def run(
        self,
        library: KernelLibrary,
        step: StepArguments,
        dtype: torch.dtype,
        begin: int = 0,
        end: int | None = None,
    ) -> bool:
        """Run operations [begin, end); False if an exchange gave up.

        They use as many threads as torch does.
        """
        count = (self._count if end is None else end) - begin
        address = self._array.ctypes.data + begin * self._array.itemsize
        step_at, threads = step.array.ctypes.data, torch.get_num_threads()
        return library.call("run", address, count, step_at, ELEMENT[dtype], threads) == 0


def check(library: KernelLibrary, layouts: Mapping[str, np.dtype[Any]]) -> None:
    """Check that operations and structures are those of the compiled sources."""
    assert library.text("operation_names").split() == [kind.name for kind in OperationKind]
    every = {"operation": _OPERATION, "step": _STEP, **layouts}
    library.check_bytes({name: layout.itemsize for name, layout in every.items()})


def _address(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        assert value.is_contiguous()
        return value.data_ptr()
    if isinstance(value, RecordedWeights):
        value = value.record
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous
        return value.ctypes.data
    return 0 if value is None else value
