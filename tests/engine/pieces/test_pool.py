from __future__ import annotations

import random

import pytest

from engine.pieces.pool import PiecePool, hash_block


def hashes(*blocks: list[int], salt: str = "") -> list[bytes]:
    found: list[bytes] = []
    for tokens in blocks:
        found.append(hash_block(found[-1] if found else None, tokens, salt))
    return found


def test_a_hash_stands_for_the_whole_context() -> None:
    assert hashes([1, 2], [3, 4]) == hashes([1, 2], [3, 4])
    assert hashes([1, 2], [3, 4])[1] != hashes([9, 2], [3, 4])[1]
    assert hashes([1, 2])[0] != hashes([1, 2], salt="tenant")[0]
    assert hashes([1, 2], [3, 4])[1] != hashes([3, 4])[0]


def test_blocks_are_taken_and_released() -> None:
    pool = PiecePool(4)
    taken = pool.take(3)
    assert taken == [0, 1, 2]
    assert pool.take(2) is None
    assert repr(pool) == "<PiecePool 3 of 4 used, 0 known>"
    pool.release(taken)
    assert pool.num_free == 4


def test_a_known_prefix_is_shared_and_survives_its_first_owner() -> None:
    pool = PiecePool(4)
    first = pool.take(2)
    assert first is not None
    names = hashes([1, 2], [3, 4])
    for block, name in zip(first, names, strict=True):
        pool.name(block, name)
    pool.release(first)
    assert pool.num_free == 4
    assert pool.find_prefix([*names, b"other"]) == first
    assert pool.find_prefix([b"other", *names]) == []
    pool.hold(first)
    pool.hold(first[:1])
    assert pool.num_free == 2
    pool.release(first)
    assert pool.num_used == 1


def test_content_is_forgotten_oldest_and_deepest_first() -> None:
    pool = PiecePool(3)
    names = hashes([1], [2], [3])
    taken = pool.take(3)
    assert taken is not None
    for block, name in zip(taken, names, strict=True):
        pool.name(block, name)
    pool.release(taken)
    assert pool.take(1) == [taken[2]], "the tail of a context goes before its head"
    assert pool.find_prefix(names) == taken[:2]


def test_blocks_without_content_are_taken_before_known_ones() -> None:
    pool = PiecePool(3)
    known = pool.take(1)
    assert known is not None
    pool.name(known[0], b"known")
    pool.release(known)
    other = pool.take(2)
    assert other is not None
    assert known[0] not in other
    pool.release(other)
    again = pool.take(2)
    assert again is not None
    assert known[0] not in again


def test_known_blocks_that_others_hold_cost_no_free_ones() -> None:
    pool = PiecePool(4)
    held = pool.take(2)
    assert held is not None
    assert pool.num_free_beside(held) == 2, "they are held already"
    pool.release(held[:1])
    assert pool.num_free == 3
    assert pool.num_free_beside(held) == 2, "one of the three would be held"


def test_what_may_be_wrong_is_found_no_more() -> None:
    pool, (name, other) = PiecePool(4), hashes([1], [2])
    held = pool.take(2)
    assert held is not None
    pool.name(held[0], name)
    pool.name(held[1], other)
    pool.release(held[1:])
    pool.unname([name, other])
    assert not pool.knows(name)
    assert not pool.knows(other)
    assert pool.take(1) == held[1:], "it has no content that is of use: it goes first"
    pool.release(held)


def test_a_partly_filled_block_that_is_filled_further_is_no_longer_found() -> None:
    pool = PiecePool(2)
    (block, _) = held = pool.take(2) or []
    pool.parts.name(block, b"part")
    assert pool.parts.find(b"part") is None, "somebody holds it"
    pool.release(held)
    assert pool.parts.find(b"part") == block
    pool.go_on_in(block)
    pool.release([block])
    assert pool.parts.find(b"part") is None, "it has more tokens by now"


def test_a_reset_forgets_full_and_partly_filled_blocks() -> None:
    """Else a short request that was handed over goes on in a wrong block."""
    pool, (name,) = PiecePool(2), hashes([1])
    held = pool.take(2) or []
    pool.name(held[0], name)
    pool.parts.name(held[1], b"part")
    pool.release(held)
    pool.unname()
    assert not pool.knows(name)
    assert pool.parts.find(b"part") is None
    assert len(pool.take(2) or []) == 2


def test_without_caching_nothing_is_known() -> None:
    pool = PiecePool(1, enable_prefix_caching=False)
    taken = pool.take(1)
    assert taken is not None
    pool.name(taken[0], b"name")
    assert pool.find_prefix([b"name"]) == []


def test_the_first_block_of_equal_content_stays_the_known_one() -> None:
    pool = PiecePool(2)
    taken = pool.take(2)
    assert taken is not None
    pool.name(taken[0], b"same")
    pool.name(taken[1], b"same")
    pool.release(taken[1:])
    assert pool.take(1) == taken[1:]
    assert pool.find_prefix([b"same"]) == taken[:1]


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        PiecePool(0)


def test_a_new_pool_gives_its_blocks_out_in_the_order_of_their_numbers() -> None:
    """Whatever comes back meanwhile: the highest number so far says which pages were never touched."""
    numbers = random.Random(0)
    pool, used, held, num_named = PiecePool(200), set[int](), list[list[int]](), 0
    while len(used) < pool.num_blocks:
        blocks = pool.take(numbers.randrange(min(pool.num_free, 20) + 1))
        assert blocks is not None
        used |= set(blocks)
        assert used == set(range(len(used)))
        for block in blocks[: numbers.randrange(len(blocks) + 1)]:
            num_named += 1
            pool.name(block, hashes([num_named])[0])
        held.append(blocks)
        while pool.num_free < 10 or (held and numbers.random() < 0.5):
            pool.release(held.pop(numbers.randrange(len(held))))
