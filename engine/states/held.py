"""Open rows of running requests: inputs of layers with a state, behind the last boundary.

States at boundaries lie in slots of a pool (:mod:`engine.states.pool`), which the scheduler hands out. A
step can run again and drafts can be refused, so inputs are kept as the last row found and left them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from engine.states.grid import boundary_of
from engine.step import RowPieces

State = tuple[torch.Tensor | None, ...]
"""Tensors of one layer's state behind some token."""
NOWHERE: tuple[int, int | None] = (0, None)
"""Boundary and slot of a context's beginning, where no state is read."""


class StateRows(NamedTuple):
    """Rows of a step, as far as states need them."""

    slots: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]
    pieces: Mapping[int, RowPieces] = {}


class RequestStates(Protocol):
    """Contract of the recurrent states of running requests, by the requests' slots."""

    def admit(self, slot: int, num_equal: int) -> None:
        """A request takes a slot, whose first ``num_equal`` tokens are those of the one before."""

    def step(self, rows: StateRows) -> AbstractContextManager[None]:
        """Context in which the model computes these rows, packed one behind the other."""


class RowBoundaries:
    """Boundaries that a request's next row, or its last one run again, begins from."""

    def __init__(self) -> None:
        self._known = [NOWHERE]
        """Positions and slots of states, the newest first."""

    def begin(self, start: int, pieces: RowPieces | None) -> tuple[int, int | None, dict[int, int]]:
        """Boundary of a row, the slot that it reads, and those that it fills."""
        fills: dict[int, int] = {}
        if pieces is not None:
            if pieces.begins is not None:
                position, slots = pieces.begins
                self._known.insert(0, (position, slots[0]) if position else NOWHERE)
            fills = {position: slots[0] for position, slots in pieces.fills.items()}
        read = next((each for each in self._known if each[0] <= start), NOWHERE)
        last = max(fills, default=read[0])
        self._known = [(last, fills[last]), read] if fills else [read]
        return *read, fills


@dataclass
class OpenRows:
    """Layers' inputs of one request at positions from a boundary on."""

    boundary: int
    end: int
    """Position behind the last token of which there are inputs."""
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """By layer: [end - boundary, width]."""


@dataclass(frozen=True)
class Row:
    """One row of a step: what its layers read, and where they keep what."""

    before: OpenRows | None
    """Inputs behind the boundary; None: the row begins there."""
    after: OpenRows
    boundary: int
    num_open: int
    """Tokens between the boundary and the row's first."""
    reads: int | None
    """Slot of the state at the boundary; None: a context's beginning."""
    fills: Mapping[int, int]
    """Slots to fill, by position."""

    def inputs(self, layer: int, new: torch.Tensor) -> torch.Tensor:
        """[open and new, width] inputs of a layer from the boundary on."""
        if self.before is None:
            return new
        return torch.cat([self.before.inputs[layer][: self.num_open], new])

    def keep(self, layer: int, inputs: torch.Tensor) -> None:
        """Keep the inputs behind the row's last boundary."""
        num_open = self.after.end - self.after.boundary
        self.after.inputs[layer] = inputs[len(inputs) - num_open :].clone()


def new_request(num_tokens: int) -> Row:
    """A row outside of steps: a context's first tokens, of which nothing is kept."""
    return Row(None, OpenRows(boundary_of(num_tokens), num_tokens), 0, 0, None, {})


@dataclass
class _Kept:
    """What is kept of the request in a slot, before and after its last row."""

    boundaries: RowBoundaries = field(default_factory=RowBoundaries)
    before: OpenRows | None = None
    after: OpenRows | None = None
    """Complete if all layers have run."""


class RunningStates:
    """Open rows of the requests in all slots."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._kept: dict[int, _Kept] = {}

    def admit(self, slot: int, num_equal: int) -> None:
        """A request takes a slot, whose first ``num_equal`` tokens are those of the one before.

        A step that runs again admits its requests again: inputs of equal tokens stay.
        """
        kept = self._kept.get(slot)
        if kept is not None:
            kept.boundaries = RowBoundaries()
            kept.before, kept.after = _cut(kept.before, num_equal), _cut(kept.after, num_equal)

    def clear(self) -> None:
        """No request is there any more."""
        self._kept.clear()

    def begin(self, slot: int, start: int, count: int, pieces: RowPieces | None) -> Row:
        """A row of a step, from what is kept.

        Raises RuntimeError if that does not reach its start.
        """
        kept = self._kept.setdefault(slot, _Kept())
        boundary, reads, fills = kept.boundaries.begin(start, pieces)
        before = self._open_rows(kept, boundary, start)
        kept.before, kept.after = before, OpenRows(max(fills, default=boundary), start + count)
        return Row(before, kept.after, boundary, start - boundary, reads, fills)

    def _open_rows(self, kept: _Kept, boundary: int, start: int) -> OpenRows | None:
        """Inputs from the boundary up to a row's start; None where that is the boundary."""
        if start == boundary:
            return None
        for each in (kept.after, kept.before):
            if each is not None and each.boundary == boundary and each.end >= start:
                if len(each.inputs) < self._num_layers:  # its step was cut short
                    continue
                return each
        raise RuntimeError(f"no inputs of layers with a state are kept from {boundary} to {start}")


def _cut(rows: OpenRows | None, end: int) -> OpenRows | None:
    """Open rows of the first ``end`` positions at most."""
    if rows is None or rows.end <= end:
        return rows
    return OpenRows(rows.boundary, end, rows.inputs) if end > rows.boundary else None
