"""Choice of how a step's partial sums are added up over tensor-parallel ranks.

Inside the list of operations where ranks share memory or have native links, else through their communicator.
All ranks choose alike.
"""

from __future__ import annotations

from engine.kernels.core.library import KernelLibrary
from engine.kernels.exchange.linked import LinkedSums, has_links, linked
from engine.kernels.exchange.sums import OwnSums, SharedSums, Sums
from parallel.communicators.shared_memory import SharedMemoryCommunicator
from parallel.tensor_parallel import TensorRank


class RankSums:
    """Sums over the ranks of one program, whose steps are of any size."""

    def __init__(self, library: KernelLibrary, ranks: TensorRank | None, width: int) -> None:
        """``ranks``: None if nothing is added up. ``width``: numbers of the widest row of sums."""
        self._library = library
        self._ranks, self._width = ranks, width
        self.common: SharedSums | LinkedSums | None = None
        """Sums inside the list of operations."""
        self.own: OwnSums | None = None
        """Sums through the communicator, as large as the buffers of steps."""
        self._are_agreed = True
        if ranks is not None and isinstance(ranks.group, SharedMemoryCommunicator):
            self.common = SharedSums(ranks.group, width)
        elif ranks is not None and has_links(ranks.group):
            self._are_agreed = False

    def __repr__(self) -> str:
        return f"<RankSums {self.common or self.own or 'of no ranks'}>"

    def agree(self) -> None:
        """Find out, at the first step, whether the links of all ranks are native."""
        if self._are_agreed:
            return
        assert self._ranks is not None
        assert self._ranks.group is not None
        links = linked(self._ranks.group)
        sums = None if links is None else LinkedSums(self._library, links, self._width)
        answers = self._ranks.group.all_gather_ints([-1 if sums is None else sums.given])
        self._are_agreed = True
        if sums is not None and all(given >= 0 for (given,) in answers):
            sums.start_at(max(given for (given,) in answers))
            self.common = sums

    def are_common(self, tokens: int) -> bool:
        """Whether ranks add up inside the list in a step of so many tokens."""
        return self.common is not None and tokens <= self.common.rows

    def of_step(self, tokens: int, rows: int) -> Sums | None:
        """Sums for a step; None without ranks.

        ``rows``: that the buffers of steps have room for.
        """
        if self.are_common(tokens):
            return self.common
        if self._ranks is not None and self.own is None:
            self.own = OwnSums(self._ranks, rows, self._width)
        return self.own
