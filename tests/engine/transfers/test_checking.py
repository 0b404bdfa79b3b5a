"""Fetched blocks that are computed as well: which are compared, and what follows."""

from __future__ import annotations

import pytest

from engine.messages import Submit
from engine.pieces.pool import PiecePool
from engine.sampling import SamplingParams
from engine.scheduling.request import Request, from_submit
from engine.transfers.checking import CHECK_INTERVAL, BlockChecks

SIZE = 4


class Setup:
    """A pool with three blocks of a prompt, two of which were fetched."""

    def __init__(self) -> None:
        self.pool = PiecePool(8)
        submit = Submit(1, "r", list(range(14)), SamplingParams(), 0)
        self.request: Request = from_submit(submit, b"", arrival=1, eos_ids=(), max_model_len=100)
        self.names = self.request.hashes_up_to(3, SIZE)
        there = self.pool.take(3) or []
        for block, name in zip(there, self.names, strict=True):
            self.pool.name(block, name)
        self.pool.release(there)
        self.checks = BlockChecks(self.pool, SIZE)
        for _ in range(CHECK_INTERVAL):
            self.checks.fetched(self.request, "source", self.names[:2])

    def admit(self, num_computed: int) -> None:
        """Take one block from the cache and compute the others."""
        assert self.request.most_cached == 1
        known = self.pool.find_prefix(self.names[:1])
        self.pool.hold(known)
        self.request.blocks = known + (self.pool.take(3) or [])
        self.request.num_computed = num_computed
        self.checks.admitted(self.request)


@pytest.mark.parametrize(("num_computed", "pending"), [(2 * SIZE - 1, 0), (2 * SIZE, 1), (13, 1)])
def test_a_block_is_compared_if_its_step_computes_all_of_it(num_computed: int, pending: int) -> None:
    setup = Setup()
    setup.admit(num_computed)
    assert len(setup.checks) == pending


@pytest.mark.parametrize("is_same", [True, False])
def test_what_was_compared_is_held_no_longer(is_same: bool) -> None:
    setup = Setup()
    setup.admit(13)
    num_compared, wrong = setup.checks.compare(lambda fetched, own: is_same)
    assert (num_compared, len(wrong)) == (1, 0 if is_same else 1)
    setup.pool.release(setup.request.blocks)
    assert setup.pool.num_used == 0
