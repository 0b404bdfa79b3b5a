"""Rings of open rows over steps that run again, refused drafts and other requests."""

from __future__ import annotations

import random

import pytest

from engine.kernels.cache.rings import NUM_RINGS, NativeRow, RequestRings
from engine.states.grid import NATIVE_GRID, boundary_of
from engine.step import RowPieces

SLOTS = 3


def boundary(position: int) -> int:
    return boundary_of(position, NATIVE_GRID)


class Worker:
    """Requests whose open rows are their tokens, written as ``step.cpp`` writes them."""

    def __init__(self) -> None:
        self.rings = [RequestRings() for _ in range(SLOTS)]
        self.rows = [[[-1] * NATIVE_GRID for _ in range(NUM_RINGS)] for _ in range(SLOTS)]
        self.states: dict[int, list[int]] = {}
        """Tokens before the state in each slot of the pool."""
        self.next_state = 100
        self.known: list[tuple[int, list[int]]] = [(0, []) for _ in range(SLOTS)]
        """What the scheduler knows of each request: its last boundary, and the slot there."""

    def pieces(self, slot: int, start: int, end: int, *, begins: bool) -> RowPieces | None:
        """Pieces as the scheduler chooses them."""
        before, fills = self.known[slot], {}
        if (last := boundary(end)) > boundary(start):
            fills[last] = [self.next_state]
            self.known[slot] = last, [self.next_state]
            self.next_state += 1
        return RowPieces(before if begins else None, fills) if begins or fills else None

    def compute(self, slot: int, tokens: list[int], start: int, row: NativeRow, done: float = 1.0) -> None:
        """One row up to a share of its tokens; checks all that it reads."""
        first = boundary(start)
        assert (self.states[row.reads] if row.reads is not None else []) == tokens[:first]
        rings = self.rows[slot]
        assert rings[row.rings[0]][: row.num_open] == tokens[first:start]
        for position in range(start, start + int(done * (len(tokens) - start))):
            ring = rings[row.rings[boundary(position) > first]]
            ring[position % NATIVE_GRID] = tokens[position]
        for position, number in row.fills.items():
            assert number != row.reads
            self.states[number] = tokens[:position]


@pytest.mark.parametrize("seed", range(40))
def test_any_schedule_reads_the_rows_and_states_before_it(seed: int) -> None:
    numbers = random.Random(seed)
    worker = Worker()
    contexts: list[list[int]] = [[] for _ in range(SLOTS)]
    begins = [True] * SLOTS
    for _ in range(400):
        slot = numbers.randrange(SLOTS)
        rings, context = worker.rings[slot], contexts[slot]
        event = numbers.random()
        if event < 0.03:  # another request, of which nothing goes on
            equal = numbers.randrange(len(context) + 1)
            rings.admit(equal)
            contexts[slot], worker.known[slot], begins[slot] = [], (0, []), True
        elif event < 0.08:  # preempted: it goes on from its boundary
            rings.admit(len(context))
            del context[worker.known[slot][0] :]
            begins[slot] = True
        elif event < 0.13:  # all is sent again after a failure
            rings.admit(len(context))
            begins[slot] = True
        context = contexts[slot]
        start, count = len(context), numbers.choice([1, 1, 1, 2, 5, NATIVE_GRID, 3 * NATIVE_GRID + 1])
        room = NATIVE_GRID - 1 - (start + count) % NATIVE_GRID
        drafts = min(numbers.choice([0, 0, 3]), room) if count == 1 else 0
        tokens = context + [numbers.randrange(1 << 20) for _ in range(count + drafts)]
        pieces = worker.pieces(slot, start, start + count, begins=begins[slot])
        for _ in range(numbers.choice([0, 0, 0, 1, 2])):  # cut short, or run again
            row = rings.begin(start, count + drafts, pieces)
            done = numbers.choice([0.0, 0.5, 1.0])
            worker.compute(slot, tokens, start, row, done)
            if done == 1.0:
                rings.ended(row)
        row = rings.begin(start, count + drafts, pieces)
        worker.compute(slot, tokens, start, row)
        rings.ended(row)
        begins[slot] = False
        contexts[slot] = tokens[: start + count + (numbers.randrange(drafts + 1) if drafts else 0)]


def test_rows_of_a_step_that_was_cut_short_are_not_kept() -> None:
    rings = RequestRings()
    rings.ended(rings.begin(0, 5, RowPieces((0, []), {})))
    rings.begin(5, 2, None)
    with pytest.raises(RuntimeError, match="no rows of layers with a state are kept from 0 to 6"):
        rings.begin(6, 1, None)


def test_rows_of_other_tokens_are_not_kept() -> None:
    rings = RequestRings()
    rings.ended(rings.begin(0, 9, RowPieces((0, []), {})))
    rings.admit(8)
    with pytest.raises(RuntimeError, match="no rows of layers with a state are kept from 0 to 9"):
        rings.begin(9, 1, RowPieces((0, []), {}))


def test_a_row_that_passes_a_boundary_needs_a_slot() -> None:
    with pytest.raises(RuntimeError, match="no slot for the state at 32, which a row from 0 to 33 passes"):
        RequestRings().begin(0, 33, RowPieces((0, []), {16: [1]}))
