"""Weights of each token in the ledger, and no way back to older ones."""

from __future__ import annotations

import logging
import random

import msgspec
import pytest

from coordinator.numerics import Numerics
from engine.messages import Attached, WeightsInUse
from router.dispatch import policy
from router.dispatch.chooser import MANY
from router.dispatch.departures import HandOver
from router.dispatch.ledger import Loss
from router.dispatch.policy import Candidate
from router.dispatch.stream import Stream
from router.mesh import NumericsSwitch, WeightSpan
from tests.router.dispatch.test_numerics_classes import CAPACITY, A, B, World, member

OLD, NEW = (
    Numerics(A, "avx2", "bfloat16", True, "digest 1"),
    Numerics(B, "avx2", "bfloat16", True, "digest 2"),
)


class Trained(World):
    """A router's instances, whose weights change while they serve."""

    def __init__(self, num_instances: int) -> None:
        super().__init__(*[None] * num_instances)
        for rank in self.members:
            self.switch(rank, 0)

    def switch(self, rank: int, number: int, label: str = "", numerics: Numerics | None = None) -> None:
        """An instance goes over to other weights, and names them over its connection."""
        in_use = WeightsInUse(number, label, numerics)
        capacity = msgspec.structs.replace(CAPACITY, in_use=in_use, weights=str(number))
        instance = self.at(rank)
        self._receiver.received(instance, Attached(instance.name, capacity, repeated=True))

    def join(self, rank: int, number: int) -> None:
        """Another instance comes, with these weights."""
        found = member(rank, None)
        self.members[rank] = msgspec.structs.replace(found, instance=f"i{rank}-{number}-{id(found)}")
        self.show()
        self.switch(rank, number)

    def number_at(self, stream: Stream) -> int | None:
        """The weights where a request is now; None while it has no instance."""
        rank = stream.rank
        return None if rank is None else self.at(rank).weights.number


def test_spans_name_the_weights_of_each_token() -> None:
    world = Trained(2)
    stream = world.begin(0, tokens=2)
    late = world.begin(0, tokens=0)
    world.switch(0, 1, "step-1")
    world.give(stream, 7)
    world.switch(0, 2)
    world.switch(0, 3)
    world.give(stream, 8, 9)
    world.give(late, 5)
    assert list(stream.weight_spans) == [WeightSpan(0, 0), WeightSpan(2, 1, "step-1"), WeightSpan(3, 3)]
    assert list(late.weight_spans) == [WeightSpan(0, 3)], "it had no token of the older ones"
    assert [span.name for span in stream.weight_spans] == ["default", "step-1", "3"]


def test_a_request_keeps_the_class_of_its_first_token() -> None:
    world = Trained(1)
    world.switch(0, 1, numerics=OLD)
    stream, late = world.begin(0, tokens=2), world.begin(0, tokens=0)
    world.switch(0, 2, numerics=NEW)
    world.give(stream, 7)
    world.give(late, 7)
    assert (stream.fingerprint, stream.first_class) == (A, OLD)
    assert (late.fingerprint, late.first_class) == (B, NEW), "it had no token of the older ones"
    world.give(stream, 8)
    assert (stream.first_class, world.at(0).numerics) == (OLD, NEW)


def test_a_request_goes_on_where_the_weights_are_not_older() -> None:
    world = Trained(3)
    world.switch(0, 1)
    stream = world.begin(0)
    world.switch(2, 1)
    for _ in range(3):
        world.work(2, requests=50, tokens=10_000)  # anything but cheap
    world.kill(0)
    assert stream.rank == 2
    world.give(stream, 7)
    assert list(stream.weight_spans) == [WeightSpan(0, 1)]


def test_it_waits_for_an_instance_that_has_not_gone_over_yet() -> None:
    world = Trained(2)
    world.switch(0, 1)
    stream = world.begin(0)
    world.kill(0)
    assert stream.rank is None
    world.mover.dispatch_orphans()
    assert stream.rank is None
    world.switch(1, 1)
    assert stream.rank == 1


def test_weights_that_made_no_token_do_not_count() -> None:
    world = Trained(2)
    stream, fresh = world.begin(0), world.begin(0, tokens=0)
    world.switch(0, 1)
    world.kill(0)
    assert stream.rank == 1
    assert fresh.rank == 1
    world.give(stream, 7)
    world.give(fresh, 7)
    assert list(stream.weight_spans) == list(fresh.weight_spans) == [WeightSpan(0, 0)]


def test_among_many_instances_too() -> None:
    world = Trained(MANY + 1)
    for rank in (0, MANY):
        world.switch(rank, 1)
    stream = world.begin(0)
    world.kill(0)
    assert stream.rank == MANY


def test_a_handed_over_request_does_not_go_to_older_weights() -> None:
    world = Trained(3)
    stream = world.begin(0)
    entry = stream._entry
    source, older = world.at(0), world.at(1)
    world.switch(0, 1)
    world.switch(2, 1)
    world.give(stream, 7)
    entry.owed = True
    world.mover._hand_over(HandOver(entry, source, older, copy=0, loss=Loss(0, 0.0, 1)))
    assert stream.rank == 2


def test_one_line_for_all_requests_of_an_instance(caplog: pytest.LogCaptureFixture) -> None:
    world = Trained(1)
    streams = [world.begin(0, tokens=1) for _ in range(5)]
    with caplog.at_level(logging.INFO):
        world.switch(0, 1, "step-1", NEW)
        for stream in streams:
            world.give(stream, 7)
        world.show()
    lines = [line for line in caplog.messages if "weights" in line or "class" in line]
    assert lines == ["instance 0 computes with weights 1 (step-1) from now on; 5 requests go on with them"]
    assert not world.mover.num_class_changes


def test_the_class_changes_with_the_weights_not_with_the_view() -> None:
    """The instance names its weights in order with its tokens; views come earlier or later."""
    world = Trained(2)
    world.show(numerics=OLD)
    world.switch(1, 0, numerics=OLD)
    stream = world.begin(1)
    assert stream.fingerprint == A
    world.show(numerics=NEW)  # the view is ahead
    world.give(stream, 7)
    assert world.at(1).fingerprint == A
    world.switch(1, 1, numerics=NEW)
    world.give(stream, 8)
    assert list(stream.numerics_changes) == [NumericsSwitch(3, A, B)]
    later = world.begin(1)
    assert later.fingerprint == B
    world.switch(1, 2, numerics=OLD)  # the view is behind
    assert world.begin(1).fingerprint == A
    world.show(numerics=OLD)
    assert world.begin(1).fingerprint == A


def schedule(seed: int) -> None:
    """Updates, deaths, joins and tokens in any order: weights of tokens never get older."""
    chance = random.Random(seed)
    world, newest, streams, next_rank = Trained(3), 0, [], 3
    truth: dict[Stream, list[int]] = {}
    for _ in range(60):
        ranks = list(world.members)
        match chance.randrange(8):
            case 0:
                newest += 1
            case 1 | 2:  # an instance follows
                rank = chance.choice(ranks)
                if world.at(rank).weights.number < newest:
                    world.switch(rank, newest)
            case 3 if len(ranks) > 1:
                world.kill(chance.choice(ranks))
            case 4 if len(ranks) < 4:
                world.join(next_rank, newest)
                next_rank += 1
            case 5 if len(streams) < 6:
                stream = world.begin(None, tokens=0)
                streams.append(stream)
                truth[stream] = []
            case _:
                for stream in streams:
                    if (number := world.number_at(stream)) is not None and chance.random() < 0.6:
                        world.give(stream, 7)
                        truth[stream].append(number)
        for stream, numbers in truth.items():
            assert numbers == sorted(numbers), (seed, numbers)
            spans = list(stream.weight_spans)
            named = [
                next(span.number for span in reversed(spans) if span.first_token <= position)
                for position in range(len(numbers))
            ]
            assert named == numbers, (seed, named, numbers)


def test_random_schedules() -> None:
    for seed in range(300):
        schedule(seed)


def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def any_weights(candidates: list[Candidate], _weights: int) -> list[Candidate]:
        return candidates

    monkeypatch.setattr(policy, "not_older", any_weights)
    with pytest.raises(AssertionError):
        test_random_schedules()
