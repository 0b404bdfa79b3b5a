"""Requests that another process dispatches, and instances that an endpoint picker chose."""

from __future__ import annotations

import pytest

from coordinator.messages import Load, Member, State, View
from engine.messages import BlockEvents, Capacity, Counters, InstanceReport
from engine.pieces.pool import prefix_names
from engine.sampling import SamplingParams
from router.dispatch.chooser import Chooser
from router.dispatch.ledger import Entry, Ledger
from router.dispatch.pool import Pool, PooledInstance
from router.dispatch.reservations import COUNTED_FOR, EXPECTED_FOR, Reservations
from router.mesh import MeshError, Prompt

BLOCK = 16
CAPACITY = Capacity(
    block_size=BLOCK, num_blocks=100, max_num_seqs=8, max_num_batched_tokens=512, max_num_queued_reqs=0
)


def pool_of(count: int) -> Pool:
    pool = Pool()
    members = [
        Member(
            instance=f"i{rank}", rank=rank, state=State.READY, phase="serving", address="tcp://a:1", host="h",
            pid=rank, load=Load(),
        )
        for rank in range(count)
    ]  # fmt: skip
    pool.apply(View(epoch=1, size=count, settings=None, members=members, waiting_for=""), 0.0)
    for instance in pool:
        instance.attached, instance.capacity = True, CAPACITY
    return pool


def report(running: int = 0, waiting: int = 0) -> InstanceReport:
    return InstanceReport(0, running, waiting, 0, 0, 100, Counters())


def prompt(first: int = 0, length: int = 64, **fields: object) -> Prompt:
    ids = list(range(first, first + length))
    return Prompt(request_id="r", prompt_ids=ids, params=SamplingParams(), seed=0, **fields)


def test_requests_of_a_moment_spread_though_no_report_has_come() -> None:
    book = Reservations(pool_of(2))
    ranks = [book.make(prompt(1000 * number), 1.0).instance.rank for number in range(6)]
    assert sorted(ranks) == [0, 0, 0, 1, 1, 1]
    assert book.num_open == 6


def test_a_reservation_counts_until_reports_hold_it() -> None:
    pool = pool_of(2)
    book = Reservations(pool)
    made = book.make(prompt(), 1.0)
    made.instance.take_report(report(), 1.1)
    assert made.instance.waiting == 1, "the report may be older than the request"
    made.instance.take_report(report(running=1), 1.0 + COUNTED_FOR)
    book.look(1.0 + COUNTED_FOR)
    assert made.instance.candidate(2.0).requests == 1, "counted once"
    assert made.instance.waiting == 0


def test_a_prefix_attracts_while_it_is_computed_and_from_then_on_as_reported() -> None:
    pool = pool_of(2)
    book = Reservations(pool)
    first = book.make(prompt(length=160), 1.0)
    first.instance.take_report(report(), 1.1)
    book.end(first, 1.2)
    later = 1.0 + COUNTED_FOR
    again = book.make(prompt(length=160), later)
    assert again.instance is first.instance, "its blocks are expected there"
    book.end(again, later)
    book.look(later + EXPECTED_FOR)
    assert pool.index.num_expected(first.instance.name) == 0
    names = prefix_names(prompt(length=160).prompt_ids, BLOCK, "")
    stored = b"".join(name.to_bytes(8, "big") for name in names)
    other = next(each for each in pool if each is not first.instance)
    pool.index.apply(other.name, BlockEvents(0, len(names), reset=True, stored=stored))
    assert book.make(prompt(length=160), 5.0).instance is other


def test_nothing_is_left_of_what_has_ended() -> None:
    pool = pool_of(2)
    book = Reservations(pool)
    made = [book.make(prompt(1000 * number), 1.0) for number in range(4)]
    for each in made:
        book.end(each, 1.5)
        book.end(each, 1.5)
    book.look(10.0)
    assert book.num_open == 0
    assert len(book._ledger) == 0
    assert not book._uncounted
    assert not book._ended
    assert [pool.index.num_expected(each.name) for each in pool] == [0, 0]


def test_a_lost_instance_takes_its_reservations_along() -> None:
    pool = pool_of(2)
    book = Reservations(pool)
    made = book.make(prompt(), 1.0)
    pool.index.forget(made.instance.name)
    made.instance.lost(1.1)
    other = book.make(prompt(), 1.2)
    assert other.instance is not made.instance
    book.end(made, 1.3)
    book.look(9.0)


def test_without_an_instance_there_is_no_reservation() -> None:
    with pytest.raises(MeshError):
        Reservations(Pool()).make(prompt(), 1.0)


# ---- the router's side


def choose(pool: Pool, asked: Prompt, **fields: object) -> PooledInstance:
    entry = Entry(asked)
    for name, value in fields.items():
        setattr(entry, name, value)
    return Chooser(pool, Ledger()).choose(entry, 1.0)


def test_the_preferred_instance_is_taken_where_it_can_take_the_request() -> None:
    pool = pool_of(3)
    busy = next(each for each in pool if each.rank == 2)
    busy.take_report(report(running=3), 0.5)
    assert choose(pool, prompt()).rank != 2
    assert choose(pool, prompt(preferred=2)).rank == 2
    assert choose(pool, prompt(preferred=2, rank=1)).rank == 1, "what the client asks for goes first"
    assert choose(pool, prompt(preferred=7)).rank != 7, "there is none of that rank"


@pytest.mark.parametrize("why", ["draining", "stalled", "full", "failed", "unattached", "small"])
def test_another_instance_is_taken_where_the_preferred_one_cannot(why: str) -> None:
    pool = pool_of(2)
    preferred = next(each for each in pool if each.rank == 1)
    fields: dict[str, object] = {}
    asked = prompt(preferred=1)
    match why:
        case "draining":
            preferred.leaves = True
        case "stalled":
            load = Load(running=1, stalled_for=60.0)
            preferred.member = Member(
                instance="i1", rank=1, state=State.READY, phase="serving", address="tcp://a:1", host="h",
                pid=1, load=load,
            )  # fmt: skip
        case "full":
            preferred.take_report(report(running=8, waiting=1), 0.5)
        case "failed":
            fields["failed_ranks"] = frozenset({1})
        case "unattached":
            preferred.attached = False
        case "small":
            preferred.capacity = Capacity(
                block_size=BLOCK,
                num_blocks=2,
                max_num_seqs=8,
                max_num_batched_tokens=512,
                max_num_queued_reqs=9,
            )
    assert choose(pool, asked, **fields).rank == 0
