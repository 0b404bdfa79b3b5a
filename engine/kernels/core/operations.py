"""Arrays of operations and of a step, laid out as ``step.cpp`` reads them."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import torch

from engine.kernels.products.compression import Compressed
from engine.kernels.core.library import Library
from engine.kernels.choosing.logits import DRAW, SHAPE
from engine.kernels.products.quantized import ROUNDING, EightBitPanels, QuantizedPanels

ELEMENT = {torch.float32: 0, torch.bfloat16: 1}

ADD, AS_FLOAT, SELECTED, COMPRESSED, TO_CHOOSE, CENTRED, NORM_LAST = 1, 2, 4, 8, 16, 32, 64
QUANTIZED, WIDE, ROUNDED, QUERIES_ONLY, WITHIN = 128, 256, 512, 1024, 2048
"""Flags of operations.

They add to what is there; write float32; compute the selected rows only; read compressed weights; run only if
tokens are chosen; have norms around the mean, or norms behind the rotation; read codes of weights; multiply
float32 whatever the step's type; multiply inputs that were rounded to 8 bits; have queries, but no keys and
values; have values that are the end of keys.
"""

_OPERATION = np.dtype(
    [(name, np.float64 if name in ("number", "cap") else np.int64) for name in (
        "kind", "into", "out", "weights", "more", "extra", "n", "k", "flags", "number", "a", "b", "c", "d",
        "cap", "factors", "scales", "codes", "width", "shared", "groups", "step_in", "step_out"
    )]
)  # fmt: skip
_STEP = np.dtype(
    [(name, np.int64) for name in (
        "tokens", "selected", "num_tasks", "table_width", "block_size", "ids", "slots", "chosen", "positions",
        "angles", "starts", "counts", "offsets", "tables", "tasks", "seconds", "choose", "apart",
        "num_chosen_tasks", "chosen_tasks", "draws"
    )]
)  # fmt: skip
EXCHANGE = np.dtype(
    [(name, np.int64) for name in (
        "rank", "size", "num_experts", "num_local", "top_k", "hidden", "rows_at", "ids_at", "places_at",
        "results_at", "arenas", "returned", "copies", "counts", "most_copies", "numbers", "line",
        "sizes", "firsts", "rounds", "counted", "begins", "sources", "gathered", "check", "crowded",
        "linkage", "row_bytes"
    )]
)  # fmt: skip
"""See ``linked.hpp``, as for the next two."""
ROUTING = np.dtype(
    [(name, np.float64 if name in ("factor", "least", "near") else np.int64) for name in (
        "is_sigmoid", "is_normalised", "is_exact", "groups", "kept", "best_of_group", "factor", "least",
        "near", "correction", "scales"
    )]
)  # fmt: skip
"""See ``experts.hpp``."""
_LEARNED = "budget", "arrival", "products", "offered_at", "began_at", "first_pass", "next_look"
LINKAGE = np.dtype(
    [(name, np.float64 if name in _LEARNED else np.int64) for name in (
        "links", "are_sums", "peers", "hosts", "roles", "most", "area", "area_bytes", "look", *_LEARNED,
        "num_missing", "now", "problem", "problem_rank", "problem_note", "problem_bytes"
    )]
)  # fmt: skip
PEER = np.dtype(
    [(name, np.int64) for name in (
        "stage", "note", "num_bytes", "expected", "pass", "is_returned", "offer_note", "offer_bytes",
        "results_note", "results_bytes"
    )]
)  # fmt: skip


class OperationKind(enum.IntEnum):
    """Kinds of operations, in the order of ``contract.hpp``.

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


class StepArguments:
    """Fields that change from step to step; keeps what they point to alive."""

    def __init__(self, **fields: Any) -> None:
        self._kept = fields
        self.array = np.zeros((), dtype=_STEP)
        for name, value in fields.items():
            self.array[name] = _address(value)


class Operations:
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
        if isinstance(fields.get("weights"), Compressed):
            row["flags"] |= COMPRESSED
        if isinstance(fields.get("weights"), QuantizedPanels):
            row["flags"] |= QUANTIZED
        if isinstance(fields.get("weights"), EightBitPanels):
            row["flags"] |= ROUNDED
        self._count += 1

    def run(
        self,
        library: Library,
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
        return library.run(address, count, step.array.ctypes.data, ELEMENT[dtype], torch.get_num_threads())


def check(library: Library) -> None:
    """Check that the layouts here are those of the compiled source."""
    layouts = _OPERATION, _STEP, EXCHANGE, LINKAGE, PEER, DRAW, SHAPE, ROUTING, ROUNDING
    assert library.sizes == tuple(layout.itemsize for layout in layouts)


def _address(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        assert value.is_contiguous()
        return value.data_ptr()
    if isinstance(value, Compressed | QuantizedPanels | EightBitPanels):
        value = value.record
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous
        return value.ctypes.data
    return 0 if value is None else value
