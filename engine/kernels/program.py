"""Runs the steps of a decoder as a list of operations in ``step.cpp``.

The list is written once and run every step. The layers' weights are laid out anew; the model that they came
from is not run any more. Where the list is cut at the expert layers (:mod:`engine.kernels.lowering.writer`),
:class:`~parallel.expert_parallel.ExpertParallel` does the exchange between two pieces; where it is cut for a
sum over tensor-parallel ranks, their communicator adds up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import AttentionUse, Int64s, LayerShape, PackedRows
from engine.kernels.cache.native_cache import NativeCache, NativePlan
from engine.kernels.choosing.logits import NO_DRAWS, Draws, can_contest
from engine.kernels.core import operations
from engine.kernels.core.library import KernelLibrary, Kind
from engine.kernels.core.operations import OperationKind, StepArguments
from engine.kernels.decode_continuation import DecodeContinuation
from engine.kernels.decoder import Decoder
from engine.kernels.embedding.per_layer import INPUTS
from engine.kernels.exchange.exchange import ExpertExchange, LocalExchange, SharedMemoryExchange
from engine.kernels.exchange.linked import LinkedExchange, LinkedSums, has_links, linked
from engine.kernels.exchange.sums import OwnSums, SharedSums, Sums
from engine.kernels.experts.packed_experts import NativeExperts, combine
from engine.kernels.experts.packed_mixture import ExchangedLayer
from engine.kernels.lowering.buffers import BufferRoom, Buffers
from engine.kernels.lowering.parts import Packing, PositionTable
from engine.kernels.lowering.writer import PartialSums, StepList, Writer, WriterFacts
from engine.kernels.products.packing import Packer
from engine.kernels.registry import LAYOUTS
from engine.kernels.step_list import PackedDecoder
from parallel.communicators.base import Communicator
from parallel.communicators.shared_memory import SharedMemoryCommunicator
from parallel.expert_parallel import ExpertParallel
from parallel.parts import is_order_fixed
from parallel.placement import Placement
from parallel.tensor_parallel import TensorRank

MIN_POSITIONS = 1024

Seconds = npt.NDArray[np.float64]


class Program:
    """Runs the steps of one model, or of one shard of it, on the CPU.

    One step at a time.
    """

    def __init__(
        self,
        library: KernelLibrary,
        decoder: Decoder,
        experts: ExpertParallel | None = None,
        ranks: TensorRank | None = None,
    ) -> None:
        """``experts``: the common part of expert layers that are spread over instances.

        ``ranks``: those that the decoder's partial sums are of, all of which run the same steps.
        """
        operations.check(library, LAYOUTS)
        self._library = library
        self._decoder = decoder
        self._experts = experts
        self._products = NativeExperts(library)
        self._is_rank, self._size = ranks is not None, 1 if ranks is None else ranks.size
        packer = Packer(library)
        spread = None if experts is None else self._products
        self._packed = PackedDecoder(decoder, Packing(packer, decoder.dtype, self._size, spread))
        self._needs = decoder.needs
        self.weight_bytes, self.saved_bytes = packer.num_bytes, packer.saved_bytes
        """Bytes of the weights as they are laid out, and bytes that this saves.

        Without spread experts.
        """
        self.quantized_bytes, self.half_bytes = packer.quantized_bytes, packer.half_bytes
        """Bytes of the weights that are kept as codes, and as float16."""
        self._angles: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Cosines and sines [positions, half] of each rotary embedding."""
        self._angle_table = np.zeros(0, dtype=np.int64)
        """Their addresses and widths, as a step reads them."""
        self._tables: dict[PositionTable, torch.Tensor] = {}
        """Tables by position."""
        self._num_positions = 0
        """Positions that there are angles and tables for."""
        self._cache: NativeCache | None = None
        self._room = BufferRoom()
        self._num_sparse, self._shape = len(decoder.sparse), decoder.exchanged
        self._joined: SharedMemoryExchange | LinkedExchange | None = None
        self._buffers: Buffers | None = None
        self._exchange: ExpertExchange | None = None
        """Exchange for the buffers' room; None without expert layers."""
        self._ranks = ranks if decoder.num_sums else None
        self._common_sums: SharedSums | LinkedSums | None = None
        """Sums inside the list of operations."""
        self._sums_are_agreed = True
        if self._ranks is not None and isinstance(self._ranks.group, SharedMemoryCommunicator):
            self._common_sums = SharedSums(self._ranks.group, decoder.sums_width)
        elif self._ranks is not None and has_links(self._ranks.group):
            self._sums_are_agreed = False
        self._own_sums: OwnSums | None = None
        """Sums through the communicator, for the buffers' room."""
        self.continuation: DecodeContinuation | None = None
        """Rows of the last step, if :meth:`continue_rows` may compute the next one."""
        self._lists: dict[tuple[bool, bool], StepList] = {}
        """Lists by whether the exchange of experts, and sums over ranks, are part of them."""
        self.seconds = np.zeros(len(OperationKind))
        """Time spent so far, by kind of operation."""
        self.attention = AttentionUse()
        """What attention has cost so far."""

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
        """What the layers cache of a token."""
        return self._decoder.cached

    def __repr__(self) -> str:
        return f"<Program {len(self._packed.layers)} layers, {self._decoder.dtype}, {self._room}>"

    def can_choose(self, tokens: int, draws: Draws = NO_DRAWS) -> bool:
        """Whether steps of so many tokens can :meth:`choose` with these draws.

        All layers must be here, and the whole vocabulary. Instead of the latter, ranks that have it together
        may add up inside the list, if each can choose among its own tokens.
        """
        output = self._decoder.output
        if self._decoder.embedding is None or output is None:
            return False
        return not output.is_partial or (self._is_common(tokens) and can_contest(draws))

    @property
    def cache(self) -> NativeCache:
        """The cache in use."""
        assert self._cache is not None
        return self._cache

    def use(self, cache: NativeCache) -> None:
        """Keep keys and values in this cache from now on."""
        self._cache, self._room = cache, self._room._replace(own=0)

    def spread(self) -> None:
        """Use these kernels for experts that are exchanged outside the list of operations.

        Other instances hold experts, too.
        """
        assert self._experts is not None
        self._experts.use_products(self._products)

    def prepare_experts(
        self, module: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter], rows: Sequence[int]
    ) -> None:
        """Lay out the tensors that an experts module will get, while steps run.

        ``rows``: where the module has each of these experts now, or -1.
        """
        self._products.prepare(module, parameters, rows)

    def join(self, group: Communicator, placement: Placement) -> None:
        """Spread the experts over this group from the next step on.

        The modules hold this member's.
        """
        before, self._joined = self._joined, None
        self._lists.clear()
        if self._shape is None or self._is_rank:
            return
        assert self._experts is not None
        facts = placement, self._shape, self._num_sparse
        if isinstance(group, SharedMemoryCommunicator):
            self._joined = SharedMemoryExchange(self._library, group, *facts, self._experts.tokens_per_expert)
        elif links := linked(group):
            self._joined = LinkedExchange(self._library, links, *facts, self._experts)
        if self._joined is None or self._exchange is None:
            # No buffers yet, or those of a group that is left.
            self._room = self._room if before is None else self._room._replace(own=0)
        else:  # to make buffers anew takes page faults in the next step
            self._joined.take_room(self._exchange)
            self._exchange = self._joined

    def serve(self) -> bool:
        """Take part in a step of the group without rows; False without a native exchange.

        Raises:
            parallel.communicators.base.CollectiveError: a peer is lost.
        """
        if not self._exchanges():
            return False
        self._make_room(BufferRoom(0, 0, self._total(0)))
        self._run(StepArguments(seconds=self.seconds), 0)
        return True

    def forward(
        self,
        packed: PackedRows,
        input_ids: Int64s,
        wanted: Int64s,
        hidden: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [wanted, vocabulary of this rank] in float32, valid until the next call.

        Before the last stage it is hidden [1, tokens, hidden], as ``hidden`` is of the stage before.
        ``inputs`` [tokens, numbers of all layers]: what layers have beside it, where there is no embedding.
        """
        self._compute(packed, input_ids, wanted, hidden, inputs=inputs)
        assert self._buffers is not None
        if self._decoder.output is None:
            return self._buffers.stream[None, : len(input_ids), : self._decoder.hidden]
        return self._buffers.logits[: len(wanted)]

    def choose(
        self, packed: PackedRows, input_ids: Int64s, wanted: Int64s, draws: Draws = NO_DRAWS
    ) -> list[int]:
        """A token for each wanted row, drawn from :meth:`forward`'s logits or greedy.

        Greedy is what ``argmax`` finds. All threads take part. The arrays must not be used any more.
        """
        assert self.can_choose(len(input_ids), draws)
        arguments, plan = self._compute(packed, input_ids, wanted, draws=draws)
        assert self._buffers is not None
        assert self._cache is not None
        chosen = self._buffers.chosen[: len(wanted)]
        if packed.num_single == len(packed.starts) == len(wanted):
            self.continuation = DecodeContinuation(arguments, input_ids, packed, plan, self._cache.block_size)
            return self.continuation.chose(chosen)
        found: list[int] = chosen.tolist()
        return found

    def continue_rows(self, new_blocks: Mapping[int, Sequence[int]]) -> list[int] | None:
        """Compute the next position of each row of the last step, as :meth:`choose` does.

        ``new_blocks``: by row, for those whose position begins a block. None, and nothing done, if the rows
        must be packed again: not all of them got a chosen token, or room is lacking.
        """
        last, self.continuation = self.continuation, None
        if last is None or not last.fits(self._num_positions):
            return None
        last.advance(new_blocks)
        size = last.size
        self._make_room(BufferRoom(size, size, self._total(size)))
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
    ) -> tuple[StepArguments, NativePlan]:
        assert self._cache is not None
        self.continuation = None
        wanted = np.ascontiguousarray(wanted)
        plan = self._cache.plan(packed, wanted)
        tokens = len(input_ids)
        self._make_room(BufferRoom(tokens, len(wanted), self._total(tokens)))
        self._make_angles(int(packed.positions.max()) + 1)
        if hidden is not None:
            assert self._buffers is not None
            self._buffers.stream[:tokens, : self._decoder.hidden] = hidden[0]
        if inputs is not None:
            assert self._buffers is not None
            self._buffers[INPUTS][:tokens, : inputs.shape[1]] = inputs
        arguments = self._arguments(plan, packed, input_ids, wanted, draws)
        self._run(arguments, tokens)
        return arguments, plan

    def _exchanges(self) -> bool:
        """Whether the exchange of this step is part of the list."""
        if self._experts is None:
            return self._shape is not None
        return self._joined is not None and self._joined.can(self._experts.sizes)

    def _total(self, tokens: int) -> int:
        """Rows of this step over all members."""
        return tokens if self._experts is None or not self._exchanges() else sum(self._experts.sizes)

    def _run(self, step: StepArguments, tokens: int) -> None:
        self._agree_on_sums()
        native, sums = self._exchanges(), self._sums(tokens)
        how = native, sums is self._common_sums
        written = self._lists.get(how)
        if written is None:
            assert self._cache is not None
            assert self._buffers is not None
            decoder = self._decoder
            facts = WriterFacts(decoder.hidden, decoder.dtype, self._size, decoder.num_sums, self._tables)
            exchange = self._exchange if native else None
            room = self._packed.most_operations
            writer = Writer(room, facts, self._cache, self._buffers, exchange, sums)
            written = self._lists[how] = self._packed.write(writer, exchanges=native)
        if native:
            assert self._exchange is not None
            self._exchange.begin(() if self._experts is None else self._experts.sizes)
        if sums is not None:
            sums.begin()
        before = self.seconds.copy() if native and self._experts is not None else None
        begin = 0
        for end, then in written.cuts:
            if not written.operations.run(self._library, step, self._decoder.dtype, begin, end):
                raise self._failure()
            if isinstance(then, ExchangedLayer):
                self._exchange_through_python(then, tokens)
            elif isinstance(then, PartialSums):
                assert self._own_sums is not None
                rows = int(step.array["selected"]) if then.are_selected else tokens
                self._own_sums.add_others(then.area, rows * then.width)
            begin = end
        if before is not None:
            self._note(self.seconds - before)
        if tokens:
            self.attention.calls += len(self._packed.layers)
            self.attention.seconds = float(
                self.seconds[OperationKind.QKV] + self.seconds[OperationKind.ATTEND]
            )

    def _sums(self, tokens: int) -> Sums | None:
        """How a step's partial sums are added up, the same at all ranks."""
        if self._is_common(tokens):
            return self._common_sums
        if self._ranks is not None and self._own_sums is None:
            self._own_sums = OwnSums(self._ranks, self._room.own, self._decoder.sums_width)
        return self._own_sums

    def _is_common(self, tokens: int) -> bool:
        """Whether ranks add up inside the list.

        They do in memory that they share, or over their links.
        """
        return self._common_sums is not None and tokens <= self._common_sums.rows

    def _agree_on_sums(self) -> None:
        """Find out, at the first step, whether the links of all ranks are native."""
        if self._sums_are_agreed:
            return
        assert self._ranks is not None
        assert self._ranks.group is not None
        links = linked(self._ranks.group)
        sums = None if links is None else LinkedSums(self._library, links, self._decoder.sums_width)
        answers = self._ranks.group.all_gather_ints([-1 if sums is None else sums.given])
        self._sums_are_agreed = True
        if sums is not None and all(given >= 0 for (given,) in answers):
            sums.start_at(max(given for (given,) in answers))
            self._common_sums = sums

    def _failure(self) -> BaseException:
        """Why a step was given up."""
        for each in (self._joined, self._common_sums):
            error = each.error if each is not None else None
            if error is not None:
                return error
        raise AssertionError("only waits for other members give up")

    def _note(self, spent: Seconds) -> None:
        """Note the times of a step's expert layers by part, as other transports do."""
        assert self._experts is not None
        times = self._experts.times
        times.dispatch += float(
            spent[
                [
                    OperationKind.ROUTE,
                    OperationKind.OFFER,
                    OperationKind.LOOK,
                    OperationKind.MEET,
                    OperationKind.SORT,
                    OperationKind.GATHER,
                ]
            ].sum()
        )
        times.experts += float(spent[[OperationKind.EXPERTS_UP, OperationKind.EXPERTS_DOWN]].sum())
        times.combine += float(spent[[OperationKind.RETURN, OperationKind.HOME, OperationKind.COMBINE]].sum())

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
            angles=self._angle_table,
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
        )

    def _make_angles(self, length: int) -> None:
        """Compute the angles of at least ``length`` positions, by the model's own rotary embeddings."""
        if length > self._num_positions:
            self._num_positions = max(MIN_POSITIONS, 1 << (length - 1).bit_length())
            ids = torch.arange(self._num_positions)
            self._angles = [rotary.halves(ids) for rotary in self._decoder.rotaries]
            kinds = {each for layer in self._decoder.layers for each in layer.mixer.tables()}
            if kinds:
                self._lists.clear()  # which point to those of before
            self._tables = {kind: kind.table(ids) for kind in kinds}
            self._angle_table = np.array(
                [
                    (cosines.data_ptr(), sines.data_ptr(), cosines.shape[-1])
                    for cosines, sines in self._angles
                ],
                dtype=np.int64,
            )

    def _exchange_through_python(self, layer: ExchangedLayer, tokens: int) -> None:
        """Compute the experts of a layer, wherever they are."""
        assert self._experts is not None
        assert self._buffers is not None
        hidden = self._decoder.hidden
        with torch.inference_mode():
            rows = self._buffers.normed[:tokens, :hidden].contiguous()
            ids, scores = layer.ids[:tokens], layer.scores[:tokens]
            given = self._experts.forward(layer.moe.experts, rows, ids, scores, combine)
            given = given if layer.factor == 1.0 else given * layer.factor
            if layer.adds:
                layer.out[:tokens, :hidden] += given
            else:
                layer.out[:tokens, :hidden] = given

    def _make_room(self, wanted: BufferRoom) -> None:
        """Make buffers for so many tokens; written lists of others are dropped."""
        if self._room.holds(wanted):
            return
        self._room = self._room.grown(wanted)
        self._lists.clear()
        self._buffers = self._own_sums = None  # gone before the new ones come
        if self._shape is not None:
            self._exchange = self._joined or LocalExchange(self._shape, self._room.own)
        self._buffers = Buffers(self._needs, self._room, self._exchange)
