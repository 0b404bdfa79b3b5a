"""Runner of steps on one device: packs rows of running requests, computes, samples.

Knows nothing of scheduling: the rows of a step and their blocks were decided before. State is set by
position, never appended blindly, so that a step which was cut short can run again.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import PLAN_KEYWORD, Int64s, PackedRows, PagedAttention
from engine.attention.transfer import begin_fetch, upload
from engine.compute.logits_backend import SampleRow
from engine.compute.request_slots import BlockTables, RequestSlot, WantedLogits
from engine.compute.sampler import Sampler, VocabularyShard, read_logprobs
from engine.compute.trace import MOST_SPANS
from engine.kernels.choosing.logits import NO_DRAWS, Draws, draws
from engine.messages import TokenLogprobs
from engine.model.weights import LoadedModel
from engine.scheduling.speculation import num_taken
from engine.states.held import RequestStates, StateRows
from engine.step import Admit, ExtraTokens, Span, Step, StepResult
from parallel.communicators.base import carries
from parallel.tensor_parallel import TensorRank

if TYPE_CHECKING:
    from engine.compute.decode_graphs import DecodeGraphs
    from engine.kernels.decode_continuation import DecodeContinuation
    from engine.kernels.program import Program

Pending = Callable[[], StepResult]
"""Function that waits for the result of a begun step."""


class ModelRunner:
    """A model, its KV cache, and the requests in its slots."""

    def __init__(
        self,
        model: LoadedModel,
        cache: PagedAttention | None,
        block_size: int,
        program: Program | None = None,
        graphs: DecodeGraphs | None = None,
        *,
        row_by_row: bool = False,
    ) -> None:
        """A runner over a cache, over captured graphs of it, or over a native program.

        ``program`` computes steps natively, over a cache of its own, in place of the model's modules.
        ``graphs`` computes the steps that were captured, over ``cache``.
        ``row_by_row``: see :class:`.Sampler`.
        """
        self._model = model
        self._cache = cache
        self._program = program
        self._states: RequestStates | None = model.states if program is None else program.states
        self._graphs = graphs
        self._block_size = block_size
        self.spans: deque[Span] = deque(maxlen=MOST_SPANS)
        """Times in which steps were computed here, without waits for other stages."""
        self._slots: dict[int, RequestSlot] = {}
        self._tables = BlockTables(block_size)
        self._continuation: DecodeContinuation | None = None
        """Decode rows of the last native step, which the next may continue."""
        self._shard = model.stage.shard
        self._sampler = sampler_of(model, row_by_row=row_by_row)

    def __repr__(self) -> str:
        name = type(self._model.module).__name__
        return f"ModelRunner({name}, slots={len(self._slots)}, {self._program or self._cache!r})"

    def run(self, step: Step) -> StepResult:
        """Compute one step. Running it again gives the same result and leaves the same state."""
        return self.begin(step)()

    def begin(self, step: Step) -> Pending:
        """Begin one step; the function returned waits for it, before another begins.

        On a device all is launched when this returns. On a CPU most of it is computed by then.
        """
        result = self._go_on(step)
        if result is not None:
            return _done(result)
        for admit in step.admits:
            if self._states is not None:
                self._states.admit(admit.slot, self._num_equal(admit))
            self._slots[admit.slot] = RequestSlot.of(admit)
            self._tables.clear(admit.slot)
        if not step.slots:
            return _done(StepResult([]))
        for slot, start, token in zip(step.slots, step.starts, step.tokens, strict=False):
            self._slots[slot].put(start, token)
        for index, draft in step.drafts.items():
            self._slots[step.slots[index]].put(step.starts[index] + 1, *draft)
        with torch.inference_mode():
            ends = step.ends
            packed, input_ids = self._pack(step, ends)
            hidden = self._receive(len(input_ids))
            began = time.monotonic()
            wanted = self._wanted(step, packed, ends)
            program = self._program
            draws = self._draws(step, wanted) if program is not None and self._is_plain(step) else None
            if program is not None and draws is not None and program.can_choose(len(input_ids), draws):
                with self._states_of(step):
                    tokens = program.choose(packed, input_ids, wanted.tokens, draws)
                pending = _done(self._result(step, wanted, tokens, {}, {}))
                self._continuation = program.continuation
                if self._continuation is not None:
                    self._continuation.begin(step)
            else:
                with self._states_of(step):
                    output = self._forward(packed, input_ids, wanted.tokens, hidden)
                pending = self._sample(step, wanted, output) if self._shard.is_last else _done(StepResult([]))
            if not self._shard.is_last:
                self.spans.append((began, time.monotonic()))
                self._send(output)
                return pending

        def finish() -> StepResult:
            result = pending()
            self.spans.append((began, time.monotonic()))
            return result

        return finish

    def _states_of(self, step: Step) -> contextlib.AbstractContextManager[None]:
        """Context in which layers with a recurrent state compute the rows of a step."""
        if self._states is None:
            return contextlib.nullcontext()
        return self._states.step(_state_rows(step))

    def _num_equal(self, admit: Admit) -> int:
        """Number of leading tokens in common with the request that had the slot before."""
        held = self._slots.get(admit.slot)
        if held is None:
            return 0
        both = min(len(admit.token_ids), len(held.token_ids))
        differs = held.token_ids[:both] != np.array(admit.token_ids[:both])
        return int(differs.argmax()) if differs.any() else both

    def _go_on(self, step: Step) -> StepResult | None:
        """Compute a consecutive decode step of the same rows; None if it is none."""
        continuation = self._continuation
        if continuation is None:
            return None
        follows = continuation.is_followed_by(step)
        if continuation.is_full or not follows:
            self._settle(continuation)
        if follows:
            assert self._program is not None
            began = time.monotonic()
            self._tables.extend(step)
            rows = None if self._states is None else _state_rows(step)
            tokens = self._program.continue_rows(step.new_blocks, rows)
            if tokens is not None:
                self.spans.append((began, time.monotonic()))
                return StepResult([*tokens])
            self._settle(continuation)
        self._continuation = None
        return None

    def _settle(self, continuation: DecodeContinuation) -> None:
        """Put the tokens that were kept for rows into their slots."""
        for slot, position, tokens in continuation.take():
            self._slots[slot].put(position, *tokens)

    def _is_plain(self, step: Step) -> bool:
        """Whether tokens are chosen from bare logits, without masks or log-probabilities."""
        return step.masks is None and all(self._slots[slot].is_plain for slot in step.slots)

    def _draws(self, step: Step, wanted: WantedLogits) -> Draws:
        """Sampling parameters of each row of a plain step.

        Empty (:data:`NO_DRAWS`) if each is the most likely one.
        """
        if all(self._slots[slot].admit.params.greedy for slot in step.slots):
            return NO_DRAWS
        return draws([self._slots[step.slots[row]].draw for row in wanted.sampled])

    def _pack(self, step: Step, ends: list[int]) -> tuple[PackedRows, Int64s]:
        """The rows of a step and their token ids; ``ends`` are those of the step."""
        slots = np.array(step.slots, dtype=np.int64)
        starts = np.array(step.starts, dtype=np.int64)
        counts = np.array(step.counts, dtype=np.int64)
        self._tables.extend(step)
        tables = self._tables.blocks[slots, : (max(ends) - 1) // self._block_size + 1]
        if step.counts.count(1) == len(slots):
            token_ids = [
                self._slots[slot].token_ids.item(start)
                for slot, start in zip(step.slots, step.starts, strict=True)
            ]
            return PackedRows(starts, counts, tables, starts.copy(), len(slots)), np.array(token_ids)
        input_ids = np.concatenate(
            [
                self._slots[slot].token_ids[start:end]
                for slot, start, end in zip(step.slots, step.starts, ends, strict=True)
            ]
        )
        offsets = np.cumsum(counts) - counts
        positions = np.arange(len(input_ids)) + np.repeat(starts - offsets, counts)
        return PackedRows(starts, counts, tables, positions, int((counts != 1).argmax())), input_ids

    def _wanted(self, step: Step, packed: PackedRows, row_ends: list[int]) -> WantedLogits:
        """``row_ends``: position behind the last token of each row."""
        if packed.num_single == len(row_ends) and not step.partial:
            return WantedLogits(np.arange(len(row_ends)), range(len(row_ends)), row_ends, [])
        ends = np.cumsum(packed.counts)
        sampled: Sequence[int] = range(len(step.slots))
        if step.partial:
            sampled = [index for index in sampled if index not in step.partial]
        positions = row_ends if len(sampled) == len(step.slots) else [row_ends[i] for i in sampled]
        last = ends[sampled] - 1
        if step.drafts:
            lengths = [len(step.drafts.get(index, ())) for index in sampled]
            before = [back for length in lengths for back in range(length, -1, -1)]
            copies = [length + 1 for length in lengths]
            last = np.repeat(last, copies) - before
            positions = (np.repeat(positions, copies) - before).tolist()
            sampled = np.repeat(sampled, copies).tolist()
        tokens, prompt_rows = [last], self._prompt_rows(step, packed.num_single, row_ends)
        for index, _, count in prompt_rows:
            first = ends[index] - packed.counts[index]
            tokens.append(np.arange(first, first + count))
        return WantedLogits(np.concatenate(tokens), sampled, positions, prompt_rows)

    def _prompt_rows(self, step: Step, num_single: int, row_ends: list[int]) -> list[tuple[int, int, int]]:
        """See :class:`WantedLogits`. A row of one token that samples is behind its prompt."""
        found = []
        single = [index for index in step.partial if index < num_single]
        for index in (*single, *range(num_single, len(row_ends))):
            admit, start = self._slots[step.slots[index]].admit, step.starts[index]
            if admit.params.prompt_logprobs is not None:
                count = min(row_ends[index], admit.num_prompt - 1) - start
                if count > 0:
                    found.append((index, start + 1, count))
        return found

    def _forward(
        self, packed: PackedRows, input_ids: Int64s, wanted: Int64s, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits [wanted, vocabulary of this rank]; before the last stage, hidden [1, tokens, hidden]."""
        if self._program is not None:
            return self._program.forward(packed, input_ids, wanted, hidden)
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
        """Hidden states of the previous stage for this step; None on the first one."""
        if self._shard.is_first:
            return None
        assert self._shard.stages is not None
        like = torch.empty(
            1, num_tokens, self._model.hidden_size, dtype=self._model.dtype, device=self._model.device
        )
        like = like if carries(self._shard.stages, like) else torch.empty_like(like, device="cpu")
        return self._shard.stages.receive(like, self._shard.stage - 1).to(self._model.device)

    def _send(self, hidden: torch.Tensor) -> None:
        assert self._shard.stages is not None
        hidden = hidden.to(self._model.dtype)
        carried = hidden if carries(self._shard.stages, hidden) else hidden.cpu()
        self._shard.stages.send(carried, self._shard.stage + 1)

    def _sample(self, step: Step, wanted: WantedLogits, logits: torch.Tensor) -> Pending:
        """Sample, fetch everything from the device at once, then keep the new tokens."""
        masks = _masks_by_row(step)
        num_sampled = len(wanted.sampled)
        sample_rows = [
            self._sample_row(step.slots[index], end, masks.get(index))
            for index, end in zip(wanted.sampled, wanted.ends, strict=True)
        ]
        if sample_rows:
            chosen = self._sampler.sample(logits[:num_sampled], sample_rows)
        else:
            chosen = logits.new_empty(0).long()
        with_logprobs = [i for i, row in enumerate(sample_rows) if row.params.logprobs is not None]
        if not with_logprobs and not wanted.prompt_rows:
            tokens_here = begin_fetch(chosen)
            return lambda: self._result(step, wanted, tokens_here().tolist(), {}, {})
        table = self._logprob_table(step, wanted, logits, chosen, with_logprobs)
        all_here = begin_fetch(torch.cat([chosen.double(), table.flatten()]))
        return lambda: self._result_with_logprobs(
            step, wanted, all_here(), tuple(table.shape), with_logprobs, sample_rows
        )

    def _result_with_logprobs(
        self,
        step: Step,
        wanted: WantedLogits,
        fetched: npt.NDArray[np.float64],
        shape: tuple[int, ...],
        with_logprobs: list[int],
        sample_rows: list[SampleRow],
    ) -> StepResult:
        """Result from tokens and a table of that ``shape``, see :meth:`_logprob_table`."""
        num_sampled = len(wanted.sampled)
        tokens = [int(token) for token in fetched[:num_sampled]]
        lines = fetched[num_sampled:].reshape(shape)
        logprobs = {}
        for line, index in zip(lines, with_logprobs, strict=False):
            logprobs[index] = read_logprobs(line, sample_rows[index].params.logprobs or 0)
        prompt_logprobs, begin = {}, len(with_logprobs)
        for index, _, count in wanted.prompt_rows:
            num_top = self._slots[step.slots[index]].admit.params.prompt_logprobs or 0
            prompt_logprobs[index] = [read_logprobs(line, num_top) for line in lines[begin : begin + count]]
            begin += count
        return self._result(step, wanted, tokens, logprobs, prompt_logprobs)

    def _sample_row(self, slot: int, end: int, mask: npt.NDArray[np.uint8] | None) -> SampleRow:
        """A row for the token at position ``end``."""
        held = self._slots[slot]
        admit = held.admit
        return SampleRow(
            admit.params, admit.seed, end, held.token_ids[:end], admit.num_prompt, held.rules, mask
        )

    def _logprob_table(
        self,
        step: Step,
        wanted: WantedLogits,
        logits: torch.Tensor,
        chosen: torch.Tensor,
        with_logprobs: list[int],
    ) -> torch.Tensor:
        """Lines for the sampled rows that want log-probabilities, then for the prompt tokens."""
        num_sampled, device = len(wanted.sampled), logits.device
        num_top, targets = 0, []
        for index in with_logprobs:
            slot = self._slots[step.slots[wanted.sampled[index]]]
            num_top = max(num_top, slot.admit.params.logprobs or 0)
        for index, first, count in wanted.prompt_rows:
            slot = self._slots[step.slots[index]]
            num_top = max(num_top, slot.admit.params.prompt_logprobs or 0)
            targets.append(slot.token_ids[first : first + count])
        chosen_rows = upload(np.array(with_logprobs, dtype=np.int64), device)
        parts = []
        if with_logprobs:
            lines, own = logits.index_select(0, chosen_rows), chosen.index_select(0, chosen_rows)
            parts.append(self._sampler.logprob_table(lines, own, num_top))
        if targets:
            expected = upload(np.concatenate(targets), device)
            parts.append(self._sampler.logprob_table(logits[num_sampled:], expected, num_top))
        return torch.cat(parts)

    def _result(
        self,
        step: Step,
        wanted: WantedLogits,
        tokens: list[int],
        logprobs: dict[int, TokenLogprobs],
        prompt_logprobs: dict[int, list[TokenLogprobs]],
    ) -> StepResult:
        """The result of a step, whose tokens go to their slots.

        ``logprobs`` are by index into ``tokens``, which are those that were sampled.
        """
        by_row: list[int | None] = [None] * len(step.slots)
        if step.drafts:
            row_logprobs, further = self._take_drafts(step, wanted, tokens, logprobs, by_row)
            return StepResult(by_row, row_logprobs, prompt_logprobs, further)
        for index, end, token in zip(wanted.sampled, wanted.ends, tokens, strict=True):
            by_row[index] = token
            self._slots[step.slots[index]].put_one(end, token)
        row_logprobs = {wanted.sampled[index]: each for index, each in logprobs.items()}
        return StepResult(by_row, row_logprobs, prompt_logprobs)

    def _take_drafts(
        self,
        step: Step,
        wanted: WantedLogits,
        tokens: list[int],
        logprobs: dict[int, TokenLogprobs],
        by_row: list[int | None],
    ) -> tuple[dict[int, TokenLogprobs], dict[int, ExtraTokens]]:
        """Put each row's first token into ``by_row``, and the accepted ones into its slot.

        Returned are log-probabilities of the first tokens by row, and the tokens behind them.
        """
        row_logprobs: dict[int, TokenLogprobs] = {}
        further: dict[int, ExtraTokens] = {}
        begin = 0
        while begin < len(tokens):
            index = wanted.sampled[begin]
            draft = step.drafts.get(index, [])
            end = begin + 1 + num_taken(draft, tokens[begin : begin + 1 + len(draft)])
            by_row[index] = tokens[begin]
            self._slots[step.slots[index]].put(wanted.ends[begin], *tokens[begin:end])
            if begin in logprobs:
                row_logprobs[index] = logprobs[begin]
            if end > begin + 1:
                behind = range(begin + 1, end)
                further[index] = ExtraTokens(
                    tokens[begin + 1 : end], [logprobs[each] for each in behind if each in logprobs]
                )
            begin += len(draft) + 1
        return row_logprobs, further


def _state_rows(step: Step) -> StateRows:
    return StateRows(step.slots, step.starts, step.counts, step.pieces)


def _done(result: StepResult) -> Pending:
    return lambda: result


def sampler_of(model: LoadedModel, *, row_by_row: bool = False) -> Sampler:
    """The sampler of a model, over the tokens of this tensor-parallel rank."""
    shard = model.stage.shard
    if shard.size == 1:
        return Sampler(model.device, row_by_row=row_by_row)
    ranks = TensorRank(shard.rank, shard.size, shard.ranks)
    return Sampler(model.device, VocabularyShard(ranks, model.vocab_size), row_by_row=row_by_row)


def _masks_by_row(step: Step) -> dict[int, npt.NDArray[np.uint8]]:
    """Grammar masks of a step, by row."""
    if step.masks is None:
        return {}
    bits = np.frombuffer(step.masks.bits, dtype=np.uint8).reshape(len(step.masks.rows), -1)
    return dict(zip(step.masks.rows, bits, strict=True))
