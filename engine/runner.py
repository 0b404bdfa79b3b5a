"""Runs steps on one device: keeps the state of the running requests, packs, computes, samples.

Knows nothing of scheduling: which rows a step has and which blocks they own was decided before.
State is set by position, never appended blindly, so that a step which was cut short can run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import PLAN_KEYWORD, Int64s, PackedRows, PagedAttention
from engine.messages import TokenLogprobs
from engine.sampler import SampleRow, logprob_table, read_logprobs, sample
from engine.step import Admit, Row, Sampled, Step, StepResult
from engine.weights import LoadedModel

MIN_TABLE_WIDTH = 16
MIN_SPARE_TOKENS = 64


@dataclass
class _Slot:
    """What is known of the request in a slot, apart from its block table."""

    admit: Admit
    token_ids: Int64s
    """Tokens by position, with room for more."""

    @classmethod
    def of(cls, admit: Admit) -> _Slot:
        slot = cls(admit, np.zeros(len(admit.token_ids) + MIN_SPARE_TOKENS, dtype=np.int64))
        slot.token_ids[: len(admit.token_ids)] = admit.token_ids
        return slot

    def put(self, position: int, token_id: int) -> None:
        if position == len(self.token_ids):
            self.token_ids = np.concatenate([self.token_ids, np.zeros_like(self.token_ids)])
        self.token_ids[position] = token_id


class _BlockTables:
    """Block tables of all slots, one row each; grows as slots and contexts do."""

    def __init__(self) -> None:
        self.blocks = np.zeros((1, MIN_TABLE_WIDTH), dtype=np.int32)
        self._lengths = np.zeros(1, dtype=np.int64)
        # Where each slot's last row began and how many blocks it had then: a row that begins at the
        # same place again is that row run again, and its blocks go to the same places.
        self._last_starts = np.full(1, -1, dtype=np.int64)
        self._lengths_before = np.zeros(1, dtype=np.int64)

    def clear(self, slot: int) -> None:
        while slot >= len(self.blocks):
            self.blocks = np.concatenate([self.blocks, np.zeros_like(self.blocks)])
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
            self._lengths_before = np.concatenate([self._lengths_before, np.zeros_like(self._lengths)])
            self._last_starts = np.concatenate([self._last_starts, np.full_like(self._last_starts, -1)])
        self._lengths[slot] = 0
        self._last_starts[slot] = -1

    def extend(self, rows: Sequence[Row], slots: Int64s, starts: Int64s) -> None:
        again = self._last_starts[slots] == starts
        lengths = np.where(again, self._lengths_before[slots], self._lengths[slots])
        self._lengths[slots] = lengths
        self._lengths_before[slots] = lengths
        self._last_starts[slots] = starts
        for row in rows:
            if row.new_blocks:
                begin = self._lengths[row.slot]
                end = begin + len(row.new_blocks)
                while end > self.blocks.shape[1]:
                    self.blocks = np.concatenate([self.blocks, np.zeros_like(self.blocks)], axis=1)
                self.blocks[row.slot, begin:end] = row.new_blocks
                self._lengths[row.slot] = end


@dataclass(frozen=True)
class _Wanted:
    """Which logits of a step are needed, and what for."""

    tokens: Int64s
    """[logits] indices into the packed tokens: first one per sampled row, then those of prompt tokens."""
    sampled: list[int]
    """Indices of the rows that sample."""
    prompt_rows: list[tuple[int, int, int]]
    """(row, first prompt position predicted, how many) of rows that want prompt log-probabilities."""


class ModelRunner:
    """A model, its KV cache, and the requests in its slots."""

    def __init__(self, model: LoadedModel, cache: PagedAttention, block_size: int) -> None:
        self._model = model
        self._cache = cache
        self._block_size = block_size
        self._slots: dict[int, _Slot] = {}
        self._tables = _BlockTables()

    def __repr__(self) -> str:
        name = type(self._model.module).__name__
        return f"ModelRunner({name}, slots={len(self._slots)}, cache={self._cache!r})"

    def run(self, step: Step) -> StepResult:
        """Compute one step. Running it again gives the same result and leaves the same state."""
        for admit in step.admits:
            self._slots[admit.slot] = _Slot.of(admit)
            self._tables.clear(admit.slot)
        if not step.rows:
            return StepResult([])
        with torch.inference_mode():
            packed, input_ids = self._pack(step.rows)
            wanted = self._wanted(step.rows, packed)
            logits = self._forward(packed, input_ids, wanted.tokens)
            return self._finish(step.rows, wanted, logits)

    def _pack(self, rows: Sequence[Row]) -> tuple[PackedRows, Int64s]:
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.count for row in rows], dtype=np.int64)
        self._tables.extend(rows, slots, starts)
        longer = counts != 1
        num_single = int(longer.argmax()) if longer.any() else len(rows)
        input_ids = np.concatenate(
            [self._slots[row.slot].token_ids[row.start : row.start + row.count] for row in rows]
        )
        offsets = np.cumsum(counts) - counts
        positions = np.arange(len(input_ids)) + np.repeat(starts - offsets, counts)
        width = int((starts + counts - 1).max()) // self._block_size + 1
        tables = self._tables.blocks[slots, :width]
        return PackedRows(starts, counts, tables, positions, num_single), input_ids

    def _wanted(self, rows: Sequence[Row], packed: PackedRows) -> _Wanted:
        ends = np.cumsum(packed.counts)
        sampled = [index for index, row in enumerate(rows) if row.sample]
        prompt_rows = []
        for index, row in enumerate(rows):
            admit = self._slots[row.slot].admit
            if admit.params.prompt_logprobs is not None:
                count = min(row.start + row.count, admit.num_prompt - 1) - row.start
                if count > 0:
                    prompt_rows.append((index, row.start + 1, count))
        tokens = [ends[sampled] - 1]
        for index, _, count in prompt_rows:
            first = ends[index] - packed.counts[index]
            tokens.append(np.arange(first, first + count))
        return _Wanted(np.concatenate(tokens), sampled, prompt_rows)

    def _forward(self, packed: PackedRows, input_ids: Int64s, wanted: Int64s) -> torch.Tensor:
        """Logits [wanted, vocabulary]."""
        device = self._model.device
        output = self._model.module(
            input_ids=torch.from_numpy(input_ids).to(device).unsqueeze(0),
            position_ids=torch.from_numpy(packed.positions).to(device).unsqueeze(0),
            use_cache=False,
            logits_to_keep=torch.from_numpy(wanted).to(device),
            **{PLAN_KEYWORD: self._cache.plan(packed)},
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _finish(self, rows: Sequence[Row], wanted: _Wanted, logits: torch.Tensor) -> StepResult:
        """Sample, fetch everything from the device at once, and keep the new tokens."""
        num_sampled = len(wanted.sampled)
        sample_rows = [self._sample_row(rows[index]) for index in wanted.sampled]
        chosen = sample(logits[:num_sampled], sample_rows) if sample_rows else logits.new_empty(0).long()
        with_logprobs = [i for i, row in enumerate(sample_rows) if row.params.logprobs is not None]
        if not with_logprobs and not wanted.prompt_rows:
            return self._result(rows, wanted, chosen.tolist(), {}, {})
        table = self._logprob_table(rows, wanted, logits, chosen, with_logprobs)
        fetched = torch.cat([chosen.double(), table.flatten()]).cpu().numpy()
        tokens = [int(token) for token in fetched[:num_sampled]]
        lines = fetched[num_sampled:].reshape(table.shape)
        logprobs = {}
        for line, place in zip(lines, with_logprobs, strict=False):
            logprobs[wanted.sampled[place]] = read_logprobs(line, sample_rows[place].params.logprobs or 0)
        prompt_logprobs, begin = {}, len(with_logprobs)
        for index, _, count in wanted.prompt_rows:
            num_top = self._slots[rows[index].slot].admit.params.prompt_logprobs or 0
            prompt_logprobs[index] = [read_logprobs(line, num_top) for line in lines[begin : begin + count]]
            begin += count
        return self._result(rows, wanted, tokens, logprobs, prompt_logprobs)

    def _sample_row(self, row: Row) -> SampleRow:
        slot = self._slots[row.slot]
        end = row.start + row.count
        admit = slot.admit
        return SampleRow(
            admit.params, admit.seed, end, slot.token_ids[:end], admit.num_prompt, admit.stop_ids
        )

    def _logprob_table(
        self,
        rows: Sequence[Row],
        wanted: _Wanted,
        logits: torch.Tensor,
        chosen: torch.Tensor,
        with_logprobs: list[int],
    ) -> torch.Tensor:
        """Lines for the sampled rows that want log-probabilities, then for the prompt tokens."""
        num_sampled, device = len(wanted.sampled), logits.device
        num_top, targets = 0, []
        for place in with_logprobs:
            num_top = max(num_top, self._slots[rows[wanted.sampled[place]].slot].admit.params.logprobs or 0)
        for index, first, count in wanted.prompt_rows:
            slot = self._slots[rows[index].slot]
            num_top = max(num_top, slot.admit.params.prompt_logprobs or 0)
            targets.append(slot.token_ids[first : first + count])
        places = torch.tensor(with_logprobs, dtype=torch.int64, device=device)
        parts = []
        if with_logprobs:
            parts.append(
                logprob_table(logits.index_select(0, places), chosen.index_select(0, places), num_top)
            )
        if targets:
            expected = torch.from_numpy(np.concatenate(targets)).to(device)
            parts.append(logprob_table(logits[num_sampled:], expected, num_top))
        return torch.cat(parts)

    def _result(
        self,
        rows: Sequence[Row],
        wanted: _Wanted,
        tokens: list[int],
        logprobs: dict[int, TokenLogprobs],
        prompt_logprobs: dict[int, list[TokenLogprobs]],
    ) -> StepResult:
        token_of = dict(zip(wanted.sampled, tokens, strict=True))
        sampled = []
        for index, row in enumerate(rows):
            token = token_of.get(index)
            if token is not None:
                self._slots[row.slot].put(row.start + row.count, token)
            sampled.append(Sampled(row.slot, token, logprobs.get(index), prompt_logprobs.get(index)))
        return StepResult(sampled)
