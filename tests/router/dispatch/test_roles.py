"""Which instances' roles fit a request, and requests that move for them."""

from __future__ import annotations

import pytest

from engine.messages import Capacity
from router.dispatch import roles
from router.dispatch.departures import Copy, HandOver
from router.dispatch.policy import Candidate
from tests.router.dispatch.test_departures import SIZE, World


def capacity(role: str) -> Capacity:
    return Capacity(SIZE, 1000, 64, 512, 100, role=role)


def candidate(rank: int, role: str, cached: int = 0) -> Candidate:
    return Candidate(
        rank=rank, ready=True, stalled_for=0.0, waiting_tokens=0, requests=0, dispatches=0,
        cached_tokens=cached, capacity=capacity(role),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("instances", "tokens", "decodes", "fit"),
    [
        (["", ""], 1500, False, [0, 1]),
        (["prefill", "decode"], 1500, False, [0]),
        (["prefill", "decode"], 100, False, [1]),
        (["prefill", "decode"], 1500, True, [1]),
        (["prefill", "decode", ""], 1500, False, [0, 2]),
        (["prefill", "decode", ""], 100, False, [1, 2]),
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


def test_only_requests_with_more_to_come_move_on() -> None:
    assert roles.moves_on(capacity("prefill"), 100)
    assert roles.moves_on(capacity("prefill"), None)
    assert not roles.moves_on(capacity("prefill"), 3)
    assert not roles.moves_on(capacity("decode"), 100)
    assert not roles.moves_on(capacity(""), 100)
    assert not roles.moves_on(None, 100)


def begun(world: World) -> list[object]:
    return list(world.departures.begin_one(world.source, world.entries[0], world.loss))


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
            world.target.capacity = capacity("decode")  # lends and takes nothing
        assert begun(world) == []
        assert world.loss.away == 0


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
