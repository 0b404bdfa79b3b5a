"""The table of a cache whose owner is killed between any two stores."""

from __future__ import annotations

import random

import pytest

from engine.inheritance.table import ENTRY_BYTES, CacheHeader, Publisher, Table, packed, unpacked
from engine.pieces.pool import BlockHash, PiecePool

BLOCKS = 6


class Recorded:
    """The memory of a table, and what it was wherever its owner may be killed."""

    def __init__(self) -> None:
        self.memory = bytearray(BLOCKS * ENTRY_BYTES)
        self.states: list[tuple[bytes, dict[int, str]]] = []
        self.content: dict[int, str] = {}
        """What each block holds: the name whose tokens are in it, or something half done."""

    def __setitem__(self, where: slice, data: bytes) -> None:
        begin = where.start
        for index, byte in enumerate(data):  # not even one store is sure to be whole
            self.memory[begin + index] = byte
            self.note()

    def __getitem__(self, where: slice) -> bytes:
        return bytes(self.memory[where])

    def __len__(self) -> int:
        return len(self.memory)

    def note(self) -> None:
        self.states.append((bytes(self.memory), dict(self.content)))


def name_of(number: int) -> BlockHash:
    return number.to_bytes(16, "big")


def found_in(memory: bytes, owner: str = "me") -> dict[BlockHash, int]:
    return Table(memoryview(memory), owner).read()


def test_what_is_found_is_whole_wherever_the_owner_was_killed() -> None:
    rng = random.Random(1)
    pool, recorded = PiecePool(BLOCKS), Recorded()
    publisher = Publisher(pool, Table(recorded, "me"))  # type: ignore[arg-type]
    pool.observe(publisher)
    held: list[int] = []
    filling: dict[int, BlockHash] = {}
    for number in range(300):
        match rng.randrange(4):
            case 0 if (taken := pool.take(1)) is not None:  # a step begins to fill a block
                (block,) = taken
                recorded.content[block] = "half"
                recorded.note()
                filling[block] = name_of(number)
                pool.name(block, filling[block])
                held.append(block)
            case 1:  # the step ends
                for block, name in filling.items():
                    recorded.content[block] = name.hex()
                    recorded.note()
                filling.clear()
            case 2 if held and (free := [each for each in held if each not in filling]):
                pool.release([free[0]])
                held.remove(free[0])
            case 3 if held:  # what a block holds may be wrong
                pool.unname([name_of(number - 1)])
        publisher.turn(lambda: set(filling))
    assert any(found_in(memory) for memory, _ in recorded.states)
    for memory, content in recorded.states:
        for name, block in found_in(memory).items():
            assert content[block] == name.hex()


def test_each_computed_block_is_found() -> None:
    pool, memory = PiecePool(BLOCKS), bytearray(BLOCKS * ENTRY_BYTES)
    publisher = Publisher(pool, Table(memoryview(memory), "me"))
    pool.observe(publisher)
    blocks = pool.take(3)
    assert blocks is not None
    for block in blocks:
        pool.name(block, name_of(block))
    publisher.turn(lambda: {blocks[2]})
    assert found_in(memory) == {name_of(block): block for block in blocks[:2]}
    assert found_in(memory, "another") == {}
    publisher.turn(set)
    assert found_in(memory) == {name_of(block): block for block in blocks}
    pool.unname([name_of(blocks[0])])
    assert found_in(memory) == {name_of(block): block for block in blocks[1:]}


@pytest.mark.parametrize("at", range(0, ENTRY_BYTES - 8, 3))
def test_a_changed_entry_counts_for_nothing(at: int) -> None:
    memory = bytearray(ENTRY_BYTES)
    Table(memoryview(memory), "me").set(0, name_of(7))
    memory[at] ^= 4
    assert found_in(memory) == {}


def test_a_header_is_whole_or_none() -> None:
    header = CacheHeader("me", "identity", 5, [(4096, 128), (8192, 64)])
    data = packed(header)
    assert unpacked(data + bytes(100)) == header
    assert unpacked(b"") is None
    for cut in range(len(data)):
        assert unpacked(data[:cut]) is None
        if 8 <= cut < 12:
            continue  # a length that is too large reads the same, where nothing follows
        assert unpacked(data[:cut] + bytes([data[cut] ^ 1]) + data[cut + 1 :]) is None
