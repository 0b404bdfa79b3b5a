"""Which instances' roles fit a request, and requests that move for them."""

from __future__ import annotations

import msgspec
import pytest

from coordinator.messages import Role, View
from coordinator.views import ViewNews
from engine.messages import Capacity
from router.dispatch import roles
from router.dispatch.departures import MOST_COPIES, MOST_TRIES, Copy, HandOver
from router.dispatch.policy import Candidate
from router.dispatch.pool import Pool
from tests.router.dispatch.test_departures import World
from tests.router.dispatch.test_mesh_parts import member, view


def candidate(rank: int, role: str, cached: int = 0) -> Candidate:
    return Candidate(
        rank=rank, ready=True, stalled_for=0.0, waiting_tokens=0, requests=0, dispatches=0,
        cached_tokens=cached, role=Role(role),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("instances", "tokens", "decodes", "fit"),
    [
        (["mixed", "mixed"], 1500, False, [0, 1]),
        (["prefill", "decode"], 1500, False, [0]),
        (["prefill", "decode"], 100, False, [1]),
        (["prefill", "decode"], 1500, True, [1]),
        (["prefill", "decode", "mixed"], 1500, False, [0, 2]),
        (["prefill", "decode", "mixed"], 100, False, [1, 2]),
        (["decode"], 1500, False, [0]),
        (["prefill"], 100, False, [0]),
        (["prefill"], 100, True, [0]),
    ],
)
def test_long_prompts_are_for_some_and_all_else_for_others(
    instances: list[str], tokens: int, decodes: bool, fit: list[int]
) -> None:
    there = [candidate(rank, role) for rank, role in enumerate(instances)]
    assert [each.rank for each in roles.suited(there, tokens, decodes=decodes)] == fit


def test_a_long_prompt_that_is_cached_is_a_short_one() -> None:
    there = [candidate(0, "prefill"), candidate(1, "decode", cached=1400)]
    assert [each.rank for each in roles.suited(there, 1500, decodes=False)] == [1]


def test_an_image_that_is_not_cached_is_encoded_apart_from_decodes() -> None:
    there = [candidate(0, "prefill"), candidate(1, "decode", cached=80)]

    def fit(images_end: int, *, decodes: bool = False) -> list[int]:
        return [each.rank for each in roles.suited(there, 100, decodes=decodes, images_end=images_end)]

    assert fit(0) == fit(80) == [1]
    assert fit(81) == [0]
    assert fit(81, decodes=True) == [1], "its blocks come along"


def test_only_requests_with_more_to_come_move_on() -> None:
    assert roles.moves_on(Role.PREFILL, 100)
    assert roles.moves_on(Role.PREFILL, None)
    assert not roles.moves_on(Role.PREFILL, 3)
    assert not roles.moves_on(Role.DECODE, 100)
    assert not roles.moves_on(Role.MIXED, 100)


def test_a_pool_knows_whether_any_instance_has_a_role() -> None:
    pool = Pool()
    one, other = member("a", 0), member("b", 1)
    pool.apply(view(one, other), 0.0)
    assert not pool.has_roles

    def follow(*left: str, **changed: Role) -> list[int]:
        news = [msgspec.structs.replace(each, role=changed[each.instance]) for each in (one, other)
                if each.instance in changed]  # fmt: skip
        head = View(epoch=1, size=2, settings=None, members=[], waiting_for="")
        assert pool.can_follow(ViewNews(False, left, news), head)
        return [each.rank for each in pool.follow(ViewNews(False, left, news), 0.0).with_new_role]

    assert follow(b=Role.PREFILL) == [1]
    assert pool.has_roles
    assert [each.candidate(0.0).role for each in pool] == [Role.MIXED, Role.PREFILL]
    assert follow(b=Role.PREFILL) == []
    assert follow(a=Role.DECODE, b=Role.MIXED) == [0, 1]
    assert pool.has_roles
    assert follow("a") == []
    assert not pool.has_roles


def begun(world: World) -> list[object]:
    return list(world.departures.begin_some(world.source, world.entries[:1], world.loss))


def test_what_an_instance_decodes_moves_a_few_at_a_time_when_it_is_to_prefill() -> None:
    world = World(MOST_COPIES + 2)
    copies = world.departures.begin_some(world.source, world.entries, world.loss)
    assert len(copies) == MOST_COPIES
    (last,) = world.copied(copies[0])
    over, following = world.hands_over([last])
    assert over == HandOver(
        world.entries[0], world.source, world.target, world.loss, copy=last.message.number
    )
    assert isinstance(following, Copy)


def test_a_request_that_moves_is_not_moved_once_more() -> None:
    """As when an instance is set to prefill, back, and to prefill again meanwhile."""
    world = World()
    (copy,) = begun(world)
    assert begun(world) == []
    world.loss.away += 1
    (over,) = world.hands_over(world.copied(copy))
    assert isinstance(over, HandOver)


def test_a_request_moves_once_its_blocks_are_there() -> None:
    world = World()
    (copy,) = begun(world)
    assert isinstance(copy, Copy)
    (over,) = world.hands_over(world.copied(copy))
    assert isinstance(over, HandOver)
    assert over.target is world.target


def test_it_stays_where_nobody_takes_its_blocks() -> None:
    for chosen in (None, "source", "other kind"):
        world = World()
        world.chosen = {None: None, "source": world.source}.get(chosen, world.target)
        if chosen == "other kind":
            world.target.capacity = Capacity(16, 1000, 64, 512, 100)  # lends and takes nothing
        assert begun(world) == []
        assert world.loss.away == 0


def test_a_hand_over_that_comes_to_nothing_is_tried_again_a_few_times() -> None:
    """The request outgrew the room for it, as it may where cores are busy."""
    for refused in range(MOST_TRIES + 1):
        world = World()
        (copy,) = begun(world)
        (last,) = world.copied(copy)
        for _ in range(refused):
            assert isinstance(last, Copy)
            assert last.message.request
            world.give(world.entries[0], 48)
            following = world.copied(last, tokens=96)
            if world.loss.away == 0:
                break
            (copy,) = following
            assert isinstance(copy, Copy)
            assert not copy.message.request, "what is new is copied first"
            (last,) = world.copied(copy)
        if refused == MOST_TRIES:
            assert following == []
            assert world.loss.away == 0, "it stays"
            assert world.departures.handed_over(world.source, 1) is None
        else:
            (over,) = world.hands_over([last])
            assert isinstance(over, HandOver)


def test_it_stays_when_the_target_is_lost_or_got_too_little() -> None:
    world = World()
    begun(world)
    world.target.attached = False
    assert world.departures.gone(world.target) == []
    world = World()
    (copy,) = begun(world)
    assert isinstance(copy, Copy)
    assert world.copied(copy, tokens=0) == []
    assert world.loss.away == 0
