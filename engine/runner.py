"""Runs steps on one device: keeps the state of the running requests, packs, computes, samples.

Knows nothing of scheduling: which rows a step has and which blocks they own was decided before.
State is set by position, never appended blindly, so that a step which was cut short can run again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import PLAN_KEYWORD, Int64s, PackedRows, PagedAttention
from engine.messages import TokenLogprobs
from engine.sampler import (
    SampleRow,
    VocabularyShard,
    logprob_table,
    read_logprobs,
    sample,
    sample_shard,
)
from engine.step import Admit, Row, Sampled, Step, StepResult
from engine.trace import MOST_SPANS, Span
from engine.transfer import fetch, upload
from engine.weights import LoadedModel
from parallel.tensor_parallel import TensorRank

if TYPE_CHECKING:
    from engine.decode_graphs import DecodeGraphs
    from engine.kernels.program import Program

MIN_TABLE_WIDTH = 16
MIN_SPARE_TOKENS = 64


@dataclass
class _Slot:
    """What is known of the request in a slot, apart from its block table."""

    admit: Admit
    token_ids: Int64s
    """Tokens by position, with room for more."""
    picks_best: bool
    """See :attr:`SamplingParams.picks_best`."""

    @classmethod
    def of(cls, admit: Admit) -> _Slot:
        room = np.zeros(len(admit.token_ids) + MIN_SPARE_TOKENS, dtype=np.int64)
        slot = cls(admit, room, admit.params.picks_best)
        slot.token_ids[: len(admit.token_ids)] = admit.token_ids
        return slot

    def put(self, position: int, token_id: int) -> None:
        if position == len(self.token_ids):
            self.token_ids = np.concatenate([self.token_ids, np.zeros_like(self.token_ids)])
        self.token_ids[position] = token_id


class _BlockTables:
    """Block tables of all slots, one row each; grows as slots and contexts do."""

    def __init__(self, block_size: int) -> None:
        self.blocks = np.zeros((1, MIN_TABLE_WIDTH), dtype=np.int32)
        self._block_size = block_size
        self._admitted: set[int] = set()
        """Slots whose next row brings the whole table."""

    def clear(self, slot: int) -> None:
        while slot >= len(self.blocks):
            self.blocks = np.concatenate([self.blocks, np.zeros_like(self.blocks)])
        self._admitted.add(slot)

    def extend(self, rows: Sequence[Row]) -> None:
        """Where a row's blocks go follows from its start: a row that is run again puts them there again."""
        for row in rows:
            if row.new_blocks:
                begin = 0 if row.slot in self._admitted else -(-row.start // self._block_size)
                end = begin + len(row.new_blocks)
                while end > self.blocks.shape[1]:
                    self.blocks = np.concatenate([self.blocks, np.zeros_like(self.blocks)], axis=1)
                self.blocks[row.slot, begin:end] = row.new_blocks
        if self._admitted:
            self._admitted.difference_update(row.slot for row in rows)


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

    def __init__(
        self,
        model: LoadedModel,
        cache: PagedAttention | None,
        block_size: int,
        program: Program | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """``program`` computes steps natively, over a cache of its own, in place of the model's modules;
        ``graphs`` computes those that were captured, over this cache."""
        self._model = model
        self._cache = cache
        self._program = program
        self._graphs = graphs
        self._block_size = block_size
        self.spans: deque[Span] = deque(maxlen=MOST_SPANS)
        """When steps were computed here, waiting for other stages not included."""
        self._slots: dict[int, _Slot] = {}
        self._tables = _BlockTables(block_size)
        shard = model.stage.shard
        self._shard = shard
        self._vocabulary: VocabularyShard | None = None
        if shard.size > 1:
            ranks = TensorRank(shard.rank, shard.size, shard.ranks)
            self._vocabulary = VocabularyShard(ranks, model.vocab_size)

    def __repr__(self) -> str:
        name = type(self._model.module).__name__
        return f"ModelRunner({name}, slots={len(self._slots)}, {self._program or self._cache!r})"

    def run(self, step: Step) -> StepResult:
        """Compute one step. Running it again gives the same result and leaves the same state."""
        for admit in step.admits:
            self._slots[admit.slot] = _Slot.of(admit)
            self._tables.clear(admit.slot)
        if not step.rows:
            return StepResult([])
        for row in step.rows:
            if row.token is not None:
                self._slots[row.slot].put(row.start, row.token)
        with torch.inference_mode():
            packed, input_ids = self._pack(step.rows)
            hidden = self._receive(len(input_ids))
            began = time.monotonic()
            wanted = self._wanted(step.rows, packed)
            if self._program is not None and self._picks_best(step):
                tokens = self._program.choose(packed, input_ids, wanted.tokens)
                self.spans.append((began, time.monotonic()))
                return self._result(step.rows, wanted, tokens, {}, {})
            output = self._forward(packed, input_ids, wanted.tokens, hidden)
            result = self._finish(step, wanted, output) if self._shard.is_last else StepResult([])
            self.spans.append((began, time.monotonic()))
            if not self._shard.is_last:
                self._send(output)
            return result

    def _picks_best(self, step: Step) -> bool:
        """Whether each row gets its most likely token, and nothing is told about others."""
        return step.masks is None and all(self._slots[row.slot].picks_best for row in step.rows)

    def _pack(self, rows: Sequence[Row]) -> tuple[PackedRows, Int64s]:
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.count for row in rows], dtype=np.int64)
        self._tables.extend(rows)
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

    def _forward(
        self, packed: PackedRows, input_ids: Int64s, wanted: Int64s, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits [wanted, vocabulary of this rank]; before the last stage, hidden [1, tokens, hidden]."""
        if self._program is not None:
            return self._program.forward(packed, input_ids, wanted)
        assert self._cache is not None
        device = self._model.device
        if self._graphs is not None:
            logits = self._graphs.forward(packed, input_ids)
            if logits is not None:
                every = len(wanted) == len(logits) and bool((wanted == np.arange(len(wanted))).all())
                return logits if every else logits.index_select(0, upload(wanted, device))
        return self._model.stage.forward(
            self._model.module,
            hidden,
            input_ids=upload(input_ids, device).unsqueeze(0),
            position_ids=upload(packed.positions, device).unsqueeze(0),
            use_cache=False,
            logits_to_keep=upload(wanted, device),
            **{PLAN_KEYWORD: self._cache.plan(packed)},
        )

    def _receive(self, num_tokens: int) -> torch.Tensor | None:
        """What the stage before this one gives for this step."""
        if self._shard.is_first:
            return None
        assert self._shard.stages is not None
        like = torch.empty(1, num_tokens, self._model.hidden_size, dtype=self._model.dtype)
        return self._shard.stages.receive(like, self._shard.stage - 1).to(self._model.device)

    def _send(self, hidden: torch.Tensor) -> None:
        assert self._shard.stages is not None
        self._shard.stages.send(hidden.to(self._model.dtype).cpu(), self._shard.stage + 1)

    def _finish(self, step: Step, wanted: _Wanted, logits: torch.Tensor) -> StepResult:
        """Sample, fetch everything from the device at once, and keep the new tokens."""
        rows, masks = step.rows, _masks_by_row(step)
        num_sampled = len(wanted.sampled)
        sample_rows = [self._sample_row(rows[index], masks.get(index)) for index in wanted.sampled]
        chosen = self._sample(logits[:num_sampled], sample_rows)
        with_logprobs = [i for i, row in enumerate(sample_rows) if row.params.logprobs is not None]
        if not with_logprobs and not wanted.prompt_rows:
            return self._result(rows, wanted, fetch(chosen).tolist(), {}, {})
        table = self._logprob_table(rows, wanted, logits, chosen, with_logprobs)
        fetched = fetch(torch.cat([chosen.double(), table.flatten()]))
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

    def _sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        if not rows:
            return logits.new_empty(0).long()
        if self._vocabulary is None:
            return sample(logits, rows)
        return sample_shard(logits, rows, self._vocabulary)

    def _sample_row(self, row: Row, mask: npt.NDArray[np.uint8] | None) -> SampleRow:
        slot = self._slots[row.slot]
        end = row.start + row.count
        admit = slot.admit
        return SampleRow(
            admit.params, admit.seed, end, slot.token_ids[:end], admit.num_prompt, admit.stop_ids, mask
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
        places = upload(np.array(with_logprobs, dtype=np.int64), device)
        parts = []
        if with_logprobs:
            lines = self._whole(logits.index_select(0, places))
            parts.append(logprob_table(lines, chosen.index_select(0, places), num_top))
        if targets:
            expected = upload(np.concatenate(targets), device)
            parts.append(logprob_table(self._whole(logits[num_sampled:]), expected, num_top))
        return torch.cat(parts)

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._vocabulary is None else self._vocabulary.whole(logits)

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


def _masks_by_row(step: Step) -> dict[int, npt.NDArray[np.uint8]]:
    """The masks of a step, by index of the row."""
    if step.masks is None:
        return {}
    bits = np.frombuffer(step.masks.bits, dtype=np.uint8).reshape(len(step.masks.rows), -1)
    return dict(zip(step.masks.rows, bits, strict=True))
