"""A small model that proposes tokens, on the native kernels.

It runs at the end of a step, where the served model's tokens are known, in the worker that answers. What it
proposes is only checked, so nothing here decides an answer's bits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from engine.attention.base import Int32s, Int64s, PackedRows
from engine.config import EngineConfig, ModelConfig
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.make import bytes_for_program, kept_of, make_program
from engine.kernels.program import Program
from engine.model.checkpoint import CheckpointError, ModelInfo, chosen_dtype
from engine.model.weights import LoadedModel, load_model
from engine.speculation.draft_cache import DraftPositions
from engine.step import Step, StepResult

MOST_CAUGHT_UP = 256
"""Tokens beyond those of a step that the drafting model takes in at its end.

Of requests for which they do not suffice, the rest is taken in at the end of later steps.
"""


class _Context(NamedTuple):
    """A request whose next tokens are to be proposed."""

    row: int
    slot: int
    tokens: Int64s
    """All that are known."""
    table: Int32s
    """Its own blocks."""
    start: int
    """Positions that are computed."""
    wanted: int
    """Tokens to propose."""


class DraftModel:
    """A loaded model that proposes what may follow the newest tokens of requests."""

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        """Reads the weights.

        Raises:
            CheckpointError: it cannot be computed.
        """
        dtype = getattr(torch, chosen_dtype(config.model.dtype, info, on_cpu=True))
        settings = ModelConfig(model=info.directory)
        wanted = config.scheduler.speculative
        assert wanted is not None
        self._most = wanted.num_speculative_tokens
        self._slots = config.scheduler.most_requests()
        self._block_size = config.cache.block_size
        self._info = info
        self._model: LoadedModel = load_model(info, settings, dtype=dtype, device=torch.device("cpu"))
        self._program: Program | None = None
        self._positions = DraftPositions(0, self._block_size, self._most)

    def __repr__(self) -> str:
        return f"<DraftModel {self._info.directory}, up to {self._most} tokens>"

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token in its cache."""
        kept = kept_of(self._model, self._block_size, has_states=False)
        return sum(layer.bytes_per_token(self._model.dtype) for layer in kept.layers)

    @property
    def bytes_to_come(self) -> int:
        """Bytes that the kernels will take for its weights; 0 where they have them."""
        return 0 if self._program is not None else bytes_for_program(self._model, self._block_size)

    def allocate(self, num_blocks: int) -> None:
        """Make its cache for so many blocks of the served model.

        Raises:
            CheckpointError: the native kernels do not compute it.
        """
        if self._program is None:
            self._program = make_program(self._model, self._block_size)
        if self._program is None:
            raise CheckpointError(
                f"--speculative-config: the native kernels do not compute {self._info.directory} "
                f"({self._info.architecture}), as the log says: choose another draft model"
            )
        self._positions = DraftPositions(num_blocks, self._block_size, self._most)
        self._program.use(
            NativeCache(
                self._program.cached,
                num_blocks=self._positions.num_blocks(self._slots),
                block_size=self._block_size,
                dtype=self._model.dtype,
            )
        )

    def propose(
        self, step: Step, texts: Mapping[int, Int64s], tables: Int32s, result: StepResult
    ) -> StepResult:
        """The result of a step with proposals behind its newest tokens.

        ``texts``: tokens by position, and ``tables``: blocks, both by slot.
        """
        began = time.perf_counter()
        for admit in step.admits:
            self._positions.forget(admit.slot)
        if not step.proposes:
            return result
        contexts = self._contexts(step, texts, tables, result)
        with torch.inference_mode():
            proposals = self._propose(contexts) if contexts else {}
        seconds = time.perf_counter() - began
        return msgspec.structs.replace(result, proposals=proposals, proposal_seconds=seconds)

    def _contexts(
        self, step: Step, texts: Mapping[int, Int64s], tables: Int32s, result: StepResult
    ) -> list[_Context]:
        """Requests for which it has time, those with one new token first."""
        found, left = [], step.num_tokens + MOST_CAUGHT_UP
        for row, wanted in step.proposes.items():
            slot, length = step.slots[row], step.ends[row]
            if row not in step.partial:
                further = result.further.get(row)
                known = step.starts[row] + 1 if row in step.drafts else length
                length = known + 1 + (0 if further is None else len(further.tokens))
            kept = length if row in step.partial else length - 1  # the newest token may have no block yet
            table = tables[slot, : -(-kept // self._block_size)]
            tokens = texts[slot][:length]
            start = self._positions.computed(slot, tokens, table)
            if length + wanted > self._info.context_length or left <= 0:
                continue
            if length - start > left:  # whole blocks, which no other request stores beside it
                tokens, wanted = tokens[: (start + left) // self._block_size * self._block_size], 0
                if len(tokens) <= start:
                    continue
            left -= len(tokens) - start
            self._positions.fill(slot, tokens, table, start)
            found.append(_Context(row, slot, tokens, table, start, wanted))
        return sorted(found, key=lambda each: len(each.tokens) - each.start > 1)

    def _propose(self, contexts: Sequence[_Context]) -> dict[int, list[int]]:
        """Proposals by row: one token by each pass, for rows that want so many."""
        assert self._program is not None
        starts = np.array([each.start for each in contexts])
        counts = np.array([len(each.tokens) for each in contexts]) - starts
        ids = np.concatenate([each.tokens[each.start :] for each in contexts])
        wanted = np.array([index for index, each in enumerate(contexts) if each.wanted], dtype=np.int64)
        tokens = self._program.choose(
            self._packed(contexts, starts, counts), ids, (np.cumsum(counts) - 1)[wanted]
        )
        going_on, last = [contexts[index] for index in wanted], len(contexts)
        proposals = {each.row: [token] for each, token in zip(going_on, tokens, strict=True)}
        for length in range(1, self._most):
            going_on = [each for each in going_on if each.wanted > length]
            if not going_on:
                break
            newest = [proposals[each.row][-1] for each in going_on]
            found = self._go_on(going_on, newest, length, same=len(going_on) == last)
            for each, token in zip(going_on, found, strict=True):
                proposals[each.row].append(token)
            last = len(going_on)
        return proposals

    def _go_on(
        self, contexts: Sequence[_Context], newest: Sequence[int], length: int, *, same: bool
    ) -> list[int]:
        """The tokens behind the ``newest``, which are proposals of so many tokens.

        ``same``: the last pass had the same rows.
        """
        assert self._program is not None
        starts = np.array([len(each.tokens) for each in contexts]) + (length - 1)
        if same and self._program.continuation is not None:
            new_blocks = {
                index: self._table(each, start + 1)[-1:].tolist()
                for index, (each, start) in enumerate(zip(contexts, starts.tolist(), strict=True))
                if start % self._block_size == 0
            }
            found = self._program.continue_rows(new_blocks)
            if found is not None:
                return found
        packed = self._packed(contexts, starts, np.ones_like(starts))
        return self._program.choose(packed, np.array(newest), np.arange(len(contexts)))

    def _table(self, context: _Context, end: int) -> Int32s:
        return self._positions.table(context.slot, context.table, end)

    def _packed(self, contexts: Sequence[_Context], starts: Int64s, counts: Int64s) -> PackedRows:
        ends = (starts + counts).tolist()
        each_table = [self._table(each, end) for each, end in zip(contexts, ends, strict=True)]
        tables = np.zeros((len(contexts), max(map(len, each_table))), dtype=np.int32)
        for row, table in zip(tables, each_table, strict=True):
            row[: len(table)] = table
        offsets = np.cumsum(counts) - counts
        positions = np.arange(int(counts.sum())) + np.repeat(starts - offsets, counts)
        return PackedRows(starts, counts, tables, positions, int((counts == 1).sum()))
