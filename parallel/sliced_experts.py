"""Slices of an instance's tokens, of which each tensor-parallel rank dispatches one to the experts.

With tensor parallelism every rank of an instance has all of its tokens. So each rank dispatches its slice of
them (:class:`parallel.expert_parallel.ExpertParallel` does the rest), and the ranks gather the results: no
token travels twice, and the experts of a layer have as many owners as there are workers in its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from parallel.rounds.arithmetic import even_sizes
from parallel.tensor_parallel import TensorRank


class TokenSlices:
    """The slice of one tensor-parallel rank, and how the ranks put their results together.

    The rank's number in the expert group is that of the instance's first one plus its own.
    """

    def __init__(self, ranks: TensorRank) -> None:
        """``ranks``: those of this instance."""
        self._ranks = ranks

    def sizes(self, sizes: Sequence[int]) -> list[int]:
        """Tokens of each rank in the expert group, where instance i has ``sizes[i]``."""
        return [part for size in sizes for part in even_sizes(size, self._ranks.size)]

    def gathered(self, num_tokens: int, compute: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        """Outputs [num_tokens, H] of all ranks, each of which computes those of its slice."""
        sizes = even_sizes(num_tokens, self._ranks.size)
        start = sum(sizes[: self._ranks.rank])
        return self._ranks.all_gather_rows(compute(slice(start, start + sizes[self._ranks.rank])), sizes)

    def summed(self, outputs: torch.Tensor) -> torch.Tensor:
        """Sum of the outputs of all ranks, each of which has computed what it holds."""
        return self._ranks.all_reduce(outputs)
