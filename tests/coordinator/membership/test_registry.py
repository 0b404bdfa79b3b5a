from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import msgspec
import pytest

from coordinator.member_state import MemberState
from coordinator.membership.admission import problem_with
from coordinator.membership.records import Instruction, Note, Publish, Rules, Send
from coordinator.membership.registry import Registry
from coordinator.messages import (
    AdmissionRefused,
    AdmissionWait,
    Beat,
    Exited,
    FromCoordinator,
    Heartbeat,
    Leave,
    Load,
    Register,
    Settings,
    State,
    Unknown,
    View,
    ViewChange,
    ViewCurrent,
    Watch,
    Welcome,
)
from coordinator.views import ViewCopy

SETTINGS = Settings(
    model="m",
    revision=None,
    served_model_name=("m",),
    fingerprint="abc",
    dtype="float32",
    max_model_len=128,
    block_size=16,
    vocab_size=100,
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    enable_expert_parallel=False,
    expert_placement_strategy="linear",
    all2all_backend="auto",
    data_parallel_size=0,
    max_num_batched_tokens=64,
    max_num_seqs=8,
)


def register(instance: str, rank: int | None = None, **fields: object) -> Register:
    return Register(
        **{  # type: ignore[arg-type]
            "instance": instance,
            "rank": rank,
            "size": None,
            "settings": SETTINGS,
            "host": "h",
            "pid": 1,
            **fields,
        }
    )


def heartbeat(instance: str, state: State = State.READY, address: str = "tcp://a:1") -> Heartbeat:
    return Heartbeat(instance=instance, state=state, phase="serving", address=address, load=Load())


def to(peer: bytes, instructions: list[Instruction]) -> list[FromCoordinator]:
    return [
        item.message
        for item in instructions
        if (isinstance(item, Send) and item.peer == peer)
        or (isinstance(item, Publish) and peer in item.peers)
    ]


class Follower:
    """A watcher of a registry, which it asks at once."""

    def __init__(self, registry: Registry, peer: bytes, now: float) -> None:
        self._registry = registry
        self._peer = peer
        self._copy = ViewCopy()
        assert self.sees(now, registry.handle(peer, Watch("w"), now)) is not None

    def sees(self, now: float, done: Sequence[Instruction] = ()) -> View | None:
        """The view once all changes are sent; None if nothing has changed."""
        due = self._registry.push_due()
        sent = to(self._peer, [*done, *self._registry.push(now if due is None else max(now, due))])
        news = [self._copy.take(each) for each in sent if isinstance(each, View | ViewChange | ViewCurrent)]
        assert not self._copy.misses_some
        return self._copy.view if any(news) else None


def joined(registry: Registry, instance: str, rank: int | None = None, now: float = 0.0) -> int:
    (welcome,) = to(instance.encode(), registry.handle(instance.encode(), register(instance, rank), now))
    assert isinstance(welcome, Welcome), welcome
    return welcome.rank


def lines_of(work: Callable[[], object]) -> int:
    """Lines of Python that it runs: what it costs, on any machine."""
    count = 0

    def trace(*_: object) -> object:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_any_rank_is_the_lowest_free_one_that_nobody_reserved() -> None:
    registry = Registry(Rules(size=4, reserved=(0, 1)))
    assert joined(registry, "a") == 2
    assert joined(registry, "b") == 3
    assert joined(registry, "c") == 4, "the mesh grows beyond -dp"
    assert joined(registry, "head", 0) == 0


def test_the_epoch_counts_changes_of_the_ready_set_only() -> None:
    registry = Registry(Rules(size=2))
    joined(registry, "a", 0)
    assert registry.view().epoch == 0
    assert to(b"a", registry.handle(b"a", heartbeat("a", State.LOADING), 1.0)) == [Beat(0, 1)]
    assert to(b"a", registry.handle(b"a", heartbeat("a"), 1.5)) == [Beat(1, 1)]
    assert to(b"a", registry.handle(b"a", heartbeat("a"), 2.0)) == [Beat(1, 1)]
    joined(registry, "b", 1)
    registry.handle(b"b", heartbeat("b"), 2.0)
    assert registry.view().epoch == 2
    registry.handle(b"b", heartbeat("b", State.DRAINING), 3.0)
    assert registry.view().epoch == 3
    registry.handle(b"b", Leave("b"), 3.0)
    assert registry.view().epoch == 3, "a draining instance was out of the world already"
    assert repr(registry) == "<Registry epoch 3 [0:ready] 0 watchers>"


def test_a_sign_of_life_costs_the_same_in_any_mesh() -> None:
    def lines(size: int) -> int:
        registry = Registry(Rules(size=size))
        for rank in range(size):
            joined(registry, f"i{rank}", rank)
            registry.handle(f"i{rank}".encode(), heartbeat(f"i{rank}"), 1.0)
        last = f"i{size - 1}"
        assert to(b"w", registry.handle(b"w", heartbeat(last), 1.5)) == [Beat(size, size)]
        return lines_of(lambda: registry.handle(b"w", heartbeat(last), 2.0))

    assert lines(200) == lines(5)


def test_heartbeats_of_a_large_mesh_come_less_often_and_some_are_always_due() -> None:
    def interval(size: int) -> float | None:
        registry = Registry(Rules(size=size, most_heartbeats=8.0, member_timeout=5.0))
        for rank in range(size):
            joined(registry, f"i{rank}", rank)
        (beat,) = to(b"x", registry.handle(b"x", heartbeat("i0"), 1.0))
        assert isinstance(beat, Beat)
        return beat.interval

    assert [interval(size) for size in (1, 4, 6, 40)] == [None, None, 0.75, 1.25]


def test_watchers_get_the_view_at_once_and_each_change() -> None:
    registry = Registry(Rules(size=1, token="t"))
    (view,) = to(b"w", registry.handle(b"w", Watch("router"), 0.0))
    assert isinstance(view, View)
    assert (view.waiting_for, view.series, view.number) == ("rank 0 to register", "t", 1)
    (change,) = to(b"w", registry.handle(b"a", register("a", 0), 0.1))
    assert isinstance(change, ViewChange)
    assert (change.waiting_for, change.number) == ("rank 0 (starting)", 2)
    (change,) = to(b"w", registry.handle(b"a", heartbeat("a"), 1.0))
    assert isinstance(change, ViewChange)
    assert (change.waiting_for, change.members[0].address, change.epoch) == ("", "tcp://a:1", 1)
    assert to(b"w", registry.handle(b"a", heartbeat("a"), 2.0)) == [], "nothing new, nothing pushed"
    assert to(b"w", registry.handle(b"w", Watch("router", series="t", number=3), 2.0)) == [
        ViewCurrent("t", 3)
    ]
    registry.tick(20.0)
    assert to(b"w", registry.handle(b"b", register("b", 1), 21.0)) == [], "a silent watcher is forgotten"


def test_changes_are_coalesced_to_twenty_a_second() -> None:
    registry = Registry(Rules(size=100, token="t"))
    follower = Follower(registry, b"w", 0.0)
    assert registry.push_due() is None
    sent: list[FromCoordinator] = []
    for rank in range(100):
        sent += to(b"w", registry.handle(b"a", register(f"i{rank}", rank), 1.0 + rank / 100))
    due = registry.push_due()
    assert due is not None
    sent += to(b"w", registry.push(due))
    assert 15 <= len(sent) <= 21
    assert sum(len(each.members) for each in sent if isinstance(each, ViewChange)) == 100
    view = follower.sees(2.1, [Publish((b"w",), each) for each in sent if isinstance(each, ViewChange)])
    assert view is not None
    assert view.members == registry.view().members


def test_loads_are_sent_once_a_second_and_alone() -> None:
    registry = Registry(Rules(size=2, token="t"))
    registry.tick(0.0)
    for name in "ab":
        joined(registry, name)
        registry.handle(name.encode(), heartbeat(name), 0.1)
    registry.tick(2.0)
    follower = Follower(registry, b"w", 2.1)
    loaded = msgspec.structs.replace(heartbeat("a"), load=Load(3, 4, 5, 6, 7.5, 8, 9.5, 10))
    assert to(b"w", registry.handle(b"a", loaded, 2.4)) == []
    assert to(b"w", registry.tick(2.9)) == []
    done = registry.tick(3.1)
    (change,) = to(b"w", done)
    assert isinstance(change, ViewChange)
    assert (change.members, len(change.loads)) == ([], 1)
    view = follower.sees(3.1, done)
    assert view is not None
    assert [member.load for member in view.members] == [loaded.load, Load()]


def test_a_watcher_that_missed_a_change_gets_the_whole_view() -> None:
    registry = Registry(Rules(size=2, token="t"))
    copy = ViewCopy()
    (view,) = to(b"w", registry.handle(b"w", Watch("w"), 0.0))
    assert isinstance(view, View)
    copy.take(view)
    registry.handle(b"a", register("a"), 0.1)
    (change,) = to(b"w", registry.handle(b"b", register("b"), 0.2))
    assert isinstance(change, ViewChange)
    assert copy.take(change) is None
    assert copy.known == ("t", 0)
    (whole,) = to(b"w", registry.handle(b"w", Watch("w", series="t"), 0.3))
    assert isinstance(whole, View)
    news = copy.take(whole)
    assert news is not None
    assert news.whole
    assert copy.view == whole


def test_a_silent_instance_is_taken_out_and_told_when_it_comes_back() -> None:
    registry = Registry(Rules(size=2, member_timeout=5.0, loading_timeout=30.0))
    joined(registry, "a", 0)
    registry.handle(b"a", heartbeat("a"), 1.0)
    joined(registry, "slow", 1, now=1.0)
    assert registry.tick(6.0) == []
    notes = [item for item in registry.tick(6.5) if isinstance(item, Note)]
    assert notes == [Note("instance 0 taken out: silent for 5.5 s", warning=True)]
    assert [member.rank for member in registry.view().members] == [1], "loading may be silent for longer"
    assert registry.view().epoch == 2
    assert to(b"a", registry.handle(b"a", heartbeat("a"), 7.0)) == [Unknown()]
    assert joined(registry, "a", 0, now=7.0) == 0


def test_a_taken_rank_is_refused_once_its_holder_has_shown_life() -> None:
    registry = Registry(Rules(size=2))
    joined(registry, "a", 0)
    registry.handle(b"a", heartbeat("a"), 1.0)
    (answer,) = to(b"b", registry.handle(b"b", register("b", 0), 1.1))
    assert isinstance(answer, AdmissionWait)
    registry.handle(b"a", heartbeat("a"), 1.5)
    (answer,) = to(b"b", registry.handle(b"b", register("b", 0), 1.6))
    assert answer == AdmissionRefused("rank 0 is taken by h (pid 1): choose another, or none")
    (answer,) = to(b"c", registry.handle(b"c", register("c", 0), 5.0))
    assert isinstance(answer, AdmissionWait), "the holder may have died since: that contest is over"
    assert registry.tick(5.1) == []
    registry.tick(7.0)
    assert joined(registry, "c", 0, now=7.1) == 0


def test_a_contest_that_was_abandoned_is_none() -> None:
    registry = Registry(Rules(size=2, member_timeout=5.0))
    joined(registry, "a", 0)
    registry.handle(b"a", heartbeat("a"), 1.0)
    (answer,) = to(b"b", registry.handle(b"b", register("b", 0), 1.1))
    assert isinstance(answer, AdmissionWait)
    for now in range(2, 60):  # b was ended meanwhile; then a dies
        registry.handle(b"a", heartbeat("a"), float(now))
    for now in (60.0, 62.0, 64.0):
        (answer,) = to(b"c", registry.handle(b"c", register("c", 0), now))
        assert isinstance(answer, AdmissionWait), "a may have died after its last sign of life, as it has"
        registry.tick(now)
    registry.tick(64.1)
    assert joined(registry, "c", 0, now=64.2) == 0


def test_who_had_asked_for_no_rank_gets_another_than_the_one_it_was_given() -> None:
    """A newcomer reaches the restarted coordinator before the instance, which is still loading."""
    member = MemberState(register("a"))
    member.take(to(b"a", Registry(Rules(size=2)).handle(b"a", member.register, 0.0))[0])
    assert member.register.rank == 0
    restarted = Registry(Rules(size=2))
    assert joined(restarted, "newcomer") == 0
    member.take(Unknown())
    (welcome,) = to(b"a", restarted.handle(b"a", member.register, 0.1))
    member.take(welcome)
    assert member.register.rank == 1
    member.take(Unknown())
    assert member.register.rank_was_given, "nor does it ask for this one"


def test_a_rank_that_is_missing_is_named_though_another_has_left() -> None:
    registry = Registry(Rules(size=2))
    for name, rank in (("a", 0), ("b", 1), ("c", 2)):
        joined(registry, name, rank)
        registry.handle(name.encode(), heartbeat(name), 0.1)
    registry.handle(b"c", heartbeat("c", State.DRAINING), 0.2)
    registry.handle(b"c", Leave("c"), 0.3)
    registry.handle(b"serve", Exited(instance="b", how="was killed"), 0.4)
    assert registry.view().waiting_for == "rank 1 to register"


def test_who_was_here_before_and_lost_its_rank_gets_another() -> None:
    """A newcomer may be the first to find a coordinator that was started again."""
    restarted = Registry(Rules(size=2))
    assert joined(restarted, "newcomer") == 0
    restarted.handle(b"newcomer", heartbeat("newcomer"), 0.1)
    for now in (0.2, 0.4):
        (answer,) = to(b"a", restarted.handle(b"a", register("a", 0, epoch=3), now))
        assert isinstance(answer, Welcome)
        assert answer.rank == 1
    assert [(member.instance, member.rank) for member in restarted.view().members] == [
        ("newcomer", 0),
        ("a", 1),
    ]


def test_a_rank_whose_holder_died_goes_to_the_newcomer() -> None:
    registry = Registry(Rules(size=2, member_timeout=5.0))
    joined(registry, "a", 0)
    registry.handle(b"a", heartbeat("a"), 1.0)
    for now in (2.0, 4.0, 6.0):
        (answer,) = to(b"b", registry.handle(b"b", register("b", 0), now))
        assert isinstance(answer, AdmissionWait)
        registry.tick(now)
    registry.tick(6.1)
    assert joined(registry, "b", 0, now=6.2) == 0


def test_registering_twice_is_harmless() -> None:
    registry = Registry(Rules(size=2))
    assert joined(registry, "a") == 0
    assert joined(registry, "a") == 0
    assert len(registry.view().members) == 1


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (register("b", size=3), "-dp 3 differs from the mesh's -dp 2: start all parts with the same -dp"),
        (register("b", -1), "rank -1 is negative"),
        (register("b", 2**40), f"rank {2**40} is more than the 65536 instances that a mesh can have"),
        (register("b", 5, size=2), "rank 5 is out of range: with -dp 2 ranks are 0 to 1"),
        (
            register("b", settings=msgspec.structs.replace(SETTINGS, dtype="bfloat16", block_size=8)),
            "this instance differs from the mesh: --dtype is bfloat16, the mesh has float32; "
            "--block-size is 8, the mesh has 16",
        ),
        (
            register("b", settings=msgspec.structs.replace(SETTINGS, kv_cache_dtype="int8")),
            "this instance differs from the mesh: --kv-cache-dtype is int8, the mesh has auto",
        ),
        (
            register("b", settings=msgspec.structs.replace(SETTINGS, model="other", fingerprint="def")),
            "this instance differs from the mesh: model is other (fingerprint def), "
            "the mesh has m (fingerprint abc)",
        ),
    ],
)
def test_who_does_not_fit_is_refused_with_the_difference(message: Register, reason: str) -> None:
    registry = Registry(Rules(size=2))
    joined(registry, "a", 0)
    assert to(b"b", registry.handle(b"b", message, 0.0)) == [AdmissionRefused(reason)]
    assert len(registry.view().members) == 1, "nobody else notices"


def test_settings_that_need_not_agree_may_differ() -> None:
    registry = Registry(Rules(size=2, settings=SETTINGS))
    other = msgspec.structs.replace(SETTINGS, model="/elsewhere/m", max_num_seqs=99)
    (answer,) = to(b"a", registry.handle(b"a", register("a", settings=other), 0.0))
    assert isinstance(answer, Welcome)
    assert answer.settings == SETTINGS


def test_an_instance_without_a_model_waits_for_one_that_brings_it() -> None:
    registry = Registry(Rules())
    assert to(b"b", registry.handle(b"b", register("b", settings=None), 0.0)) == [
        AdmissionWait("no instance has brought a model yet")
    ]
    joined(registry, "a")
    (answer,) = to(b"b", registry.handle(b"b", register("b", settings=None), 1.0))
    assert isinstance(answer, Welcome)
    assert (answer.rank, answer.settings) == (1, SETTINGS)


def test_a_restarted_coordinator_learns_the_world_and_never_lowers_the_epoch() -> None:
    registry = Registry(Rules(size=2))
    assert to(b"a", registry.handle(b"a", heartbeat("a"), 0.0)) == [Unknown()]
    registry.handle(b"a", register("a", 1, epoch=7), 0.1)
    assert to(b"a", registry.handle(b"a", heartbeat("a"), 0.2)) == [Beat(8, 1)]
    assert [member.rank for member in registry.view().members] == [1]


EXPERTS = msgspec.structs.replace(SETTINGS, enable_expert_parallel=True, data_parallel_size=2)


def test_who_was_not_told_the_size_takes_what_depends_on_it_from_the_mesh() -> None:
    registry = Registry(Rules(size=2, settings=EXPERTS))
    (answer,) = to(b"a", registry.handle(b"a", register("a", 0, settings=SETTINGS), 0.0))
    assert isinstance(answer, Welcome)
    (answer,) = to(b"b", registry.handle(b"b", register("b", 1, size=2, settings=SETTINGS), 0.0))
    assert isinstance(answer, AdmissionRefused)
    assert "-ep is False, the mesh has True" in answer.reason


def test_no_message_makes_the_mesh_absurdly_large() -> None:
    registry = Registry(Rules())
    (answer,) = to(b"a", registry.handle(b"a", register("a", size=10**12), 0.0))
    assert answer == AdmissionRefused(f"-dp {10**12} is more than the 65536 instances that a mesh can have")
    everybody = range(65536)
    assert problem_with(register("b"), None, SETTINGS, everybody) == (
        "the mesh has 65536 instances, as many as a mesh can have"
    )
    assert problem_with(register("b", 7), None, SETTINGS, everybody) is None, "the holder of 7 may be dead"
