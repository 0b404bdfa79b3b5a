"""Expert parallelism for instances with tensor parallelism: each rank dispatches its share.

With tensor parallelism every rank of an instance has all of its tokens. So each rank dispatches its slice of
them (:class:`parallel.expert_parallel.ExpertParallel` does the rest), and the ranks gather the results: no
token travels twice, and the experts of a layer have as many owners as there are workers in its stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from parallel.expert_parallel import Combine, Dispatch, ExpertParallel, LocalExperts
from parallel.placement import Placement
from parallel.rounds.arithmetic import even_sizes
from parallel.tensor_parallel import TensorRank


class SlicedExpertParallel(ExpertParallel):
    """Expert parallelism of one tensor-parallel rank of an instance.

    Its rank in the expert group is that of the instance's first one plus its own.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        dispatch: Dispatch,
        local_experts: LocalExperts,
        ranks: TensorRank,
        num_layers: int = 1,
    ) -> None:
        """``ranks``: those of this instance. The others are as for :class:`ExpertParallel`."""
        super().__init__(placement, rank, dispatch, local_experts, num_layers)
        self._ranks = ranks

    def begin(self, sizes: Sequence[int]) -> None:
        """A step begins in which instance i has ``sizes[i]`` tokens in every layer."""
        super().begin([part for size in sizes for part in even_sizes(size, self._ranks.size)])

    def forward(
        self,
        module: Any,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        combine: Combine | None = None,
    ) -> torch.Tensor:
        """One layer of experts, with the same arguments and result on all ranks.

        Hidden [tokens, H], expert_ids and weights [tokens, k] -> [tokens, H].
        """
        if self._group is None:  # being loaded: what this instance holds counts, wherever a token stands
            return self._ranks.all_reduce(super().forward(module, hidden, expert_ids, weights, combine))
        sizes = even_sizes(len(hidden), self._ranks.size)
        start = sum(sizes[: self._ranks.rank])
        mine = slice(start, start + sizes[self._ranks.rank])
        outputs = super().forward(module, hidden[mine], expert_ids[mine], weights[mine], combine)
        return self._ranks.all_gather_rows(outputs, sizes)
