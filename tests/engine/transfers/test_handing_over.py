"""Running requests that are handed over with their partly filled block, as lists of events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.pieces.pool import PiecePool
from engine.scheduling.request import Request, Status
from engine.transfers.exchange import AHEAD
from engine.transfers.fetching import TransferEnded, TransferOutcome
from engine.transfers.handing_over import HandOvers, tail_of
from engine.transfers.lending import Lookup, Return
from engine.transfers.messages import NO_BLOCK
from tests.engine.transfers.test_exchange import LOAN, SIZE, Setup

HOLDER = ("router-1", 7)


def running(setup: Setup, length: int = 5 * SIZE + 4) -> Request:
    """A request of ``length`` tokens, all of which but the newest are computed."""
    request = setup.request(length)
    blocks = setup.pool.take(-(-length // SIZE))
    assert blocks is not None
    request.status, request.blocks, request.num_computed = Status.RUNNING, blocks, length - 1
    for block, name in zip(blocks, request.hashes_up_to((length - 1) // SIZE, SIZE), strict=False):
        setup.pool.name(block, name)
    return request


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_what_a_taker_lacks_ends_with_the_partly_filled_block(setup: Setup) -> None:
    request = running(setup)
    names = request.hashes_up_to(5, SIZE)
    tail = tail_of(request, SIZE, names[2])
    assert tail is not None
    assert (tail.names[:-1], tail.blocks, tail.has_part) == (names[3:], request.blocks[3:], True)
    assert tail.names[-1] == request.name_of_part(SIZE)
    whole = tail_of(request, SIZE, NO_BLOCK)
    assert whole is not None
    assert whole.blocks == request.blocks
    assert tail_of(request, SIZE, b"x" * 16) is None
    request.status = Status.WAITING
    waiting = tail_of(request, SIZE, b"x" * 16)
    assert waiting is not None
    assert not waiting.blocks


def test_names_of_parts_are_those_of_their_tokens_and_no_others(setup: Setup) -> None:
    names = {setup.request(length).name_of_part(SIZE) for length in range(2, 60)}
    names |= {setup.request(length, first=1).name_of_part(SIZE) for length in range(2, 60)}
    assert len(names) == 2 * (58 - 3) + 1
    assert None in names, "nothing is behind the last full block"


@pytest.mark.parametrize("length", [4, SIZE + 4])
def test_names_of_parts_differ_by_salt(setup: Setup, length: int) -> None:
    names = set()
    for salt in ("", "a", "b"):
        request = setup.request(length)
        request.cache_salt = salt
        names.add(request.name_of_part(SIZE))
    assert len(names) == 3


def test_a_request_goes_once_it_is_in_no_step_and_its_blocks_are_held(setup: Setup) -> None:
    request = running(setup)
    request.num_in_flight = 1
    look = Lookup(LOAN, [request.hashes[4]], HOLDER, AHEAD)
    setup.mover.events.append(look)
    assert setup.exchange.turn(set, lambda holder: request if holder == HOLDER else None) == []
    assert setup.exchange.take_handed_over() == []
    assert not setup.exchange.is_idle
    request.num_in_flight = 0
    setup.exchange.turn(set, lambda _: request)
    assert setup.exchange.take_handed_over() == [request.key]
    assert setup.mover.handed == {LOAN: ([request.name_of_part(SIZE)], request.blocks[5:], True)}
    setup.pool.release(request.blocks)  # it is forgotten
    assert setup.pool.num_used == 1, "the part is being read"
    setup.mover.events.append(Return(LOAN))
    setup.turn()
    assert setup.exchange.is_idle
    assert setup.pool.num_used == 0


def test_what_is_refused(setup: Setup) -> None:
    request = running(setup)
    setup.mover.events += [
        Lookup((b"t", 1), [request.hashes[4]], HOLDER, 0),
        Lookup((b"t", 2), [b"x" * 16], HOLDER, 9),
    ]
    setup.exchange.turn(set, lambda _: request)
    setup.mover.events += [Lookup((b"t", 3), [request.hashes[4]], HOLDER, 9)]
    setup.turn()
    assert list(setup.mover.refused.values()) == [
        "the request has outgrown the room for it", "the block is none of the request", "the request is not here"
    ]  # fmt: skip
    assert setup.exchange.take_handed_over() == []


def test_two_that_ask_for_the_same_request_do_not_both_get_it(setup: Setup) -> None:
    request, asked = running(setup), HandOvers(PiecePool(1), SIZE)
    for number in (1, 2):
        asked.add(Lookup((b"t", number), [request.hashes[4]], HOLDER, AHEAD))
    assert [found is request for _, found, _ in asked.due(lambda _: request)] == [True, False]


def test_a_request_waits_for_its_blocks_and_goes_on_in_the_last_one(setup: Setup) -> None:
    """Four of its blocks were known when it was asked for; it has grown since."""
    there = running(Setup())
    known = there.hashes_up_to(4, SIZE)
    blocks = setup.pool.take(4)
    assert blocks is not None
    for block, name in zip(blocks, known, strict=True):
        setup.pool.name(block, name)
    setup.pool.release(blocks)
    setup.exchange.take_over((b"router", 3), known, "s", HOLDER)
    (wanted,) = setup.mover.fetches
    assert (wanted.names, len(wanted.blocks), wanted.holder) == ([known[-1]], AHEAD, HOLDER)
    request = setup.request(5 * SIZE + 4, source="")
    request.copy = 3
    assert setup.exchange.takes(request)
    names = [*there.hashes_up_to(5, SIZE)[4:], there.name_of_part(SIZE)]
    end = TransferEnded(wanted.number, 2, TransferOutcome.WHOLE, "s", 2000, 0.01)
    setup.mover.events.append(replace(end, names=names, has_part=True, was_lent=True))
    assert setup.turn() == [request]
    assert setup.exchange.take_copied() == [((b"router", 3), 4 * SIZE, True)]
    assert len(setup.pool.find_prefix(request.prefix_hashes(SIZE))) == 5
    part = setup.pool.parts.find(request.name_of_part(SIZE) or b"")
    assert part == wanted.blocks[1]
    assert setup.pool.num_used == 0
    setup.pool.go_on_in(part)
    assert setup.pool.num_used == 1
    assert setup.pool.parts.find(request.name_of_part(SIZE) or b"") is None, "no other request goes on in it"


def test_a_request_waits_for_many_blocks_only_if_fetching_pays(setup: Setup) -> None:
    names = running(setup, (AHEAD + 2) * SIZE + 4).prefix_hashes(SIZE)
    setup.pool.unname(list(setup.pool.known))
    setup.price.computed(1000, 0.001)
    setup.price.fetched(1000, 10.0, setup.now)
    for number, lacking in enumerate((AHEAD + 1, AHEAD)):
        setup.exchange.take_over((b"router", number), names[:lacking], "s", HOLDER)
    assert setup.exchange.take_copied() == [((b"router", 0), 0, False)]
    assert [len(wanted.blocks) for wanted in setup.mover.fetches] == [2 * AHEAD]


def test_parts_leave_the_cache_like_other_blocks_when_room_is_needed() -> None:
    pool = PiecePool(2)
    (block,) = pool.take(1) or ()
    pool.parts.name(block, b"part")
    pool.release([block])
    assert pool.parts.find(b"part") == block
    assert list(pool.known) == [], "routers do not hear of it"
    assert pool.take(2) is not None
    assert pool.parts.find(b"part") is None


def test_requests_with_equal_tokens_go_on_in_a_block_each() -> None:
    pool = PiecePool(4)
    blocks = pool.take(2) or []
    for block in blocks:
        pool.parts.name(block, b"part")
    assert pool.parts.find(b"part") is None, "both are held"
    pool.release(blocks)
    found = []
    while (part := pool.parts.find(b"part")) is not None:
        pool.go_on_in(part)
        found.append(part)
    assert sorted(found) == sorted(blocks)
