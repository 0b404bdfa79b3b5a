"""What the step loop holds for transfers, and which requests wait, as lists of events."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from engine.messages import Submit
from engine.pieces.pool import PiecePool, hash_block
from engine.sampling import SamplingParams
from engine.scheduling.request import Request, from_submit
from engine.transfers.copies import MOST_COPIES
from engine.transfers.exchange import BlockExchange
from engine.transfers.fetching import TransferEnded, TransferOutcome, Wanted
from engine.transfers.lending import Key, Lookup, Return
from engine.transfers.loans import LENT_PART
from engine.transfers.price import FEWEST, UNKNOWN, WORTH, FetchPrice
from engine.transfers.sources import Sources
from tests.nightly import examples

SIZE = 16
LOAN: Key = (b"taker", 1)


class FakeMover:
    """Notes what it is asked for; its events are those of the test."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.fetches: list[Wanted] = []
        self.cancelled: list[int] = []
        self.answers: dict[Key, list[int]] = {}
        self.handed: dict[Key, Any] = {}
        self.refused: dict[Key, str] = {}
        self.has_ended = False

    def take_events(self) -> list[Any]:
        found, self.events = self.events, []
        return found

    def fetch(self, wanted: Wanted) -> None:
        self.fetches.append(wanted)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def found(self, loan: Key, blocks: Sequence[int]) -> None:
        self.answers[loan] = list(blocks)

    def handed_over(
        self, loan: Key, names: Sequence[bytes], blocks: Sequence[int], *, has_part: bool
    ) -> None:
        self.handed[loan] = names, blocks, has_part

    def refuse(self, loan: Key, reason: str) -> None:
        self.refused[loan] = reason

    def same(self, one: int, other: int) -> bool:
        raise AssertionError("nothing is checked here")

    def ends(
        self, wanted: Wanted, count: int, outcome: TransferOutcome = TransferOutcome.WHOLE, **more: Any
    ) -> None:
        self.events.append(
            TransferEnded(wanted.number, count, outcome, wanted.source, count * 1000, 0.01, **more)
        )


class Setup:
    def __init__(self, num_blocks: int = 40) -> None:
        self.pool = PiecePool(num_blocks)
        self.mover = FakeMover()
        self.price = FetchPrice(100.0)
        self.now = 100.0
        self.in_flight: set[int] = set()
        self.exchange = BlockExchange(
            self.pool,
            Sources(self.mover, self.price, lambda: self.now),
            SIZE,
            in_flight=lambda: self.in_flight,
        )
        self.arrivals = 0

    def request(self, length: int = 10 * SIZE + 3, first: int = 0, source: str = "s") -> Request:
        self.arrivals += 1
        submit = Submit(
            request=self.arrivals,
            request_id="r",
            prompt_ids=list(range(first, first + length)),
            params=SamplingParams(max_tokens=4),
            seed=0,
            blocks_at=source,
        )
        return from_submit(submit, b"router", arrival=self.arrivals, eos_ids=(), max_model_len=10_000)

    def turn(self) -> list[Request]:
        return self.exchange.turn(set)

    def computed(self, request: Request) -> list[int]:
        """Put the blocks of a request into the cache, as if it had ended."""
        names = request.prefix_hashes(SIZE)
        blocks = self.pool.take(len(names))
        assert blocks is not None
        for block, name in zip(blocks, names, strict=True):
            self.pool.name(block, name)
        self.pool.release(blocks)
        return blocks


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_a_request_waits_for_its_blocks_and_finds_them(setup: Setup) -> None:
    request = setup.request()
    assert setup.exchange.takes(request)
    (wanted,) = setup.mover.fetches
    assert wanted.names == request.prefix_hashes(SIZE)
    assert setup.pool.num_used == 10
    assert request.key in setup.exchange.waiting
    assert setup.turn() == []
    setup.mover.ends(wanted, 10)
    assert setup.turn() == [request]
    assert setup.pool.find_prefix(request.prefix_hashes(SIZE)) == wanted.blocks
    assert setup.pool.num_used == 0
    assert setup.exchange.is_idle
    assert setup.exchange.counters().fetched_tokens == 160


def test_what_is_here_is_not_fetched_again(setup: Setup) -> None:
    setup.computed(setup.request(4 * SIZE + 1))
    request = setup.request()
    assert setup.exchange.takes(request)
    assert setup.mover.fetches[0].names == request.prefix_hashes(SIZE)[4:]
    assert not setup.exchange.takes(setup.request(4 * SIZE + 1))


def test_blocks_that_did_not_come_have_no_names(setup: Setup) -> None:
    request = setup.request()
    setup.exchange.takes(request)
    setup.mover.ends(setup.mover.fetches[0], 3, TransferOutcome.LOST)
    assert setup.turn() == [request]
    assert len(setup.pool.find_prefix(request.prefix_hashes(SIZE))) == 3
    assert setup.pool.num_used == 0
    assert request.num_fetched == 48


@pytest.mark.parametrize("why", ["no source", "short", "dear", "no room", "ended", "no caching"])
def test_what_is_computed_at_once(setup: Setup, why: str) -> None:
    request = setup.request()
    match why:
        case "no source":
            request = setup.request(source="")
        case "short":
            request = setup.request(FEWEST)
        case "dear":
            setup.price.computed(1000, 0.1)
            setup.price.fetched(1000, 1.0, setup.now)
        case "no room":
            assert setup.pool.take(36) is not None
        case "ended":
            setup.mover.has_ended = True
        case "no caching":
            setup.exchange._pool = PiecePool(40, enable_prefix_caching=False)
    assert not setup.exchange.takes(request)
    assert setup.mover.fetches == []


def test_requests_with_the_same_prefix_wait_for_one_transfer(setup: Setup) -> None:
    first, second = setup.request(), setup.request(12 * SIZE + 1)
    assert setup.exchange.takes(first)
    assert setup.exchange.takes(second)
    assert len(setup.mover.fetches) == 1
    assert len(setup.exchange.waiting) == 2
    setup.exchange.forget(first.key)
    assert setup.mover.cancelled == []
    setup.mover.ends(setup.mover.fetches[0], 10)
    assert setup.turn() == [second]


def test_room_of_a_cancelled_transfer_is_kept_until_it_has_ended(setup: Setup) -> None:
    """The mover may be writing there just now."""
    request = setup.request()
    setup.exchange.takes(request)
    assert setup.exchange.forget(request.key)
    assert not setup.exchange.forget(request.key)
    assert setup.mover.cancelled == [1]
    assert setup.pool.num_used == 10
    setup.mover.ends(setup.mover.fetches[0], 2, TransferOutcome.CANCELLED)
    assert setup.turn() == []
    assert setup.pool.num_used == 0


def test_lent_blocks_are_held_until_they_return(setup: Setup) -> None:
    request = setup.request(6 * SIZE + 1)
    blocks = setup.computed(request)
    names = request.prefix_hashes(SIZE)
    setup.mover.events.append(Lookup(LOAN, [*names, b"x" * 16]))
    setup.turn()
    assert setup.mover.answers == {LOAN: blocks}
    taken = setup.pool.take(34)
    assert taken is not None
    assert not set(taken) & set(blocks)
    assert setup.pool.take(1) is None  # never one that is read
    setup.mover.events.append(Return(LOAN))
    setup.turn()
    assert setup.pool.num_free == 6


def test_blocks_that_are_being_filled_are_not_lent(setup: Setup) -> None:
    request = setup.request(6 * SIZE + 1)
    blocks = setup.computed(request)
    setup.mover.events.append(Lookup(LOAN, request.prefix_hashes(SIZE)))
    setup.exchange.turn(lambda: {blocks[2]})
    assert setup.mover.answers == {LOAN: blocks[:2]}


def test_no_more_than_a_part_of_the_cache_is_kept_from_requests_by_loans() -> None:
    setup = Setup(40)
    request = setup.request(20 * SIZE + 1)
    setup.computed(request)
    setup.mover.events.append(Lookup(LOAN, request.prefix_hashes(SIZE)))
    setup.turn()
    assert len(setup.mover.answers[LOAN]) == 40 // LENT_PART
    setup.mover.events.append(Lookup((b"taker", 2), request.prefix_hashes(SIZE)))
    setup.turn()
    assert len(setup.mover.answers[b"taker", 2]) == 40 // LENT_PART  # they are held already


def test_blocks_of_running_requests_are_lent_without_limit() -> None:
    setup = Setup(40)
    request = setup.request(20 * SIZE + 1)
    blocks = setup.computed(request)
    setup.pool.hold(blocks)
    setup.mover.events.append(Lookup(LOAN, request.prefix_hashes(SIZE)))
    setup.turn()
    assert setup.mover.answers[LOAN] == blocks


def test_a_wrong_source_is_not_asked_again(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    setup.exchange.takes(setup.request())
    setup.mover.ends(setup.mover.fetches[0], 0, TransferOutcome.WRONG, for_good=True)
    setup.turn()
    assert "KV blocks of s are not asked for any more: what it sent is not what it named" in caplog.text
    assert not setup.exchange.takes(setup.request(first=1000))
    assert setup.exchange.takes(setup.request(first=1000, source="another"))


def test_free_blocks_that_a_step_still_touches_are_not_written(setup: Setup) -> None:
    """Its request was aborted, and workers are not done with it."""
    setup.in_flight = {9}  # of those that are taken next
    assert not setup.exchange.takes(setup.request())
    setup.exchange.take_over((b"router", 1), setup.request().prefix_hashes(SIZE), "s", ("router", 5))
    assert setup.exchange.take_copied() == [((b"router", 1), 0, False)]
    assert setup.pool.num_used == 0
    assert setup.exchange.is_idle
    assert not setup.mover.fetches
    setup.in_flight = {39}
    assert setup.exchange.takes(setup.request())
    setup.in_flight = set()


def test_without_the_mover_nothing_is_held(setup: Setup) -> None:
    request = setup.request(first=500)
    setup.computed(setup.request())
    setup.mover.events.append(Lookup(LOAN, setup.request().prefix_hashes(SIZE)))
    setup.turn()
    setup.exchange.takes(request)
    assert setup.pool.num_used == 20
    setup.mover.has_ended = True
    assert setup.turn() == [request]
    assert setup.pool.num_used == 0
    assert setup.exchange.is_idle


@pytest.mark.parametrize("seed", range(examples(100)))
def test_every_reference_ends_in_any_order_of_events(seed: int) -> None:
    chance = random.Random(seed)
    setup = Setup(chance.choice([20, 60]))
    loans: set[Key] = set()
    open_transfers: dict[int, Wanted] = {}
    waiting: dict[Any, Request] = {}
    ready: list[Request] = []
    for number in range(150):
        match chance.randrange(6):
            case 0 | 1:
                request = setup.request(chance.randrange(1, 20) * SIZE + 1, first=chance.randrange(3) * 1000)
                if setup.exchange.takes(request):
                    waiting[request.key] = request
                open_transfers |= {each.number: each for each in setup.mover.fetches}
                setup.mover.fetches.clear()
            case 2 if open_transfers:
                wanted = open_transfers.pop(chance.choice(list(open_transfers)))
                setup.mover.ends(
                    wanted, chance.randrange(len(wanted.names) + 1), chance.choice(list(TransferOutcome))
                )
            case 3 if waiting:
                key = chance.choice(list(waiting))
                del waiting[key]
                setup.exchange.forget(key)
            case 4:
                loan = (b"t", number)
                loans.add(loan)
                setup.mover.events.append(
                    Lookup(loan, setup.request(200, first=chance.randrange(3) * 1000).prefix_hashes(SIZE))
                )
            case 5 if loans & set(setup.mover.answers):
                loan = chance.choice(sorted(loans & set(setup.mover.answers)))
                loans.remove(loan)
                setup.mover.events.append(Return(loan))
        for request in setup.turn():
            del waiting[request.key]
            ready.append(request)
    for wanted in open_transfers.values():
        setup.mover.ends(wanted, 0, TransferOutcome.LOST)
    for request in setup.turn():
        del waiting[request.key]
    setup.mover.events += [Return(loan) for loan in loans]
    setup.turn()
    assert setup.exchange.is_idle
    assert setup.pool.num_used == 0
    assert not waiting
    assert len(setup.exchange.waiting) == 0


def test_the_price_follows_both_speeds_and_a_bad_one_fades() -> None:
    price = FetchPrice(1000.0)
    assert price.at(0.0) == UNKNOWN
    price.computed(500, 0.5)  # 1 ms a token
    price.fetched(1_000_000, 0.1, 10.0)  # 0.1 ms a token
    assert price.at(10.0) == pytest.approx(0.1)
    assert price.pays(FEWEST, 10.0)
    assert not price.pays(FEWEST - 1, 10.0)
    for _ in range(20):
        price.fetched(1_000_000, 3.0, 20.0)
    assert price.at(20.0) > WORTH
    assert not price.pays(10_000, 20.0)
    assert price.pays(10_000, 20.0 + 600.0)  # it is tried again
    assert price.seconds_to_compute(100) == pytest.approx(0.1)


def test_names_of_blocks_are_those_of_their_tokens(setup: Setup) -> None:
    request = setup.request(2 * SIZE + 1)
    setup.exchange.takes(setup.request())
    first = hash_block(None, list(range(SIZE)))
    assert request.prefix_hashes(SIZE)[0] == setup.mover.fetches[0].names[0] == first


# ---- copies of requests that run elsewhere


def copy(setup: Setup, number: int, request: Request, source: str = "s") -> None:
    setup.exchange.copy((b"router", number), request.prefix_hashes(SIZE), source)


def test_a_copy_ends_with_the_tokens_that_the_cache_has(setup: Setup) -> None:
    request = setup.request()
    setup.computed(setup.request(2 * SIZE + 1))
    copy(setup, 1, request)
    (wanted,) = setup.mover.fetches
    assert wanted.names == request.prefix_hashes(SIZE)[2:]
    assert setup.exchange.take_copied() == []
    setup.mover.ends(wanted, 5, TransferOutcome.LOST)
    assert setup.turn() == []
    assert setup.exchange.take_copied() == [((b"router", 1), 7 * SIZE, False)]
    assert setup.exchange.is_idle


def test_a_copy_is_made_at_any_price_and_of_one_block(setup: Setup) -> None:
    setup.price.computed(1000, 0.001)
    setup.price.fetched(1000, 10.0, setup.now)
    assert not setup.exchange.takes(setup.request())
    copy(setup, 1, setup.request(SIZE + 1))
    assert [len(each.names) for each in setup.mover.fetches] == [1]


def test_what_cannot_be_copied_is_answered_at_once(setup: Setup) -> None:
    here = setup.request(3 * SIZE + 1)
    setup.computed(here)
    copy(setup, 1, here)
    copy(setup, 2, setup.request(first=500), source="")
    setup.mover.has_ended = True
    copy(setup, 3, setup.request(first=500))
    assert setup.exchange.take_copied() == [
        ((b"router", n), size, False) for n, size in ((1, 48), (2, 0), (3, 0))
    ]
    assert setup.mover.fetches == []


def test_copies_are_bounded() -> None:
    setup = Setup(num_blocks=4000)
    for number in range(MOST_COPIES + 2):
        copy(setup, number, setup.request(first=200 * number))
    assert len(setup.mover.fetches) == MOST_COPIES
    assert [key[1] for key, _, _ in setup.exchange.take_copied()] == [MOST_COPIES, MOST_COPIES + 1]


def test_copies_of_a_router_that_is_gone_are_cancelled_unless_a_request_waits(setup: Setup) -> None:
    request = setup.request()
    copy(setup, 1, request)
    assert setup.exchange.takes(request)
    assert len(setup.mover.fetches) == 1, "it waits for the copy"
    setup.exchange.forget_copies(b"router")
    assert setup.mover.cancelled == []
    copy(setup, 2, setup.request(first=500))
    setup.exchange.forget_copies(b"another")
    assert setup.mover.cancelled == []
    setup.exchange.forget_copies(b"router")
    assert setup.mover.cancelled == [setup.mover.fetches[1].number]
    setup.mover.ends(setup.mover.fetches[1], 0, TransferOutcome.CANCELLED)
    setup.mover.ends(setup.mover.fetches[0], 10)
    assert setup.turn() == [request]
    assert setup.exchange.take_copied() == []


def test_copies_end_when_nothing_is_moved_any_more(setup: Setup) -> None:
    copy(setup, 1, setup.request())
    setup.mover.has_ended = True
    assert setup.turn() == []
    assert setup.exchange.take_copied() == [((b"router", 1), 0, False)]
    assert setup.pool.num_used == 0
