"""Blocks that queued and running requests will put into the prefix cache (pure).

A request that waits behind one with the same prefix will find that prefix computed. So a queue costs less
than its tokens, and reports to routers say how much less.
"""

from __future__ import annotations

from collections import Counter

from engine.scheduling.blocks import BlockHash, BlockPool
from engine.scheduling.request import Request


class ExpectedPrefixBlocks:
    """Blocks that will be known when queued requests and prefills have been computed."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
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
