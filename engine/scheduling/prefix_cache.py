"""Prefix cache of the scheduler: names full blocks and finds blocks by name (pure).

A request that waits behind one with the same prefix will find that prefix computed. So a queue costs less
than its tokens, and reports to routers say how much less (:class:`ExpectedPrefixBlocks`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from engine.pieces.pool import BlockHash, PiecePool
from engine.scheduling.request import Request


class Contents(Protocol):
    """Interface that learns the tokens of named blocks (:class:`engine.events.recording.EventRecorder`)."""

    @property
    def lacks_tokens(self) -> bool: ...
    def tell(self, request: Request, first: int, end: int) -> None: ...


class Hits(Protocol):
    """Interface that learns what requests find (:class:`engine.transfers.spot_checks.SpotChecks`)."""

    def found(self, request: Request, num_blocks: int) -> None: ...


class PrefixCache:
    """Names the blocks that requests fill, and finds those that need no computing."""

    def __init__(self, pool: PiecePool, block_size: int) -> None:
        self._pool = pool
        self.block_size = block_size
        self.contents: Contents | None = None
        self.hits: Hits | None = None

    def __repr__(self) -> str:
        return f"<PrefixCache of {self._pool!r}>"

    def advance(self, request: Request, count: int) -> None:
        """Count tokens of a running request as computed, and name the blocks that they fill."""
        request.num_computed += count
        if request.num_computed >= (request.num_named + 1) * self.block_size:
            self._name_full_blocks(request)

    def token_known(self, request: Request) -> None:
        """Name the block that a request's newest token completes, while a step computes it."""
        if request.num_computed >= (request.num_named + 1) * self.block_size:
            self._name_full_blocks(request)

    def _name_full_blocks(self, request: Request) -> None:
        """Put the blocks that this step fills into the prefix index.

        Their tokens must be known: those of rows ahead come later (:meth:`token_known`).

        Every layer writes all rows' keys and values before it reads any, so another row of the same step may
        already share them.
        """
        num_full = min(request.num_computed, len(request.token_ids)) // self.block_size
        hashes = request.hashes_up_to(num_full, self.block_size)
        for index in range(request.num_named, num_full):
            self._pool.name(request.blocks[index], hashes[index])
        if self.contents is not None and request.num_named < num_full:
            self._tell_contents(request, request.num_named, num_full)
        request.num_named = num_full

    def unname(self, hashes: Sequence[BlockHash]) -> None:
        """Take blocks, and boundary pieces behind them, out of the index: their content is wrong."""
        kinds = self._pool.kinds
        self._pool.unname([*hashes, *(name for each in hashes for name in kinds.boundary_names(each))])

    def find(self, request: Request) -> tuple[list[int], int | None]:
        """Blocks that a waiting request finds, and the partly filled one behind them.

        Sets how many tokens of the request are computed. It holds until blocks are taken or released.
        """
        known = self._pool.find_prefix(request.prefix_hashes(self.block_size)[: request.most_cached])
        request.num_computed = len(known) * self.block_size
        return known, self._part_behind(request)

    def _part_behind(self, request: Request) -> int | None:
        """The partly filled block that came along as a request was handed over.

        It has all that the request's cached blocks lack, but its newest token.
        """
        size, before = self.block_size, len(request.token_ids) - 1
        if not request.copy or request.num_computed != before // size * size or self._pool.kinds.step:
            return None
        name = request.name_of_part(size)
        part = None if name is None else self._pool.parts.find(name)
        if part is not None:
            request.num_computed = before
        return part

    def admitted(self, request: Request) -> None:
        """Note what an admitted request has found."""
        request.num_found = request.num_computed
        request.num_named = request.num_computed // self.block_size
        self._tell_contents(request, 0, request.num_named)
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached = min(request.num_computed, request.num_prompt)
            request.num_cached_output = request.num_computed - request.num_cached
        if self.hits is not None and request.num_named:
            self.hits.found(request, request.num_named)

    def _tell_contents(self, request: Request, first: int, end: int) -> None:
        if self.contents is not None and self.contents.lacks_tokens:
            self.contents.tell(request, first, end)


class ExpectedPrefixBlocks:
    """Blocks that will be known when queued requests and prefills have been computed."""

    def __init__(self, pool: PiecePool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._expected: Counter[BlockHash] = Counter()

    def __repr__(self) -> str:
        return f"<ExpectedPrefixBlocks of {len(self._expected)} blocks>"

    def expect(self, request: Request) -> None:
        """Estimate a queued request's uncached tokens (``num_expected``), and expect its blocks.

        Requests behind it count on these blocks.
        """
        request.num_expected = len(request.token_ids)
        if not self._pool.is_caching:
            return
        hashes = request.prefix_hashes(self._block_size)
        missing = next(
            (index for index, each in enumerate(hashes) if not self._is_expected(each)), len(hashes)
        )
        request.num_expected -= missing * self._block_size
        request.expected_blocks = hashes[missing:]
        self._expected.update(request.expected_blocks)

    def settle(self, request: Request) -> None:
        """Stop expecting a request's blocks: they are known now, or never will be."""
        for block_hash in request.expected_blocks:
            self._expected[block_hash] -= 1
            if not self._expected[block_hash]:
                del self._expected[block_hash]
        request.expected_blocks = []

    def _is_expected(self, block_hash: BlockHash) -> bool:
        return block_hash in self._expected or self._pool.knows(block_hash)
