"""Runs the steps of a decoder as a list of operations in ``step.cpp``.

The list is written once and run every step. The layers' weights are laid out anew; the model that they came
from is not run any more. Where the list is cut at the expert layers (:mod:`engine.kernels.lowering.writer`),
:class:`~parallel.expert_parallel.ExpertParallel` does the exchange between two pieces; where it is cut for a
sum over tensor-parallel ranks, their communicator adds up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from engine.attention.base import AttentionUse, Int64s, LayerShape, PackedRows
from engine.kernels.adapters.sites import AdapterRoom, Sites, sorted_rows
from engine.kernels.cache.native_cache import NativeCache, NativePlan
from engine.kernels.cache.native_states import NativeStates
from engine.kernels.choosing.logits import NO_DRAWS, Draws, can_contest
from engine.kernels.core import operations
from engine.kernels.core.library import KernelLibrary
from engine.kernels.core.operations import OperationKind, StepArguments
from engine.kernels.decode_continuation import DecodeContinuation
from engine.kernels.decoder import DecoderModel
from engine.kernels.embedding.per_layer import INPUTS
from engine.kernels.exchange.rank_sums import RankSums
from engine.kernels.exchange.sums import Sums
from engine.kernels.experts.kept_choices import KeptChoices
from engine.kernels.experts.packed_mixture import ExchangedLayer
from engine.kernels.experts.step_exchange import StepExchange
from engine.kernels.laid_out import LaidOut
from engine.kernels.lowering.buffers import BufferRoom, Buffers
from engine.kernels.lowering.writer import PartialSums, StepList, Writer, WriterFacts
from engine.kernels.registry import LAYOUTS
from engine.kernels.step_ends import StepEnds
from engine.states.held import StateRows
from engine.states.pool import Zeros, own_zeros
from parallel.communicators.base import Communicator
from parallel.expert_parallel import ExpertParallel
from parallel.kernel_kinds import Kind
from parallel.parts import is_order_fixed
from parallel.placement import Placement
from parallel.tensor_parallel import TensorRank


class Program:
    """Runs the steps of one model, or of one shard of it, on the CPU.

    One step at a time.
    """

    def __init__(
        self,
        library: KernelLibrary,
        decoder: DecoderModel,
        experts: ExpertParallel | None = None,
        ranks: TensorRank | None = None,
        adapters: AdapterRoom | None = None,
    ) -> None:
        """``experts``: the common part of expert layers that are spread over instances.

        ``ranks``: those that the decoder's partial sums are of, all of which run the same steps.
        ``adapters``: room for low-rank adapters; None: rows have none.
        """
        operations.check(library, LAYOUTS)
        self._library = library
        self._decoder = decoder
        self._size = 1 if ranks is None else ranks.size
        self.exchange = StepExchange(
            library, decoder.exchanged, len(decoder.sparse), experts, may_join=ranks is None
        )
        self.sites = None if adapters is None else Sites(adapters, decoder.dtype)
        """Products beside which adapters add something; None without room for any."""
        spread = None if experts is None else self.exchange.products
        self.laid_out = LaidOut(library, decoder, self._size, spread, self.sites)
        self.weight_bytes, self.saved_bytes = self.laid_out.weight_bytes, self.laid_out.saved_bytes
        self.quantized_bytes, self.half_bytes = self.laid_out.quantized_bytes, self.laid_out.half_bytes
        needs = self.laid_out.sizes[0]
        self._needs = needs if self.sites is None else needs.with_adapters(self.sites)
        self.sums = RankSums(library, ranks if decoder.num_sums else None, decoder.sums_width)
        self._cache: NativeCache | None = None
        self.states = NativeStates(decoder.states, decoder.dtype) if decoder.states else None
        """Recurrent states of requests; None: no layer has one."""
        self._room = BufferRoom()
        self._buffers: Buffers | None = None
        self.continuation: DecodeContinuation | None = None
        """Rows of the last step, if :meth:`continue_rows` may compute the next one."""
        self._lists: dict[tuple[int, ...], StepList] = {}
        """Lists by whether they have exchanges, sums over ranks, adapters, all and inner rows."""
        self.kept_choices: KeptChoices | None = None
        """Experts of the tokens of the last step, if it kept them."""
        self.ends = StepEnds()
        """Rows that go through steps, where the stream is read or given between them."""
        self.seconds = np.zeros(len(OperationKind))
        """Time spent so far, by kind of operation."""
        self.attention = AttentionUse()
        """Calls and seconds of attention so far."""

    @property
    def kind(self) -> Kind:
        """Kind of the kernels that compute the steps."""
        return self._library.kind(bfloat16=self._decoder.dtype == torch.bfloat16)

    @property
    def version(self) -> str:
        """See :attr:`engine.kernels.core.library.KernelLibrary.version`."""
        return self._library.version

    @property
    def is_order_fixed(self) -> bool:
        """Whether all sums are made in the order of one worker's."""
        return all(is_order_fixed(inputs, self._size) for inputs in self._decoder.inputs_of_sums(self._size))

    @property
    def cached(self) -> tuple[LayerShape, ...]:
        """Shapes of what the layers cache of a token."""
        return self._decoder.cached

    def __repr__(self) -> str:
        return f"<Program {len(self.laid_out.packed.layers)} layers, {self._decoder.dtype}, {self._room}>"

    def can_choose(self, tokens: int, draws: Draws = NO_DRAWS) -> bool:
        """Whether steps of so many tokens can :meth:`choose` with these draws.

        All layers must be here, and the whole vocabulary. Instead of the latter, ranks that have it together
        may add up inside the list, if each can choose among its own tokens.
        """
        output = self._decoder.output
        if self._decoder.embedding is None or output is None:
            return False
        return not output.is_partial or (self.sums.are_common(tokens) and can_contest(draws))

    @property
    def cache(self) -> NativeCache:
        """The cache in use."""
        assert self._cache is not None
        return self._cache

    def replace_weights(self, laid_out: LaidOut) -> None:
        """Compute with other weights of the same model from the next step on.

        The cache, states and buffers stay.
        """
        self.laid_out, self._decoder = laid_out, laid_out.decoder
        self.continuation = None
        self._lists.clear()

    def use(self, cache: NativeCache) -> None:
        """Keep keys and values in this cache from now on."""
        self._cache, self._room = cache, self._room._replace(own=0)

    def allocate_states(self, num_slots: int, first: int, zeros: Zeros = own_zeros) -> None:
        """Keep recurrent states in slots numbered from ``first`` on, and forget those of requests."""
        if self.states is not None:
            self.states.allocate(num_slots, first, zeros)
            self._lists.clear()

    def alone(self, rows: Sequence[tuple[int, int, int]]) -> AbstractContextManager[None]:
        """Context of a step outside of a scheduler; ``rows``: (request, start, tokens) of each."""
        return nullcontext() if self.states is None else self.states.alone(rows)

    def spread(self) -> None:
        """Use these kernels for experts that are exchanged outside the list of operations.

        Other instances hold experts, too.
        """
        self.exchange.use_products()

    def prepare_experts(
        self, module: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter], rows: Sequence[int]
    ) -> None:
        """Lay out the tensors that an experts module will get, while steps run.

        ``rows``: where the module has each of these experts now, or -1.
        """
        self.exchange.products.prepare(module, parameters, rows)

    def join(self, group: Communicator, placement: Placement) -> None:
        """Spread the experts over this group from the next step on.

        The modules hold this member's.
        """
        self._lists.clear()
        if self.exchange.join(group, placement):
            self._room = self._room._replace(own=0)

    def serve(self) -> bool:
        """Take part in a step of the group without rows; False without a native exchange.

        Raises:
            parallel.communicators.base.CollectiveError: a peer is lost.
        """
        if not self.exchange.is_native:
            return False
        self._make_room(BufferRoom(0, 0, self.exchange.total(0)))
        self._run(StepArguments(seconds=self.seconds), 0)
        return True

    def forward(
        self,
        packed: PackedRows,
        input_ids: Int64s,
        wanted: Int64s,
        hidden: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
        *,
        keeps_choices: bool = False,
        given: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [wanted, vocabulary of this rank] in float32, valid until the next call.

        Before the last stage it is hidden [1, tokens, hidden], as ``hidden`` is of the stage before.
        ``inputs`` [tokens, numbers of all layers]: what layers have beside it, where there is no embedding.
        ``keeps_choices``: whether :attr:`kept_choices` is to have the experts of all tokens.
        ``given`` [planes, rows, hidden]: what the stream begins with where an id is -1 - (index of a row);
        the planes behind the first are added behind the first layers.
        """
        tokens, layers = len(input_ids), self.laid_out.packed.layers
        kept = KeptChoices([each.mlp for each in layers], tokens) if keeps_choices else None
        with kept or nullcontext():
            self._compute(
                packed, input_ids, wanted, hidden, inputs=inputs, computes_all=keeps_choices, given=given
            )
        self.kept_choices = kept
        assert self._buffers is not None
        if self._decoder.output is None:
            return self._buffers.stream[None, : len(input_ids), : self._decoder.hidden]
        return self._buffers.logits[: len(wanted)]

    def choose(
        self,
        packed: PackedRows,
        input_ids: Int64s,
        wanted: Int64s,
        draws: Draws = NO_DRAWS,
        hidden: torch.Tensor | None = None,
        given: torch.Tensor | None = None,
    ) -> list[int]:
        """A token for each wanted row, drawn from :meth:`forward`'s logits or greedy.

        Greedy is what ``argmax`` finds. All threads take part. The arrays must not be used any more.
        """
        assert self.can_choose(len(input_ids), draws)
        arguments, plan = self._compute(packed, input_ids, wanted, hidden, draws, given=given)
        assert self._buffers is not None
        assert self._cache is not None
        chosen = self._buffers.chosen[: len(wanted)]
        turned = arguments.array_of("turned")
        goes_on = turned is None or bool((turned >= 0).all())  # an image's token is not followed by its next
        if packed.num_single == len(packed.starts) == len(wanted) and goes_on:
            self.continuation = DecodeContinuation(
                arguments, input_ids, packed, plan, self._cache.block_size, turned
            )
            return self.continuation.chose(chosen)
        found: list[int] = chosen.tolist()
        return found

    def continue_rows(
        self, new_blocks: Mapping[int, Sequence[int]], rows: StateRows | None = None
    ) -> list[int] | None:
        """Compute the next position of each row of the last step, as :meth:`choose` does.

        ``new_blocks``: by row, for those whose position begins a block; ``rows``: what recurrent states need.
        None, and nothing done, if the rows must be packed again: not all of them got a chosen token, or room
        is lacking.
        """
        last, self.continuation = self.continuation, None
        if last is None or not last.fits(self.laid_out.positions.num_positions):
            return None
        last.advance(new_blocks)
        size = last.size
        self._make_room(BufferRoom(size, size, self.exchange.total(size)))
        with nullcontext() if self.states is None or rows is None else self.states.step(rows):
            if self.states is not None:
                last.arguments.put(**self.states.arguments())
            self._run(last.arguments, size)
        assert self._buffers is not None
        self.continuation = last  # not if the step came to no end: it runs again, from where it stood
        tokens = last.chose(self._buffers.chosen[:size])
        last.keep(tokens)
        return tokens

    def _compute(
        self,
        packed: PackedRows,
        input_ids: Int64s,
        wanted: Int64s,
        hidden: torch.Tensor | None = None,
        draws: Draws | None = None,
        inputs: torch.Tensor | None = None,
        *,
        computes_all: bool = False,
        given: torch.Tensor | None = None,
    ) -> tuple[StepArguments, NativePlan]:
        assert self._cache is not None
        self.continuation = None
        wanted = np.ascontiguousarray(wanted)
        plan = self._cache.plan(packed, wanted)
        tokens = len(input_ids)
        self._make_room(BufferRoom(tokens, len(wanted), self.exchange.total(tokens)))
        if self.laid_out.positions.grow(int(packed.positions.max()) + 1):
            self._lists.clear()  # which point to the tables of before
        if hidden is not None:
            assert self._buffers is not None
            self._buffers.stream[:tokens, : self._decoder.hidden] = hidden[0]
        if inputs is not None:
            assert self._buffers is not None
            self._buffers[INPUTS][:tokens, : inputs.shape[1]] = inputs
        arguments = self._arguments(plan, packed, input_ids, wanted, draws)
        planes = 0
        if given is not None:
            planes = len(given)
            arguments.put(given=given, num_given=given.shape[1])
        if packed.axes is not None:
            found = self.laid_out.positions.turned(packed.axes)
            arguments.put(turned=found.rows, own_angles=found.own_angles if found.own else None)
            arguments.keep(found)
        if packed.sees is not None:
            arguments.put(sees=packed.sees, windows_see=int(packed.windows_see))
        self._run(arguments, tokens, computes_all=computes_all, num_added=max(0, planes - 1))
        return arguments, plan

    def _run(
        self, step: StepArguments, tokens: int, *, computes_all: bool = False, num_added: int = 0
    ) -> None:
        """``num_added``: layers behind which something of given rows is added."""
        self.sums.agree()
        native, sums = self.exchange.is_native, self.sums.of_step(tokens, self._room.own)
        adapts = bool(step.array["num_runs"])
        computes_all = computes_all or self.ends.all_rows
        adapts_spread = self.sites is not None and bool(self.sites.tagged)
        has_inner = bool(self.ends.kept_layers)
        how = native, sums is self.sums.common, adapts, adapts_spread, computes_all, has_inner, num_added
        written = self._lists.get(how)
        if written is None:
            written = self._lists[how] = self._write(
                sums,
                exchanges=native,
                adapts=adapts,
                adapts_spread=adapts_spread,
                computes_all=computes_all,
                num_added=num_added,
            )
        if native:
            assert self.exchange.current is not None
            self.exchange.current.begin(self.exchange.sizes)
        if sums is not None:
            sums.begin()
        before = self.seconds.copy() if native and self.exchange.is_spread else None
        begin = 0
        for end, then in written.cuts:
            if not written.operations.run(self._library, step, self._decoder.dtype, begin, end):
                raise self._failure()
            if isinstance(then, ExchangedLayer):
                assert self._buffers is not None
                self.exchange.exchange_outside(then, tokens, self._buffers, self._decoder.hidden)
            elif isinstance(then, PartialSums):
                assert self.sums.own is not None
                rows = int(step.array["selected"]) if then.are_selected else tokens
                self.sums.own.add_others(then.area, rows * then.width)
            begin = end
        if before is not None:
            self.exchange.note(self.seconds - before)
        if tokens:
            self.attention.calls += len(self.laid_out.packed.layers)
            self.attention.seconds = float(
                self.seconds[OperationKind.QKV] + self.seconds[OperationKind.ATTEND]
            )

    def _write(
        self,
        sums: Sums | None,
        *,
        exchanges: bool,
        adapts: bool,
        adapts_spread: bool,
        computes_all: bool,
        num_added: int,
    ) -> StepList:
        """Write the list of a step.

        ``exchanges``: with that of experts, ``adapts``: with adapters, ``adapts_spread``: of spread experts.
        """
        assert self._cache is not None
        assert self._buffers is not None
        decoder, tables = self._decoder, self.laid_out.positions.tables
        tags = None if self.sites is None else self.sites.tags_in_choices
        adapters = adapts, adapts_spread, tags
        facts = WriterFacts(
            decoder.hidden,
            decoder.dtype,
            self._size,
            decoder.num_sums,
            tables,
            *adapters,
            computes_all,
            num_added,
        )
        exchange = self.exchange.current if exchanges else None
        packed, buffers = self.laid_out.packed, self._buffers
        writer = Writer(packed.most_operations, facts, self._cache, buffers, exchange, sums, self.states)
        return packed.write(writer, self.ends, exchanges=exchanges)

    def _failure(self) -> BaseException:
        """Why a step was given up."""
        for each in (self.exchange.joined, self.sums.common):
            error = each.error if each is not None else None
            if error is not None:
                return error
        raise AssertionError("only waits for other members give up")

    def _arguments(
        self,
        plan: NativePlan,
        packed: PackedRows,
        input_ids: Int64s,
        wanted: Int64s,
        draws: Draws | None,
    ) -> StepArguments:
        assert self._cache is not None
        return StepArguments(
            tokens=len(input_ids),
            selected=len(wanted),
            num_tasks=len(plan.tasks),
            table_width=plan.tables.shape[1],
            block_size=self._cache.block_size,
            ids=input_ids,
            slots=plan.slots,
            chosen=wanted,
            positions=packed.positions,
            angles=self.laid_out.positions.angles,
            starts=packed.starts,
            counts=packed.counts,
            offsets=plan.offsets,
            tables=plan.tables,
            tasks=plan.tasks,
            num_chosen_tasks=len(plan.chosen_tasks),
            chosen_tasks=plan.chosen_tasks,
            seconds=self.seconds,
            choose=int(draws is not None),
            draws=draws if draws is not None and len(draws) else None,
            **({} if packed.adapters is None else _adapter_runs(packed, packed.adapters, wanted)),
            **({} if self.states is None else self.states.arguments()),
        )

    def _make_room(self, wanted: BufferRoom) -> None:
        """Make buffers for so many tokens; written lists of others are dropped."""
        if self._room.holds(wanted):
            return
        self._room = self._room.grown(wanted)
        self._lists.clear()
        self._buffers = self.sums.own = None  # gone before the new ones come
        needs = self.ends.needs(self._needs)
        self._buffers = Buffers(needs, self._room, self.exchange.make_current(self._room.own))
        self.ends.use(self._buffers, self._decoder.hidden)


def _adapter_runs(packed: PackedRows, numbers: Int64s, wanted: Int64s) -> dict[str, Any]:
    """Arguments that name the adapter of each token of a step."""
    of_tokens = np.repeat(numbers, packed.counts)
    every, chosen = sorted_rows(of_tokens), sorted_rows(of_tokens[wanted])
    return {
        "num_runs": len(every.runs),
        "num_chosen_runs": len(chosen.runs),
        "runs": every.runs,
        "chosen_runs": chosen.runs,
        "adapters": every.numbers,
        "chosen_adapters": chosen.numbers,
        "order": every.order,
        "chosen_order": chosen.order,
    }
