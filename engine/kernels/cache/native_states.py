"""Recurrent states of a native program: slots at boundaries, and rings of open rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from engine.kernels.cache.rings import NUM_RINGS, NativeRow, RequestRings
from engine.kernels.cache.state_shape import LAYER_STATE, STATE_FILL, STATE_ROW, StateShape
from engine.kernels.core.pages import mapped
from engine.pieces.kinds import BoundaryKind
from engine.states.grid import LABEL, NATIVE_GRID, boundary_of
from engine.states.held import StateRows
from engine.states.pool import StatePool, Zeros, form_of, own_zeros, state_bytes
from engine.step import RowPieces


class NativeStates:
    """States and open rows of all layers of one program, by the slots of requests."""

    def __init__(self, shapes: Sequence[StateShape], dtype: torch.dtype) -> None:
        """``shapes``: of the layers that have a state; ``dtype``: of the rows."""
        self._shapes, self._dtype = shapes, dtype
        ends = list(accumulate((shape.ring_bytes(dtype) for shape in shapes), initial=0))
        self._ring_at, self._ring_bytes = ends[:-1], ends[-1]
        self._rings: dict[int, RequestRings] = {}
        self._memory: dict[int, torch.Tensor] = {}
        """Bytes of the rings of each request."""
        self.pool: StatePool | None = None
        """Where states are kept; None: before :meth:`allocate`."""
        self.records: list[np.ndarray[Any, Any]] = []
        """Record of each layer's state, which operations point to."""
        self._step: list[NativeRow] = []
        self._slots: Sequence[int] = ()
        self._next_slot = 0
        """Number of slots that steps outside of a scheduler have filled."""

    def __repr__(self) -> str:
        return f"<NativeStates of {len(self._shapes)} layers, {len(self._rings)} requests>"

    @property
    def kind(self) -> BoundaryKind:
        """The kind of piece that states are."""
        like = [shape.like(self._dtype) for shape in self._shapes]
        return BoundaryKind(label=LABEL, grid=NATIVE_GRID, num_bytes=state_bytes(like), form=form_of(like))

    @property
    def request_bytes(self) -> int:
        """Bytes of a running request's rings."""
        return NUM_RINGS * self._ring_bytes

    def allocate(self, num_slots: int, first: int = 0, zeros: Zeros = own_zeros) -> None:
        """Make room for states in slots numbered from ``first`` on, and forget all requests."""
        self.clear()
        self.pool = StatePool([shape.like(self._dtype) for shape in self._shapes], num_slots, first, zeros)
        self.records = [self._record(number) for number in range(len(self._shapes))]

    def _record(self, number: int) -> np.ndarray[Any, Any]:
        assert self.pool is not None
        shape, (conv, recurrent) = self._shapes[number], self.pool.layers[number]
        record = np.zeros((), dtype=LAYER_STATE)
        for name, tensor in (("conv", conv), ("recurrent", recurrent)):
            if tensor is not None:
                record[name], record[f"{name}_step"] = tensor.data_ptr(), tensor.stride(0)
        record["before"], record["width"] = shape.kernel - 1, shape.width
        record["heads"], record["key_dim"], record["value_dim"] = shape.heads, shape.key_dim, shape.value_dim
        record["head_floats"] = shape.head_floats
        record["ring_at"], record["heads_at"] = self._ring_at[number], shape.heads_at(self._dtype)
        return record

    def admit(self, slot: int, num_equal: int) -> None:
        """See :meth:`engine.states.held.RequestStates.admit`."""
        if slot in self._rings:
            self._rings[slot].admit(num_equal)

    def clear(self) -> None:
        """No request is there any more."""
        self._rings.clear()

    def alone(self, rows: Sequence[tuple[int, int, int]]) -> AbstractContextManager[None]:
        """Context of a step outside of a scheduler, which fills slots in turn.

        ``rows``: (request, start, tokens) of each. Requests are the same until :meth:`clear`.
        """
        assert self.pool is not None
        pieces = {}
        for index, (request, start, count) in enumerate(rows):
            if start == 0:
                self._rings.pop(request, None)
            last, fills = boundary_of(start + count, NATIVE_GRID), {}
            if last > boundary_of(start, NATIVE_GRID):
                fills[last] = [self.pool.first + self._next_slot % self.pool.num_slots]
                self._next_slot += 1
            pieces[index] = RowPieces((0, []) if start == 0 else None, fills)
        requests, starts, counts = zip(*rows, strict=True)
        return self.step(StateRows(requests, starts, counts, pieces))

    @contextmanager
    def step(self, rows: StateRows) -> Iterator[None]:
        """Context in which the program computes these rows."""
        self._slots, self._step = rows.slots, []
        for index, (slot, start, count) in enumerate(zip(rows.slots, rows.starts, rows.counts, strict=True)):
            rings = self._rings.setdefault(slot, RequestRings())
            self._step.append(rings.begin(start, count, rows.pieces.get(index)))
        try:
            yield
            for slot, row in zip(self._slots, self._step, strict=True):
                self._rings[slot].ended(row)
        finally:
            self._slots, self._step = (), []

    def arguments(self) -> dict[str, Any]:
        """Fields of a step's arguments for the rows of the running step."""
        assert self.pool is not None
        states = np.zeros(len(self._step), dtype=STATE_ROW)
        fills: list[tuple[int, int]] = []
        for state, slot, row in zip(states, self._slots, self._step, strict=True):
            if (memory := self._memory.get(slot)) is None:
                memory = self._memory[slot] = mapped(self.request_bytes)
            state["reads"] = -1 if row.reads is None else row.reads - self.pool.first
            begins = [memory.data_ptr() + number * self._ring_bytes for number in row.rings]
            state["from_ring"], state["to_ring"] = begins
            state["num_open"], state["first_fill"] = row.num_open, len(fills)
            state["num_fills"] = len(row.fills)
            fills += [(position, number - self.pool.first) for position, number in sorted(row.fills.items())]
        return {"rows": len(states), "states": states, "fills": np.array(fills, dtype=STATE_FILL)}
