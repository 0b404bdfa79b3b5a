"""The pure parts of the mesh client: pool, policy, ledger."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from coordinator.messages import Load, Member, State, View, ViewChange
from coordinator.numerics import Numerics
from coordinator.views import ViewCopy
from engine.messages import Capacity, Counters, Delta, FinishReason, InstanceReport
from engine.sampling import SamplingParams
from router.dispatch import policy
from router.dispatch.chooser import Chooser
from router.dispatch.client import MeshClient
from router.dispatch.ledger import Entry, Ledger, Loss
from router.dispatch.policy import Candidate
from router.dispatch.pool import ANSWER_TIMEOUT, Pool, PooledInstance
from router.mesh import MeshError, Prompt


def member(name: str, rank: int, state: State = State.READY, address: str = "tcp://a:1") -> Member:
    return Member(
        instance=name, rank=rank, state=state, phase="serving", address=address, host="h", pid=1, load=Load()
    )


def view(*members: Member) -> View:
    return View(epoch=1, size=2, settings=None, members=list(members), waiting_for="")


def show(mesh: MeshClient, world: View) -> None:
    """Have a router see a view, as if the coordinator had sent it."""
    news = mesh._watcher.take(world)
    assert news is not None
    mesh._on_news(news)


def report(last_dispatch: int, running: int = 0, waiting: int = 0, waiting_tokens: int = 0) -> InstanceReport:
    return InstanceReport(
        last_dispatch, running, waiting, waiting_tokens, 0, 10, Counters(), uncached_tokens=waiting_tokens
    )


def candidate(rank: int, **fields: object) -> Candidate:
    return Candidate(
        **{  # type: ignore[arg-type]
            "rank": rank,
            "ready": True,
            "stalled_for": 0.0,
            "waiting_tokens": 0,
            "requests": 0,
            "dispatches": 0,
            **fields,
        }
    )


def take(ledger: Ledger, instance: str, delta: Delta) -> tuple[Entry, Delta] | None:
    """As the client does it with what comes from an instance."""
    entry = ledger.at(instance).get(delta.request)
    return None if entry is None else (entry, ledger.book(entry, delta))


# ---- pool


def test_who_has_just_come_is_waited_for_and_not_for_long() -> None:
    pool = Pool()
    chooser = Chooser(pool, Ledger())
    entry = Entry(Prompt(request_id="r", prompt_ids=[1, 2, 3], params=SamplingParams(), seed=9))
    assert not chooser.may_soon_choose(entry, 10.0), "nobody is there"
    pool.apply(view(member("a", 0, State.LOADING)), 10.0)
    assert not chooser.may_soon_choose(entry, 10.0)
    pool.apply(view(member("a", 0)), 11.0)
    with pytest.raises(MeshError):
        chooser.choose(entry, 11.0)
    assert chooser.may_soon_choose(entry, 11.0), "it serves, but has not answered on our connection yet"
    assert not chooser.may_soon_choose(entry, 10.0 + ANSWER_TIMEOUT)
    (instance,) = pool
    instance.attached = True
    assert chooser.choose(entry, 11.0) is instance
    assert not chooser.may_soon_choose(entry, 11.0)


def test_an_instance_without_a_group_is_not_idle_for_ever() -> None:
    pool = Pool()
    pool.apply(view(member("a", 0)), 1.0)
    (instance,) = pool
    assert instance.idle_since is None
    for now in (2.0, 3.0):
        pool.apply(view(member("a", 0, State.LOADED)), now)
        assert instance.idle_since == 2.0
    assert pool.without_group(61.0, 60.0) == []
    assert pool.without_group(62.5, 60.0) == [instance]
    pool.apply(view(member("a", 0)), 63.0)
    assert instance.idle_since is None
    assert pool.without_group(200.0, 60.0) == []


def capacity(num_blocks: int) -> Capacity:
    return Capacity(
        block_size=16,
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_num_queued_reqs=9,
    )


def test_who_holds_a_request_is_preferred() -> None:
    """Instances of one mesh may have KV caches of different sizes."""
    pool = Pool()
    chooser = Chooser(pool, Ledger())
    pool.apply(view(member("small", 0), member("large", 1)), 0.0)
    small, large = pool
    for instance, num_blocks in ((small, 4), (large, 8)):
        instance.attached, instance.capacity = True, capacity(num_blocks)

    def entry(tokens: int, *, owed: bool = False) -> Entry:
        prompt = Prompt(request_id="r", prompt_ids=[1] * tokens, params=SamplingParams(), seed=9)
        return Entry(prompt, owed=owed)

    for _ in range(8):
        large.dispatch(1, 0.0)
    assert chooser.choose(entry(63), 0.0) is small, "it has less to do"
    assert chooser.choose(entry(64), 0.0) is large
    assert chooser.choose(entry(500), 0.0) in (small, large), "the one that gets it says what is wrong"
    large.attached = False
    with pytest.raises(MeshError, match="no instance that is ready holds the 100 tokens") as caught:
        chooser.choose(entry(100, owed=True), 0.0)
    assert caught.value.status == 503


def test_what_a_dead_instance_had_is_taken_on_its_host_alone() -> None:
    pool = Pool()
    chooser = Chooser(pool, Ledger())
    near = member("near", 0)
    pool.apply(view(near, msgspec.structs.replace(near, instance="far", rank=1, host="far")), 0.0)
    pool.apply(
        view(*(each.member for each in pool), msgspec.structs.replace(near, instance="other serve", rank=2)),
        0.0,
    )
    for instance, had in itertools.product(pool, (0, 64, 100)):
        reads = "memory:/proc/3/fd/4#y" if instance.name != "other serve" else ""
        instance.attached = True
        instance.capacity = msgspec.structs.replace(capacity(100), inherited_at=reads)
        entry = Entry(
            Prompt(request_id="r", prompt_ids=[had] * 100, params=SamplingParams(), seed=9),
            inherits_at="memory:/proc/1/fd/2#x",
            inherits_on=near.host,
            inherits=had,
        )
        number = chooser.dispatch(entry, instance, 0.0)
        is_near = instance.name == "near"
        assert entry.submit(number).blocks_at == ("memory:/proc/1/fd/2#x" if is_near else "")
        assert entry.uncached == (100 - min(had, 99) if is_near else 100)


def test_a_report_never_hides_or_doubles_a_dispatch() -> None:
    instance = PooledInstance(member("a", 0))
    numbers = [instance.dispatch(tokens, 0.0) for tokens in (100, 50, 25)]
    assert numbers == [1, 2, 3]
    assert (instance.candidate(0.0).waiting_tokens, instance.candidate(0.0).requests) == (175, 3)
    instance.take_report(report(2, waiting=2, waiting_tokens=150), 0.0)
    assert (instance.candidate(0.0).waiting_tokens, instance.candidate(0.0).requests) == (175, 3)
    instance.take_report(report(3, running=3), 0.0)
    assert (instance.candidate(0.0).waiting_tokens, instance.candidate(0.0).requests) == (0, 3)
    instance.take_report(report(3), 0.0)
    assert instance.candidate(0.0).requests == 0


def test_the_pool_follows_the_view() -> None:
    pool = Pool()
    changes = pool.apply(view(member("a", 0), member("b", 1, State.LOADING, address="")), 0.0)
    assert [instance.name for instance in changes.added] == ["a"], "b cannot be reached yet"
    pool.apply(view(member("a", 0, State.DRAINING), member("b", 1)), 0.0)
    first, second = pool
    first.attached = second.attached = True
    assert [first.ready, second.ready] == [False, True]
    changes = pool.apply(view(member("b", 1), member("a2", 0)), 0.0)
    assert [instance.name for instance in changes.removed] == ["a"]
    assert repr(pool) == "<Pool 1:ready 0:ready>"
    assert {instance.rank: instance.name for instance in pool} == {1: "b", 0: "a2"}


def test_nobody_leaves_the_pool_because_a_coordinator_was_restarted() -> None:
    pool = Pool()
    pool.apply(view(member("a", 0), member("b", 1)), 0.0)
    assert pool.apply(msgspec.structs.replace(view(member("b", 1)), complete=False), 0.0).removed == []
    assert [instance.name for instance in pool.apply(view(member("b", 1)), 0.0).removed] == ["a"]


def test_a_rank_has_one_holder_also_while_the_coordinator_does_not_know_all() -> None:
    """Else requests for the new holder of a rank would go to the dead one."""
    pool = Pool()
    pool.apply(view(member("a", 0), member("b", 1)), 0.0)
    starting = member("a2", 0, State.LOADING, address="")
    changes = pool.apply(msgspec.structs.replace(view(starting), complete=False), 0.0)
    assert [instance.name for instance in changes.removed] == ["a"]
    assert [instance.name for instance in pool] == ["b"], "of whose rank nothing is known"
    pool.apply(msgspec.structs.replace(view(member("a2", 0)), complete=False), 0.0)
    for instance in pool:
        instance.attached = instance.name == "a2"
    entry = Entry(Prompt(request_id="r", prompt_ids=[1, 2, 3], params=SamplingParams(), seed=9))
    assert Chooser(pool, Ledger()).choose(entry, 0.0).name == "a2"


def test_who_says_that_it_leaves_gets_nothing_more_whatever_the_view_says() -> None:
    pool = Pool()
    pool.apply(view(member("a", 0), member("b", 1)), 0.0)
    for instance in pool:
        instance.attached, instance.leaves = True, instance.name == "a"
    chooser = Chooser(pool, Ledger())
    entry = Entry(Prompt(request_id="r", prompt_ids=[1, 2, 3], params=SamplingParams(), seed=9), owed=True)
    entry.failed_ranks = frozenset({0, 1})
    assert chooser.choose(entry, 0.0).name == "b"
    pool.apply(view(member("a", 0)), 0.0)
    with pytest.raises(MeshError):
        chooser.choose(entry, 0.0)


def test_who_reports_steps_does_not_stand_still_whatever_an_old_view_says() -> None:
    pool = Pool()
    stalled = member("a", 0)
    stalled = msgspec.structs.replace(stalled, load=msgspec.structs.replace(stalled.load, stalled_for=20.0))
    pool.apply(view(stalled), 0.0)
    (instance,) = pool

    def after(steps: int) -> InstanceReport:
        return InstanceReport(0, 1, 0, 0, 0, 10, Counters(steps=steps))

    for steps in (7, 7):
        instance.take_report(after(steps), 1.0)
        assert instance.candidate(1.0).stalled_for == 20.0
    instance.take_report(after(8), 2.0)
    assert instance.candidate(2.0).stalled_for == 0.0
    pool.apply(view(stalled), 3.0)
    assert instance.candidate(3.0).stalled_for == 20.0


# ---- policy


def test_only_ready_moving_instances_are_eligible() -> None:
    candidates = [candidate(0, ready=False), candidate(1, stalled_for=60.0), candidate(2), candidate(3)]
    assert [c.rank for c in policy.eligible(candidates)] == [2, 3]
    assert [c.rank for c in policy.eligible(candidates, frozenset({2}))] == [3]
    assert [c.rank for c in policy.eligible(candidates, frozenset({2, 3}))] == [2, 3], "better than nobody"


# ---- ledger


def entry() -> Entry:
    return Entry(Prompt(request_id="r", prompt_ids=[1, 2, 3], params=SamplingParams(), seed=9))


def test_a_request_resumes_from_what_was_passed_on() -> None:
    ledger, request = Ledger(), entry()
    ledger.place(request, "a", 1)
    assert take(ledger, "a", Delta(1, [10])) is not None
    assert take(ledger, "a", Delta(1, [11])) is not None
    ledger.place(request, "b", 7)
    submit = request.submit(7)
    assert (submit.request, submit.prompt_ids, submit.output_ids, submit.seed) == (7, [1, 2, 3], [10, 11], 9)
    assert request.work == 5
    assert take(ledger, "a", Delta(1, [99])) is None, "a late answer of the lost instance"
    taken = take(ledger, "b", Delta(7, [12], FinishReason.LENGTH))
    assert taken is not None
    assert request.emitted == [10, 11, 12]
    assert len(ledger) == 0


def test_a_resumed_request_differs_in_nothing_but_its_try() -> None:
    """Its random numbers go on: those of its own sample, not of the first."""
    prompt = Prompt(
        "r", [1, 2, 3], SamplingParams(n=4, temperature=0.7), 9, sample_index=3, priority=-2, cache_salt="s",
        traceparent="00-1-2-01", background=True,
    )  # fmt: skip
    ledger, request = Ledger(), Entry(prompt)
    ledger.place(request, "a", 1)
    first = request.submit(1)
    take(ledger, "a", Delta(1, [10]))
    ledger.place(request, "b", 7)
    request.owed = True
    again = request.submit(7)
    assert (first.sample_index, first.seed) == (again.sample_index, again.seed) == (3, 9)
    assert again == msgspec.structs.replace(first, request=7, output_ids=[10], owed=True)
    given = msgspec.structs.asdict(prompt)
    carried = {name: value for name, value in msgspec.structs.asdict(again).items() if name in given}
    assert carried == {name: given[name] for name in carried}, "nothing of the prompt is lost"


def test_a_loss_is_over_when_all_its_requests_have_a_token_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    loss, requests = Loss(rank=2, at=10.0, away=3), [entry() for _ in range(3)]
    for request in requests:
        request.moves(loss)
    requests[0].emitted = [7, 8]
    requests[0].returns(Delta(1, [8], num_cached_tokens=1), 10.25)
    requests[0].returns(Delta(1, [9]), 10.5)
    assert loss.away == 2, "once only"
    requests[1].ends_its_move()  # its client is gone
    requests[2].emitted = [7]
    assert caplog.messages == []
    requests[2].returns(Delta(1, [7]), 10.5)
    text = "2 requests of instance 2 are back after 250 to 500 ms: 4 tokens computed again, 1 were cached"
    assert caplog.messages == [text]


def test_a_loss_is_told_if_the_last_one_away_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    loss, request = Loss(rank=2, at=10.0, away=2), entry()
    request.moves(loss)
    request.returns(Delta(1, []), 10.5)
    assert caplog.messages == []
    loss.less()  # it ended where it was
    assert [text.partition(":")[0] for text in caplog.messages] == [
        "1 requests of instance 2 are back after 500 to 500 ms"
    ]


def test_a_loss_of_which_nobody_comes_back_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    loss = Loss(rank=2, at=10.0, away=1)
    loss.less()
    assert caplog.messages == []


def test_tries_that_give_tokens_are_not_fruitless() -> None:
    ledger, request = Ledger(), entry()
    for number in range(1, 4):
        ledger.place(request, "a", number)
    assert (request.attempts, request.fruitless) == (3, 3)
    take(ledger, "a", Delta(3, [10]))
    ledger.place(request, "b", 1)
    assert (request.attempts, request.fruitless) == (4, 1)


def test_tries_that_the_request_did_not_end_are_not_fruitless() -> None:
    ledger, request = Ledger(), entry()
    for instance in ("a", "b"):
        ledger.place(request, instance, 1)
    request.uncount_try()
    assert (request.attempts, request.fruitless) == (2, 1)
    ledger.place(request, "c", 1)
    take(ledger, "c", Delta(1, [10]))
    request.uncount_try()
    assert request.fruitless == 0


def test_who_failed_a_request_is_avoided_until_it_has_a_token_again() -> None:
    ledger, request = Ledger(), entry()
    ledger.place(request, "a", 1)
    request.uncount_try()  # it was refused
    request.failed_at(0)
    ledger.place(request, "b", 1)
    request.uncount_try()
    request.failed_at(1)
    assert request.failed_ranks == {0, 1}
    ledger.place(request, "c", 1)
    take(ledger, "c", Delta(1, [10]))
    request.failed_at(2)
    assert request.failed_ranks == {2}


def test_who_moves_twice_counts_for_the_later_loss() -> None:
    first, second, request = Loss(0, 1.0, 1), Loss(1, 2.0, 1), entry()
    request.moves(first)
    request.moves(second)
    assert first.away == 0
    request.returns(Delta(1, []), 3.0)
    assert (second.waits, second.away) == ([1.0], 0)


def test_dropping_tells_where_to_abort() -> None:
    ledger, request = Ledger(), entry()
    ledger.place(request, "a", 4)
    assert (ledger.of_instance("a")) == [request]
    assert ledger.find("a", 4) is request
    assert ledger.drop(request) == ("a", 4)
    assert ledger.drop(request) is None
    assert repr(ledger) == "<Ledger 0 in flight>"


def test_prompt_logprobs_are_told_once() -> None:
    ledger, request = Ledger(), entry()
    ledger.place(request, "a", 1)
    first = take(ledger, "a", Delta(1, [10], prompt_logprobs=[None]))
    assert first is not None
    assert first[1].prompt_logprobs == [None]
    ledger.place(request, "b", 1)
    second = take(ledger, "b", Delta(1, [11], prompt_logprobs=[None]))
    assert second is not None
    assert second[1].prompt_logprobs is None


def test_a_request_keeps_the_numerics_class_of_its_first_token() -> None:
    """A try without a token leaves none, and no later instance changes it."""
    pool, ledger = Pool(), Ledger()
    chooser = Chooser(pool, ledger)
    entry = Entry(Prompt(request_id="r", prompt_ids=[1, 2, 3], params=SamplingParams(), seed=9))
    classes = [Numerics(f"fp_{name}", "amx", "bfloat16", True) for name in "ab"]
    members = [
        msgspec.structs.replace(member(name, rank), numerics=numerics)
        for rank, (name, numerics) in enumerate(zip("abc", [*classes, None], strict=True))
    ]
    pool.apply(view(*members), 1.0)
    assert entry.fingerprint is None
    first, second, third = pool
    chooser.dispatch(entry, first, 1.0)
    assert entry.fingerprint == "fp_a"
    number = chooser.dispatch(entry, second, 2.0)
    assert entry.fingerprint == "fp_b", "the first one gave no token"
    take(ledger, "b", Delta(number, [7]))
    chooser.dispatch(entry, first, 3.0)
    assert entry.fingerprint == "fp_b"
    chooser.dispatch(entry, third, 4.0)
    assert entry.fingerprint == "fp_b"


def test_a_pool_follows_changes_as_it_takes_whole_views() -> None:
    """Whatever changes, it ends as one that was shown each whole view."""
    rng = random.Random(3)
    for _ in range(30):
        copy, follows, whole = ViewCopy(), Pool(), Pool()
        members = {name: member(name, rank) for rank, name in enumerate("abcd")}
        world = msgspec.structs.replace(view(*members.values()), series="s", number=1)
        for number in range(1, 40):
            if number == 1:
                news = copy.take(world)
            else:
                left = [name for name in members if rng.random() < 0.1]
                for name in left:
                    del members[name]
                changed = {
                    name: member(name, rank, address=rng.choice(("", "tcp://a:1")))
                    for rank, name in enumerate("abcdefgh")
                    if (name in members and rng.random() < 0.2)
                    or (name not in members and rng.random() < 0.2)
                }
                members |= changed
                news = copy.take(
                    ViewChange(
                        series="s", number=number, epoch=1, size=2, waiting_for="", left=left,
                        members=list(changed.values()), complete=rng.random() < 0.9,
                    )
                )  # fmt: skip
            assert news is not None
            assert copy.head is not None
            assert copy.view is not None
            if follows.can_follow(news, copy.head):
                follows.follow(news, 1.0)
            else:
                follows.apply(copy.view, 1.0)
            whole.apply(copy.view, 1.0)
            assert {each.name: each.member for each in follows} == {each.name: each.member for each in whole}
