"""Fetched blocks that are computed as well: which are compared, and what follows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.messages import Submit
from engine.pieces.kinds import BoundaryKind, BoundarySlots
from engine.pieces.pool import PiecePool
from engine.sampling import SamplingParams
from engine.scheduling.request import Request, Status, from_submit
from engine.transfers import checking
from engine.transfers.checking import CHECK_INTERVAL, BlockChecks

SIZE = 4


class Setup:
    """A pool with three blocks of a prompt, two of which were fetched."""

    def __init__(self, boundaries: Sequence[BoundarySlots] = ()) -> None:
        self.pool = PiecePool(8, boundaries=boundaries, block_size=SIZE)
        submit = Submit(1, "r", list(range(14)), SamplingParams(), 0)
        self.request: Request = from_submit(submit, b"", arrival=1, eos_ids=(), max_model_len=100)
        self.names = self.request.hashes_up_to(3, SIZE)
        there = self.pool.take(3) or []
        for block, name in zip(there, self.names, strict=True):
            self.pool.name(block, name)
        self.pool.release(there)
        if boundaries:
            states = self.pool.take_boundary() or []
            self.pool.name(states[0], self.pool.kinds.boundary_names(self.names[1])[0])
            self.pool.release(states)
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


def test_a_block_that_its_request_comes_to_in_a_later_step_is_not_compared() -> None:
    """Others have evicted the blocks before, and a chunk ends before it."""
    setup = Setup()
    setup.request.blocks = setup.pool.take(1) or []
    setup.request.num_computed = SIZE
    setup.checks.admitted(setup.request)
    assert len(setup.checks) == 0


STATES = [BoundarySlots(BoundaryKind(label="state", grid=2 * SIZE, num_bytes=8), 4)]


@pytest.mark.parametrize("wrong", [None, "block", "state"])
def test_a_state_is_compared_once_its_request_has_come_to_it(wrong: str | None) -> None:
    """It goes on from an earlier one, so several steps may pass."""
    setup = Setup(STATES)
    pool, request = setup.pool, setup.request
    fetched = pool.slot_of(setup.names[1]), *pool.find_boundary(setup.names[:2])
    request.status, request.most_cached, request.blocks = Status.RUNNING, 1, pool.take(3) or []
    request.num_computed = SIZE
    setup.checks.admitted(request)
    own, filled = pool.take_boundary() or [], dict[int, list[int]]()
    compared: list[tuple[int, int]] = []

    def same(one: int, other: int) -> bool:
        compared.append((one, other))
        return (one, other) != {"block": (fetched[0], request.blocks[1]), "state": (fetched[1], own[0])}.get(
            wrong or ""
        )

    assert setup.checks.compare(same, lambda _: filled) == (0, [])
    request.num_computed, filled[2 * SIZE] = 3 * SIZE, own
    count, found = setup.checks.compare(same, lambda _: filled)
    assert (count, len(found)) == (1, int(wrong is not None))
    assert compared[0] == (fetched[0], request.blocks[1])
    assert not len(setup.checks)
    pool.release([*request.blocks, *own])
    assert (pool.num_used, pool.num_free_boundaries) == (0, 4)


def test_a_check_that_would_compute_too_much_waits_for_another_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checking, "MOST_AGAIN", 2 * SIZE - 1)
    setup = Setup(STATES)
    assert setup.request.most_cached is None
    monkeypatch.setattr(checking, "MOST_AGAIN", 2 * SIZE)
    setup.checks.fetched(setup.request, "source", setup.names[:2])
    assert setup.request.most_cached == 1
    setup.request.most_cached = None
    setup.checks.fetched(setup.request, "source", setup.names[:2])
    assert setup.request.most_cached is None, "one of so many"


@pytest.mark.parametrize("case", ["passed without a slot", "preempted"])
def test_a_check_of_a_state_that_is_not_computed_ends(case: str) -> None:
    setup = Setup(STATES)
    pool, request = setup.pool, setup.request
    request.status, request.blocks, request.num_computed = Status.RUNNING, pool.take(3) or [], SIZE
    setup.checks.admitted(request)
    setup.checks.drop_ended()
    assert len(setup.checks) == 1
    if case == "preempted":
        request.status = Status.WAITING
        setup.checks.drop_ended()
    else:
        request.num_computed = 3 * SIZE
        assert setup.checks.compare(lambda *_: False) == (0, [])
    assert not len(setup.checks)
    pool.release(request.blocks)
    assert (pool.num_used, pool.num_free_boundaries) == (0, 4)


@pytest.mark.parametrize("is_same", [True, False])
def test_what_was_compared_is_held_no_longer(is_same: bool) -> None:
    setup = Setup()
    setup.admit(13)
    num_compared, wrong = setup.checks.compare(lambda fetched, own: is_same)
    assert (num_compared, len(wrong)) == (1, 0 if is_same else 1)
    setup.pool.release(setup.request.blocks)
    assert setup.pool.num_used == 0
