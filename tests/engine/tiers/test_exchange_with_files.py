"""Blocks that come from files, and requests that wait for them, as lists of events."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from engine.pieces.pool import BlockHash
from engine.scheduling.request import Request
from engine.transfers import checking
from engine.transfers.exchange import BlockExchange
from engine.transfers.fetching import FILES, TransferEnded, TransferOutcome, Wanted
from engine.transfers.incoming import FILES_PART
from engine.transfers.sources import MOST_SECONDS, Sources
from tests.engine.transfers.test_exchange import SIZE, Setup

LONG = 8 * SIZE + 1
"""Tokens of a prompt of eight full blocks."""


class FakeTier:
    """Has the blocks that the test says."""

    def __init__(self) -> None:
        self.kept: set[BlockHash] = set()
        self.events: list[TransferEnded] = []
        self.fetches: list[Wanted] = []
        self.cancelled: list[int] = []
        self.forgotten: list[BlockHash] = []
        self.is_abandoned = False
        self.drops = 0

    def count(self, names: Sequence[BlockHash]) -> int:
        return next((at for at, name in enumerate(names) if name not in self.kept), len(names))

    def usable(self, names: Sequence[BlockHash]) -> int:
        return self.count(names)

    def fetch(self, wanted: Wanted) -> None:
        self.fetches.append(wanted)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def take_events(self) -> list[TransferEnded]:
        found, self.events = self.events, []
        return found

    def turn(self, being_filled: Callable[[], set[int]]) -> None:
        being_filled()

    def forget(self, names: Sequence[BlockHash]) -> None:
        self.forgotten += names

    def drop_written(self) -> None:
        self.drops += 1

    def abandon(self) -> None:
        self.is_abandoned = True

    def ends(self, wanted: Wanted, count: int, outcome: TransferOutcome = TransferOutcome.WHOLE) -> None:
        self.events.append(TransferEnded(wanted.number, count, outcome, FILES, count * 1000, 0.01))


class WithFiles(Setup):
    def __init__(self, *, checks: bool = False) -> None:
        super().__init__()
        self.tier = FakeTier()
        self.exchange = BlockExchange(
            self.pool, Sources(self.mover, self.price, lambda: self.now, tier=self.tier), SIZE, checks=checks
        )

    def names(self, request: Request) -> list[BlockHash]:
        return request.prefix_hashes(SIZE)


def test_a_request_waits_for_its_blocks_in_files() -> None:
    setup = WithFiles()
    request = setup.request(source="")
    setup.tier.kept.update(setup.names(request)[:7])
    assert setup.exchange.takes(request)
    (wanted,) = setup.tier.fetches
    assert (wanted.names, wanted.source) == (setup.names(request)[:7], FILES)
    setup.tier.ends(wanted, 7)
    assert setup.turn() == [request]
    assert setup.pool.find_prefix(setup.names(request)) == wanted.blocks
    assert setup.exchange.is_idle
    assert setup.mover.fetches == []


def test_files_come_before_an_instance_if_they_have_all() -> None:
    setup = WithFiles()
    some, whole = setup.request(), setup.request(first=5000)
    setup.tier.kept.update(setup.names(some)[:7], setup.names(whole))
    assert setup.exchange.takes(some)
    assert setup.exchange.takes(whole)
    assert [each.source for each in setup.mover.fetches] == ["s"]
    assert [each.names for each in setup.tier.fetches] == [setup.names(whole)]


def test_what_no_file_has_is_computed() -> None:
    setup = WithFiles()
    assert not setup.exchange.takes(setup.request(source=""))
    assert setup.pool.num_used == 0


def test_a_wrong_file_is_counted_and_files_are_asked_again() -> None:
    setup = WithFiles()
    request = setup.request(source="")
    setup.tier.kept.update(setup.names(request))
    setup.exchange.takes(request)
    setup.tier.ends(setup.tier.fetches[0], 3, TransferOutcome.WRONG)
    assert setup.turn() == [request]
    assert len(setup.pool.find_prefix(setup.names(request))) == 3
    assert setup.exchange.counters().wrong_blocks == 1
    again = setup.request(source="")
    assert setup.exchange.takes(again)


def test_a_read_that_hangs_keeps_its_room_but_no_request() -> None:
    setup = WithFiles()
    request, same = setup.request(source=""), setup.request(source="")
    setup.tier.kept.update(setup.names(request))
    setup.exchange.takes(request)
    setup.exchange.takes(same)
    setup.now += MOST_SECONDS - 0.1
    assert setup.turn() == []
    setup.now += 0.2
    assert setup.turn() == [request, same]
    assert request.key not in setup.exchange.waiting
    assert setup.tier.cancelled == [1]
    assert setup.pool.num_used == 10
    setup.tier.ends(setup.tier.fetches[0], 0, TransferOutcome.CANCELLED)
    assert setup.turn() == []
    assert setup.pool.num_used == 0


def test_all_reads_together_take_half_of_the_cache() -> None:
    setup = WithFiles()
    requests = [setup.request(first=1000 * number, source="") for number in range(4)]
    for request in requests:
        setup.tier.kept.update(setup.names(request))
    assert [setup.exchange.takes(request) for request in requests] == [True, True, False, False]
    assert setup.pool.num_used == 40 // FILES_PART
    setup.tier.ends(setup.tier.fetches[0], 10)
    setup.turn()
    assert setup.exchange.takes(requests[2])


def test_slow_files_are_not_read_for_a_while_and_instances_are_not_blamed() -> None:
    setup = WithFiles()
    request = setup.request(source="")
    setup.tier.kept.update(setup.names(request))
    setup.exchange.sources.computed(1000, 0.01)
    setup.exchange.takes(request)
    setup.tier.events.append(TransferEnded(1, 1, TransferOutcome.SLOW, FILES, 1000, 9.0))
    setup.turn()
    assert not setup.exchange.takes(setup.request(first=90, source=""))
    other = setup.request(first=700, source="")
    setup.tier.kept.update(setup.names(other))
    assert not setup.exchange.takes(other)
    assert setup.exchange.takes(setup.request(first=3000))


def test_a_reset_forgets_what_is_here_and_what_is_on_its_way() -> None:
    setup = WithFiles()
    here, request = setup.request(first=9000), setup.request(source="")
    setup.computed(here)
    setup.tier.kept.update(setup.names(request))
    setup.exchange.takes(request)
    setup.exchange.reset()
    assert list(setup.pool.known) == []
    setup.tier.ends(setup.tier.fetches[0], 10)
    assert setup.turn() == [request]
    assert list(setup.pool.known) == []
    assert setup.pool.num_used == 0


def test_files_outlive_the_mover_with_their_room() -> None:
    setup = WithFiles()
    request = setup.request(source="")
    setup.tier.kept.update(setup.names(request))
    setup.exchange.takes(request)
    setup.mover.has_ended = True
    assert setup.turn() == []
    assert setup.pool.num_used == 10
    setup.tier.ends(setup.tier.fetches[0], 10)
    assert setup.turn() == [request]
    assert setup.exchange.is_idle


# ---- blocks that are computed as well


class Checked(WithFiles):
    """Some blocks are computed as well, and what they are compared with is the test's."""

    def __init__(self) -> None:
        super().__init__(checks=True)
        self.mover.same = lambda one, other: self.is_right
        self.is_right = True

    def fetched(self, request: Request, source: str = FILES) -> Request:
        """All blocks of a request come from there, and it is queued."""
        if source == FILES:
            self.tier.kept.update(self.names(request))
        assert self.exchange.takes(request)
        fetches = self.tier.fetches if source == FILES else self.mover.fetches
        (self.tier if source == FILES else self.mover).ends(fetches[-1], len(fetches[-1].names))
        assert self.turn() == [request]
        self.tier.kept.clear()
        return request

    def admit(self, request: Request) -> bool:
        """Compute the rest of a request in one step.

        Returns whether a block of it is checked.
        """
        names = self.names(request)
        known = self.pool.find_prefix(names[: request.most_cached])
        self.pool.hold(known)
        own = self.pool.take(len(names) + 1 - len(known))
        assert own is not None
        request.blocks, request.num_computed = known + own, len(request.token_ids)
        before = self.exchange.counters().checked_blocks
        self.exchange.checks.admitted(request)
        self.wrong = self.exchange.checks.wrong_requests(self.running)
        self.pool.release(request.blocks)
        return self.exchange.counters().checked_blocks > before

    running: Sequence[Request] = ()


def test_the_first_blocks_of_files_are_checked_and_few_later_ones() -> None:
    setup = Checked()
    found = [setup.admit(setup.fetched(setup.request(first=1000 * n, length=LONG))) for n in range(8)]
    assert found == [True] + [False] * 7
    assert not setup.wrong
    assert not setup.tier.is_abandoned


def test_a_check_that_could_not_be_made_is_made_later() -> None:
    setup = Checked()
    first = setup.fetched(setup.request(length=LONG))
    first.most_cached = first.checked = None  # its block is computed in two steps
    assert not setup.admit(first)
    assert setup.admit(setup.fetched(setup.request(first=1000, length=LONG)))


def test_blocks_of_an_instance_are_checked_as_seldom_as_before() -> None:
    setup = Checked()
    requests = [setup.request(first=1000 * n, length=LONG, source="peer") for n in range(4)]
    assert not any(setup.admit(setup.fetched(each, "peer")) for each in requests)


def test_a_wrong_block_of_files_drops_all_of_theirs_and_sets_back_those_that_run_with_them() -> None:
    setup = Checked()
    beside, other = setup.request(first=5000, length=LONG), setup.request(first=9000, length=LONG)
    setup.admit(setup.fetched(beside))
    setup.computed(other)
    setup.running = [beside, other]
    for each in setup.running:
        setup.pool.hold(setup.pool.find_prefix(setup.names(each)))
    setup.is_right = False
    for number in range(40):
        checked = setup.fetched(setup.request(first=20_000 + 1000 * number, length=LONG))
        if setup.admit(checked):
            break
    assert setup.wrong == [checked, beside], "the other one holds nothing of them"
    assert not list(setup.pool.known)
    assert setup.tier.is_abandoned
    assert setup.tier.forgotten == setup.names(checked)
    again = setup.request(first=30_000)
    setup.tier.kept.update(setup.names(again))
    again.blocks_at = ""
    assert not setup.exchange.takes(again), "files are asked no more"


def test_a_wrong_block_of_an_instance_drops_what_was_written_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "CHECK_INTERVAL", 1)
    setup = Checked()
    setup.is_right = False
    request = setup.fetched(setup.request(length=LONG, source="peer"), "peer")
    assert setup.admit(request)
    assert setup.wrong == [request]
    assert not list(setup.pool.known)
    assert (setup.tier.drops, setup.tier.is_abandoned) == (1, False)
    assert not setup.exchange.takes(setup.request(first=50_000, source="peer")), "it is asked no more"
    other = setup.request(first=60_000, source="")
    setup.tier.kept.update(setup.names(other))
    assert setup.exchange.takes(other), "files are"


def test_origins_are_those_of_blocks_that_are_there() -> None:
    setup = Checked()
    request = setup.fetched(setup.request(length=LONG))
    assert setup.exchange.checks is not None
    origins = setup.exchange.checks.origins
    assert len(origins) == 8
    setup.pool.take(setup.pool.num_free)
    assert len(origins) == 0
    assert not setup.pool.find_prefix(setup.names(request))
