"""An instance that failed is not chosen again until it has proved itself."""

from __future__ import annotations

from coordinator.messages import State
from router.dispatch import policy
from router.dispatch.circuit_breaker import FORGOTTEN_AFTER, LONGEST_PAUSE, TRIAL_INTERVAL, CircuitBreaker
from router.dispatch.pool import Pool, PooledInstance
from tests.router.dispatch.test_mesh_parts import candidate, member, view


def test_pauses_grow_and_tokens_end_them() -> None:
    trust = CircuitBreaker()
    assert trust.admits(0.0)
    pauses = []
    now = 0.0
    for _ in range(9):
        trust.failed(now)
        began = now
        while not trust.admits(now):
            now += 0.25
        pauses.append(now - began)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, LONGEST_PAUSE, LONGEST_PAUSE]
    for _ in range(2000):
        trust.failed(now)
    assert trust.admits(now + LONGEST_PAUSE), "however often"
    trust.proved()
    assert trust.admits(now)
    trust.failed(now)
    assert trust.admits(now + 0.5), "the row began anew"


def test_on_trial_it_gets_one_request_now_and_then() -> None:
    trust = CircuitBreaker()
    trust.failed(0.0)
    assert trust.admits(1.0)
    trust.dispatched(1.0)
    assert not trust.admits(1.5)
    assert trust.admits(1.0 + TRIAL_INTERVAL), "the first may have been cancelled before it could tell"
    trust.dispatched(2.0)
    trust.proved()
    assert trust.admits(2.1)


def test_others_are_preferred_and_nobody_else_is_better_than_nobody() -> None:
    candidates = [candidate(0, admitted=False), candidate(1), candidate(2)]
    assert [c.rank for c in policy.eligible(candidates)] == [1, 2]
    assert [c.rank for c in policy.eligible(candidates, frozenset({1, 2}))] == [0], (
        "those failed this request"
    )
    assert [c.rank for c in policy.eligible(candidates[:1])] == [0]
    assert [c.rank for c in policy.eligible(candidates[:1], frozenset({0}))] == [0]


def test_one_death_counts_once_however_it_shows() -> None:
    instance = PooledInstance(member("a", 0), attached=True)
    instance.dispatch(10, 0.0)
    assert instance.lost(1.0), "the connection breaks"
    assert not instance.lost(2.0), "the coordinator takes it out"
    assert instance.breaker.failures == 1
    assert instance.candidate(1.0).requests == 0, "what was there is elsewhere now"


def test_who_leaves_as_told_has_not_failed() -> None:
    instance = PooledInstance(member("a", 0, State.DRAINING), attached=True)
    assert instance.lost(1.0)
    assert instance.breaker.failures == 0


def test_a_new_process_under_the_rank_is_on_trial_until_its_first_tokens() -> None:
    pool = Pool()
    (old,) = pool.apply(view(member("a", 0)), 0.0).added
    old.attached = True
    old.lost(1.0)
    pool.apply(view(), 1.0)
    (new,) = pool.apply(view(member("a2", 0)), 1.2).added
    new.attached = True
    assert not new.candidate(1.2).admitted
    assert new.candidate(2.0).admitted
    new.dispatch(10, 2.0)
    assert not new.candidate(2.1).admitted
    new.breaker.proved()
    assert new.candidate(2.1).admitted


def test_failures_of_ranks_that_are_gone_are_forgotten() -> None:
    pool = Pool()
    for rank in range(3):
        (instance,) = pool.apply(view(member(f"i{rank}", rank)), 0.0).added
        instance.attached = True
        instance.lost(1.0)
    pool.apply(view(), 10.0)
    assert sorted(pool._breakers) == [0, 1, 2]
    pool.apply(view(), 10.0 + FORGOTTEN_AFTER)
    assert not pool._breakers
