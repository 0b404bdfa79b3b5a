"""What threads read, what ends, and what a hanging disk keeps, as lists of events."""

from __future__ import annotations

import random

from engine.tiers.reads import HANGS, FileJob, Reads
from engine.transfers.fetching import FILES, TransferEnded, TransferOutcome, Wanted

NAMES = [bytes([number]) * 16 for number in range(40)]


def wanted(number: int, count: int = 3, seconds: float = 2.0) -> Wanted:
    return Wanted(number, FILES, NAMES[:count], [10 * number + each for each in range(count)], seconds)


def take(reads: Reads, now: float) -> FileJob:
    job = reads.take(now)
    assert job is not None
    return job


def ended(reads: Reads) -> list[tuple[int, int, TransferOutcome]]:
    return [(each.number, each.count, each.outcome) for each in reads.take_ended()]


def test_a_read_ends_once_its_last_block_is_there() -> None:
    reads = Reads(lambda _: 100)
    reads.ask(wanted(1), 0.0)
    first, second, third = (take(reads, 0.5) for _ in range(3))
    assert [(each.index, each.name, each.block) for each in (first, third)] == [
        (0, NAMES[0], 10),
        (2, NAMES[2], 12),
    ]
    assert reads.take(0.5) is None
    assert not reads.done(third, None, 0.6)
    assert not reads.done(first, None, 0.7)
    assert reads.done(second, None, 1.5)
    assert reads.take_ended() == [TransferEnded(1, 3, TransferOutcome.WHOLE, FILES, 300, 1.0)]
    assert len(reads) == 0


def test_the_first_block_that_lacks_ends_a_read_behind_those_under_way() -> None:
    reads = Reads(lambda _: 100)
    reads.ask(wanted(1, 9), 0.0)
    jobs = [take(reads, 0.0) for _ in range(3)]
    reads.done(jobs[2], TransferOutcome.WRONG, 0.1)
    assert reads.take(0.1) is None
    reads.done(jobs[1], TransferOutcome.LOST, 0.1)
    assert ended(reads) == []
    reads.done(jobs[0], None, 0.1)
    assert ended(reads) == [(1, 1, TransferOutcome.LOST)]


def test_the_oldest_read_is_first_and_a_free_thread_goes_on_with_the_next() -> None:
    reads = Reads(lambda _: 100)
    for number in (4, 2):
        reads.ask(wanted(number, 1), 0.0)
    assert [take(reads, 0.0).number, take(reads, 0.0).number] == [4, 2]


def test_a_read_that_was_not_begun_gives_its_room_back_when_it_is_cancelled_or_late() -> None:
    reads = Reads(lambda _: 100)
    for number in (1, 2, 3):
        reads.ask(wanted(number), 0.0)
    job = take(reads, 0.0)
    reads.cancel(2, 0.1)
    reads.cancel(7, 0.1)
    assert ended(reads) == [(2, 0, TransferOutcome.CANCELLED)]
    assert reads.look(2.0) == []
    assert reads.look(2.1) == [job.block]
    assert ended(reads) == [(1, 0, TransferOutcome.SLOW), (3, 0, TransferOutcome.CANCELLED)]


def test_a_cancelled_read_waits_for_the_block_under_way() -> None:
    reads = Reads(lambda _: 100)
    reads.ask(wanted(1), 0.0)
    job = take(reads, 0.0)
    reads.cancel(1, 0.1)
    assert ended(reads) == []
    assert reads.take(0.1) is None
    assert reads.done(job, None, 0.2)
    assert ended(reads) == [(1, 1, TransferOutcome.CANCELLED)]


def test_a_read_beyond_its_time_is_slow_and_what_is_there_counts() -> None:
    reads = Reads(lambda _: 100)
    reads.ask(wanted(1), 0.0)
    reads.done(take(reads, 0.0), None, 1.9)
    reads.done(take(reads, 1.9), None, 2.1)
    assert ended(reads) == [(1, 2, TransferOutcome.SLOW)]
    reads.ask(wanted(2, 1), 3.0)
    reads.done(take(reads, 3.0), None, 9.0)
    assert ended(reads) == [(2, 1, TransferOutcome.WHOLE)]


def test_a_call_that_hangs_keeps_its_block_alone_and_nothing_begins_until_it_returns() -> None:
    reads = Reads(lambda _: 100)
    reads.ask(wanted(1, 9), 0.0)
    first, hung = take(reads, 0.0), take(reads, 0.0)
    reads.done(first, None, 0.1)
    assert not reads.is_overdue(2.0)
    assert reads.is_overdue(2.1)
    assert reads.hangs_for(2.1) == 0.0
    assert reads.look(2.1) == [hung.block]
    assert ended(reads) == [(1, 1, TransferOutcome.SLOW)]
    reads.ask(wanted(2), 2.2)
    assert reads.take(2.2) is None
    assert reads.hangs_for(2.0 + HANGS + 5.0) == HANGS + 5.0
    assert reads.look(2.3) == []
    assert reads.take_returned() == []
    assert reads.done(hung, None, 2.4)
    assert reads.take_returned() == [hung.block]
    assert reads.take_returned() == []
    assert not reads.is_overdue(2.4)
    assert take(reads, 2.4).number == 2


def test_any_order_of_events_ends_each_read_once_and_frees_no_block_that_a_thread_fills() -> None:
    for seed in range(300):
        draw, reads, now, numbers = random.Random(seed), Reads(lambda _: 1), 0.0, 0
        references: dict[int, int] = {}
        threads: list[FileJob] = []
        open_reads: dict[int, Wanted] = {}
        for turn in range(160):
            now += draw.random() / 2
            is_last = turn > 120
            match draw.randrange(5):
                case 0 if not is_last:
                    numbers += 1
                    asked = wanted(numbers, draw.randint(1, 6), draw.choice((0.3, 1.0, 3.0)))
                    open_reads[numbers] = asked
                    references |= dict.fromkeys(asked.blocks, 1)
                    reads.ask(asked, now)
                case 1 if open_reads:
                    reads.cancel(draw.choice(list(open_reads)), now)
                case 2 | 3 if len(threads) < 2 and not is_last:
                    overdue = any(now > each.until for each in reads._reads.values() if each.busy)
                    if (job := reads.take(now)) is not None:
                        assert not overdue
                        threads.append(job)
                case _ if threads:
                    lacks = draw.choice((None, None, None, TransferOutcome.LOST, TransferOutcome.ABSENT))
                    reads.done(threads.pop(draw.randrange(len(threads))), lacks, now)
            for block in reads.look(now):
                assert references[block] == 1
                references[block] += 1
            for block in reads.take_returned():
                references[block] -= 1
            for end in reads.take_ended():
                for block in open_reads.pop(end.number).blocks:
                    references[block] -= 1
            assert all(references[job.block] > 0 for job in threads)
            held = sum(count > 0 for count in references.values())
            assert held <= sum(len(each.blocks) for each in open_reads.values()) + 2
        while threads:
            reads.done(threads.pop(), None, now)
        assert reads.look(now + 9.0) == []
        returned = reads.take_returned()
        assert sorted({end.number for end in reads.take_ended()}) == sorted(open_reads)
        gone = {block for each in open_reads.values() for block in each.blocks}
        left = {block for block, count in references.items() if count and block not in gone}
        assert sorted(returned) == sorted(left)
        assert len(reads) == 0
        assert not reads.is_overdue(now + 99.0)
