"""Exchange of expert rows in a step: inside the list of operations, or between pieces.

Which of both is known once the headers of a step are here, and the same at all members of the group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.adapters.sites import EXPERT_BITS
from engine.kernels.core.library import KernelLibrary
from engine.kernels.core.operations import OperationKind
from engine.kernels.exchange.exchange import ExpertExchange, ExpertShape, LocalExchange, SharedMemoryExchange
from engine.kernels.exchange.linked import LinkedExchange, linked
from engine.kernels.experts.packed_experts import NativeExperts, combine
from engine.kernels.experts.packed_mixture import ExchangedLayer
from engine.kernels.lowering.buffers import Buffers
from parallel.communicators.base import Communicator
from parallel.communicators.shared_memory import SharedMemoryCommunicator
from parallel.expert_parallel import ExpertParallel
from parallel.placement import Placement

Seconds = npt.NDArray[np.float64]

DISPATCH = [
    *(OperationKind.ROUTE, OperationKind.OFFER, OperationKind.LOOK),
    *(OperationKind.MEET, OperationKind.SORT, OperationKind.GATHER),
]
COMPUTE = [OperationKind.EXPERTS_UP, OperationKind.EXPERTS_DOWN]
COMBINE = [OperationKind.RETURN, OperationKind.HOME, OperationKind.COMBINE]


class StepExchange:
    """Exchange of expert rows and results between the members of a program's group."""

    def __init__(
        self,
        library: KernelLibrary,
        shape: ExpertShape | None,
        num_layers: int,
        experts: ExpertParallel | None,
        *,
        may_join: bool,
    ) -> None:
        """``shape``: of the expert layers, ``num_layers`` of them; None without any.

        ``experts``: the common part of layers that are spread over instances. ``may_join``: whether a group's
        rows may be exchanged inside the list.
        """
        self._library, self._shape, self._num_layers = library, shape, num_layers
        self._experts, self._may_join = experts, may_join
        self.products = NativeExperts(library)
        """Products of experts between two pieces of the list."""
        self.joined: SharedMemoryExchange | LinkedExchange | None = None
        """Exchange with the other members of the group, if native code can do it."""
        self.current: ExpertExchange | None = None
        """Exchange for the buffers of steps; None without expert layers."""

    @property
    def is_spread(self) -> bool:
        """Whether experts are spread over instances."""
        return self._experts is not None

    @property
    def sizes(self) -> Sequence[int]:
        """Rows of each member in this step; none if experts are not spread."""
        return () if self._experts is None else self._experts.sizes

    @property
    def is_native(self) -> bool:
        """Whether the exchange of this step is part of the list."""
        if self._experts is None:
            return self._shape is not None
        return self.joined is not None and self.joined.can(self._experts.sizes)

    def total(self, tokens: int) -> int:
        """Rows of this step over all members."""
        return sum(self.sizes) if self._experts is not None and self.is_native else tokens

    def use_products(self) -> None:
        """Use these kernels for experts that are exchanged outside the list of operations."""
        assert self._experts is not None
        self._experts.use_products(self.products)

    def join(self, group: Communicator, placement: Placement) -> bool:
        """Spread the experts over this group; returns whether buffers must be made anew."""
        before, self.joined = self.joined, None
        if self._shape is None or not self._may_join:
            return False
        assert self._experts is not None
        facts = placement, self._shape, self._num_layers
        if isinstance(group, SharedMemoryCommunicator):
            counted = self._experts.tokens_per_expert
            self.joined = SharedMemoryExchange(self._library, group, *facts, counted)
        elif links := linked(group):
            self.joined = LinkedExchange(self._library, links, *facts, self._experts)
        if self.joined is None or self.current is None:  # no buffers yet, or those of a group that is left
            return before is not None
        self.joined.take_room(self.current)  # to make buffers anew takes page faults in the next step
        self.current = self.joined
        return False

    def make_current(self, rows: int) -> ExpertExchange | None:
        """The exchange for buffers of so many rows of this member."""
        if self._shape is not None:
            self.current = self.joined or LocalExchange(self._shape, rows)
        return self.current

    def note(self, spent: Seconds) -> None:
        """Note the times of a step's spread expert layers by part, as other transports do.

        ``spent``: by kind of operation.
        """
        assert self._experts is not None
        times = self._experts.times
        times.dispatch += float(spent[DISPATCH].sum())
        times.experts += float(spent[COMPUTE].sum())
        times.combine += float(spent[COMBINE].sum())

    def exchange_outside(self, layer: ExchangedLayer, tokens: int, buffers: Buffers, hidden: int) -> None:
        """Compute the experts of a layer between two pieces of the list, wherever they are."""
        assert self._experts is not None
        with torch.inference_mode():
            rows = buffers.normed[:tokens, :hidden].contiguous()
            ids, scores, tags = layer.ids[:tokens], layer.scores[:tokens], None
            if self.products.tagged is not None and self._experts.group is not None:  # else being tried out
                ids, tags = ids & ((1 << EXPERT_BITS) - 1), ids[:, 0] >> EXPERT_BITS
            given = self._experts.forward(layer.moe.experts, rows, ids, scores, combine, tags)
            given = given if layer.factor == 1.0 else given * layer.factor
            if layer.adds:
                layer.out[:tokens, :hidden] += given
            else:
                layer.out[:tokens, :hidden] = given
