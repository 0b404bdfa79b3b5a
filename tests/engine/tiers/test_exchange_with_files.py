"""Blocks that come from files, and requests that wait for them, as lists of events."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.scheduling.blocks import BlockHash
from engine.scheduling.request import Request
from engine.transfers.exchange import FILES, FILES_PART, MOST_SECONDS, BlockExchange
from engine.transfers.fetching import Ended, Outcome, Wanted
from tests.engine.transfers.test_exchange import SIZE, Setup


class FakeTier:
    """Has the blocks that the test says."""

    def __init__(self) -> None:
        self.kept: set[BlockHash] = set()
        self.events: list[Ended] = []
        self.fetches: list[Wanted] = []
        self.cancelled: list[int] = []
        self.forgotten: list[BlockHash] = []

    def count(self, names: Sequence[BlockHash]) -> int:
        return next((at for at, name in enumerate(names) if name not in self.kept), len(names))

    def fetch(self, wanted: Wanted) -> None:
        self.fetches.append(wanted)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def take_events(self) -> list[Ended]:
        found, self.events = self.events, []
        return found

    def turn(self, being_filled: Callable[[], set[int]]) -> None:
        being_filled()

    def forget(self, names: Sequence[BlockHash]) -> None:
        self.forgotten += names

    def ends(self, wanted: Wanted, count: int, outcome: Outcome = Outcome.WHOLE) -> None:
        self.events.append(Ended(wanted.number, count, outcome, FILES, count * 1000, 0.01))


class WithFiles(Setup):
    def __init__(self) -> None:
        super().__init__()
        self.tier = FakeTier()
        self.exchange = BlockExchange(
            self.pool, self.mover, self.price, SIZE, lambda: self.now, tier=self.tier
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
    setup.tier.ends(setup.tier.fetches[0], 3, Outcome.WRONG)
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
    assert request.key not in setup.exchange
    assert setup.tier.cancelled == [1]
    assert setup.pool.num_used == 10
    setup.tier.ends(setup.tier.fetches[0], 0, Outcome.CANCELLED)
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
    setup.exchange.computed(1000, 0.01)
    setup.exchange.takes(request)
    setup.tier.events.append(Ended(1, 1, Outcome.SLOW, FILES, 1000, 9.0))
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
