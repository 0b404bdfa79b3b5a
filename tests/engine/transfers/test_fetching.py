"""The taker's side of transfers, as lists of events."""

from __future__ import annotations

import random

import pytest

from engine.transfers.fetching import (
    MOST_ASKED,
    STALL,
    WINDOW,
    Action,
    Fetcher,
    SendToSource,
    TransferEnded,
    TransferOutcome,
    Wanted,
    Write,
)
from engine.transfers.messages import (
    BlockPiece,
    Enough,
    Held,
    Lent,
    LoanRefused,
    LoanRequest,
    WindowGrant,
    digest_of,
    digest_of_part,
    joined,
)
from tests.nightly import examples

NAMES = [bytes([index]) * 16 for index in range(6)]
BLOCKS = [11, 7, 3, 20, 21, 22]
SIZE = 8


def data_of(index: int) -> bytes:
    return bytes([index, 255 - index]) * (SIZE // 2)


def piece(first: int, count: int, number: int = 1, *, names: list[bytes] | None = None) -> BlockPiece:
    rows = range(first, first + count)
    digests = [digest_of("same", (names or NAMES)[index], data_of(index)) for index in rows]
    return BlockPiece(number, first, b"".join(digests), b"".join(data_of(index) for index in rows))


def wanted(number: int = 1, source: str = "s", seconds: float = 5.0) -> Wanted:
    return Wanted(number, source, NAMES, BLOCKS, seconds)


@pytest.fixture
def fetcher() -> Fetcher:
    found = Fetcher("same", lambda _: SIZE)
    begin(found)
    return found


def begin(fetcher: Fetcher, number: int = 1, source: str = "s", now: float = 0.0) -> None:
    fetcher.begin(wanted(number, source), now)
    assert (number, source) in fetcher.due(now)
    fetcher.asked(number)


def ended(
    outcome: TransferOutcome, count: int, seconds: float, *, for_good: bool = False, number: int = 1
) -> TransferEnded:
    return TransferEnded(number, count, outcome, "s", count * SIZE, seconds, for_good)


def written(actions: list[Action]) -> dict[int, bytes]:
    return {action.block: bytes(action.data) for action in actions if isinstance(action, Write)}


def test_blocks_are_written_where_they_go_and_room_is_granted(fetcher: Fetcher) -> None:
    assert fetcher.ask(1) == LoanRequest(1, "same", joined(NAMES), WINDOW)
    assert fetcher.received("s", Lent(1, 3), 0.1) == []
    first = fetcher.received("s", piece(0, 2), 0.2)
    assert written(first) == {11: data_of(0), 7: data_of(1)}
    assert first[-1] == SendToSource("s", WindowGrant(1, 1))
    last = fetcher.received("s", piece(2, 1), 0.3)
    assert written(last) == {3: data_of(2)}
    assert last[-1] == ended(TransferOutcome.WHOLE, 3, 0.3)
    assert len(fetcher) == 0


def part(offset: int, data: bytes, first: int = 0, name: bytes = NAMES[0]) -> BlockPiece:
    return BlockPiece(1, first, digest_of_part("same", name, offset, data), data, offset)


def test_parts_of_a_block_are_written_once_it_is_whole(fetcher: Fetcher) -> None:
    fetcher.received("s", Lent(1, 2), 0.1)
    whole = data_of(0)
    for begin, end in [(0, 3), (3, 5)]:
        (grant,) = fetcher.received("s", part(begin, whole[begin:end]), 0.2)
        assert grant == SendToSource("s", WindowGrant(1, 1))
    actions = fetcher.received("s", part(5, whole[5:]), 0.3)
    assert written(actions) == {11: whole}
    last = fetcher.received("s", piece(1, 1), 0.4)
    assert written(last) == {7: data_of(1)}
    assert last[-1] == ended(TransferOutcome.WHOLE, 2, 0.4)


@pytest.mark.parametrize(
    "wrong",
    [
        part(4, data_of(0)[4:]),
        part(2, data_of(0)[2:4]),
        part(3, b""),
        part(3, data_of(0)),
        part(3, data_of(0)[3:], name=NAMES[1]),
        BlockPiece(1, 0, digest_of_part("same", NAMES[0], 0, data_of(0)[3:]), data_of(0)[3:], 3),
        piece(0, 1),
    ],
    ids=["gap", "again", "empty", "too long", "another name", "another place", "the whole"],
)
def test_a_part_that_does_not_follow_is_wrong(fetcher: Fetcher, wrong: BlockPiece) -> None:
    fetcher.received("s", Lent(1, 2), 0.1)
    fetcher.received("s", part(0, data_of(0)[:3]), 0.2)
    actions = fetcher.received("s", wrong, 0.3)
    assert not written(actions)
    (end,) = (each for each in actions if isinstance(each, TransferEnded))
    assert (end.outcome, end.count, end.for_good) == (TransferOutcome.WRONG, 0, True)


def test_a_source_that_has_none_or_refuses_ends_it(fetcher: Fetcher) -> None:
    assert fetcher.received("s", Lent(1, 0), 0.5)[-1] == ended(TransferOutcome.ABSENT, 0, 0.5)
    begin(fetcher, 2)
    assert fetcher.received("s", LoanRefused(2, "too many"), 0.5) == [
        ended(TransferOutcome.REFUSED, 0, 0.5, number=2)
    ]
    begin(fetcher, 3)
    (end,) = fetcher.received("s", LoanRefused(3, "the caches differ", for_good=True), 0.5)
    assert end == ended(TransferOutcome.REFUSED, 0, 0.5, for_good=True, number=3)


def test_a_flipped_bit_is_not_written_and_ends_it(fetcher: Fetcher) -> None:
    fetcher.received("s", Lent(1, 6), 0.1)
    good = piece(0, 3)
    bad = BlockPiece(
        1, 0, good.digests, good.data[: SIZE + 3] + bytes([good.data[SIZE + 3] ^ 1]) + good.data[SIZE + 4 :]
    )
    actions = fetcher.received("s", bad, 0.2)
    assert written(actions) == {11: data_of(0)}
    assert actions[-2:] == [
        SendToSource("s", Enough(1)),
        TransferEnded(1, 1, TransferOutcome.WRONG, "s", 0, 0.2, for_good=True),
    ]
    assert fetcher.received("s", piece(1, 1), 0.3) == []  # late


@pytest.mark.parametrize(
    "message",
    [
        piece(1, 1),  # not the next one
        piece(0, 4),  # more than was lent
        BlockPiece(1, 0, b"d" * 16, b"short"),
        piece(0, 1, names=NAMES[::-1]),  # of another block
        Lent(1, 3),  # twice
    ],
    ids=["out of order", "too many", "torn", "another block", "lent twice"],
)
def test_what_does_not_belong_is_dropped(fetcher: Fetcher, message: BlockPiece | Lent) -> None:
    fetcher.received("s", Lent(1, 3), 0.1)
    actions = fetcher.received("s", message, 0.2)
    assert not written(actions)
    assert isinstance(actions[-1], TransferEnded)
    assert (actions[-1].outcome, actions[-1].count) == (TransferOutcome.WRONG, 0)


def test_a_piece_before_the_answer_is_wrong(fetcher: Fetcher) -> None:
    actions = fetcher.received("s", piece(0, 1), 0.2)
    assert not written(actions)
    assert isinstance(actions[-1], TransferEnded)


def test_messages_of_other_transfers_and_sources_are_dropped(fetcher: Fetcher) -> None:
    fetcher.received("s", Lent(1, 3), 0.1)
    assert fetcher.received("s", piece(0, 1, number=2), 0.2) == []
    assert fetcher.received("another", piece(0, 1), 0.2) == []
    assert written(fetcher.received("s", piece(0, 1), 0.2))


def test_a_broken_connection_keeps_what_has_come(fetcher: Fetcher) -> None:
    begin(fetcher, 2, "another")
    fetcher.received("s", Lent(1, 3), 0.1)
    fetcher.received("s", piece(0, 2), 0.2)
    assert fetcher.broke("s", 0.4) == [ended(TransferOutcome.LOST, 2, 0.4)]
    assert len(fetcher) == 1


def test_a_transfer_that_was_not_asked_for_outlives_the_connection(fetcher: Fetcher) -> None:
    fetcher.begin(wanted(2), 0.0)
    assert fetcher.due(0.0) == [(2, "s")]
    assert fetcher.broke("s", 0.4) == [ended(TransferOutcome.LOST, 0, 0.4)]
    assert fetcher.due(0.5) == [(2, "s")], "it is asked over the next one"


def test_a_handed_over_request_without_its_end_has_no_partly_filled_block() -> None:
    fetcher = Fetcher("same", lambda _: SIZE)
    fetcher.begin(Wanted(1, "s", NAMES[:1], BLOCKS, 5.0, holder=("router", 7)), 0.0)
    fetcher.due(0.0)
    fetcher.asked(1)
    fetcher.received("s", Lent(1, 3, joined(NAMES[:3]), True), 0.1)
    fetcher.received("s", piece(0, 2), 0.2)
    (over,) = fetcher.broke("s", 0.4)
    assert isinstance(over, TransferEnded)
    assert (over.count, list(over.names), over.has_part, over.was_lent) == (2, NAMES[:2], False, True)


def test_silence_ends_it_and_a_word_without_news_does_not_help(fetcher: Fetcher) -> None:
    fetcher.received("s", Lent(1, 3), 0.1)
    assert fetcher.received("s", Held(1), 0.9) == []
    assert fetcher.look(0.1 + STALL) == []
    assert fetcher.look(0.11 + STALL)[-1] == ended(TransferOutcome.SLOW, 0, 0.11 + STALL)


def test_a_trickle_ends_when_computing_would_have_been_faster(fetcher: Fetcher) -> None:
    fetcher.received("s", Lent(1, 6), 0.9)
    for index in range(5):
        assert fetcher.look(0.9 * (index + 1)) == []
        fetcher.received("s", piece(index, 1), 0.9 * (index + 2))
    (_, end) = fetcher.look(5.1)
    assert isinstance(end, TransferEnded)
    assert (end.outcome, end.count) == (TransferOutcome.SLOW, 5)


def test_a_source_that_is_never_reached_is_lost() -> None:
    fetcher = Fetcher("same", lambda _: SIZE)
    fetcher.begin(wanted(), 0.0)
    assert fetcher.due(0.0) == [(1, "s")]
    assert fetcher.look(STALL + 0.1) == [ended(TransferOutcome.LOST, 0, STALL + 0.1)]


def test_transfers_of_a_source_take_turns() -> None:
    fetcher = Fetcher("same", lambda _: SIZE)
    for number in range(MOST_ASKED + 2):
        fetcher.begin(wanted(number), 0.0)
    fetcher.begin(wanted(99, "another"), 0.0)
    assert [number for number, _ in fetcher.due(0.0)] == [*range(MOST_ASKED), 99]
    for number in range(MOST_ASKED):
        fetcher.asked(number)
    assert fetcher.received("s", Lent(0, 0), 9.0)
    assert [number for number, _ in fetcher.due(9.0)] == [MOST_ASKED, 99]
    waits = [action.number for action in fetcher.look(9.1) if isinstance(action, TransferEnded)]
    assert MOST_ASKED + 1 not in waits  # its time begins with its turn


def test_nobody_waits_any_more(fetcher: Fetcher) -> None:
    fetcher.received("s", Lent(1, 3), 0.1)
    assert fetcher.cancel(1, 0.2) == [SendToSource("s", Enough(1)), ended(TransferOutcome.CANCELLED, 0, 0.2)]
    assert fetcher.cancel(1, 0.3) == []
    assert fetcher.received("s", piece(0, 1), 0.4) == []


@pytest.mark.parametrize("seed", range(examples(200)))
def test_each_transfer_ends_once_and_writes_only_what_is_right(seed: int) -> None:
    """Any order of answers, pieces (late, doubled, torn), losses and looks."""
    chance = random.Random(seed)
    fetcher = Fetcher("same", lambda _: SIZE)
    begun: set[int] = set()
    over: dict[int, TransferEnded] = {}
    clock = 0.0

    def check(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Write):
                assert bytes(action.data) == data_of(BLOCKS.index(action.block))
            elif isinstance(action, TransferEnded):
                assert action.number in begun
                assert action.number not in over
                over[action.number] = action

    for _ in range(120):
        clock += chance.random() * 0.2
        number, source = chance.randrange(12), chance.choice(["s", "z"])
        match chance.randrange(8):
            case 0 if number not in begun:
                begun.add(number)
                fetcher.begin(wanted(number, source), clock)
            case 1:
                for due, _ in fetcher.due(clock):
                    fetcher.asked(due)
            case 2:
                check(fetcher.received(source, Lent(number, chance.randrange(7)), clock))
            case 3 | 4:
                first = chance.randrange(6)
                sent = piece(first, chance.randrange(1, 7 - first), number)
                if chance.random() < 0.2:
                    flipped = bytearray(sent.data)
                    flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
                    sent = BlockPiece(number, sent.first, sent.digests, bytes(flipped))
                check(fetcher.received(source, sent, clock))
            case 5 if chance.random() < 0.3:
                check(fetcher.broke(source, clock))
            case 6:
                check(fetcher.look(clock))
            case 7 if chance.random() < 0.3:
                check(fetcher.cancel(number, clock))
    for later in range(40):
        for due, _ in fetcher.due(clock + later):
            fetcher.asked(due)
        check(fetcher.look(clock + later + 0.5))
    assert set(over) == begun
    assert len(fetcher) == 0


def test_a_source_that_holds_blocks_of_a_transfer_that_is_over_is_told() -> None:
    assert Fetcher("x", lambda _: 4).received("s", Held(7), 0.0) == [SendToSource("s", Enough(7))]
