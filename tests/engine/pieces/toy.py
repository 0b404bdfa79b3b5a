"""A toy kind of state beside keys and values, run through the real scheduler.

The state of a context is a digest of all its tokens. It lies in slots of 64-bit floats at multiples of a
grid; a row computes its next token from the slot that it begins from and the tokens behind it. Slots that
nobody holds and nobody can find are filled with NaN, so what is read before it is written shows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.messages import Submit
from engine.pieces.kinds import BoundaryKind, BoundarySlots
from engine.pieces.pool import PiecePool
from engine.sampling import SamplingParams
from engine.scheduling.request import Request, from_submit
from engine.scheduling.rules import SchedulerRules
from engine.scheduling.scheduler import Scheduler
from engine.step import Step, StepResult
from engine.transfers.block_memory import BlockMemory
from engine.transfers.piece_memory import PieceMemory
from tests.engine.simulated_executor import VOCAB, SimulatedExecutor, _digest

PEER = b"router"
EOS = VOCAB + 1  # never sampled
NUMBERS = 2
"""Floats of a state: the digest, and the position that it belongs to."""


def toy_kind(grid: int = 8, label: str = "toy") -> BoundaryKind:
    return BoundaryKind(label=label, grid=grid, num_bytes=8 * NUMBERS)


class _Rows(dict[tuple[int, int], int]):
    """Keys and values by block and offset, in an array of 64-bit floats."""

    def __init__(self, rows: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> None:
        super().__init__()
        self._rows = rows

    def __getitem__(self, place: tuple[int, int]) -> int:
        found = self._rows[place]
        return -1 if math.isnan(found) else int(found)

    def __setitem__(self, place: tuple[int, int], value: int) -> None:
        self._rows[place] = value


class ToyExecutor(SimulatedExecutor):
    """Makes keys and values of states and the tokens behind them: wrong states show."""

    def __init__(self, pool: PiecePool, **settings: Any) -> None:
        super().__init__(**settings)
        self._pool = pool
        self.states = np.full((pool.kinds.num_slots, NUMBERS), math.nan)
        """By slot; those of blocks are not used."""
        self.rows = np.full((pool.num_blocks, settings["block_size"]), math.nan)
        self._cache = _Rows(self.rows)
        self._begins: dict[int, tuple[int, list[int]]] = {}
        self._reads: dict[int, tuple[int, int]] = {}
        """Position and state that each row of the step begins from, by slot."""

    def _compute(self, step: Step) -> StepResult:
        for admit in step.admits:
            self._begins.pop(admit.slot, None)
        self._reads = {}
        for index, (slot, start) in enumerate(zip(step.slots, step.starts, strict=True)):
            pieces = step.pieces.get(index)
            if pieces is not None and pieces.begins is not None:
                self._begins[slot] = pieces.begins
            begin, slots = self._begins[slot]
            assert 0 <= start - begin < self._pool.kinds.step, "a worker keeps no more rows than the grid has"
            self._reads[slot] = begin, self._read(begin, slots)
        self._spoil(step)
        result = super()._compute(step)
        for index, (slot, start, end) in enumerate(zip(step.slots, step.starts, step.ends, strict=True)):
            fills = step.pieces[index].fills if index in step.pieces else {}
            end -= len(step.drafts.get(index, ()))
            for position, slots in fills.items():
                assert start < position <= end, "only what is sure to count is in a state"
                for each in slots:
                    self.states[each] = self._fold(slot, position), position
            if fills:
                last = max(fills)
                self._begins[slot] = last, fills[last]
        return result

    def cached(self, block: int, offset: int) -> int:
        """Keys and values of a position."""
        return self._cache[block, offset]

    def _read(self, begin: int, slots: list[int]) -> int:
        if not begin:
            return 0
        found = {tuple(self.states[slot].tolist()) for slot in slots}
        state, position = found.pop()
        if self._checks_reads:
            assert not found, "the pieces of one position are of one context"
            assert position == begin, f"a state of {position} is read at {begin}"
        return 0 if math.isnan(state) else int(state)

    def _spoil(self, step: Step) -> None:
        """What a step fills is not what any of its rows begins from."""
        fills = [slot for row in step.pieces.values() for slots in row.fills.values() for slot in slots]
        assert len(set(fills)) == len(fills), "two rows fill one slot"
        read = {slot for each in step.slots for slot in self._begins[each][1]}
        assert read.isdisjoint(fills), "a slot is read and filled by one step: it could not run again"
        self.states[fills] = math.nan

    def _fold(self, slot: int, end: int) -> int:
        begin, state = self._reads[slot]
        for position in range(begin, end):
            state = _digest(state, position, self._tokens[slot][position])
        return state

    def _write(self, step: Step) -> None:
        written: set[tuple[int, int]] = set()
        for start, end, slot in zip(step.starts, step.ends, step.slots, strict=True):
            for position in range(start, end):
                place = self._place(slot, position)
                assert place not in written, "two rows write one place"
                written.add(place)
                self._cache[place] = self._fold(slot, position + 1)


class ToyBench:
    """A scheduler with a simulated model that has states."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        num_states: int = 32,
        grid: int = 8,
        num_kinds: int = 1,
        block_size: int = 4,
        max_seqs: int = 8,
        budget: int = 32,
        micro_batches: int = 1,
        checks_reads: bool = True,
        **scheduler: Any,
    ) -> None:
        kinds = [BoundarySlots(toy_kind(grid, f"toy{each}"), num_states) for each in range(num_kinds)]
        self.pool = PiecePool(num_blocks, boundaries=kinds, block_size=block_size)
        self.num_states, self.block_size = num_states, block_size
        rules = SchedulerRules(
            max_num_seqs=max_seqs,
            max_num_batched_tokens=budget,
            block_size=block_size,
            micro_batches=micro_batches,
            tells_tokens=micro_batches > 1,
        )
        self.scheduler = Scheduler(rules, self.pool, **scheduler)
        self.executor = ToyExecutor(
            self.pool, block_size=block_size, budget=budget, max_rows=max_seqs, in_flight=micro_batches,
            checks_reads=checks_reads,
        )  # fmt: skip
        self.under_way: deque[Step] = deque()
        self.requests: dict[int, Request] = {}
        self.outputs: dict[int, list[int]] = {}
        self.computed: Callable[[Step], None] = lambda _: None

    def request(self, prompt: list[int], max_tokens: int = 5, **fields: Any) -> Request:
        number = len(self.requests) + 1
        submit = Submit(number, f"r{number}", prompt, SamplingParams(max_tokens=max_tokens), seed=0, **fields)
        request = from_submit(submit, PEER, arrival=number, eos_ids=(EOS,), max_model_len=10_000)
        self.requests[number], self.outputs[number] = request, []
        return request

    def add(self, prompt: list[int], max_tokens: int = 5, **fields: Any) -> int:
        request = self.request(prompt, max_tokens, **fields)
        self.scheduler.add(request)
        return request.key[1]

    def begin(self) -> None:
        while len(self.under_way) < self.executor.in_flight and (step := self.scheduler.schedule()):
            self.executor.begin(step)
            self.under_way.append(step)

    def step(self) -> int:
        """Begin steps, finish the oldest, and return the number of its tokens."""
        self.begin()
        if not self.under_way:
            return 0
        step = self.under_way.popleft()
        for outcome in self.scheduler.update(step, self.executor.finish()):
            self.outputs[outcome.request.key[1]] += outcome.token_ids
        self.spoil_free()
        return step.num_tokens

    def restart(self) -> None:
        """Run all steps in flight again, as after a failure."""
        self.executor.forget()
        again = self.scheduler.restart()
        assert [each.slots for each in again] == [each.slots for each in self.under_way]
        self.under_way = deque(again)
        for step in again:
            self.executor.begin(step)

    def spoil_free(self) -> None:
        """Fill what nobody holds and nobody can find with NaN."""
        named = {self.pool.slot_of(name) for name in self.pool.known}
        for slot in range(self.pool.kinds.num_slots):
            if not self.pool.num_holders(slot) and slot not in named:
                self.executor.states[slot] = math.nan
                self.executor.rows[slot : slot + 1] = math.nan

    def memory(self) -> PieceMemory:
        """The bytes of all pieces, a region for each kind."""
        kinds, states = self.pool.kinds, self.executor.states
        regions = [self.executor.rows]
        for number in range(len(kinds.boundaries)):
            slots = kinds.slots_of(number + 1)
            regions.append(states[slots.start : slots.stop])
        return PieceMemory([BlockMemory([region.view(np.uint8)]) for region in regions])

    def _check_known(self, request: Request) -> None:
        """What is known of a request's context is what its names say."""
        size, kinds = self.block_size, self.pool.kinds
        state = 0
        for index, link in enumerate(request.hashes):
            block = self.pool.slot_of(link)
            for offset in range(size):
                position = index * size + offset
                state = _digest(state, position, request.token_ids[position])
                assert block is None or self.executor.cached(block, offset) == state
            for name in kinds.boundary_names(link):
                if (slot := self.pool.slot_of(name)) is not None:
                    assert self.executor.states[slot].tolist() == [state, (index + 1) * size]

    def finish(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.queues.has_work:
                break
            assert self.step() > 0, f"stuck: {self.scheduler!r}"
        while self.under_way:
            self.step()
        assert not self.scheduler.queues.has_work
        assert self.pool.num_used == 0
        for request in self.requests.values():
            self._check_known(request)
        assert self.pool.num_free_boundaries == self.num_states
