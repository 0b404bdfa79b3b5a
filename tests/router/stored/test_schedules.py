"""Random schedules of one answer over three routers: deaths, followers, takeovers, clients that come back.

A router may also be taken for dead while it lives.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable

import pytest

from router.stored.journal import Journal, JournalMesh
from router.stored.store import AnswerTaken
from tests.router.stored.test_journal import Memory, behind_known, prompt_of

SCHEDULES = 10_000 if os.environ.get("LOCKSTEP_NIGHTLY") == "1" else 300
ROUTERS = 3
TRUTH = (5, 6, 7, 8, 9, 10)
MOST_DEATHS = 6
MOST_MISTAKES = 3


class World:
    """The store of one answer, its owner, and what the client has seen."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.samples = self.chance.randint(1, 3)
        self.memory = Memory()
        self.owner: Router | None = None
        self.deaths = 0
        self.mistakes = 0
        self.losses = 0
        """Writes that were refused."""
        self.is_fenced = True
        self.seen: list[tuple[int, int]] = []

    def claim(self, router: Router) -> bool:
        """As :meth:`router.stored.store.AnswerStore.claim`."""
        owner = self.owner
        if owner is not None and owner is not router and owner.is_alive and not owner.seems_dead:
            return False
        self.owner = router
        return True


class RouterStore:
    """The store for one life of a router: what is not committed dies with it."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._memory = router.world.memory

    async def append(self, id: str, number: int, batch: bytes) -> None:
        for _ in range(self._router.world.chance.randrange(3)):
            await asyncio.sleep(0)
        world = self._router.world
        while number > len(self._memory.batches):  # noqa: ASYNC110 (commits keep their order)
            await asyncio.sleep(0)
        if world.is_fenced and world.owner is not self._router:
            world.losses += 1
            raise AnswerTaken
        if self._router.is_alive:
            await self._memory.append(id, number, batch)

    async def tokens(self, id: str, first: int) -> list[bytes]:
        return await self._memory.tokens(id, first)


class Router:
    """One life of a router that makes or follows the answer."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_alive = True
        self.seems_dead = False
        """Another router may take over what this one makes; it does not know."""
        self.events: list[tuple[int, int]] = []
        self.has_ended = False
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        world = self.world
        first = None if not world.memory.batches and world.claim(self) else self._continues
        journal = Journal("a", RouterStore(self), list(world.memory.batches), first)
        mesh = JournalMesh(behind_known(TRUTH), journal)

        async def read(sample: int) -> None:
            async for delta in mesh.generate(prompt_of(sample)):
                self.events.append((sample, delta.token_ids[0]))
                await asyncio.sleep(0)

        try:
            await asyncio.gather(*(read(sample) for sample in range(world.samples)))
        except AnswerTaken:  # it cuts its clients off, and they come back
            self.is_alive = False
            return
        self.has_ended = True

    async def _continues(self) -> bool:
        if self.world.claim(self):
            return False
        await asyncio.sleep(0)
        return True

    def die(self) -> None:
        self.is_alive = False
        self.task.cancel()


async def follow_a_schedule(
    seed: int, claims: Callable[[World, Router], bool] | None = None, *, is_fenced: bool = True
) -> World:
    """One schedule, to the end of the answer as its client sees it."""
    world = World(seed)
    world.is_fenced = is_fenced
    if claims is not None:
        world.mistakes = MOST_MISTAKES  # no others than those of the claims
        world.claim = lambda router: claims(world, router)  # type: ignore[method-assign]
    routers = [Router(world) for _ in range(ROUTERS)]
    try:
        await _watch(world, routers)
    finally:
        for router in routers:
            router.die()
        await asyncio.gather(*(router.task for router in routers), return_exceptions=True)
    return world


async def _watch(world: World, routers: list[Router]) -> None:
    """Read as a client, and let routers die, until the client has the whole answer."""
    at = world.chance.choice(routers)
    for _ in range(2000):
        await asyncio.sleep(0)
        for router in routers:
            if router.is_alive and router.task.done():
                router.task.result()
        if world.deaths < MOST_DEATHS and world.chance.random() < 0.1:
            victim = world.chance.randrange(ROUTERS)
            world.deaths += 1
            routers[victim].die()
        if world.owner is not None and world.mistakes < MOST_MISTAKES and world.chance.random() < 0.05:
            world.mistakes += 1
            world.owner.seems_dead = True
        for index, router in enumerate(routers):
            if not router.is_alive:
                router.die()
                await asyncio.gather(router.task, return_exceptions=True)
                routers[index] = Router(world)
        if not at.is_alive or world.chance.random() < 0.05:
            at = world.chance.choice(routers)
        known = len(world.seen)
        assert at.events[:known] == world.seen[: len(at.events)], "another stream than the client has seen"
        world.seen += at.events[known:]
        if at.has_ended and len(at.events) <= len(world.seen):
            return
    raise AssertionError("the answer does not end")


def is_right(world: World) -> bool:
    return sorted(world.seen) == [(sample, token) for sample in range(world.samples) for token in TRUTH]


def test_a_client_gets_each_token_once_whatever_dies() -> None:
    deaths = losses = 0
    for seed in range(SCHEDULES):
        world = asyncio.run(follow_a_schedule(seed))
        assert is_right(world), (seed, world.seen)
        deaths += world.deaths
        losses += world.losses
    assert deaths > SCHEDULES
    assert losses > SCHEDULES / 10


def test_two_owners_are_found_without_the_fence() -> None:
    """A claim that does not look whether the owner lives: the fence makes it harmless."""

    def claims(world: World, router: Router) -> bool:
        world.owner = router
        return True

    def run() -> None:
        for seed in range(200):
            assert is_right(asyncio.run(follow_a_schedule(seed, claims, is_fenced=False)))

    with pytest.raises(AssertionError):
        run()


def test_a_router_that_writes_though_it_was_taken_for_dead_is_found() -> None:
    def run() -> None:
        for seed in range(200):
            assert is_right(asyncio.run(follow_a_schedule(seed, is_fenced=False)))

    with pytest.raises(AssertionError):
        run()
