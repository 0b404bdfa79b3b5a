"""Runner of steps on one device: packs rows of running requests, computes, samples.

Knows nothing of scheduling: the rows of a step and their blocks were decided before. State is set by
position, never appended blindly, so that a step which was cut short can run again.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import PLAN_KEYWORD, Int64s, PackedRows, PagedAttention
from engine.attention.transfer import begin_fetch, upload
from engine.compute.followed_tokens import ChosenTokens, FollowedTokens
from engine.compute.request_slots import BlockTables, RequestSlot, WantedLogits
from engine.compute.sampler import Sampler, VocabularyShard
from engine.compute.step_images import agreed, rows_with_images, with_failed
from engine.compute.step_results import result_of, result_with_logprobs, with_experts
from engine.compute.trace import MOST_SPANS
from engine.kernels.choosing.logits import NO_DRAWS, Draws, draws
from engine.kernels.core.base_model import TABLE
from engine.model.weights import LoadedModel
from engine.states.held import RequestStates, StateRows
from engine.step import Admit, Span, Step, StepResult
from engine.vision.axes import NUM_AXES, RequestAxes
from engine.vision.encoded_images import EncodedImages, RowImages
from parallel.communicators.base import carries
from parallel.tensor_parallel import TensorRank

if TYPE_CHECKING:
    from engine.adapters.held import HeldAdapters
    from engine.compute.step_graphs import StepGraphs
    from engine.config.speculation import SpeculativeConfig
    from engine.kernels.decode_continuation import DecodeContinuation
    from engine.kernels.program import Program
    from engine.model.checkpoint import ModelInfo
    from engine.speculation.draft_model import DraftModel

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
        graphs: StepGraphs | None = None,
        *,
        row_by_row: bool = False,
        adapters: HeldAdapters | None = None,
    ) -> None:
        """A runner over a cache, over captured graphs of it, or over a native program.

        ``program`` computes steps natively, over a cache of its own, in place of the model's modules.
        ``graphs`` computes the steps that were captured, over ``cache``.
        ``row_by_row``: see :class:`.Sampler`. ``adapters``: of which rows may have one; None: they have none.
        """
        self._adapters = adapters
        self._images: EncodedImages | None = None
        self._image_merge = 0
        self._images_are_whole = self._windows_see = False
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
        self._chosen: ChosenTokens | None = None
        """Tokens of the newest step, until they are in their slots."""
        self._drafts: DraftModel | None = None
        self._shard = model.stage.shard
        self._sampler = sampler_of(model, row_by_row=row_by_row)

    def __repr__(self) -> str:
        name = type(self._model.module).__name__
        return f"ModelRunner({name}, slots={len(self._slots)}, {self._program or self._cache!r})"

    def run(self, step: Step) -> StepResult:
        """Compute one step. Running it again gives the same result and leaves the same state."""
        return self.begin(step)()

    def begin(self, step: Step) -> Pending:
        """Begin one step; the function returned waits for it, before the next but one begins.

        On a device all is launched when this returns. On a CPU most of it is computed by then.
        """
        if self._program is not None:
            self._program.ends.are_read = bool(step.proposes)
        result = self._go_on(step)
        if result is not None:
            return _done(self._with_proposals(step, result))
        for admit in step.admits:
            self._admit(admit)
        if not step.slots:
            return _done(StepResult([]))
        held = [self._slots[slot] for slot in step.slots]
        for each, start, token in zip(held, step.starts, step.tokens, strict=False):
            each.put(start, token)
        for index, draft in step.drafts.items():
            held[index].put(step.starts[index] + 1, *draft)
        followed = self._chosen.followed_by(step) if step.ahead and self._chosen is not None else None
        with torch.inference_mode():
            ends = step.ends
            packed, input_ids = self._pack(step, held, ends)
            hidden = self._receive(1, len(input_ids), self._model.hidden_size)
            began = time.monotonic()
            wanted = self._wanted(step, packed, ends)
            images = rows_with_images(step, held, packed)
            given, failed = self._place_images(images, input_ids) if images else (None, [])
            program = self._program
            is_plain = program is not None and step.masks is None and all(each.is_plain for each in held)
            draws = _draws(held, wanted) if is_plain else None
            if program is not None and draws is not None and program.can_choose(len(input_ids), draws):
                with self._states_of(step):
                    tokens = program.choose(packed, input_ids, wanted.tokens, draws, given=given)
                pending = _done(result_of(step, held, wanted, tokens, {}, {}))
                self._continuation = program.continuation
                if self._continuation is not None:
                    self._continuation.begin(step)
            else:
                with self._states_of(step):
                    keeps = any(each.admit.keeps_experts for each in held)
                    output = self._forward(
                        packed, input_ids, wanted.tokens, hidden, followed, keeps=keeps, given=given
                    )
                pending = _done(StepResult([]))
                if self._shard.is_last:
                    pending = self._sample(step, held, wanted, output)
            if not self._shard.is_last:
                self.spans.append((began, time.monotonic()))
                self._send(output)
                if images:
                    self._send(torch.tensor(failed))
                return pending

        def finish() -> StepResult:
            result = with_failed(pending(), images, failed)
            self.spans.append((began, time.monotonic()))
            return self._with_proposals(step, result)

        return finish

    def see_images(self, encoder: EncodedImages | None, info: ModelInfo) -> None:
        """Take in what this model does with images; ``encoder``: where the stream begins."""
        self._images = encoder
        self._image_merge, self._images_are_whole = info.image_merge, info.images_are_whole
        self._windows_see = info.windows_see_images

    def _admit(self, admit: Admit) -> None:
        """Put a request into its slot."""
        if self._states is not None:
            self._states.admit(admit.slot, self._num_equal(admit))
        self._slots[admit.slot] = slot = RequestSlot.of(admit)
        if self._image_merge and admit.images:
            slot.axes = RequestAxes(admit.images, self._image_merge)
        if self._adapters is not None and admit.adapter:
            self._adapters.use(admit.adapter, admit.adapter_digest)
        self._tables.clear(admit.slot)

    def use_drafts(
        self, config: SpeculativeConfig | None, drafts: DraftModel | None, num_blocks: int
    ) -> None:
        """Let a model propose what may follow the newest tokens; None: none here.

        It gets so many blocks, under the numbers of the cache's.
        """
        assert self._program is not None
        self._program.ends.keeps = config is not None and config.method == "mtp"  # on all workers alike
        self._drafts = drafts
        if drafts is not None:
            drafts.allocate(num_blocks, self._program, self._model)

    def _with_proposals(self, step: Step, result: StepResult) -> StepResult:
        """The result with what a model proposes behind the step's newest tokens, if one does."""
        if self._drafts is None or not (step.proposes or step.admits):
            return result
        if step.proposes and self._continuation is not None:
            self._settle(self._continuation)
        texts = {slot: self._slots[slot].token_ids for slot in step.slots}
        return self._drafts.propose(step, texts, self._tables.blocks, result)

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

    def _pack(self, step: Step, held: Sequence[RequestSlot], ends: list[int]) -> tuple[PackedRows, Int64s]:
        """The rows of a step and their token ids; ``ends`` are those of the step."""
        slots = np.array(step.slots, dtype=np.int64)
        starts = np.array(step.starts, dtype=np.int64)
        counts = np.array(step.counts, dtype=np.int64)
        adapters = self._adapters_of(step)
        self._tables.extend(step)
        tables = self._tables.blocks[slots, : (max(ends) - 1) // self._block_size + 1]
        if step.counts.count(1) == len(slots):
            token_ids = [each.token_ids.item(start) for each, start in zip(held, step.starts, strict=True)]
            axes = _axes_of(held, step.starts, starts, range(len(held) + 1))
            packed = PackedRows(starts, counts, tables, starts.copy(), len(slots), adapters, axes)
            return packed, np.array(token_ids)
        input_ids = np.concatenate(
            [each.token_ids[start:end] for each, start, end in zip(held, step.starts, ends, strict=True)]
        )
        offsets = np.cumsum(counts) - counts
        positions = np.arange(len(input_ids)) + np.repeat(starts - offsets, counts)
        num_single = int((counts != 1).argmax())
        begins = [*offsets.tolist(), len(positions)]
        axes = _axes_of(held, step.starts, positions, begins)
        sees = _seen_by(held, step.starts, positions, begins) if self._images_are_whole else None
        rows = PackedRows(
            starts, counts, tables, positions, num_single, adapters, axes, sees, self._windows_see
        )
        return rows, input_ids

    def _place_images(
        self, rows: Sequence[RowImages], input_ids: Int64s
    ) -> tuple[torch.Tensor | None, list[bool]]:
        """What the stream begins with at the images' tokens of a step, see :class:`.EncodedImages`.

        Also which rows failed; later stages learn that from the one before.
        """
        if not self._shard.is_first:
            told = self._receive(len(rows))
            assert told is not None
            return None, [bool(each) for each in told.tolist()]
        assert self._images is not None, "such requests are refused"
        given, failed = self._images.place(rows, input_ids)
        return given, agreed(failed, self._shard.ranks)

    def _adapters_of(self, step: Step) -> Int64s | None:
        """Number of each row's adapter; None if no row has one."""
        if self._adapters is None:
            return None
        numbers = np.array([self._slots[slot].admit.adapter for slot in step.slots])
        return numbers if numbers.any() else None

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
        for index, predicted, count in prompt_rows:
            first = ends[index] - packed.counts[index] + predicted - 1 - step.starts[index]
            tokens.append(np.arange(first, first + count))
        return WantedLogits(np.concatenate(tokens), sampled, positions, prompt_rows)

    def _prompt_rows(self, step: Step, num_single: int, row_ends: list[int]) -> list[tuple[int, int, int]]:
        """See :class:`WantedLogits`. A row of one token that samples is behind its prompt."""
        found = []
        single = [index for index in step.partial if index < num_single]
        for index in (*single, *range(num_single, len(row_ends))):
            admit, start = self._slots[step.slots[index]].admit, step.starts[index]
            if admit.params.prompt_logprobs is not None:
                first = max(start + 1, admit.scored_from)
                count = min(row_ends[index], admit.num_prompt - 1) - first + 1
                if count > 0:
                    found.append((index, first, count))
        return found

    def _forward(
        self,
        packed: PackedRows,
        input_ids: Int64s,
        wanted: Int64s,
        hidden: torch.Tensor | None,
        followed: FollowedTokens | None = None,
        *,
        keeps: bool = False,
        given: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [wanted, vocabulary of this rank]; before the last stage, hidden [1, tokens, hidden].

        ``keeps``: the program keeps the experts of all tokens. ``given``: see :meth:`.Program.forward`.
        """
        if self._program is not None:
            return self._program.forward(packed, input_ids, wanted, hidden, keeps_choices=keeps, given=given)
        assert self._cache is not None
        device = self._model.device
        is_plain = given is None and packed.axes is None and packed.sees is None
        if self._graphs is not None and is_plain:
            logits = self._graphs.forward(packed, input_ids, wanted, followed)
            if logits is not None:
                return logits
        ids = upload(input_ids, device)
        if followed is not None:
            followed.fill(ids)
        adapting = contextlib.nullcontext() if self._adapters is None else self._adapters.step(packed, wanted)
        with adapting:
            words = {"input_ids": ids.unsqueeze(0)} if given is None else self._embedded(ids, given)
            return self._model.stage.forward(
                self._model.module,
                hidden,
                **words,
                position_ids=self._position_ids(packed),
                use_cache=False,
                logits_to_keep=upload(wanted, device),
                **{PLAN_KEYWORD: self._cache.plan(packed)},
            )

    def _embedded(self, ids: torch.Tensor, given: torch.Tensor) -> dict[str, Any]:
        """Embeddings of tokens [n], and rows of ``given`` [planes, rows, hidden] for ids below 0."""
        embedded = self._model.module.get_input_embeddings()(ids.clamp(min=0))
        are_given = ids < 0
        rows = given[0].index_select(0, (-1 - ids).clamp(min=0))
        words = {"inputs_embeds": torch.where(are_given.unsqueeze(1), rows, embedded).unsqueeze(0)}
        if hasattr(inputs := self._model.module.base_model, TABLE):  # layers have inputs of tokens beside it
            ids = torch.where(are_given, inputs.padding_idx or 0, ids)
            words["per_layer_inputs"] = inputs.get_per_layer_inputs(ids.unsqueeze(0))
        if len(given) == 1:
            return words
        numbers = -1 - ids[are_given]  # transformers adds the other planes behind its first layers
        added = [plane.index_select(0, numbers) for plane in given[1:]]
        return words | {"visual_pos_masks": are_given.unsqueeze(0), "deepstack_visual_embeds": added}

    def _position_ids(self, packed: PackedRows) -> torch.Tensor:
        """Positions [1, tokens], or [3, 1, tokens] on axes."""
        if packed.axes is None:
            return upload(packed.positions, self._model.device).unsqueeze(0)
        return upload(packed.axes, self._model.device).unsqueeze(1)

    def _receive(self, *shape: int) -> torch.Tensor | None:
        """The next tensor of the previous stage, hidden states first; None on the first one."""
        if self._shard.is_first:
            return None
        assert self._shard.stages is not None
        like = torch.empty(shape, dtype=self._model.dtype, device=self._model.device)
        like = like if carries(self._shard.stages, like) else torch.empty_like(like, device="cpu")
        return self._shard.stages.receive(like, self._shard.stage - 1).to(self._model.device)

    def _send(self, hidden: torch.Tensor) -> None:
        assert self._shard.stages is not None
        hidden = hidden.to(self._model.dtype)
        carried = hidden if carries(self._shard.stages, hidden) else hidden.cpu()
        self._shard.stages.send(carried, self._shard.stage + 1)

    def _sample(
        self, step: Step, held: Sequence[RequestSlot], wanted: WantedLogits, logits: torch.Tensor
    ) -> Pending:
        """Sample, and begin to fetch everything from the device at once.

        The function returned waits, and keeps the new tokens in their slots: those that the step began with,
        since another request may have got one meanwhile.
        """
        masks = _masks_by_row(step)
        num_sampled = len(wanted.sampled)
        sample_rows = [
            held[index].sample_row(end, next(masks[index], None) if index in masks else None)
            for index, end in zip(wanted.sampled, wanted.ends, strict=True)
        ]
        if sample_rows:
            chosen = self._sampler.sample(logits[:num_sampled], sample_rows)
        else:
            chosen = logits.new_empty(0).long()
        self._chosen = newest = ChosenTokens(chosen, [step.slots[index] for index in wanted.sampled])
        with_logprobs = [i for i, row in enumerate(sample_rows) if row.params.logprobs is not None]
        if not with_logprobs and not wanted.prompt_rows:
            shape: tuple[int, ...] | None = None
            all_here = begin_fetch(chosen)
        else:
            table = self._logprob_table(held, wanted, logits, chosen, with_logprobs)
            shape = tuple(table.shape)
            all_here = begin_fetch(torch.cat([chosen.double(), table.flatten()]))

        kept = None if self._program is None else self._program.kept_choices

        def finish() -> StepResult:
            fetched = all_here()
            if self._chosen is newest:
                self._chosen = None
            if shape is None:
                result = result_of(step, held, wanted, fetched.tolist(), {}, {})
            else:
                result = result_with_logprobs(step, held, wanted, fetched, shape, with_logprobs)
            return result if kept is None else with_experts(result, step, held, kept)

        return finish

    def _logprob_table(
        self,
        held: Sequence[RequestSlot],
        wanted: WantedLogits,
        logits: torch.Tensor,
        chosen: torch.Tensor,
        with_logprobs: list[int],
    ) -> torch.Tensor:
        """Lines for the sampled rows that want log-probabilities, then for the prompt tokens."""
        num_sampled, device = len(wanted.sampled), logits.device
        num_top, targets = 0, []
        for index in with_logprobs:
            num_top = max(num_top, held[wanted.sampled[index]].admit.params.logprobs or 0)
        for index, first, count in wanted.prompt_rows:
            num_top = max(num_top, held[index].admit.params.prompt_logprobs or 0)
            targets.append(held[index].token_ids[first : first + count])
        chosen_rows = upload(np.array(with_logprobs, dtype=np.int64), device)
        parts = []
        if with_logprobs:
            lines, own = logits[:num_sampled], chosen
            if len(with_logprobs) < num_sampled:
                lines, own = logits.index_select(0, chosen_rows), chosen.index_select(0, chosen_rows)
            parts.append(self._sampler.logprob_table(lines, own, num_top))
        if targets:
            expected = upload(np.concatenate(targets), device)
            parts.append(self._sampler.logprob_table(logits[num_sampled:], expected, num_top))
        return torch.cat(parts)


def _axes_of(
    held: Sequence[RequestSlot], starts: Sequence[int], positions: Int64s, offsets: Sequence[int]
) -> Int64s | None:
    """See :attr:`.PackedRows.axes`; ``offsets``: index of each row's first token, and the number of all."""
    if all(each.axes is None for each in held):
        return None
    axes = np.repeat(positions[None], NUM_AXES, axis=0)
    for index, (each, start) in enumerate(zip(held, starts, strict=True)):
        if each.axes is not None:
            each.axes.write(start, axes[:, offsets[index] : offsets[index + 1]])
    return axes


def _seen_by(
    held: Sequence[RequestSlot], starts: Sequence[int], positions: Int64s, offsets: Sequence[int]
) -> Int64s | None:
    """See :attr:`.PackedRows.sees`, of models whose images see all of themselves."""
    sees = None
    for index, (each, start) in enumerate(zip(held, starts, strict=True)):
        begin, end = offsets[index], offsets[index + 1]
        for image in each.admit.images:
            if start < image.end and image.first < start + end - begin:
                sees = positions.copy() if sees is None else sees
                first = begin + max(0, image.first - start)
                sees[first : begin + image.end - start] = image.end - 1
    return sees


def _draws(held: Sequence[RequestSlot], wanted: WantedLogits) -> Draws:
    """Sampling parameters of each row of a plain step.

    Empty (:data:`NO_DRAWS`) if each is the most likely one.
    """
    if all(each.admit.params.greedy for each in held):
        return NO_DRAWS
    return draws([held[row].draw for row in wanted.sampled])


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


def _masks_by_row(step: Step) -> dict[int, Iterator[npt.NDArray[np.uint8]]]:
    """Grammar masks of a step, by row: one for each token that a row samples."""
    if step.masks is None:
        return {}
    rows = step.masks.rows
    bits = np.frombuffer(step.masks.bits, dtype=np.uint8).reshape(len(rows), -1)
    return {row: iter(bits[rows.index(row) : rows.index(row) + rows.count(row)]) for row in set(rows)}
