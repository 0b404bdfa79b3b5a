"""The source's side of transfers, as lists of events."""

from __future__ import annotations

import random

import pytest

from engine.pieces.kinds import BoundaryKind, BoundarySlots, PieceKinds
from engine.transfers import lending
from engine.transfers.lending import (
    MOST_LOANS,
    MOST_LOANS_OF_PEER,
    MOST_UNREAD,
    Action,
    Lender,
    Lookup,
    Return,
    SendPiece,
    SendToTaker,
)
from engine.transfers.messages import Enough, Held, Lent, LoanRefused, LoanRequest, WindowGrant, joined
from tests.nightly import examples

NAMES = [bytes([index]) * 16 for index in range(7)]


def asking(number: int = 1, count: int = 7, pieces: int = 2, identity: str = "same") -> LoanRequest:
    return LoanRequest(number, identity, joined(NAMES[:count]), pieces)


@pytest.fixture
def lender() -> Lender:
    return Lender("same", blocks_per_piece=2)


def test_a_loan_is_looked_up_then_read_as_room_is_granted(lender: Lender) -> None:
    assert lender.received(b"t", asking()) == [Lookup((b"t", 1), NAMES)]
    assert lender.found((b"t", 1), [4, 2, 9, 7, 1]) == [
        SendToTaker(b"t", Lent(1, 5)),
        SendPiece(b"t", 1, 0, NAMES[0:2], [4, 2]),
        SendPiece(b"t", 1, 2, NAMES[2:4], [9, 7]),
    ]
    assert lender.received(b"t", WindowGrant(1, 1)) == [
        SendPiece(b"t", 1, 4, NAMES[4:5], [1]),
        Return((b"t", 1)),
    ]
    assert len(lender) == 0
    assert lender.received(b"t", WindowGrant(1, 1)) == []  # it was on the way


def test_large_pieces_are_sent_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks only above the larger bound, as instances without parts expect them."""
    monkeypatch.setattr(lending, "PART_BYTES", 10)
    monkeypatch.setattr(lending, "LARGEST_WHOLE", 20)
    kinds = PieceKinds(8, [BoundarySlots(BoundaryKind(label="state", grid=4, num_bytes=25), 3)], 4)
    for block_bytes, blocks in [(20, [None]), (21, [(0, 10), (10, 20), (20, 21)] * 2)]:
        sizes = [block_bytes] * 8 + [25] * 3
        lender = Lender("same", 2, kinds, sizes.__getitem__)
        lender.received(b"t", asking(count=2, pieces=1))
        actions = lender.found((b"t", 1), [4, 2, 9])
        while len(lender):
            actions += lender.received(b"t", WindowGrant(1, 1))
        sent = [each for each in actions if isinstance(each, SendPiece)]
        assert [each.part for each in sent] == [*blocks, (0, 10), (10, 20), (20, 25)]
        assert [each.blocks for each in sent[-3:]] == [[9]] * 3
        assert actions[-1] == Return((b"t", 1))


def test_a_loan_of_nothing_ends_at_once(lender: Lender) -> None:
    lender.received(b"t", asking())
    assert lender.found((b"t", 1), []) == [SendToTaker(b"t", Lent(1, 0)), Return((b"t", 1))]


def test_caches_that_differ_lend_nothing(lender: Lender) -> None:
    (send,) = lender.received(b"t", asking(identity="other"))
    assert send == SendToTaker(b"t", LoanRefused(1, "the caches differ", for_good=True))
    assert len(lender) == 0


def test_loans_are_bounded_by_taker_and_in_all(lender: Lender) -> None:
    for number in range(MOST_LOANS_OF_PEER):
        assert isinstance(lender.received(b"t", asking(number))[0], Lookup)
    assert isinstance(lender.received(b"t", asking(99))[0], SendToTaker)
    for peer in range(1, MOST_LOANS // MOST_LOANS_OF_PEER):
        for number in range(MOST_LOANS_OF_PEER):
            assert isinstance(lender.received(b"%d" % peer, asking(number))[0], Lookup)
    assert len(lender) == MOST_LOANS
    assert isinstance(lender.received(b"last", asking())[0], SendToTaker)


def test_a_number_that_is_open_is_not_lent_twice(lender: Lender) -> None:
    lender.received(b"t", asking())
    assert lender.received(b"t", asking()) == [
        SendToTaker(b"t", LoanRefused(1, "a loan of this number is open"))
    ]
    assert len(lender) == 1


def test_it_ends_with_the_takers_word_or_its_connection(lender: Lender) -> None:
    for number in (1, 2):
        lender.received(b"t", asking(number, pieces=1))
        lender.found((b"t", number), [0, 1, 2, 3])
    assert lender.received(b"t", Enough(1)) == [Return((b"t", 1))]
    assert lender.received(b"t", Enough(1)) == []
    assert lender.gone(b"t") == [Return((b"t", 2))]
    assert lender.gone(b"t") == []


def test_what_is_looked_up_for_a_taker_that_went_comes_back_once(lender: Lender) -> None:
    lender.received(b"t", asking())
    assert lender.gone(b"t") == []
    assert lender.received(b"t", WindowGrant(1, 1)) == []
    assert lender.found((b"t", 1), [3]) == [Return((b"t", 1))]
    assert len(lender) == 0


def test_takers_that_keep_a_loan_waiting_are_asked(lender: Lender) -> None:
    lender.received(b"t", asking(1, pieces=1))
    assert lender.waiting() == [SendToTaker(b"t", Held(1))]
    lender.found((b"t", 1), [0, 1, 2, 3])
    assert lender.waiting() == [SendToTaker(b"t", Held(1))]
    lender.received(b"t", WindowGrant(1, 1))
    assert lender.waiting() == []


def test_takers_that_may_not_have_read_all_are_asked_before_the_end(lender: Lender) -> None:
    for number in (1, 2):
        lender.received(b"t", asking(number))
        lender.found((b"t", number), [0, 1])
    for number, peer in enumerate((b"u", b"v")):
        lender.received(peer, asking(number))
        lender.found((peer, number), [0, 1])
    assert lender.farewell() == [
        SendToTaker(b"t", Held(2)),
        SendToTaker(b"u", Held(0)),
        SendToTaker(b"v", Held(1)),
    ]
    lender.gone(b"u")
    lender.received(b"t", Enough(1))
    lender.received(b"v", Enough(1))
    assert lender.farewell() == [SendToTaker(b"t", Held(2))]
    lender.received(b"t", Enough(2))
    assert lender.farewell() == []


def test_takers_that_never_answer_are_remembered_up_to_a_bound(lender: Lender) -> None:
    for number in range(MOST_UNREAD + 5):
        lender.received(b"%d" % number, asking(number))
        lender.found((b"%d" % number, number), [0, 1])
    assert len(lender.farewell()) == MOST_UNREAD


@pytest.mark.parametrize("seed", range(examples(200)))
def test_nothing_is_read_outside_a_loan_and_all_are_returned(seed: int) -> None:
    """Each loan is read while it is held, and returned once, in any order."""
    chance = random.Random(seed)
    lender = Lender("same", blocks_per_piece=chance.choice([1, 2, 3]))
    looked: list[tuple[bytes, int]] = []
    held: dict[tuple[bytes, int], list[int]] = {}
    returned = 0

    def carry_out(actions: list[Action]) -> None:
        nonlocal returned
        for action in actions:
            match action:
                case Lookup(loan, _):
                    looked.append(loan)
                case SendPiece(peer, number, _, names, blocks):
                    assert set(blocks) <= set(held[peer, number])
                    assert len(names) == len(blocks)
                case Return(loan):
                    del held[loan]
                    returned += 1
                case SendToTaker():
                    pass

    peers, found = [b"a", b"b", b"c"], 0
    for _ in range(150):
        peer, number = chance.choice(peers), chance.randrange(5)
        match chance.randrange(6):
            case 0 | 1:
                carry_out(lender.received(peer, asking(number, pieces=chance.randrange(1, 3))))
            case 2 if looked:
                loan = looked.pop(chance.randrange(len(looked)))
                held[loan] = [chance.randrange(100) for _ in range(chance.randrange(8))]
                found += 1
                carry_out(lender.found(loan, held[loan]))
            case 3:
                carry_out(lender.received(peer, WindowGrant(number, chance.randrange(1, 4))))
            case 4:
                carry_out(lender.received(peer, Enough(number)))
            case 5 if chance.random() < 0.3:
                carry_out(lender.gone(peer))
    for peer in peers:
        carry_out(lender.gone(peer))
    while looked:
        loan = looked.pop()
        held[loan] = [1]
        found += 1
        carry_out(lender.found(loan, held[loan]))
    assert held == {}
    assert returned == found
    assert len(lender) == 0
