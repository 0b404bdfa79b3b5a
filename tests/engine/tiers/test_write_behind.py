"""Which blocks are written to files, as lists of events."""

from __future__ import annotations

import random

from engine.tiers.write_behind import PAUSE, WriteBehind, Writing

NAMES = [bytes([number]) * 16 for number in range(40)]


class Setup:
    def __init__(self, window: int = 3, most_pending: int = 100) -> None:
        self.kept: set[bytes] = set()
        self.policy = WriteBehind(self.kept, window, most_pending)
        self.computed = {name: number for number, name in enumerate(NAMES)}

    def due(self, now: float = 0.0) -> list[Writing]:
        return self.policy.due(now, self.computed.get)

    def ends(self, writing: Writing, now: float = 0.0, *, is_written: bool = True) -> None:
        assert self.policy.ended(writing.name, now, is_written=is_written) == writing.block
        if is_written:
            self.kept.add(writing.name)


def test_blocks_are_written_in_order_a_few_at_a_time() -> None:
    setup = Setup()
    for name in NAMES[:5]:
        setup.policy.stored(name)
    first = setup.due()
    assert first == [Writing(name, number) for number, name in enumerate(NAMES[:3])]
    assert setup.due() == []
    setup.ends(first[0])
    assert setup.due() == [Writing(NAMES[3], 3)]
    for each in first[1:]:
        setup.ends(each)
    assert setup.due() == [Writing(NAMES[4], 4)]
    assert len(setup.policy) == 0


def test_a_block_that_is_not_computed_yet_waits_and_so_do_those_behind_it() -> None:
    setup = Setup()
    for name in NAMES[:3]:
        setup.policy.stored(name)
    del setup.computed[NAMES[1]]
    assert setup.due() == [Writing(NAMES[0], 0)]
    setup.computed[NAMES[1]] = 7
    assert setup.due() == [Writing(NAMES[1], 7), Writing(NAMES[2], 2)]


def test_what_has_a_file_is_not_written_again() -> None:
    setup = Setup()
    setup.kept.add(NAMES[0])
    for name in NAMES[:3]:
        setup.policy.stored(name)
    setup.kept.add(NAMES[1])  # another instance wrote it meanwhile
    assert setup.due() == [Writing(NAMES[2], 2)]
    setup.policy.stored(NAMES[2])  # named anew while it is written
    assert len(setup.policy) == 0
    assert setup.policy.num_skipped == 0


def test_what_the_cache_drops_before_its_turn_is_counted_and_not_written() -> None:
    setup = Setup(window=1)
    for name in NAMES[:3]:
        setup.policy.stored(name)
    (first,) = setup.due()
    setup.policy.dropped(NAMES[1])
    setup.policy.dropped(NAMES[30])  # never stored here
    setup.ends(first)
    assert setup.due() == [Writing(NAMES[2], 2)]
    assert setup.policy.num_skipped == 1


def test_more_than_can_wait_are_left_out_the_newest_first() -> None:
    setup = Setup(window=4, most_pending=4)
    for name in NAMES[:6]:
        setup.policy.stored(name)
    assert [each.name for each in setup.due()] == NAMES[:4]
    assert setup.policy.num_skipped == 2


def test_after_a_failure_nothing_is_tried_for_a_while() -> None:
    setup = Setup(window=1)
    for name in NAMES[:4]:
        setup.policy.stored(name)
    (first,) = setup.due(now=10.0)
    setup.ends(first, now=11.0, is_written=False)
    assert (setup.policy.num_failed, setup.policy.num_skipped) == (1, 3)
    setup.policy.stored(NAMES[9])
    assert setup.due(now=11.0 + PAUSE - 0.1) == []
    assert setup.due(now=11.0 + PAUSE) == [Writing(NAMES[9], 9)]


def test_any_order_of_events_keeps_the_bounds_and_writes_nothing_twice() -> None:
    for seed in range(200):
        draw, setup = random.Random(seed), Setup(window=2, most_pending=5)
        writing: list[Writing] = []
        written: list[bytes] = []
        for _ in range(100):
            name = draw.choice(NAMES[:12])
            match draw.randrange(4):
                case 0 | 1:
                    setup.policy.stored(name)
                case 2:
                    setup.policy.dropped(name)
                case _ if writing:
                    each = writing.pop(draw.randrange(len(writing)))
                    setup.ends(each)
                    written.append(each.name)
            writing += setup.due()
            assert len(writing) == setup.policy.num_held <= 2
            assert len(setup.policy) <= 5
        assert len(written) == len(set(written))
