"""The prefix index against the block pools that it follows."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from engine.messages import BlockEvents, Submit
from engine.pieces.block_log import BlockLog
from engine.pieces.pool import NAME_BYTES, PiecePool, hash_block, prefix_names
from engine.sampling import SamplingParams
from engine.scheduling.request import from_submit
from router.dispatch.evictions import MAX_SHARE, Evictions
from router.dispatch.prefix_index import PrefixIndex

BLOCK = 4


def name_of(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:NAME_BYTES], "big")


def chain(tokens: list[int]) -> list[bytes]:
    found: list[bytes] = []
    for start in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
        found.append(hash_block(found[-1] if found else None, tokens[start : start + BLOCK]))
    return found


class Holder:
    """A block pool whose changes the index hears of, one message at a time."""

    def __init__(self, name: str, num_blocks: int, max_events: int = 1000) -> None:
        self.name = name
        self.log = BlockLog(max_events)
        self.pool = PiecePool(num_blocks, observer=self.log)
        self.told: int | None = None

    def serve(self, tokens: list[int]) -> None:
        """Compute a prompt: what a scheduler does to the pool."""
        hashes = chain(tokens)
        held = self.pool.find_prefix(hashes)
        self.pool.hold(held)
        fresh = self.pool.take(len(hashes) - len(held))
        assert fresh is not None
        for block, block_hash in zip([*held, *fresh], hashes, strict=True):
            if block in fresh:
                self.pool.name(block, block_hash)
        self.pool.release([*held, *fresh])

    def word(self) -> BlockEvents | None:
        word = self.log.since(self.told, self.pool.known)
        self.told = self.log.next
        return word


@pytest.mark.parametrize("max_events", [1000, 7])
def test_the_index_is_exact_whatever_is_evicted_batched_or_lost(max_events: int) -> None:
    rng = random.Random(5)
    holders = [Holder(f"i{number}", 12, max_events) for number in range(3)]
    index = PrefixIndex()
    documents = [[rng.randrange(100) for _ in range(16)] for _ in range(4)]
    for _ in range(400):
        holder = rng.choice(holders)
        holder.serve(
            [*rng.choice(documents)[: rng.randrange(4, 17)], *(rng.randrange(100) for _ in range(9))]
        )
        if rng.random() < 0.5:
            word = holder.word()
            if word is not None and rng.random() < 0.1:
                continue  # lost on its way
            if word is not None and not index.apply(holder.name, word):
                holder.told = None  # asked for everything
        if rng.random() < 0.02:
            index.forget(holder.name)  # the connection broke
            holder.told = None
    for holder in holders:
        word = holder.word()
        if word is not None and not index.apply(holder.name, word):
            holder.told = None
            word = holder.word()
            assert word is not None
            assert word.reset
            assert index.apply(holder.name, word)
    for holder in holders:
        assert index.num_blocks(holder.name) == len(set(holder.pool.known))
    for document in documents:
        prompt = [*document, 1]
        expected = {holder.name: len(holder.pool.find_prefix(chain(prompt))) for holder in holders}
        names = [name_of(block_hash) for block_hash in chain(prompt)]
        assert index.prefix_lengths(names) == {name: size for name, size in expected.items() if size}


def test_a_gap_is_noticed_once_and_closed_by_a_snapshot() -> None:
    index = PrefixIndex()
    log = BlockLog()
    assert index.apply("a", BlockEvents(0, 0, True))
    for number in range(4):
        log.stored(bytes([number]) * 16)
    late = log.since(2, [])
    assert late is not None
    assert not index.apply("a", late), "changes 0 and 1 were missed"
    assert index.apply("a", late), "it has been asked already"
    assert index.num_blocks("a") == 0
    snapshot = log.since(None, [b"x" * 16])
    assert snapshot is not None
    assert index.apply("a", snapshot)
    assert index.num_blocks("a") == 1
    assert log.since(4, []) is None, "nothing new, nothing said"


def test_changes_that_were_applied_already_are_a_gap_as_well() -> None:
    """An instance that began anew counts from 0 again."""
    index, log = PrefixIndex(), BlockLog()
    assert index.apply("a", BlockEvents(0, 0, True))
    for number in range(4):
        log.stored(bytes([number]) * 16)
    news = log.since(0, [])
    assert news is not None
    assert index.apply("a", news)
    again = log.since(2, [])
    assert again is not None
    assert not index.apply("a", again)
    assert index.num_blocks("a") == 0


def test_expected_blocks_count_until_they_are_settled() -> None:
    index = PrefixIndex()
    index.expect("a", 1, [10, 11])
    index.expect("a", 2, [10, 11, 12])
    index.expect("b", 1, [10])
    assert index.prefix_lengths([10, 11, 12]) == {"a": 3, "b": 1}
    index.settle("a", 2)
    index.settle("a", 2)
    assert index.prefix_lengths([10, 11, 12]) == {"a": 2, "b": 1}
    index.forget("a")
    assert index.prefix_lengths([10, 11, 12]) == {"b": 1}
    index.settle("b", 1)
    assert index.prefix_lengths([10]) == {}


def test_a_full_index_forgets_nothing_and_learns_nothing() -> None:
    index = PrefixIndex(max_blocks=2)
    names = [bytes([number]) * NAME_BYTES for number in range(3)]
    index.apply("a", BlockEvents(0, 3, True, b"".join(names)))
    assert len(index) == 2
    assert index.prefix_lengths([name_of(name) for name in names]) == {"a": 2}
    index.apply("a", BlockEvents(3, 5, False, b"", names[2] + names[0]))
    assert index.num_blocks("a") == 1
    index.forget("a")
    assert len(index) == 0


def test_router_and_instance_name_blocks_alike_in_every_process() -> None:
    prompt = list(range(50))
    submit = Submit(1, "r", prompt, SamplingParams(), 0, cache_salt="tenant")
    request = from_submit(submit, b"", arrival=1, eos_ids=(), max_model_len=100)
    names = prefix_names(prompt, 16, "tenant")
    assert names == [name_of(block_hash) for block_hash in request.hashes_up_to(3, 16)]
    assert names != prefix_names(prompt, 16)
    assert len(prefix_names(list(range(48)), 16)) == 2, "the last token is computed always"
    program = (
        "from engine.pieces.pool import prefix_names; print(prefix_names(list(range(50)), 16, 'tenant'))"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert run.stdout.strip() == str(names), run.stderr


def test_what_was_dropped_for_good_and_what_comes_back_are_told_apart() -> None:
    """One cache with room for a document, and one that holds two by turns."""
    shares = []
    for num_blocks in (20, 5):
        index, holder = PrefixIndex(), Holder("i0", num_blocks)
        documents = [[word] * 16 for word in range(2)]
        for turn in range(200):
            holder.serve([*documents[turn % 2], 100 + turn, 1, 1, 1])
            word = holder.word()
            assert word is not None
            assert index.apply("i0", word)
        shares.append(index.evictions.share)
    assert shares[0] < 0.1, "what follows the documents never comes back"
    assert 0.6 < shares[1] <= MAX_SHARE


def test_what_an_instance_had_all_the_time_is_not_computed_again() -> None:
    """As when an instance sends everything to an index that was full before."""
    evictions = Evictions()
    evictions.dropped(1, 10)
    evictions.found(1)
    assert evictions.share == 0.0
    evictions.computed(1)
    assert evictions.share == 0.0, "it was not gone"
    evictions.dropped(1, 10)
    evictions.computed(1)
    assert evictions.share > 0.0


def test_a_copy_that_is_dropped_and_an_instance_that_is_lost_are_no_evictions() -> None:
    index = PrefixIndex()
    first, second = Holder("i0", 5), Holder("i1", 5)
    for holder in (first, second):
        holder.serve([1] * 16)
        word = holder.word()
        assert word is not None
        assert index.apply(holder.name, word)
    for turn in range(100):
        first.serve([1 + turn % 2] * 16)
        word = first.word()
        if word is not None:
            index.apply("i0", word)
    copies = index.evictions.share
    index.forget("i1")
    second.told = None
    word = second.word()
    assert word is not None
    assert index.apply("i1", word)
    assert index.evictions.share == copies
    assert len(index.evictions) <= len(index)
