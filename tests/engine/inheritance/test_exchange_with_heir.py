"""Requests that wait for blocks of dead instances, as lists of events."""

from __future__ import annotations

from engine.transfers.exchange import BlockExchange
from engine.transfers.fetching import DEAD, TransferOutcome
from engine.transfers.sources import MOST_SECONDS, Sources
from tests.engine.transfers.test_exchange import SIZE, FakeMover, Setup

SOURCE = f"{DEAD}/proc/1/fd/2#x"


class WithHeir(Setup):
    def __init__(self) -> None:
        super().__init__()
        self.heir = FakeMover()
        self.exchange = BlockExchange(
            self.pool, Sources(self.mover, self.price, lambda: self.now, heir=self.heir), SIZE
        )


def test_a_request_waits_for_the_blocks_of_a_dead_instance() -> None:
    setup = WithHeir()
    request = setup.request(source=SOURCE)
    assert setup.exchange.takes(request)
    (wanted,) = setup.heir.fetches
    setup.heir.ends(wanted, 7)
    assert setup.turn() == [request]
    assert setup.pool.find_prefix(request.prefix_hashes(SIZE)) == wanted.blocks[:7]
    assert setup.exchange.counters().inherited_tokens == 7 * SIZE
    assert setup.exchange.is_idle
    assert setup.mover.fetches == []


def test_a_single_block_is_inherited_too() -> None:
    setup = WithHeir()
    assert setup.exchange.takes(setup.request(SIZE + 1, source=SOURCE))


def test_what_is_not_there_is_computed() -> None:
    setup = WithHeir()
    request = setup.request(source=SOURCE)
    assert setup.exchange.takes(request)
    setup.heir.ends(setup.heir.fetches[0], 0, TransferOutcome.LOST)
    assert setup.turn() == [request]
    assert setup.pool.num_used == 0


def test_a_copy_that_hangs_keeps_no_request() -> None:
    setup = WithHeir()
    request = setup.request(source=SOURCE)
    assert setup.exchange.takes(request)
    setup.now += MOST_SECONDS + 1
    assert setup.turn() == [request]
    assert setup.heir.cancelled == [1]
    setup.mover.has_ended = True
    assert setup.turn() == []
    assert setup.pool.num_used == 10, "its thread may still write"
    setup.heir.ends(setup.heir.fetches[0], 3)
    setup.turn()
    assert setup.pool.num_used == 0


def test_without_an_heir_such_a_request_is_queued_at_once() -> None:
    setup = Setup()
    assert not setup.exchange.takes(setup.request(source=SOURCE))
    assert setup.mover.fetches == []
