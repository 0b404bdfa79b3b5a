"""Requests that leave with their KV blocks, as lists of events."""

from __future__ import annotations

import random

from engine.messages import Capacity, Delta
from engine.sampling import SamplingParams
from router.dispatch.departures import (
    MOST_COPIES,
    MOST_MISSING,
    MOST_ROUNDS,
    MOST_TRIES,
    Action,
    Copy,
    Departures,
    HandOver,
)
from router.dispatch.ledger import Entry, Ledger, Loss
from router.dispatch.pool import PooledInstance
from router.mesh import Prompt
from tests.router.dispatch.test_mesh_parts import member

SIZE = 16


def instance(name: str, rank: int, identity: str = "x") -> PooledInstance:
    found = PooledInstance(member(name, rank))
    found.attached = True
    found.capacity = Capacity(SIZE, 1000, 64, 512, 100, blocks_at=f"at {name}", cache_identity=identity)
    return found


class World:
    """Requests at ``a``, which leaves; ``b`` is where they go."""

    def __init__(self, count: int = 1, length: int = 100) -> None:
        self.ledger = Ledger()
        self.source, self.target = instance("a", 0), instance("b", 1)
        self.chosen: PooledInstance | None = self.target
        self.departures = Departures(lambda _: self.chosen)
        self.loss = Loss(0, 1.0, count)
        self.entries = []
        for number in range(count):
            ids = list(range(number, number + length))
            entry = Entry(Prompt(request_id=str(number), prompt_ids=ids, params=SamplingParams(), seed=9))
            self.ledger.place(entry, "a", 1 + number)
            self.give(entry)
            self.entries.append(entry)

    def give(self, entry: Entry, tokens: int = 1) -> None:
        for _ in range(tokens):
            self.ledger.book(entry, Delta(0, [7]))

    def begin(self) -> list[Action]:
        self.source.leaves = True
        return self.departures.begin(self.source, self.entries, self.loss)

    def copied(self, action: Action, tokens: int | None = None) -> list[Action]:
        """All that was asked for has been copied, or so many tokens."""
        assert isinstance(action, Copy)
        whole = (len(action.message.token_ids) - 1) // SIZE * SIZE
        return self.departures.copied(
            action.target, action.message.number, whole if tokens is None else tokens
        )

    def hands_over(self, actions: list[Action]) -> list[Action]:
        """The source lets a request go, as one of these copies asks."""
        (last,) = (each for each in actions if isinstance(each, Copy) and each.message.request)
        found = self.departures.handed_over(self.source, last.message.request)
        assert found is not None
        assert self.departures.copied(last.target, last.message.number, 0, is_taken=True) == []
        return found


def test_a_request_is_handed_over_once_all_its_full_blocks_are_there() -> None:
    world = World()
    (entry,) = world.entries
    (copy,) = world.begin()
    assert isinstance(copy, Copy)
    assert copy.target is world.target
    assert copy.message.blocks_at == "at a"
    assert copy.message.token_ids == [*range(100), 7]
    world.give(entry, 15)  # 116 tokens: a block more is full
    (second,) = world.copied(copy)
    assert isinstance(second, Copy)
    assert second.message.token_ids == [*range(100), *[7] * 16]
    world.give(entry, 10)
    (last,) = world.copied(second)
    assert isinstance(last, Copy)
    assert last.message.request == 1, "it ends at its source, and the block in the making comes, too"
    number = last.message.number
    assert world.departures.copied(world.target, number, 112, is_taken=True) == [], "its source says so, too"
    over = HandOver(entry, world.source, world.target, world.loss, copy=number)
    assert world.departures.handed_over(world.source, 1) == [over]
    assert world.copied(last) == [], "once only"
    assert world.departures.handed_over(world.source, 1) is None


def test_copies_of_a_request_that_outruns_them_end() -> None:
    """Each has less to copy than the one before, and there are not many."""
    for blocks_meanwhile, most_rounds in (([1, 1], 2), ([9, 3, 3], 3), (range(20, 0, -1), MOST_ROUNDS)):
        world = World()
        (action,) = world.begin()
        for rounds, blocks in enumerate(blocks_meanwhile, 1):
            world.give(world.entries[0], blocks * SIZE)
            (following,) = world.copied(action)
            assert isinstance(following, Copy)
            assert bool(following.message.request) == (rounds == most_rounds)
            action = following
            if action.message.request:
                break
        assert action.message.request, "it is asked for, with what still lacks"
        world.give(world.entries[0], (MOST_MISSING + 1) * SIZE)
        (following,) = world.departures.copied(world.target, action.message.number, 0)
        assert world.departures.copied(world.target, following.message.number, 0) == [
            HandOver(world.entries[0], world.source, world.target, world.loss)
        ], "nothing came, so it is computed again"


def test_a_request_that_may_stay_moves_though_it_outruns_its_copies() -> None:
    """What one copy's time computes comes with the hand-over."""
    world = World()
    (action,) = world.departures.begin_some(world.source, world.entries, world.loss)
    for _ in range(2):
        world.give(world.entries[0], (MOST_MISSING + 3) * SIZE)
        (action,) = world.copied(action)
    assert isinstance(action, Copy)
    assert action.message.request == 1
    (over,) = world.hands_over([action])
    assert isinstance(over, HandOver)
    assert over.copy == action.message.number


def test_a_request_that_outgrew_the_room_for_it_is_copied_further_and_asked_for_again() -> None:
    world = World()
    (action,) = world.copied(world.begin()[0])
    for tries in range(1, MOST_TRIES + 1):
        assert isinstance(action, Copy)
        assert action.message.request == 1
        known = (len(action.message.token_ids) - 1) // SIZE * SIZE
        world.give(world.entries[0], 5 * SIZE)
        (following,) = world.departures.copied(world.target, action.message.number, known)
        if tries == MOST_TRIES:
            assert following == HandOver(world.entries[0], world.source, world.target, world.loss)
            break
        assert isinstance(following, Copy)
        assert following.message.request == 0
        (action,) = world.copied(following)


def test_a_request_that_went_after_its_target_had_given_up_is_computed_there() -> None:
    """Its source took longer than the target waited."""
    world = World()
    (last,) = world.copied(world.begin()[0])
    assert isinstance(last, Copy)
    (again,) = world.departures.copied(world.target, last.message.number, 96)
    assert world.departures.handed_over(world.source, 1) == [
        HandOver(world.entries[0], world.source, world.target, world.loss)
    ]
    assert world.copied(again) == []
    assert world.loss.away == 1, "until it is back"


def test_a_source_that_is_lost_while_it_hands_over_ends_the_move() -> None:
    world = World()
    (last,) = world.copied(world.begin()[0])
    assert world.departures.gone(world.source) == []
    assert world.loss.away == 0, "it is moved like all that the instance had"
    assert world.copied(last) == []
    assert world.departures.handed_over(world.source, 1) is None


def test_what_a_lost_target_was_taking_over_goes_elsewhere() -> None:
    world = World()
    world.copied(world.begin()[0])
    world.target.attached = False
    assert world.departures.gone(world.target) == [HandOver(world.entries[0], world.source, None, world.loss)]
    assert world.departures.handed_over(world.source, 1) is None, "the router resumes it by itself"


def test_copies_that_bring_nothing_end() -> None:
    world = World()
    (action,) = world.begin()
    assert world.copied(action, 0) == [HandOver(world.entries[0], world.source, world.target, world.loss)]


def test_few_are_copied_at_once_and_the_others_follow() -> None:
    world = World(count=MOST_COPIES + 3)
    actions = world.begin()
    assert len(actions) == MOST_COPIES
    world.ledger.drop(world.entries[MOST_COPIES])  # it ends meanwhile
    handed, copy = world.hands_over(world.copied(actions[1]))
    assert isinstance(handed, HandOver)
    assert handed.entry is world.entries[1]
    assert isinstance(copy, Copy)
    assert copy.message.token_ids[0] == MOST_COPIES + 1
    assert world.loss.away == MOST_COPIES + 2


def test_a_request_that_ended_while_it_was_copied_is_not_handed_over() -> None:
    world = World()
    (action,) = world.begin()
    world.ledger.drop(world.entries[0])
    assert world.copied(action) == []
    assert world.loss.away == 0


def test_a_request_that_moved_otherwise_is_left_alone() -> None:
    world = World()
    (action,) = world.begin()
    world.ledger.place(world.entries[0], "c", 1)  # its instance died
    assert world.copied(action) == []


def test_what_cannot_be_copied_is_handed_over_at_once() -> None:
    for target in (None, instance("b", 1, identity="y")):
        world = World()
        world.chosen = target
        assert world.begin() == [HandOver(world.entries[0], world.source, target, world.loss)]
    world = World()
    world.ledger.place(world.entries[0], "a", 7)  # it has no token of this try
    assert world.begin() == [HandOver(world.entries[0], world.source, None, world.loss)]


def test_where_the_target_is_lost_its_requests_go_elsewhere() -> None:
    world = World(count=MOST_COPIES + 1)
    actions = world.begin()
    world.target.attached = False
    world.chosen = None
    found = world.departures.gone(world.target)
    assert {each.entry for each in found if isinstance(each, HandOver)} == set(world.entries)
    assert all(isinstance(each, HandOver) and each.target is None for each in found)
    assert world.copied(actions[0]) == []


def test_each_request_is_handed_over_once_or_has_ended_in_any_order_of_events() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        world = World(count=chance.randrange(1, 14))
        pending, handed, ended = world.begin(), [], 0
        while pending:
            action = pending.pop(chance.randrange(len(pending)))
            match chance.randrange(8):
                case 0 if alive := [
                    each for each in world.entries if each.address and each.address[0] == "a"
                ]:
                    world.ledger.drop(chance.choice(alive))
                    ended += 1
                case 1:
                    for entry in world.entries:
                        if entry.address:
                            world.give(entry, chance.randrange(20))
            if isinstance(action, HandOver):
                handed.append(action.entry)
                if action.entry.address:
                    assert action.entry.address[0] == "a"
                    world.ledger.place(action.entry, "b", len(handed))
            elif action.message.request and chance.randrange(3):
                handing = world.departures.handed_over(world.source, action.message.request)
                pending += handing or []
            elif chance.randrange(10):
                pending += world.copied(action, None if chance.randrange(4) else chance.randrange(100))
            else:
                world.target.attached = bool(chance.randrange(2))
                pending += world.departures.gone(world.target)
        assert len(set(map(id, handed))) == len(handed), seed
        assert {id(each) for each in world.entries if each.address} <= set(map(id, handed)), seed
        assert "0 copies" in repr(world.departures)
