"""Small models and heads that propose tokens, on the native kernels.

They run at the end of a step, where the served model's tokens are known, in the worker that answers. What
they propose is only checked, so nothing here decides an answer's bits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from engine.attention.base import Int32s, Int64s, PackedRows
from engine.config import EngineConfig, ModelConfig
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.make import bytes_for_program, kept_of, make_program
from engine.kernels.other_weights import PreparedWeights
from engine.kernels.program import Program
from engine.model.checkpoint import CheckpointError, ModelInfo, chosen_dtype
from engine.model.weight_files import OpenFile
from engine.model.weights import LoadedModel, load_model
from engine.speculation.draft_cache import DraftPositions
from engine.speculation.eagle_head import EagleHead
from engine.speculation.prediction_layer import PredictionInput
from engine.step import Step, StepResult

MOST_CAUGHT_UP = 256
"""Tokens beyond those of a step that the drafting model takes in at its end.

Of requests for which they do not suffice, the rest is taken in at the end of later steps.
"""


class RowInput(Protocol):
    """Contract of heads: input of a layer that predicts from rows of the served model."""

    model: LoadedModel
    """The layer as a model, computed without its embedding."""

    def attach(self, program: Program, served: Program, model: LoadedModel) -> None:
        """Prepare the layer's program before its first step; ``served``: that of the served ``model``."""

    def prepare(
        self, program: Program, directory: Path, open_file: OpenFile
    ) -> tuple[RowInput, PreparedWeights | None]:
        """Input for other weights of the served model and its layer.

        Called in a thread beside steps; ``program`` computes the layer.
        """

    def served_rows(self, num_tokens: int, wanted: Int64s) -> torch.Tensor:
        """Rows of the served model's step, of the ``wanted`` ones of so many tokens."""

    def join(self, ids: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the layer begins with [tokens, hidden], from rows and the tokens behind them."""

    def result(self, stream: torch.Tensor) -> torch.Tensor:
        """Results of the layer's own rows, for the token behind the next one."""

    def targets(self, tokens: list[int]) -> list[int]:
        """The served model's numbers of the layer's tokens."""


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
    first: int = 0
    """Position at which the context begins, a multiple of the block size."""
    begin: int = 0
    """Index of its first token to compute among those of the step."""


class DraftModel:
    """A loaded model that proposes what may follow the newest tokens of requests."""

    def __init__(self, config: EngineConfig, info: ModelInfo, served: ModelInfo) -> None:
        """Reads the weights of the model ``info``, which proposes for ``served``.

        Raises:
            CheckpointError: it cannot be computed.
        """
        dtype = getattr(torch, chosen_dtype(config.model.dtype, info, on_cpu=True))
        settings = ModelConfig(model=info.directory)
        wanted = config.scheduler.speculative
        assert wanted is not None
        self._most = wanted.most
        self._slots = config.scheduler.most_requests()
        self._block_size = config.cache.block_size
        self._info = info
        self._is_layer = wanted.method == "mtp"
        """Whether its weights are in the checkpoint of the served model."""
        is_cut = config.device.tensor_parallel_size > 1
        self._input = _input_of(wanted.method, info, served, settings, dtype, is_cut=is_cut)
        if self._input is None:
            self._model = load_model(info, settings, dtype=dtype, device=torch.device("cpu"))
        else:
            self._model = self._input.model
        self._program: Program | None = None
        self._served: tuple[Program, LoadedModel] | None = None
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

    @property
    def bytes_again(self) -> int:
        """Bytes that :meth:`prepare` takes for other weights, read and laid out."""
        if not self._is_layer or self._program is None:
            return 0
        return self._model.weight_bytes + self._program.weight_bytes

    def allocate(self, num_blocks: int, served: Program, model: LoadedModel) -> None:
        """Make its cache for so many blocks of the served model.

        Raises:
            CheckpointError: the native kernels do not compute it.
        """
        self._served = served, model
        if self._program is None:
            self._program = make_program(self._model, self._block_size)
            if self._program is not None and self._input is not None:
                self._program.ends.keeps = self._program.ends.from_rows = True
                self._input.attach(self._program, served, model)
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

    def prepare(self, directory: Path, open_file: OpenFile) -> PreparedDrafts | None:
        """Read and lay out what another version of the served model's weights has of it.

        None where it has nothing to do with them. Called in a thread beside steps.

        Raises:
            CheckpointError: the version has no such layer, or another one.
        """
        if self._input is None:
            return None
        assert self._program is not None, "allocate() comes first"
        return PreparedDrafts(self, *self._input.prepare(self._program, directory, open_file))

    def use(self, found: RowInput) -> None:
        """Propose by this input from the next step on."""
        assert self._program is not None
        assert self._served is not None
        self._input = found
        found.attach(self._program, *self._served)
        self._program.replace_weights(self._program.laid_out)  # lists of steps have addresses
        self._positions.forget_blocks()

    def propose(
        self, step: Step, texts: Mapping[int, Int64s], tables: Int32s, result: StepResult
    ) -> StepResult:
        """The result of a step with proposals behind its newest tokens.

        ``texts``: tokens by position, and ``tables``: blocks, both by slot.
        """
        began = time.thread_time()
        for admit in step.admits:
            self._positions.forget(admit.slot)
        if not step.proposes:
            return result
        find = self._contexts if self._input is None else self._contexts_of_step
        contexts = find(step, texts, tables, result)
        with torch.inference_mode():
            proposals = self._propose(contexts, step.num_tokens) if contexts else {}
        seconds = time.thread_time() - began
        return msgspec.structs.replace(result, proposals=proposals, proposal_seconds=seconds)

    def _contexts(
        self, step: Step, texts: Mapping[int, Int64s], tables: Int32s, result: StepResult
    ) -> list[_Context]:
        """Requests for which it has time, those with one new token first."""
        found, left = [], step.num_tokens + MOST_CAUGHT_UP
        for row, wanted in step.proposes.items():
            slot, kept = step.slots[row], _num_computed(step, row, result)
            length = kept + (row not in step.partial)  # the newest token may have no block yet
            table = tables[slot, : -(-kept // self._block_size)]
            tokens = texts[slot][:length]
            start = min(self._positions.computed(slot, tokens, table), length - 1)
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

    def _contexts_of_step(
        self, step: Step, texts: Mapping[int, Int64s], tables: Int32s, result: StepResult
    ) -> list[_Context]:
        """Requests with what a step computed of them, each position with the token behind it."""
        found, begins = [], np.cumsum(step.counts) - step.counts
        for row, wanted in step.proposes.items():
            slot, length, start = step.slots[row], _num_computed(step, row, result), step.starts[row]
            table, tokens = tables[slot, : -(-length // self._block_size)], texts[slot][:length]
            first = self._positions.first(slot, tokens, table, start)
            begin = max(start, first)
            if begin >= length or length + wanted > self._info.context_length:
                continue
            self._positions.fill(slot, tokens, table, begin)
            behind, index = texts[slot][1 : length + 1], int(begins[row]) + begin - start
            found.append(_Context(row, slot, behind, table, begin, wanted, first, index))
        return sorted(found, key=lambda each: len(each.tokens) - each.start > 1)

    def _propose(self, contexts: Sequence[_Context], num_tokens: int) -> dict[int, list[int]]:
        """Proposals by row: one token by each pass, for rows that want so many.

        ``num_tokens``: of the step of the served model.
        """
        starts = np.array([each.start for each in contexts])
        counts = np.array([len(each.tokens) for each in contexts]) - starts
        ids = np.concatenate([each.tokens[each.start :] for each in contexts])
        wanted = np.array([index for index, each in enumerate(contexts) if each.wanted], dtype=np.int64)
        last = (np.cumsum(counts) - 1)[wanted]
        rows = None
        if self._input is not None:
            pairs = zip(contexts, counts, strict=True)
            wanted_rows = [np.arange(each.begin, each.begin + count) for each, count in pairs]
            rows = self._input.served_rows(num_tokens, np.concatenate(wanted_rows))
        tokens = self._pass(self._packed(contexts, starts, counts), ids, last, rows)
        going_on, before = [contexts[index] for index in wanted], len(contexts)
        proposals = {each.row: [token] for each, token in zip(going_on, tokens, strict=True)}
        for length in range(1, self._most):
            still = [index for index, each in enumerate(going_on) if each.wanted > length]
            if not still:
                break
            rows = self._own_rows(len(ids), last[still])
            going_on, last = [going_on[index] for index in still], np.arange(len(still))
            ids = np.array([proposals[each.row][-1] for each in going_on])
            found = self._go_on(going_on, ids, length, rows, same=len(going_on) == before)
            for each, token in zip(going_on, found, strict=True):
                proposals[each.row].append(token)
            before = len(going_on)
        return proposals

    def _own_rows(self, num_tokens: int, wanted: Int64s) -> torch.Tensor | None:
        """What a head hands on of its last pass; None of a whole model."""
        if self._input is None:
            return None
        assert self._program is not None
        return self._input.result(self._program.ends.rows(num_tokens)[wanted])

    def _pass(self, packed: PackedRows, ids: Int64s, wanted: Int64s, rows: torch.Tensor | None) -> list[int]:
        """Most likely tokens behind the ``wanted`` ones of these ``ids``."""
        assert self._program is not None
        if self._input is not None:
            assert rows is not None
            joined = self._input.join(torch.from_numpy(ids), rows, torch.from_numpy(packed.positions))
            found = self._program.choose(packed, ids, wanted, hidden=joined.unsqueeze(0))
            return self._targets(found)
        return self._program.choose(packed, ids, wanted)

    def _go_on(
        self,
        contexts: Sequence[_Context],
        newest: Int64s,
        length: int,
        rows: torch.Tensor | None,
        *,
        same: bool,
    ) -> list[int]:
        """The tokens behind the ``newest``, which are the last of so many proposals.

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
            if self._input is not None:
                assert rows is not None
                given = self._input.join(torch.from_numpy(newest), rows, torch.from_numpy(starts))
                self._program.ends.rows(len(contexts))[:] = given
            found = self._program.continue_rows(new_blocks)
            if found is not None:
                return self._targets(found)
        packed = self._packed(contexts, starts, np.ones_like(starts))
        return self._pass(packed, newest, np.arange(len(contexts)), rows)

    def _targets(self, tokens: list[int]) -> list[int]:
        """The served model's numbers of a head's tokens, which its next pass reads."""
        if self._input is None:
            return tokens
        assert self._program is not None
        found = self._input.targets(tokens)
        if self._program.continuation is not None:
            self._program.continuation.chose(np.array(found))
        return found

    def _table(self, context: _Context, end: int) -> Int32s:
        """Blocks of a context up to a position, from those on that are there."""
        blocks = self._positions.table(context.slot, context.table, end)
        return blocks[context.first // self._block_size :]

    def _packed(self, contexts: Sequence[_Context], starts: Int64s, counts: Int64s) -> PackedRows:
        ends = (starts + counts).tolist()
        each_table = [self._table(each, end) for each, end in zip(contexts, ends, strict=True)]
        tables = np.zeros((len(contexts), max(map(len, each_table))), dtype=np.int32)
        for row, table in zip(tables, each_table, strict=True):
            row[: len(table)] = table
        offsets = np.cumsum(counts) - counts
        own = starts - np.array([each.first for each in contexts])
        positions = np.arange(int(counts.sum())) + np.repeat(own - offsets, counts)
        return PackedRows(own, counts, tables, positions, int((counts == 1).sum()))


class PreparedDrafts:
    """Input of a head or layer for other weights of the model."""

    def __init__(self, drafts: DraftModel, found: RowInput, weights: PreparedWeights | None) -> None:
        self._drafts, self._found, self._weights = drafts, found, weights

    def switch(self) -> None:
        """Use them from the next step on; called behind the served model's switch."""
        if self._weights is not None:
            self._weights.switch()
        self._drafts.use(self._found)

    def discard(self) -> None:
        """Let go of what was prepared."""
        if self._weights is not None:
            self._weights.discard()


def _num_computed(step: Step, row: int, result: StepResult) -> int:
    """Positions of a row's request that are computed, without refused tokens."""
    if row not in step.drafts:
        return step.ends[row]
    further = result.further.get(row)
    return step.starts[row] + 1 + (0 if further is None else len(further.tokens))


def _input_of(
    method: str,
    info: ModelInfo,
    served: ModelInfo,
    settings: ModelConfig,
    dtype: torch.dtype,
    *,
    is_cut: bool,
) -> RowInput | None:
    """The input of a head; None of a whole model."""
    if method == "mtp":
        return PredictionInput(info, settings, dtype, is_cut=is_cut)
    return EagleHead(info, served, dtype, is_cut=is_cut) if method == "eagle3" else None
