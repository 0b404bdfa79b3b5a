"""Decisions of shadow checks: what is drawn, who computes it again, and who is named."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import pytest

from engine.sampling import SamplingParams
from router.dispatch.shadow.checks import (
    COMPUTE_TIMEOUT,
    DRAIN_MEMORY_SECONDS,
    MAX_CHECK_TOKENS,
    MAX_PENDING,
    MAX_THIRDS,
    MAX_UNDER_WAY,
    PENDING_TIMEOUT,
    THIRD_TIMEOUT,
    DrainLimit,
    Party,
    ShadowCheck,
    ShadowChecks,
    ShadowVerdict,
    Start,
    Stop,
    can_be_checked,
    is_drawn,
)
from router.mesh import Prompt, ShadowResult
from router.recorded import RecordedSample
from tests.nightly import NIGHTLY

CLASS = "fp_1"
RIGHT = RecordedSample((5, 6, 7), (-0.5, -0.25, -0.125), "stop")
WRONG = RecordedSample((5, 6, 7), (-0.5, -0.25, -0.12500000000000003), "stop")
NUM_WORLDS = 2000 if NIGHTLY else 60
OTHER = RecordedSample((5, 8), (-0.5, -0.25), "length")


def party(name: str, **changes: object) -> Party:
    made = Party(name, ord(name[0]) - ord("a"), f"tcp://{name}:1", CLASS, ready=True)
    return msgspec.structs.replace(made, **changes)


def prompt(number: int = 0, num_tokens: int = 3) -> Prompt:
    return Prompt(f"r{number}", [1] * num_tokens, SamplingParams(logprobs=0), seed=number)


@dataclass
class World:
    """Instances and the checks of one router, driven by hand."""

    parties: dict[str, Party]
    checks: ShadowChecks = field(default_factory=ShadowChecks)
    now: float = 100.0

    @classmethod
    def of(cls, *names: str, **changes: object) -> World:
        return cls({name: party(name, **changes) for name in names})

    def change(self, name: str, **changes: object) -> None:
        self.parties[name] = msgspec.structs.replace(self.parties[name], **changes)

    def add(self, origin: str = "a", sample: RecordedSample = RIGHT, up_to: int | None = None) -> ShadowCheck:
        check = ShadowCheck(prompt(), sample, self.parties[origin], up_to)
        self.checks.add(check, self.now)
        return check

    def look(self) -> list[Start | Stop | ShadowVerdict]:
        return self.checks.look(self.parties, self.now)

    def started(self) -> list[str]:
        """Names of the instances that get a check now; nothing else may be ordered."""
        orders = self.look()
        assert all(isinstance(each, Start) for each in orders), orders
        return [each.party.name for each in orders if isinstance(each, Start)]

    def computed(self, check: ShadowCheck, sample: RecordedSample) -> ShadowVerdict | None:
        return self.checks.computed(check, sample, self.parties, self.now)

    def lost(self, check: ShadowCheck) -> ShadowVerdict | None:
        return self.checks.lost(check, self.parties, self.now)

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.checks.counts)


# ---- the draw


def test_the_share_that_is_drawn_is_the_rate() -> None:
    prompts = [prompt(number) for number in range(20_000)]
    for rate in (0.0, 0.01, 0.25, 1.0):
        drawn = sum(is_drawn(each, rate) for each in prompts)
        assert abs(drawn - rate * len(prompts)) <= 5 * (rate * (1 - rate) * len(prompts)) ** 0.5
    small, large = ({each.seed for each in prompts if is_drawn(each, rate)} for rate in (0.01, 0.25))
    assert small < large, "a draw is a fact of the request"


def test_a_client_that_always_sends_one_id_is_drawn_as_often() -> None:
    drawn = sum(is_drawn(Prompt("same", [1], SamplingParams(), seed), 0.25) for seed in range(4000))
    assert 850 < drawn < 1150


def test_checks_need_two_instances_of_an_invariant_class() -> None:
    a, b = party("a"), party("b")
    other, variant, unready = (
        party("b", fingerprint="fp_2"),
        party("b", fingerprint=None),
        party("b", ready=False),
    )
    assert can_be_checked(CLASS, [a, b])
    assert can_be_checked(None, [a, b, other])
    assert not can_be_checked("fp_2", [a, b, other])
    for missing in (other, variant, unready):
        assert not can_be_checked(None, [a, missing])
    assert not can_be_checked(None, [variant, party("c", fingerprint=None)])


# ---- one check


def test_an_equal_answer_ends_the_check() -> None:
    world = World.of("a", "b", "c")
    check = world.add()
    assert world.started() == ["b"]
    assert world.look() == [], "it is under way"
    assert world.computed(check, RIGHT) is None
    assert world.counts == {ShadowResult.EQUAL: 1}
    assert not world.checks


@pytest.mark.parametrize(
    ("first", "second", "third", "odd"),
    [
        (WRONG, RIGHT, RIGHT, "a"),
        (RIGHT, WRONG, RIGHT, "b"),
        (RIGHT, OTHER, RIGHT, "b"),
        (OTHER, RIGHT, RIGHT, "a"),
        (RIGHT, RIGHT, WRONG, None),  # never asked: two agree
    ],
)
def test_a_third_instance_decides(
    first: RecordedSample, second: RecordedSample, third: RecordedSample, odd: str | None
) -> None:
    world = World.of("a", "b", "c")
    check = world.add(sample=first)
    assert world.started() == ["b"]
    verdict = world.computed(check, second)
    assert verdict is None
    if odd is None:
        assert world.counts == {ShadowResult.EQUAL: 1}
        return
    assert world.started() == ["c"]
    verdict = world.computed(check, third)
    assert verdict is not None
    assert verdict.odd is not None
    assert verdict.odd.name == odd
    assert world.counts == {ShadowResult.ODD: 1}


def test_a_verdict_tells_all_there_is_to_know() -> None:
    world = World.of("a", "b", "c")
    check = world.add()
    world.started()
    world.computed(check, WRONG)
    world.started()
    text = str(world.computed(check, RIGHT))
    assert text == (
        "request r0 has other bits on instance 0 (a) at tcp://a:1 than on instance 1 (b) at tcp://b:1, both "
        "of numerics class fp_1: first differing token 2, id 7 logprob be000000 and id 7 logprob "
        "bfc0000000000001; instance 2 (c) at tcp://c:1 decides: instance 1 computes otherwise than two others"
    )


def test_three_that_differ_are_decided_by_nobody() -> None:
    world = World.of("a", "b", "c", "d")
    check = world.add(sample=RIGHT)
    world.started()
    world.computed(check, WRONG)
    world.started()
    verdict = world.computed(check, OTHER)
    assert verdict is not None
    assert verdict.odd is None
    assert "differs from both" in str(verdict)
    assert world.counts == {ShadowResult.UNDECIDED: 1}


def test_two_instances_cannot_tell_which_of_them_is_odd() -> None:
    world = World.of("a", "b")
    world.parties["c"] = party("c", fingerprint="fp_2")
    check = world.add()
    assert world.started() == ["b"]
    verdict = world.computed(check, WRONG)
    assert verdict is not None
    assert (verdict.odd, verdict.first.name, verdict.second.name) == (None, "a", "b")
    assert "the class has no third instance that serves" in str(verdict)
    assert not world.checks


def test_members_of_a_group_that_spreads_experts_are_not_named() -> None:
    world = World.of("a", "b", "c", shares_experts=True)
    check = world.add()
    world.started()
    verdict = world.computed(check, WRONG)
    assert verdict is not None
    assert verdict.odd is None
    assert "the group spreads experts" in str(verdict)


def test_an_answer_that_was_cut_is_compared_as_far_as_it_goes() -> None:
    world = World.of("a", "b", "c")
    cut = RecordedSample((5, 6), (-0.5, -0.25), "")
    check = world.add(sample=cut, up_to=2)
    assert check.most_tokens == 2
    world.started()
    assert world.computed(check, RIGHT) is None
    assert world.counts == {ShadowResult.EQUAL: 1}
    whole = world.add()
    assert whole.most_tokens == 4, "one more shows that it goes on"


# ---- what goes wrong meanwhile


def test_a_shadow_whose_instance_dies_is_lost_without_a_verdict() -> None:
    world = World.of("a", "b", "c")
    check = world.add()
    assert world.started() == ["b"]
    del world.parties["b"]
    assert world.lost(check) is None
    assert world.counts == {ShadowResult.LOST: 1}
    assert not world.checks


def test_a_third_that_dies_is_replaced_a_few_times() -> None:
    names = "abcdefg"
    world = World.of(*names)
    check = world.add()
    assert world.started() == ["b"]
    world.computed(check, WRONG)
    for name in names[2 : 2 + MAX_THIRDS]:
        assert world.started() == [name]
        del world.parties[name]
        verdict = world.lost(check)
    assert verdict is not None
    assert verdict.odd is None
    assert "third instances were lost" in str(verdict)
    assert not world.checks


def test_a_third_that_dies_and_has_no_successor_leaves_it_undecided() -> None:
    world = World.of("a", "b", "c")
    check = world.add()
    world.started()
    world.computed(check, WRONG)
    assert world.started() == ["c"]
    del world.parties["c"]
    verdict = world.lost(check)
    assert verdict is not None
    assert verdict.odd is None
    assert world.counts == {ShadowResult.UNDECIDED: 1}


def test_the_first_instance_may_be_gone_by_the_time_of_the_verdict() -> None:
    world = World.of("a", "b", "c")
    check = world.add(sample=WRONG)
    world.started()
    world.computed(check, RIGHT)
    world.started()
    del world.parties["a"]
    verdict = world.computed(check, RIGHT)
    assert verdict is not None
    assert verdict.odd is not None
    assert verdict.odd.name == "a"
    assert DrainLimit().problem(verdict.odd, world.parties, world.now) == "it leaves already"


@pytest.mark.parametrize("changed", ["a", "b"])
def test_a_class_that_changes_meanwhile_ends_the_check_without_a_verdict(changed: str) -> None:
    world = World.of("a", "b", "c")
    check = world.add()
    world.started()
    world.change(changed, fingerprint="fp_2")
    assert world.computed(check, WRONG) is None
    assert world.counts == {ShadowResult.SKIPPED: 1}
    assert not world.checks


def test_the_class_of_the_second_may_change_while_the_third_computes() -> None:
    world = World.of("a", "b", "c")
    check = world.add()
    world.started()
    world.computed(check, WRONG)
    assert world.started() == ["c"]
    world.change("b", fingerprint=None)
    assert world.computed(check, RIGHT) is None
    assert world.counts == {ShadowResult.SKIPPED: 1}


def test_a_third_that_drains_before_it_begins_is_not_waited_for_longer_than_its_time() -> None:
    world = World.of("a", "b", "c")
    check = world.add()
    world.started()
    world.computed(check, WRONG)
    world.change("c", ready=False, leaves=True)
    assert world.look() == []
    world.now += THIRD_TIMEOUT + 1
    (verdict,) = world.look()
    assert isinstance(verdict, ShadowVerdict)
    assert verdict.odd is None
    assert "in time" in str(verdict)
    assert check.second is not None


def test_an_instance_that_takes_too_long_is_stopped() -> None:
    world = World.of("a", "b", "c")
    check = world.add()
    world.started()
    world.now += COMPUTE_TIMEOUT - 1
    assert world.look() == []
    world.now += 2
    assert world.look() == [Stop(check)]
    assert world.checks.stopped(check, world.parties, world.now) is None
    assert world.counts == {ShadowResult.DROPPED: 1}
    assert not world.checks


# ---- load


def test_checks_wait_until_an_instance_is_idle_and_are_dropped_in_time() -> None:
    world = World.of("a", "b", "c", idle=False)
    world.add()
    assert world.started() == []
    world.change("c", idle=True)
    assert world.started() == ["c"]
    world.add()
    world.change("c", idle=False)
    assert world.started() == []
    world.now += PENDING_TIMEOUT + 1
    assert world.look() == []
    assert world.counts == {ShadowResult.DROPPED: 1}


def test_a_difference_waits_for_no_idle_instance() -> None:
    world = World.of("a", "b", "c")
    check = world.add()
    world.started()
    world.change("c", idle=False, crowded=True)
    world.computed(check, WRONG)
    assert world.started() == ["c"]
    assert world.look() == [], "and is not stopped where it is crowded"


def test_a_check_is_stopped_where_requests_wait_for_room() -> None:
    world = World.of("a", "b")
    check = world.add()
    assert world.started() == ["b"]
    world.change("b", crowded=True)
    assert world.look() == [Stop(check)]
    world.checks.stopped(check, world.parties, world.now)
    assert world.counts == {ShadowResult.DROPPED: 1}


def test_the_oldest_are_dropped_where_too_many_wait() -> None:
    world = World.of("a", "b", "c", idle=False)
    checks = [world.add() for _ in range(MAX_PENDING + 3)]
    assert world.counts == {ShadowResult.DROPPED: 3}
    world.change("b", idle=True)
    (start,) = world.look()
    assert isinstance(start, Start)
    assert start.check is checks[3]


def test_an_instance_gets_one_check_at_a_time_and_a_router_has_few() -> None:
    names = [f"{letter}{number}" for letter in "abcdef" for number in range(3)]
    world = World({name: party(name) for name in names})
    for _ in range(MAX_PENDING):
        world.add("a0")
    begun = world.started()
    assert len(set(begun)) == len(begun) == MAX_UNDER_WAY
    assert world.started() == []


def test_long_requests_are_not_checked() -> None:
    world = World.of("a", "b")
    world.checks.add(ShadowCheck(prompt(0, MAX_CHECK_TOKENS), RIGHT, world.parties["a"]), world.now)
    assert world.counts == {ShadowResult.SKIPPED: 1}
    assert not world.checks


def test_the_least_busy_instance_computes() -> None:
    world = World.of("a", "b", "c", "d", requests=3)
    world.change("c", requests=1)
    world.add()
    assert world.started() == ["c"]


# ---- drains


def test_no_more_than_a_minority_of_a_class_is_drained() -> None:
    for count, most in ((1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (9, 4)):
        limit = DrainLimit()
        parties = {name: party(name) for name in "abcdefghi"[:count]}
        drained = 0
        for name in list(parties):
            if limit.problem(parties[name], parties, 0.0) is None:
                drained += 1
                del parties[name]  # it has left at once
        assert drained == most, f"of {count}"


def test_instances_of_other_classes_and_those_that_leave_do_not_make_a_majority() -> None:
    parties = {name: party(name) for name in "abc"}
    parties["d"] = party("d", fingerprint="fp_2")
    parties["b"] = party("b", leaves=True, ready=False)
    problem = DrainLimit().problem(parties["a"], parties, 0.0)
    assert problem == "1 of 3 instances of its class left already, and only a minority may"
    assert DrainLimit().problem(parties["b"], parties, 0.0) == "it leaves already"


def test_an_instance_is_not_drained_where_no_other_serves() -> None:
    parties = {name: party(name, ready=name == "a") for name in "abc"}
    problem = DrainLimit().problem(parties["a"], parties, 0.0)
    assert problem == "no other instance of its class serves"


def test_an_ordered_drain_is_ordered_once_and_forgotten_after_a_while() -> None:
    limit = DrainLimit()
    parties = {name: party(name) for name in "abc"}
    assert limit.problem(parties["a"], parties, 0.0) is None
    assert limit.problem(parties["a"], parties, 1.0) == "it leaves already"
    limit.failed(parties["a"])
    assert limit.problem(parties["a"], parties, 1.0) is None, "the coordinator was away"
    assert limit.problem(parties["b"], parties, 1.0) is not None
    del parties["a"]
    parties["d"] = party("d")
    assert limit.problem(parties["b"], parties, DRAIN_MEMORY_SECONDS + 2) is None


# ---- any order of events


def simulated(seed: int) -> tuple[str, list[ShadowVerdict], Counter[str]]:
    """Instances die, leave, join, change class, get crowded, hang; at most one computes wrongly.

    Returns the faulty one, all verdicts, and the results.
    """
    rng = random.Random(seed)
    size = rng.randint(2, 6)
    world = World.of(*"abcdef"[:size])
    faulty = rng.choice(["", *world.parties])
    under_way: list[ShadowCheck] = []
    verdicts: list[ShadowVerdict | None] = []
    added = 0

    def sample_of(name: str) -> RecordedSample:
        return rng.choice([WRONG, OTHER, RIGHT]) if name == faulty else RIGHT

    for _ in range(400):
        world.now += rng.expovariate(0.5)
        event = rng.random()
        if event < 0.35 and world.parties:
            origin = rng.choice(list(world.parties))
            world.add(origin, sample_of(origin))
            added += 1
        elif event < 0.7 and under_way:
            check = under_way.pop(rng.randrange(len(under_way)))
            assert check.at is not None
            if check.at.name not in world.parties or rng.random() < 0.1:
                verdicts.append(world.lost(check))
            else:
                verdicts.append(world.computed(check, sample_of(check.at.name)))
        elif event < 0.75 and world.parties:
            name = rng.choice(list(world.parties))
            change = rng.choice(["fingerprint", "ready", "idle", "crowded"])
            value = rng.choice(["fp_2", CLASS, CLASS]) if change == "fingerprint" else rng.random() < 0.7
            world.change(name, **{change: value})
        elif event < 0.77 and len(world.parties) > 1:
            del world.parties[rng.choice(list(world.parties))]
        elif event < 0.85:
            name = rng.choice("abcdef") + ("" if rng.random() < 0.5 else str(rng.randrange(9)))
            world.parties.setdefault(name, party(name))
        for order in world.look():
            match order:
                case Start(check, chosen):
                    assert chosen.name not in {each.at.name for each in under_way if each.at is not None}
                    under_way.append(check)
                case Stop(check):
                    under_way.remove(check)
                    verdicts.append(world.checks.stopped(check, world.parties, world.now))
                case ShadowVerdict():
                    verdicts.append(order)
        assert len(under_way) <= MAX_UNDER_WAY
    world.parties.clear()
    for check in under_way:
        verdicts.append(world.lost(check))
    world.now += PENDING_TIMEOUT + THIRD_TIMEOUT
    verdicts += [order for order in world.look() if isinstance(order, ShadowVerdict)]
    assert not world.checks
    assert sum(world.checks.counts.values()) == added, "each check ends once"
    return faulty, [each for each in verdicts if each is not None], world.checks.counts


def test_no_healthy_instance_is_ever_named() -> None:
    results: Counter[str] = Counter()
    for seed in range(NUM_WORLDS):
        faulty, verdicts, counts = simulated(seed)
        named = {each.odd.name for each in verdicts if each.odd is not None}
        assert named <= {faulty}, f"seed {seed}"
        assert len(verdicts) == counts[ShadowResult.ODD] + counts[ShadowResult.UNDECIDED]
        results += counts
    assert min(results[each] for each in ShadowResult) > NUM_WORLDS // 2, results
