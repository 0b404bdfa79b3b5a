"""Which prefixes newcomers copy, and when they get requests."""

from __future__ import annotations

import pytest

from engine.messages import BlockEvents, Capacity
from engine.pieces.pool import NAME_BYTES
from router.dispatch.pool import Pool
from router.dispatch.warm_up import (
    FIRST_NUMBER,
    LEAST_BLOCKS,
    MOST_PREFIXES,
    MOST_SECONDS,
    MOST_TOKENS,
    MOST_WARMED,
    PART,
    HotPrefixes,
    WarmUps,
)
from tests.router.dispatch.test_mesh_parts import member, view

SIZE, BLOCKS = 16, 20


def prompt(first: int, tail: int = 0, shared: int = BLOCKS) -> tuple[list[int], str, list[int]]:
    """Token ids, salt and names of blocks; those after ``shared`` are the prompt's own."""
    names = [first * 1000 + index + (500 * tail if index >= shared else 0) for index in range(BLOCKS)]
    return [first] * SIZE * BLOCKS, "", names


def test_prefixes_are_what_prompts_have_in_common() -> None:
    hot = HotPrefixes()
    hot.saw(*prompt(1))
    assert hot.hottest(100) == [], "one request shares nothing"
    hot.saw(*prompt(1, tail=1, shared=12))
    (found,) = hot.hottest(100)
    assert found.blocks == prompt(1)[2][:12]
    hot.saw(*prompt(1, tail=2, shared=LEAST_BLOCKS - 1))  # too little in common: the rest stays as it was
    (found,) = hot.hottest(100)
    assert (len(found.blocks), found.uses) == (12, 3)
    hot.saw([1], "", [1, 2])
    assert len(hot.hottest(100)) == 1


def test_the_most_used_come_first_within_the_bounds() -> None:
    hot = HotPrefixes()
    for first in range(1, 13):
        for _ in range(first + 1):
            hot.saw(*prompt(first))
    assert [each.token_ids[0] for each in hot.hottest(1000)] == list(range(12, 12 - MOST_WARMED, -1))
    assert [each.token_ids[0] for each in hot.hottest(2 * BLOCKS)] == [12, 11]
    for first in range(100, 100 + 2 * MOST_PREFIXES):
        hot.saw(*prompt(first))
    assert [each.token_ids[0] for each in hot.hottest(BLOCKS)] == [12], "rare ones are forgotten first"


def test_long_prompts_take_little_room() -> None:
    hot = HotPrefixes()
    ids = [7] * 1_000_000
    for _ in range(2):
        hot.saw(ids, "", [*range(len(ids) // SIZE)])
    (found,) = hot.hottest(100_000)
    assert found.token_ids.itemsize * len(found.token_ids) == 4 * MOST_TOKENS
    assert len(found.blocks) == MOST_TOKENS // SIZE, "no block without its tokens"


def capacity(num_blocks: int = 10_000, at: str = "somewhere", identity: str = "a") -> Capacity:
    return Capacity(SIZE, num_blocks, 8, 8, 8, blocks_at=at, cache_identity=identity)


class Mesh:
    """One instance that serves and has blocks, and a newcomer."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.pool.apply(view(member("old", 0), member("new", 1)), 0.0)
        self.old, self.new = self.pool
        for each in self.pool:
            each.attached, each.capacity = True, capacity(at=f"at {each.name}")
        self.hot = HotPrefixes()
        self.warm_ups = WarmUps(self.pool, self.hot)
        for _ in range(3):
            self.hot.saw(*prompt(1))
        self.store("old", prompt(1)[2])

    def store(self, name: str, names: list[int]) -> None:
        stored = b"".join(each.to_bytes(NAME_BYTES, "big") for each in names)
        assert self.pool.index.apply(name, BlockEvents(0, len(names), reset=True, stored=stored))


def test_a_newcomer_serves_when_its_copies_are_over() -> None:
    mesh = Mesh()
    (wish,) = mesh.warm_ups.begin(mesh.new, 0.0)
    assert wish.blocks_at == "at old"
    assert len(wish.token_ids) == BLOCKS * SIZE + 1
    assert wish.number > FIRST_NUMBER
    assert not mesh.new.ready
    assert not mesh.warm_ups.copied(mesh.old, wish.number), "another one's number"
    assert mesh.warm_ups.copied(mesh.new, wish.number)
    assert mesh.new.ready
    assert not mesh.warm_ups.copied(mesh.new, wish.number), "told twice"


def test_nobody_waits_longer_than_the_bound() -> None:
    mesh = Mesh()
    assert mesh.warm_ups.begin(mesh.new, 0.0)
    mesh.warm_ups.overdue(MOST_SECONDS - 0.1)
    assert not mesh.new.ready
    mesh.warm_ups.overdue(MOST_SECONDS)
    assert mesh.new.ready
    assert mesh.warm_ups.begin(mesh.new, 0.0)
    mesh.warm_ups.stop()
    assert mesh.new.ready, "another one is lost: everybody is needed"


@pytest.mark.parametrize("what", ["nothing is hot", "nobody lends", "alone", "small cache", "other cache"])
def test_a_newcomer_serves_at_once(what: str) -> None:
    mesh = Mesh()
    if what == "nothing is hot":
        mesh.warm_ups = WarmUps(mesh.pool, HotPrefixes())
    elif what == "nobody lends":
        mesh.store("old", [])
    elif what == "alone":
        mesh.old.leaves = True
    elif what == "small cache":
        mesh.new.capacity = capacity(PART * BLOCKS - 1)
    else:
        mesh.new.capacity = capacity(identity="other")
    assert mesh.warm_ups.begin(mesh.new, 0.0) == []
    assert mesh.new.ready
