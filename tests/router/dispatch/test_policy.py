"""Choosing an instance: policies, chooser with its index, and recalls from queues."""

from __future__ import annotations

import math
from collections import Counter as Tally

import msgspec
import pytest

from coordinator.messages import Load, Member, State, View
from engine.messages import BlockEvents, Capacity, Counters, Delta, InstanceReport
from engine.pieces.pool import NAME_BYTES, prefix_names
from engine.sampling import SamplingParams
from router.dispatch import policy
from router.dispatch.chooser import Chooser
from router.dispatch.ledger import Entry, Ledger
from router.dispatch.policy import Candidate, Policy, Wish
from router.dispatch.pool import CROWD_TIME, Pool, PooledInstance
from router.dispatch.recalls import INTERVAL, Recaller
from router.mesh import MeshError, Prompt

CAPACITY = Capacity(16, 1000, 8, 2048, 4)


def candidate(rank: int, **fields: object) -> Candidate:
    known = {"ready": True, "stalled_for": 0.0, "waiting_tokens": 0, "requests": 0, "dispatches": 0}
    return Candidate(**{"rank": rank, **known, "capacity": CAPACITY, **fields})  # type: ignore[arg-type]


def wish(tokens: int = 100, **fields: object) -> Wish:
    return Wish(**{"tokens": tokens, **fields})  # type: ignore[arg-type]


def chosen(kind: Policy, *candidates: Candidate, **fields: object) -> int:
    return policy.pick(kind, candidates, wish(**fields)).rank  # type: ignore[arg-type]


# ---- policies


@pytest.mark.parametrize("kind", [Policy.PREFIX_AWARE, Policy.LEAST_LOADED])
def test_the_least_loaded_wins_and_equals_take_turns(kind: Policy) -> None:
    assert chosen(kind, candidate(0, requests=1), candidate(1)) == 1
    assert chosen(kind, candidate(0, waiting_tokens=10), candidate(1, waiting_tokens=500)) == 0
    assert chosen(kind, candidate(0, blocks=900), candidate(1, blocks=100)) == 1
    assert chosen(kind, candidate(0, requests=8), candidate(1, waiting_tokens=1500)) == 1, "no slot is free"
    assert chosen(kind, candidate(0, dispatches=3), candidate(1, dispatches=2)) == 1
    assert chosen(kind, candidate(1), candidate(0)) == 0


def test_a_prefix_is_worth_the_work_that_it_spares() -> None:
    near = candidate(0, cached_tokens=800, waiting_tokens=700)
    assert chosen(Policy.PREFIX_AWARE, near, candidate(1), tokens=900) == 0
    assert chosen(Policy.LEAST_LOADED, near, candidate(1), tokens=900) == 1
    far = candidate(0, cached_tokens=800, waiting_tokens=1100)
    assert chosen(Policy.PREFIX_AWARE, far, candidate(1), tokens=900) == 1


def test_a_copy_costs_those_who_come_meanwhile() -> None:
    """Where three wait, twelve wait longer for whatever is computed though it is there already."""
    prompt = {"tokens": 1000}
    near = candidate(0, cached_tokens=800, waiting_tokens=5000)
    idle, busy = candidate(1), candidate(1, crowd=3.0, waiting_tokens=100)
    assert chosen(Policy.PREFIX_AWARE, near, idle, **prompt) == 1, "a copy at an idle instance delays nobody"
    assert chosen(Policy.PREFIX_AWARE, near, busy, **prompt) == 0
    far = candidate(0, cached_tokens=800, waiting_tokens=20_000)
    assert chosen(Policy.PREFIX_AWARE, far, busy, **prompt) == 1, "affinity has an end"
    nobody_has_it = [candidate(0, waiting_tokens=5000), busy]
    assert chosen(Policy.PREFIX_AWARE, *nobody_has_it, **prompt) == 1, "it has to be computed somewhere"


def test_a_copy_costs_what_it_evicts() -> None:
    near = candidate(0, cached_tokens=800, waiting_tokens=1500)
    full = candidate(1, vacant=0, wanted_share=0.75)
    assert policy.eviction_cost(full, 1000) == pytest.approx(3000)
    assert chosen(Policy.PREFIX_AWARE, near, full, tokens=900) == 0
    unwanted = candidate(1, vacant=0, wanted_share=0.0)
    assert chosen(Policy.PREFIX_AWARE, near, unwanted, tokens=900) == 1, "nobody asks for what it drops"
    empty = candidate(1, vacant=60, wanted_share=0.75)
    assert chosen(Policy.PREFIX_AWARE, near, empty, tokens=900) == 1, "nothing is dropped there"


def test_instances_that_share_cores_are_not_woken_for_little() -> None:
    """Two cores: a third instance at work makes all three slower."""
    limits = msgspec.structs.replace(CAPACITY, at_once=2.0)
    busy = [candidate(rank, requests=1, waiting_tokens=500, host="h", capacity=limits) for rank in range(2)]
    idle = candidate(2, host="h", capacity=limits)
    assert policy.core_shares([*busy, idle]) == {0: 1.0, 1: 1.0, 2: pytest.approx(2 / 3)}
    assert chosen(Policy.PREFIX_AWARE, *busy, idle, tokens=2000) == 0
    alone = msgspec.structs.replace(idle, host="other")
    assert chosen(Policy.PREFIX_AWARE, *busy, alone, tokens=2000) == 2
    assert chosen(Policy.PREFIX_AWARE, *busy, idle, tokens=100) == 2, "the wait is longer than that"


def test_a_session_stays_at_home_while_that_costs_little() -> None:
    ranks = range(5)
    home = chosen(Policy.PREFIX_AWARE, *(candidate(rank) for rank in ranks), key="me")
    loaded = [candidate(rank, waiting_tokens=50 if rank == home else 0) for rank in ranks]
    assert chosen(Policy.PREFIX_AWARE, *loaded, key="me") == home
    loaded = [candidate(rank, waiting_tokens=500 if rank == home else 0) for rank in ranks]
    assert chosen(Policy.PREFIX_AWARE, *loaded, key="me") != home
    holder = (home + 1) % 5
    cached = [candidate(rank, cached_tokens=32 if rank == holder else 0) for rank in ranks]
    assert chosen(Policy.PREFIX_AWARE, *cached, key="me") == holder, "where it was is known better"


def test_round_robin_takes_turns() -> None:
    candidates = [candidate(rank, requests=rank) for rank in (2, 0, 5)]
    turns = [policy.pick(Policy.ROUND_ROBIN, candidates, wish(turn=turn)).rank for turn in range(6)]
    assert turns == [0, 2, 5, 0, 2, 5]


def test_power_of_two_takes_the_better_of_two_and_draws_all_alike() -> None:
    candidates = [candidate(rank, requests=rank) for rank in range(4)]
    found = Tally(
        policy.pick(Policy.POWER_OF_TWO, candidates, wish(request_id=f"r{number}")).rank
        for number in range(1200)
    )
    assert found[3] == 0, "it is the worse one of every pair"
    assert {rank: round(count / 200) for rank, count in found.items()} == {0: 3, 1: 2, 2: 1}


def test_consistent_hash_moves_only_the_sessions_of_who_left() -> None:
    candidates = [candidate(rank, requests=rank) for rank in range(5)]
    before = {
        key: policy.pick(Policy.CONSISTENT_HASH, candidates, wish(key=key)).rank
        for key in map(str, range(300))
    }
    assert min(Tally(before.values()).values()) > 30
    after = {key: policy.pick(Policy.CONSISTENT_HASH, candidates[:4], wish(key=key)).rank for key in before}
    assert {key for key in before if before[key] != after[key]} == {key for key in before if before[key] == 4}


def test_full_queues_are_seen() -> None:
    assert not policy.is_full(candidate(0, requests=8 + 3))
    assert policy.is_full(candidate(0, requests=8 + 4))
    limited = Capacity(16, 1000, 8, 2048, 4, max_num_queued_tokens=50)
    assert policy.is_full(candidate(0, capacity=limited, queued_tokens=50))
    assert policy.is_full(candidate(0, blocks=1000, queued=4))


# ---- the chooser


def world(size: int, kind: Policy = Policy.PREFIX_AWARE) -> tuple[Pool, Ledger, Chooser]:
    pool, ledger = Pool(), Ledger()
    members = [
        Member(
            instance=f"i{rank}",
            rank=rank,
            state=State.READY,
            phase="",
            address="a",
            host="",
            pid=1,
            load=Load(),
        )
        for rank in range(size)
    ]
    pool.apply(View(epoch=1, size=size, settings=None, members=members, waiting_for=""), 0.0)
    for instance in pool:
        instance.attached, instance.capacity = True, CAPACITY
    return pool, ledger, Chooser(pool, ledger, kind)


def entry(prompt: list[int], **fields: object) -> Entry:
    return Entry(
        Prompt(**{"request_id": "r", "prompt_ids": prompt, "params": SamplingParams(), "seed": 1, **fields})
    )  # type: ignore[arg-type]


def send(chooser: Chooser, request: Entry) -> PooledInstance:
    instance = chooser.choose(request, 0.0)
    chooser.dispatch(request, instance, 0.0)
    return instance


def test_who_holds_all_that_was_asked_for_comes_first() -> None:
    """Caches of one mesh may differ: the smaller one would end the answer early."""
    pool, _, chooser = world(2)
    small, large = pool
    small.capacity = msgspec.structs.replace(CAPACITY, num_blocks=10)
    for number in range(5):
        large.dispatch(100, 0.0)
        assert chooser.choose(entry([number] * 100), 0.0) is small, "it named no number"
        assert chooser.choose(entry([number] * 100, asked=60), 0.0) is small
        assert chooser.choose(entry([number] * 100, asked=61), 0.0) is large
    lost = entry([1] * 100, asked=61)
    lost.owed = True
    lost.failed_at(large.rank)
    assert chooser.choose(lost, 0.0) is large, "it is there again, and the small one would end the answer"
    large.attached = False
    assert chooser.choose(entry([1] * 100, asked=61), 0.0) is small, "better than nobody"
    assert chooser.choose(lost, 0.0) is small


def test_more_than_anybody_holds_is_refused_in_the_words_for_it() -> None:
    pool, _, chooser = world(2)
    (small, large), prompt = pool, [1] * 100
    small.capacity = msgspec.structs.replace(CAPACITY, num_blocks=10)
    assert chooser.choose(entry(prompt, asked=15_900), 0.0) is large
    for fields, limit in (({"asked": 15_901}, 16_000), ({"asked": 61, "rank": 0}, 160)):
        with pytest.raises(MeshError, match=f"maximum context length is {limit} tokens") as caught:
            chooser.choose(entry(prompt, **fields), 0.0)
        assert (caught.value.status, caught.value.param) == (400, "max_tokens")
    resumed = entry(prompt, asked=15_901)
    resumed.owed = True
    assert chooser.choose(resumed, 0.0) in (small, large), "its client was promised an answer"
    large.capacity = small.capacity = None
    assert chooser.choose(entry(prompt, asked=15_901), 0.0) in (small, large), "nobody knows yet"


def test_a_burst_spreads_evenly_without_any_report() -> None:
    pool, _, chooser = world(3)
    for number in range(18):
        send(chooser, entry([number] * 40))
    assert [instance.last_dispatch for instance in pool] == [6, 6, 6]


def test_what_was_just_sent_attracts_its_like_until_its_queue_is_long() -> None:
    _, _, chooser = world(2)
    shared = list(range(800))
    ranks = [send(chooser, entry([*shared, number])).rank for number in range(12)]
    assert ranks[:3] == [0] * 3, "before the first one is computed"
    assert ranks[-1] == 1, "its slots are taken"


def test_what_instances_say_they_hold_attracts() -> None:
    pool, _, chooser = world(3)
    prompt = list(range(100))
    names = b"".join(name.to_bytes(NAME_BYTES, "big") for name in prefix_names(prompt, 16))
    pool.index.apply("i2", BlockEvents(0, 6, True, names))
    request = entry(prompt)
    assert send(chooser, request).rank == 2
    assert request.uncached == 100 - 96
    assert send(chooser, entry(prompt, cache_salt="other")).rank == 0
    whole = entry(prompt, params=SamplingParams(prompt_logprobs=1))
    assert send(chooser, whole).rank == 1, "its prompt is computed whole anywhere"


def test_those_who_waited_lately_count_for_a_while() -> None:
    """Queues are empty now and then, also where they are long most of the time."""
    pool, _, _ = world(1)
    (instance,) = pool
    for _ in range(6):
        instance.dispatch(100, 0.0)
    assert instance.crowd(0.0) == 0
    instance.take_report(InstanceReport(6, 6, 0, 0, 10, 1000, Counters()), CROWD_TIME)
    assert instance.candidate(CROWD_TIME).waiting == 0
    assert instance.candidate(CROWD_TIME).crowd == pytest.approx(6 * (1 - math.exp(-1)))
    assert instance.crowd(2 * CROWD_TIME) == pytest.approx(6 * (1 - math.exp(-1)) * math.exp(-1))


@pytest.mark.parametrize("caches", [True, False])
def test_equal_prompts_stay_together_only_where_that_spares_anything(caches: bool) -> None:
    """One instance has to compute this prompt, the other one less, but of other prompts."""
    pool, _, chooser = world(2)
    first, second = pool
    for instance in pool:
        instance.capacity = msgspec.structs.replace(CAPACITY, caches_prefixes=caches)
    prompt = list(range(801))
    assert send(chooser, entry(prompt)) is first
    second.take_report(InstanceReport(0, 1, 0, 500, 40, 1000, Counters(), uncached_tokens=500), 0.0)
    assert send(chooser, entry(prompt)) is (first if caches else second)
    assert chooser.counts["affinity_hits"] == caches


def test_a_copy_is_priced_by_what_caches_dropped_and_needed_again() -> None:
    """A prompt waits for its document's instance, unless a copy drops nothing needed again."""
    ranks = []
    for comes_back in (True, False):
        pool, _, chooser = world(2)
        names = {
            name: prefix_names(list(range(start, start + 801)), 16) for name, start in (("a", 0), ("b", 900))
        }
        fill = b"".join(number.to_bytes(NAME_BYTES, "big") for number in range(1000 - 50))
        for instance, document in zip(pool, names.values(), strict=True):
            held = fill + b"".join(name.to_bytes(NAME_BYTES, "big") for name in document)
            pool.index.apply(instance.name, BlockEvents(0, 1, True, held))
        for turn in range(1, 9):
            lost = b"".join((10**6 + block).to_bytes(NAME_BYTES, "big") for block in range(100))
            if not comes_back:
                lost = b"".join((10**6 * turn + block).to_bytes(NAME_BYTES, "big") for block in range(100))
            pool.index.apply("i1", BlockEvents(2 * turn - 1, 2 * turn, False, lost))
            pool.index.apply("i1", BlockEvents(2 * turn, 2 * turn + 1, False, b"", lost))
        first, _ = pool
        first.take_report(InstanceReport(0, 1, 0, 1500, 100, 1000, Counters(), uncached_tokens=1500), 0.0)
        ranks.append(send(chooser, entry([*range(801), 7])).rank)
    assert ranks == [0, 1]


def test_front_ends_that_know_the_same_choose_the_same() -> None:
    chosen_by = []
    for _ in range(2):
        pool, _, chooser = world(5)
        for number, instance in enumerate(pool):
            instance.take_report(InstanceReport(0, number, 0, 0, 10 * number, 1000, Counters()), 0.0)
        requests = [
            entry([number % 7] * 90, session=f"s{number % 3}", request_id=f"r{number}")
            for number in range(25)
        ]
        chosen_by.append([send(chooser, request).rank for request in requests])
    assert chosen_by[0] == chosen_by[1]
    assert len(set(chosen_by[0])) > 2


def test_a_full_mesh_says_so_but_takes_whom_it_owes() -> None:
    pool, _, chooser = world(2)
    for number in range(2 * (8 + 4)):
        send(chooser, entry([number]))
    with pytest.raises(MeshError, match="the queues of all instances are full") as refused:
        send(chooser, entry([1]))
    assert (refused.value.status, refused.value.retry_after) == (503, 1)
    with pytest.raises(MeshError):
        chooser.check_room(0.0)
    owed = entry([1])
    owed.owed = True
    send(chooser, owed)
    for instance in pool:
        instance.take_report(InstanceReport(99, 8, 2, 10, 0, 1000, Counters(), queued=2), 0.0)
    chooser.check_room(0.0)
    send(chooser, entry([1]))


def test_a_pinned_request_goes_there_or_nowhere_until_it_was_taken() -> None:
    pool, _, chooser = world(2)
    pinned = entry([1], rank=1)
    assert send(chooser, pinned).rank == 1
    with pytest.raises(MeshError, match="no instance with data-parallel rank 7; ranks now: 0, 1") as refused:
        chooser.choose(entry([1], rank=7), 0.0)
    assert refused.value.status == 400
    first, second = pool
    second.attached = False
    with pytest.raises(MeshError, match="instance 1 takes no requests now"):
        chooser.choose(entry([1], rank=1), 0.0)
    pinned.owed = True
    assert chooser.choose(pinned, 0.0) is first


def test_a_pinned_rank_that_is_away_is_worth_waiting_for() -> None:
    """One that the mesh starts with, and a lost later one: both are started again."""
    pool, _, chooser = world(3)
    members = [instance.member for instance in pool]
    for away in (1, 2):
        lost = next(instance for instance in pool if instance.rank == away)
        assert lost.lost(1.0)  # its connection broke
        rest = [member for member in members if member.rank != away]
        pool.apply(View(epoch=2, size=2, settings=None, members=rest, waiting_for=""), 1.0)
        for instance in pool:
            instance.attached = True
        with pytest.raises(MeshError, match=f"instance {away} is not there now") as refused:
            chooser.choose(entry([1], rank=away), 1.0)
        assert (refused.value.status, refused.value.retry_after) == (503, 1)
    with pytest.raises(MeshError, match="no instance with data-parallel rank 3; ranks now: 0, 1"):
        chooser.choose(entry([1], rank=3), 1.0)


def test_a_rank_that_left_for_good_is_none() -> None:
    pool, _, chooser = world(3)
    members = [instance.member for instance in pool]
    leaving = [
        msgspec.structs.replace(each, state=State.DRAINING) if each.rank == 2 else each for each in members
    ]
    for shown in (leaving, members[:2]):
        pool.apply(View(epoch=2, size=2, settings=None, members=shown, waiting_for=""), 1.0)
    with pytest.raises(MeshError, match="no instance with data-parallel rank 2"):
        chooser.choose(entry([1], rank=2), 1.0)


# ---- recalls


def test_queued_requests_are_asked_back_for_an_instance_that_is_free() -> None:
    pool, ledger, chooser = world(2, Policy.ROUND_ROBIN)
    recaller = Recaller(pool, ledger)
    requests = [entry([number] * 500) for number in range(24)]
    for request in requests:
        send(chooser, request)
    crowded, free = pool
    for request in requests[1::2]:
        chooser.settle(request)
        ledger.drop(request)
    crowded.take_report(
        InstanceReport(12, 8, 4, 2000, 250, 1000, Counters(), uncached_tokens=2000, queued=4), 0.0
    )
    free.take_report(InstanceReport(12, 0, 0, 0, 0, 1000, Counters()), 0.0)
    ledger.book(ledger.at(crowded.name)[12], Delta(12, [5]))
    free.capacity = msgspec.structs.replace(CAPACITY, num_blocks=31)
    assert recaller.recalls(1.0 - INTERVAL) == {}, "it would not hold them"
    free.capacity = CAPACITY
    assert recaller.recalls(1.0) == {crowded.name: [11, 10, 9]}, "the last first; 12 has begun"
    assert recaller.recalls(1.0 + INTERVAL) == {}, "once is enough"
    for number in (11, 9):
        ledger.drop(ledger.at(crowded.name)[number])
    recaller.answered(crowded)
    again = recaller.recalls(1.0 + 2 * INTERVAL)
    assert again == {crowded.name: [8, 7, 6]}, "10 was kept: it has begun, and is in nobody's way"
    crowded.lost(1.1)
    assert not crowded.asked_back, "nobody answers any more"
    assert chooser.choose(requests[20], 1.0) is not None


def test_nothing_is_asked_back_for_nothing() -> None:
    pool, ledger, chooser = world(2, Policy.ROUND_ROBIN)
    recaller = Recaller(pool, ledger)
    for number in range(24):
        send(chooser, entry([number] * 500))
    for instance in pool:
        instance.take_report(
            InstanceReport(12, 8, 4, 2000, 250, 1000, Counters(), uncached_tokens=2000, queued=4), 0.0
        )
    assert recaller.recalls(1.0) == {}, "both are crowded"
