"""Schedules of transfers hold every rule, and planted bugs break one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from engine.inheritance.table import Publisher
from engine.pieces.pool import BlockHash
from engine.scheduling.request import Request, RequestKey
from engine.transfers import exchange, fetching
from engine.transfers.fetching import Fetcher, TransferEnded
from engine.transfers.handing_over import Tail
from engine.transfers.incoming import IncomingTransfer, IncomingTransfers
from engine.transfers.lending import Action, Key, Lender
from engine.transfers.loans import Loans
from router.dispatch.ledger import Entry
from router.dispatch.mover import RequestMover
from tests.nightly import NIGHTLY
from tests.simulator.transfers.node import Broken, Node, Rule
from tests.simulator.transfers.world import World

PARTS, SCHEDULES = (10, 1000) if NIGHTLY else (1, 60)
FEW, MANY = range(150, 240), range(6000)
"""Seeds; the few find each of their bugs."""
"""Schedules within which a planted bug is found, and within which a rare one is."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("inherits", [False, True])
@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_breaks_a_rule(part: int, inherits: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part * SCHEDULES, (part + 1) * SCHEDULES):
        world = World(seed, inherits=inherits)
        world.run()
        seen += world.seen
    more = ["inherited"] if inherits else ["drains", "handed over", "parts"]
    for kind in ["whole", "lost", "fetched", "kills", "cuts", *more]:
        assert seen[kind], f"nothing was {kind}: {seen}"


class LetsGoOfItsRoom(IncomingTransfers):
    """Room of a cancelled transfer is given to other requests, while late pieces still come."""

    def cancel_unwanted(self, transfer: IncomingTransfer) -> None:
        was_cancelled = transfer.is_cancelled
        super().cancel_unwanted(transfer)
        if transfer.is_cancelled and not was_cancelled:
            self._pool.release(transfer.wanted.blocks)

    def ended(self, end: TransferEnded) -> IncomingTransfer:
        transfer = self._transfers[end.number]
        if transfer.is_cancelled:
            self._pool.hold(transfer.wanted.blocks)
        return super().ended(end)


class KeepsLoansOfTheLost(Lender):
    """Loans of a broken connection are never returned."""

    def gone(self, peer: bytes) -> list[Action]:
        return []


class LeavesItRunning(RequestMover):
    """A hand-over after which both instances run the request."""

    def _abort(self, entry: Entry) -> None:
        return


class LetsGoOfWhatIsRead(Loans):
    """A block that is lent may be written anew while it is read."""

    def lend(self, loan: Key, names: Sequence[BlockHash], being_filled: set[int]) -> None:
        super().lend(loan, names, being_filled)
        self._pool.release(self._lent[loan])
        self._num_kept -= self._kept[loan]
        self._lent[loan], self._kept[loan] = [], 0


class LendsWhatIsBeingFilled(Loans):
    """A block is lent that has its name, but not its content yet."""

    def lend(self, loan: Key, names: Sequence[BlockHash], being_filled: set[int]) -> None:
        super().lend(loan, names, set())


class FetchesIntoStepsUnderWay(IncomingTransfers):
    """What comes is written into blocks that a step still fills."""

    def _take(self, count: int) -> tuple[list[int], list[int]] | None:
        blocks = self._pool.take(count)
        return None if blocks is None else (blocks, [])


class LendsThePartOfAnotherPosition(Loans):
    """The partly filled block of a hand-over is the one before it."""

    def _hand_over(self, loan: Key, request: Request | None, answer: Tail | str) -> None:
        if isinstance(answer, Tail) and answer.has_part and request is not None and len(request.blocks) > 1:
            answer = replace(answer, blocks=[*answer.blocks[:-1], request.blocks[-2]])
        super()._hand_over(loan, request, answer)


class PublishesWhatIsBeingFilled(Publisher):
    """An entry is made of a block that has its name, but no content yet."""

    def turn(self, being_filled: Callable[[], set[int]]) -> None:
        super().turn(set)


class KeepsEntriesOfTheDropped(Publisher):
    """An entry stays while its block is written anew."""

    def dropped(self, block_hash: BlockHash) -> None:
        self._pending.pop(block_hash, None)


class WaitsForAWay(Fetcher):
    """A fetch from where no connection leads waits until one does."""

    def look(self, now: float) -> list[fetching.Action]:
        waiting = {number: fetch for number, fetch in self._fetches.items() if not fetch.is_asked}
        self._fetches = {number: each for number, each in self._fetches.items() if number not in waiting}
        actions = super().look(now)
        self._fetches |= waiting
        return actions


class LooksAtAnotherClock(Node):
    """Deadlines are compared with a clock that is not the one they were set by."""

    def look(self) -> None:
        start, self._clock_start = self._clock_start, 0.0
        super().look()
        self._clock_start = start


class RunsOnWhatItHandedOver(Node):
    """A request goes on at the instance that handed it over."""

    def let_go(self, key: RequestKey) -> None:
        return


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("bug", "rule", "seeds"),
    [
        (LetsGoOfItsRoom, Rule.CONTENT, [*FEW[60:], *FEW[:60]]),
        (KeepsLoansOfTheLost, Rule.END, FEW),
        (LeavesItRunning, Rule.ONCE, FEW),
        (LendsThePartOfAnotherPosition, Rule.CONTENT, FEW),
        (RunsOnWhatItHandedOver, Rule.ONCE, FEW),
        (PublishesWhatIsBeingFilled, Rule.CONTENT, FEW),
        (FetchesIntoStepsUnderWay, Rule.CONTENT, FEW),
        (WaitsForAWay, Rule.END, FEW),
        (LooksAtAnotherClock, Rule.END, FEW),
        pytest.param(LetsGoOfWhatIsRead, Rule.CONTENT, MANY, marks=pytest.mark.nightly),
        pytest.param(LendsWhatIsBeingFilled, Rule.CONTENT, MANY, marks=pytest.mark.nightly),
        pytest.param(KeepsEntriesOfTheDropped, Rule.CONTENT, MANY, marks=pytest.mark.nightly),
    ],
)
def test_a_planted_bug_is_found(
    bug: type, rule: Rule, seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if bug is LetsGoOfWhatIsRead:  # with more pieces on the way, nearly all are read at once
        monkeypatch.setattr(fetching, "WINDOW", 1)
        monkeypatch.setattr(fetching, "COPY_WINDOW", 1)

    for part in (IncomingTransfers, Loans):
        if issubclass(bug, part):
            monkeypatch.setattr(exchange, part.__name__, bug)

    class PlantedNode(bug if issubclass(bug, Node) else Node):  # type: ignore[misc]
        lender_class = bug if issubclass(bug, Lender) else Lender
        fetcher_class = bug if issubclass(bug, Fetcher) else Fetcher
        publisher_class = bug if issubclass(bug, Publisher) else Publisher

    class Planted(World):
        node_class = PlantedNode
        mover_class = bug if issubclass(bug, RequestMover) else RequestMover

    for seed in seeds:
        try:
            Planted(seed, inherits=issubclass(bug, Publisher)).run()
        except Broken as broken:
            assert broken.rule is rule  # noqa: PT017 (the schedule that finds it is not known)
            return
    raise AssertionError(f"{bug.__name__} was not found")
