"""Schedules of transfers hold every rule, and planted bugs break one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from engine.scheduling.request import Request
from engine.transfers.exchange import BlockExchange
from engine.transfers.fetching import Ended
from engine.transfers.lending import Action, Lender
from router.dispatch.ledger import Entry
from router.dispatch.mover import RequestMover
from tests.nightly import NIGHTLY
from tests.simulator.transfers.node import Broken, Node, Rule
from tests.simulator.transfers.world import World

PARTS, SCHEDULES = (10, 1000) if NIGHTLY else (1, 12)
FEW = 60
"""Schedules within which a planted bug is found."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_breaks_a_rule(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part * SCHEDULES, (part + 1) * SCHEDULES):
        world = World(seed)
        world.run()
        seen += world.seen
    for kind in ("whole", "lost", "fetched", "drains", "kills"):
        assert seen[kind], f"nothing was {kind}: {seen}"


class LetsGoOfItsRoom(BlockExchange):
    """Room of a cancelled transfer is given to other requests, while late pieces still come."""

    def _cancel_unwanted(self, transfer: Any) -> None:
        was_cancelled = transfer.is_cancelled
        super()._cancel_unwanted(transfer)
        if transfer.is_cancelled and not was_cancelled:
            self._pool.release(transfer.wanted.blocks)

    def _ended(self, end: Ended) -> list[Request]:
        transfer = self._transfers[end.number]
        if transfer.is_cancelled:
            self._pool.hold(transfer.wanted.blocks)
        return super()._ended(end)


class KeepsLoansOfTheLost(Lender):
    """Loans of a broken connection are never returned."""

    def gone(self, peer: bytes) -> list[Action]:
        return []


class LeavesItRunning(RequestMover):
    """A hand-over after which both instances run the request."""

    def _abort(self, entry: Entry) -> None:
        return


@pytest.mark.parametrize(
    ("bug", "rule"),
    [
        (LetsGoOfItsRoom, Rule.CONTENT),
        (KeepsLoansOfTheLost, Rule.END),
        (LeavesItRunning, Rule.ONCE),
    ],
)
def test_a_planted_bug_is_found(bug: type, rule: Rule) -> None:
    class PlantedNode(Node):
        exchange_class = bug if issubclass(bug, BlockExchange) else BlockExchange
        lender_class = bug if issubclass(bug, Lender) else Lender

    class Planted(World):
        node_class = PlantedNode
        mover_class = bug if issubclass(bug, RequestMover) else RequestMover

    for seed in range(FEW):
        try:
            Planted(seed).run()
        except Broken as broken:
            assert broken.rule is rule  # noqa: PT017 (the schedule that finds it is not known)
            return
    raise AssertionError(f"{bug.__name__} was not found")
