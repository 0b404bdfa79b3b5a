"""Open rows of requests, over steps that run again and drafts that are refused."""

from __future__ import annotations

import random

import pytest
import torch

from engine.states.grid import GRID, Cell, boundary_of, cells
from engine.states.held import RunningStates
from engine.step import RowPieces

LAYERS = 2


class Worker:
    """Rows whose inputs are their positions, and whose states are their boundaries."""

    def __init__(self) -> None:
        self.running = RunningStates(LAYERS)
        self.states: dict[int, int] = {}
        """Position of the state in each slot."""
        self.next_slot = 100
        self.boundaries: dict[int, tuple[int, int | None]] = {}
        """What the scheduler knows of each request: its last boundary and slot."""

    def admit(self, slot: int, num_equal: int = 0) -> None:
        self.running.admit(slot, num_equal)

    def forget(self, slot: int) -> None:
        self.boundaries.pop(slot, None)

    def pieces(self, slot: int, start: int, count: int, *, begins: bool = False) -> RowPieces:
        """Pieces as the scheduler chooses them: the last boundary that the row passes is filled."""
        position, number = self.boundaries.get(slot, (0, None))
        fills = {}
        if (last := boundary_of(start + count)) > boundary_of(start):
            fills[last] = [self.next_slot]
            self.boundaries[slot] = last, self.next_slot
            self.next_slot += 1
        return RowPieces((position, [] if number is None else [number]) if begins else None, fills)

    def run(
        self,
        slot: int,
        start: int,
        count: int,
        pieces: RowPieces | None,
        *,
        drafts: int = 0,
        layers: int = LAYERS,
    ) -> None:
        """One row: checks what each layer reads, and keeps what it should."""
        row = self.running.begin(slot, start, count + drafts, pieces)
        new = torch.arange(start, start + count + drafts, dtype=torch.float32).unsqueeze(1)
        assert row.boundary % GRID == 0
        assert row.boundary == (0 if row.reads is None else self.states[row.reads])
        for layer in range(layers):
            inputs = row.inputs(layer, new)
            assert inputs.flatten().tolist() == list(range(row.boundary, start + count + drafts))
            row.keep(layer, inputs)
        for position, number in row.fills.items():
            assert number != row.reads
            self.states[number] = position


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, [(0, 1)]), (GRID, [(0, GRID)]), (GRID + 3, [(0, GRID), (GRID, GRID + 3)])],
)
def test_rows_are_cut_at_the_grid(count: int, expected: list[tuple[int, int]]) -> None:
    found = list(cells(count))
    assert found == [Cell(*each) for each in expected]
    assert [part.is_whole for part in found] == [end - begin == GRID for begin, end in expected]


def test_a_step_that_runs_again_reads_the_same() -> None:
    worker = Worker()
    for start, count in [(0, 5), (5, 2 * GRID), (5 + 2 * GRID, 1)]:
        pieces = worker.pieces(0, start, count, begins=start == 0)
        worker.run(0, start, count, pieces)
        worker.run(0, start, count, pieces)


def test_a_step_that_was_cut_short_runs_again() -> None:
    worker = Worker()
    worker.run(0, 0, GRID - 1, worker.pieces(0, 0, GRID - 1, begins=True))
    pieces = worker.pieces(0, GRID - 1, 3)
    worker.run(0, GRID - 1, 3, pieces, layers=1)
    worker.run(0, GRID - 1, 3, pieces)
    worker.run(0, GRID + 2, 1, None)


def test_requests_that_are_admitted_again_keep_inputs_of_equal_tokens() -> None:
    worker = Worker()
    worker.run(0, 0, 9, worker.pieces(0, 0, 9, begins=True))
    worker.admit(0, 9)
    worker.run(0, 9, 1, RowPieces((0, []), {}))
    worker.admit(0, 8)
    with pytest.raises(RuntimeError, match="no inputs of layers with a state are kept from 0 to 9"):
        worker.run(0, 9, 1, RowPieces((0, []), {}))


def test_another_request_begins_from_a_state_that_is_known() -> None:
    worker = Worker()
    worker.run(0, 0, GRID + 7, worker.pieces(0, 0, GRID + 7, begins=True))
    position, number = worker.boundaries[0]
    assert (position, worker.states[number or 0]) == (GRID, GRID)
    worker.admit(1)
    worker.run(1, GRID, 3, RowPieces((GRID, [number or 0]), {}))
    worker.run(1, GRID + 3, 1, None)
    worker.run(0, GRID + 7, 1, None)


@pytest.mark.parametrize("seed", range(30))
def test_any_schedule_reads_what_came_before(seed: int) -> None:
    numbers = random.Random(seed)
    worker, ends = Worker(), {}
    for _ in range(300):
        slot = numbers.randrange(4)
        begins = slot not in ends
        if numbers.random() < 0.03:  # another request
            worker.admit(slot)
            worker.forget(slot)
            ends.pop(slot, None)
            begins = True
        elif numbers.random() < 0.05 and slot in worker.boundaries:  # preempted: back to its boundary
            worker.admit(slot)
            ends[slot] = worker.boundaries[slot][0]
            begins = True
        elif numbers.random() < 0.1 and slot in ends:  # all is sent again after a failure
            worker.admit(slot, ends[slot])
            begins = True
        start = ends.get(slot, 0)
        count = numbers.choice([1, 1, 1, 2, 5, 17, GRID, 3 * GRID + 1])
        pieces = worker.pieces(slot, start, count, begins=begins)
        drafts = min(numbers.choice([0, 0, 3]), GRID - 1 - (start + count) % GRID) if count == 1 else 0
        layers = numbers.choice([1, LAYERS, LAYERS, LAYERS])
        worker.run(slot, start, count, pieces, drafts=drafts, layers=layers)
        if layers < LAYERS or numbers.random() < 0.2:
            worker.run(slot, start, count, pieces, drafts=drafts)
        ends[slot] = start + count + (numbers.randrange(drafts + 1) if drafts else 0)
