"""Requests without an instance go on in their numerics class, or record the change."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec
import pytest

from coordinator.messages import Load, Member, State, View
from coordinator.numerics import VARIANT, Numerics
from engine.messages import Capacity, Counters, Delta, FinishReason, InstanceReport, RequestRefused, Tokens
from engine.sampling import SamplingParams
from router.dispatch import policy
from router.dispatch.chooser import Chooser
from router.dispatch.ledger import Ledger
from router.dispatch.mover import RequestMover
from router.dispatch.policy import NUMERICS_COST, QUEUE_COST, Candidate, Policy, Wish
from router.dispatch.pool import Pool, PooledInstance
from router.dispatch.receiver import MessageReceiver
from router.dispatch.stream import Stream
from router.faults import Faults
from router.mesh import NumericsSwitch, Prompt

A, B, V = "fp_a", "fp_b", "fp_v" + VARIANT
CAPACITY = Capacity(16, 1000, 8, 2048, 4)
TO_B = NumericsSwitch(2, A, B)


class Link:
    """A connection that takes all messages."""

    def send(self, _message: object, growth: int = 0) -> bool:
        return True

    def close(self) -> None: ...


def member(rank: int, name: str | None, **fields: object) -> Member:
    numerics = None if name is None else Numerics(name, "avx2", "bfloat16", not name.endswith(VARIANT))
    found = Member(
        instance=f"i{rank}", rank=rank, state=State.READY, phase="", address="a", host="", pid=1, load=Load()
    )
    return msgspec.structs.replace(found, numerics=numerics, **fields)


class World:
    """A router's instances by rank, each of a class, and the requests of one client."""

    def __init__(self, *classes: str | None, kind: Policy = Policy.PREFIX_AWARE) -> None:
        self.pool, self.ledger = Pool(), Ledger()
        self._chooser = Chooser(self.pool, self.ledger, kind)
        links: dict[str, Link] = {}
        arguments = (self.pool, self.ledger, self._chooser, links, Faults())
        self.mover = RequestMover(*arguments, moves_queued=False)  # type: ignore[arg-type]
        self._receiver = MessageReceiver(
            self.pool,
            self.ledger,
            links,
            self.mover,
            Faults(),  # type: ignore[arg-type]
        )
        self._links = links
        self.members = {rank: member(rank, name) for rank, name in enumerate(classes)}
        self.show()

    def show(self, *, complete: bool = True, **fields: object) -> None:
        """The view with these fields of rank 1 changed."""
        if fields:
            self.members[1] = msgspec.structs.replace(self.members[1], **fields)
        members = list(self.members.values())
        view = View(epoch=1, size=len(members), settings=None, members=members, waiting_for="")
        view = msgspec.structs.replace(view, complete=complete)
        changes = self.pool.apply(view, time.monotonic())
        for instance in changes.added:
            instance.attached, instance.capacity = True, CAPACITY
            self._links[instance.name] = Link()
        for instance in changes.reclassed:
            self.mover.follow_class(instance)

    def at(self, rank: int) -> PooledInstance:
        return next(instance for instance in self.pool if instance.rank == rank)

    def begin(self, rank: int | None = 0, *, tokens: int = 2, **fields: object) -> Stream:
        """A request at an instance, with so many tokens."""
        known = {"request_id": "r", "prompt_ids": [1, 2, 3], "params": SamplingParams(), "seed": 1}
        prompt = Prompt(**{**known, "rank": rank, "repeatable": True, **fields})  # type: ignore[arg-type]
        stream = self.mover.generate(prompt)
        self.give(stream, *range(tokens))
        return stream

    def give(self, stream: Stream, *token_ids: int, failing: bool = False) -> None:
        """These tokens come from where the request runs, one message each."""
        address = stream._entry.address
        assert address is not None
        instance = self.pool.get(address[0])
        assert instance is not None
        deltas = [Delta(address[1], [token_id]) for token_id in token_ids]
        if failing:
            deltas.append(Delta(address[1], [], FinishReason.ERROR, error="broken"))
        for delta in deltas:
            self._receiver.received(instance, Tokens([delta]))

    def kill(self, rank: int) -> None:
        """An instance dies, and the coordinator takes it out."""
        instance = self.at(rank)
        self._receiver.connection_broke(instance)
        del self.members[rank]
        self.show()

    def refuse(self, stream: Stream, *, leaves: bool) -> None:
        """The instance refuses the request, since it leaves or has too much to do."""
        address = stream._entry.address
        assert address is not None
        instance = self.pool.get(address[0])
        assert instance is not None
        self._receiver.received(instance, RequestRefused(address[1], "no", retry=True, leaves=leaves))

    def work(self, rank: int, *, requests: int = 0, tokens: int = 0, queued: int = 0) -> None:
        """An instance reports what it has to do."""
        report = InstanceReport(0, requests, 0, 0, 0, 1000, Counters(), uncached_tokens=tokens, queued=queued)
        self.at(rank).take_report(report, time.monotonic())


# ---- the rule


def candidate(rank: int, numerics: str | None, **fields: object) -> Candidate:
    known = {"ready": True, "stalled_for": 0.0, "waiting_tokens": 0, "requests": 0, "dispatches": 0}
    made = {"rank": rank, "numerics": numerics, **known, "capacity": CAPACITY, **fields}
    return Candidate(**made)  # type: ignore[arg-type]


def ranks_of_class(numerics: str | None, *candidates: Candidate) -> list[int]:
    return [each.rank for each in policy.of_class(candidates, Wish(tokens=100, numerics=numerics))]


def test_those_of_the_class_come_first_within_a_bound() -> None:
    idle = candidate(2, B)
    assert ranks_of_class(A, candidate(0, A), candidate(1, A, requests=5), idle) == [0, 1]
    assert ranks_of_class(None, candidate(0, A), idle) == [0, 2], "any class will do"
    assert ranks_of_class("fp_c", candidate(0, A), idle) == [0, 2], "none of the class is left"
    assert ranks_of_class(A, candidate(0, A, waiting_tokens=int(NUMERICS_COST)), idle) == [0]
    assert ranks_of_class(A, candidate(0, A, waiting_tokens=int(NUMERICS_COST) + 1), idle) == [0, 2]
    busy = candidate(2, B, waiting_tokens=5000)
    assert ranks_of_class(A, candidate(0, A, waiting_tokens=int(NUMERICS_COST) + 1), busy) == [0]


def test_a_full_queue_takes_no_request_of_the_class() -> None:
    limits = msgspec.structs.replace(CAPACITY, max_num_queued_tokens=50)
    full = candidate(0, A, queued_tokens=50, capacity=limits)
    assert ranks_of_class(A, full, candidate(1, B)) == [0, 1]
    assert ranks_of_class(A, full, candidate(1, B), candidate(2, A)) == [2]
    slots = candidate(0, A, requests=12)
    assert policy.is_full(slots)
    assert ranks_of_class(A, slots, candidate(1, B)) == [0, 1]
    queued = candidate(0, A, requests=11)
    assert QUEUE_COST * 4 < NUMERICS_COST
    assert ranks_of_class(A, queued, candidate(1, B)) == [0], "three wait there, and a fourth may"


# ---- a request whose instance dies, where 1 is the only other one of its class and 2 of another


def _nothing(_: World) -> None: ...


def _fails_often(world: World) -> None:
    for _ in range(10):
        world.at(1).breaker.failed(time.monotonic())


def _is_small(world: World) -> None:
    world.at(1).capacity = msgspec.structs.replace(CAPACITY, num_blocks=2)


def _is_away(world: World) -> None:
    world.at(1).attached = False


SITUATIONS: dict[str, tuple[Callable[[World], None], bool]] = {
    "idle": (_nothing, True),
    "has work": (lambda world: world.work(1, requests=7, tokens=20_000), True),
    "has far more work": (lambda world: world.work(1, tokens=40_000), False),
    "queue has room": (lambda world: world.work(1, requests=11, queued=3), True),
    "queue is full": (lambda world: world.work(1, requests=12, queued=4), False),
    "stalled": (lambda world: world.show(load=Load(stalled_for=20.0)), False),
    "drains": (lambda world: world.show(state=State.DRAINING), False),
    "loads": (lambda world: world.show(state=State.LOADING), False),
    "hangs": (lambda world: world.show(state=State.LOADED), False),
    "not attached": (_is_away, False),
    "failed lately": (_fails_often, False),
    "holds too little": (_is_small, False),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_it_goes_on_in_its_class_if_that_may_take_it(situation: str) -> None:
    world = World(A, A, B)
    stream = world.begin(asked=60)
    bring_about, stays = SITUATIONS[situation]
    bring_about(world)
    world.kill(0)
    assert stream.rank == (1 if stays else 2)
    assert stream.numerics_changes == [], "no token of the new try has come"
    world.give(stream, 7, 8, 9)
    assert stream.fingerprint == A
    assert stream.numerics_changes == ([] if stays else [TO_B])
    assert world.mover.num_class_changes == ({} if stays else {"true": 1})


def test_a_request_that_promises_nothing_goes_where_it_is_best() -> None:
    world = World(A, A, B)
    world.work(1, tokens=500)
    stream, waiting = world.begin(repeatable=False), world.begin(tokens=0)
    world.kill(0)
    assert (stream.rank, waiting.rank) == (2, 2)
    world.give(stream, 7)
    world.give(waiting, 7)
    assert (stream.fingerprint, stream.numerics_changes) == (A, [TO_B]), "its answer still says so"
    assert (waiting.fingerprint, waiting.numerics_changes) == (B, []), "it has begun there"
    assert world.mover.num_class_changes == {"false": 1}


@pytest.mark.parametrize("kind", Policy)
def test_those_of_the_class_are_chosen_from_by_the_policy(kind: Policy) -> None:
    """The idle instance 4 is of another class."""
    world = World(A, A, A, A, B, kind=kind)
    world.work(1, tokens=900)
    world.work(3, tokens=900)
    streams = [world.begin(request_id=f"r{number}", session=f"s{number}") for number in range(7)]
    world.kill(0)
    ranks = [stream.rank for stream in streams]
    if kind in (Policy.PREFIX_AWARE, Policy.LEAST_LOADED):
        assert set(ranks) == {2}
    else:
        assert set(ranks) == {1, 2, 3}
    world.kill(2)
    assert {stream.rank for stream in streams} == {1, 3}


def test_a_crowd_changes_class_only_beyond_the_bound() -> None:
    world = World(A, A, B)
    streams = [world.begin(prompt_ids=[number] * 4000) for number in range(12)]
    world.kill(0)
    ranks = [stream.rank for stream in streams]
    assert ranks == [1] * 8 + [2, 1, 2, 1], "each adds 4000 tokens; then the other one is busy as well"


def test_who_was_pinned_goes_on_in_its_class() -> None:
    world = World(B, A, A)
    stream = world.begin(2)
    world.kill(2)
    assert stream.rank == 1


@pytest.mark.parametrize("leaves", [True, False])
def test_a_refusal_leads_to_the_next_one_of_the_class_then_to_another_class(leaves: bool) -> None:
    world = World(A, A, B, A)
    stream = world.begin()
    world.kill(0)
    for _ in range(2):
        assert stream.rank in (1, 3)
        world.refuse(stream, leaves=leaves)
    assert stream.rank == 2
    world.give(stream, 7)
    assert stream.numerics_changes == [TO_B]


def test_a_router_with_one_instance_waits_for_no_class() -> None:
    """As with ``--data-parallel-hybrid-lb`` and one local rank: its successor takes all requests."""
    world = World(A)
    stream = world.begin()
    world.kill(0)
    assert stream.rank is None
    world.members[1] = member(1, B)
    world.show()
    world.mover.dispatch_orphans()
    assert stream.rank == 1
    world.give(stream, 7)
    assert stream.numerics_changes == [TO_B]


# ---- what is recorded


def test_it_stays_in_the_class_of_its_newest_token() -> None:
    world = World(A, B, A, B)
    stream = world.begin()
    world.show(state=State.READY)
    world.members[2] = msgspec.structs.replace(world.members[2], state=State.DRAINING)
    world.show()
    world.kill(0)
    found = stream.rank
    assert found in (1, 3)
    world.give(stream, 7)
    world.members[2] = msgspec.structs.replace(world.members[2], state=State.READY)
    world.show()
    world.kill(found)
    assert stream.rank in (1, 3), "back to the first class would be another change"
    world.give(stream, 8)
    assert stream.numerics_changes == [TO_B]
    world.kill(stream.rank)
    world.give(stream, 9)
    assert stream.numerics_changes == [TO_B, NumericsSwitch(4, B, A)]


def test_a_try_without_a_token_changes_nothing() -> None:
    world = World(A, B, A)
    world.work(2, tokens=40_000)
    stream = world.begin()
    world.kill(0)
    assert stream.rank == 1
    world.work(2)
    world.kill(1)
    world.give(stream, 7)
    assert stream.numerics_changes == []
    world = World(A, B)
    stream = world.begin()
    world.kill(0)
    world.give(stream, failing=True)
    assert stream.numerics_changes == [], "it failed there before its first token"
    assert world.mover.num_class_changes == {}


def test_an_unknown_class_is_another_one() -> None:
    """Instances of older versions name none."""
    world = World(A, None)
    stream = world.begin()
    world.kill(0)
    world.give(stream, 7)
    assert stream.numerics_changes == [NumericsSwitch(2, A, None)]
    assert str(stream.numerics_changes[0]) == "fp_a -> unknown"
    world = World(None, None, A)
    stream = world.begin()
    world.kill(0)
    world.give(stream, 7)
    assert stream.numerics_changes == []


@pytest.mark.parametrize(("numerics", "promised", "level"), [(A, "true", "WARNING"), (V, "false", "INFO")])
def test_a_change_is_logged_and_counted(
    numerics: str, promised: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world = World(numerics, B)
    stream = world.begin(request_id="cmpl-9")
    world.kill(0)
    world.give(stream, 7, 8)
    assert world.mover.num_class_changes == {promised: 1}
    (record,) = (each for each in caplog.records if "numerics class" in each.message)
    text = f"request cmpl-9 goes on in another numerics class after 2 tokens: {numerics} -> fp_b"
    assert (record.message, record.levelname) == (text, level)


def test_a_variant_class_is_preferred_as_well() -> None:
    world = World(V, V, B)
    world.work(1, tokens=500)
    stream = world.begin()
    world.kill(0)
    assert stream.rank == 1


def test_an_instance_whose_group_gets_another_class_changes_that_of_its_requests() -> None:
    """Spread experts are computed for each other: a member of another class changes all bits."""
    world = World(A, A)
    running, waiting, moving = world.begin(1), world.begin(1, tokens=0), world.begin(0)
    world.kill(0)
    assert moving.rank == 1
    world.show(numerics=Numerics(V, "avx2+avx512", "bfloat16", invariant=False))
    change = NumericsSwitch(2, A, V)
    assert running.numerics_changes == [change]
    for stream in (running, waiting, moving):
        world.give(stream, 7, 8)
    assert running.numerics_changes == moving.numerics_changes == [change]
    assert (waiting.fingerprint, waiting.numerics_changes) == (V, [])
    alone = Numerics(A, "avx2", "bfloat16", invariant=True)
    world.show(complete=False, numerics=alone)  # by a coordinator that does not know the group yet
    world.show(numerics=Numerics(V, "avx2+avx512", "bfloat16", invariant=False))
    assert world.mover.num_class_changes == {"true": 2}
    world.show(numerics=alone)
    assert running.numerics_changes == [change, NumericsSwitch(4, V, A)]
