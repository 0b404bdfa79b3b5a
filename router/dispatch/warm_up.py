"""Newcomers copy the hottest prefixes from others before they get requests (pure).

A router knows which prompts begin alike, and who has their blocks. When an instance joins, the router has it
copy those that most requests shared lately, and sends it nothing else until they have come, or for a short
time. Where nothing is hot, or nobody lends, it serves at once.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from engine.messages import Prefetch
from router.dispatch.pool import Pool, PooledInstance

MOST_PREFIXES = 64
"""Prefixes that are remembered; those that were used least, and longest ago, are forgotten."""
LEAST_BLOCKS = 4
"""Blocks below which a prefix is not worth a copy."""
LEAST_USES = 2
"""Requests that shared a prefix, from which on it is copied."""
MOST_TOKENS = 32_768
"""Tokens of a prefix that are remembered.

A client may send 64 prompts of a million each.
"""
MOST_WARMED = 8
"""Prefixes that a newcomer copies."""
PART = 8
"""A newcomer copies into at most an eighth of its cache."""
MOST_SECONDS = 2.0
"""Seconds after which a newcomer gets requests even if copies are not over."""
FIRST_NUMBER = 1 << 40
"""Numbers of copies, apart from those of requests that move."""


@dataclass
class Prefix:
    """Prefix that several prompts share."""

    token_ids: array[int]
    """Token ids at the beginning of a prompt that has the prefix."""
    cache_salt: str
    adapter: str
    """Digest of their low-rank adapter; empty for none."""
    blocks: Sequence[int]
    """Names of the blocks that all have, as the index knows them."""
    uses: int = 1


class HotPrefixes:
    """Prefixes of lately dispatched prompts, by their first block."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, Prefix] = OrderedDict()

    def __repr__(self) -> str:
        return f"<HotPrefixes {len(self._known)}>"

    def saw(self, token_ids: list[int], cache_salt: str, blocks: Sequence[int], adapter: str = "") -> None:
        """Note a prompt. Its blocks' names depend on the salt and the adapter's digest."""
        if len(blocks) < LEAST_BLOCKS:
            return
        known = self._known.get(blocks[0])
        if known is None:
            if len(self._known) >= MOST_PREFIXES:
                del self._known[min(self._known, key=lambda block: self._known[block].uses)]
            first = array("i", token_ids[:MOST_TOKENS])
            held = blocks[: len(blocks) * len(first) // len(token_ids)]
            self._known[blocks[0]] = Prefix(first, cache_salt, adapter, held)
            return
        common = _common(known.blocks, blocks)
        if common >= LEAST_BLOCKS:
            known.blocks = known.blocks[:common]
        known.uses += 1
        self._known.move_to_end(blocks[0])

    def hottest(self, most_blocks: int) -> list[Prefix]:
        """Shared prefixes, the most used first, of at most so many blocks together."""
        shared = [each for each in reversed(self._known.values()) if each.uses >= LEAST_USES]
        found: list[Prefix] = []
        for each in sorted(shared, key=lambda prefix: -prefix.uses):
            if len(each.blocks) <= most_blocks and len(found) < MOST_WARMED:
                found.append(each)
                most_blocks -= len(each.blocks)
        return found


class WarmUps:
    """Warm-ups of newcomers, which copy prefixes before they get requests."""

    def __init__(self, pool: Pool, hot: HotPrefixes) -> None:
        self._pool = pool
        self._hot = hot
        self._numbers = FIRST_NUMBER
        self._copies: dict[int, tuple[PooledInstance, float]] = {}
        """By number: who copies, and until when at most."""

    def __repr__(self) -> str:
        return f"<WarmUps: {len(self._copies)} copies>"

    def begin(self, newcomer: PooledInstance, now: float) -> list[Prefetch]:
        """Begin a newcomer's warm-up; returns the prefixes that it is to copy."""
        capacity = newcomer.capacity
        others = any(other.ready for other in self._pool if other is not newcomer)
        if capacity is None or not newcomer.lends or not others:
            return []
        wishes: list[Prefetch] = []
        for prefix in self._hot.hottest(capacity.num_blocks // PART):
            found = self._pool.lender(newcomer, prefix.blocks, LEAST_BLOCKS * capacity.block_size)
            if found is None or found[0].capacity is None:
                continue
            source, tokens = found
            self._numbers += 1
            # A prefetch leaves out the block of the last token, which a prompt computes in any case.
            ids = [*prefix.token_ids[:tokens], 0]
            at = source.capacity.blocks_at if source.capacity else ""
            wishes.append(Prefetch(self._numbers, ids, at, prefix.cache_salt, adapter=prefix.adapter))
            self._copies[self._numbers] = newcomer, now + MOST_SECONDS
        newcomer.warming = bool(wishes)
        return wishes

    def copied(self, newcomer: PooledInstance, number: int) -> bool:
        """Record the end of a copy; returns whether it belonged to a warm-up."""
        if number not in self._copies or self._copies[number][0] is not newcomer:
            return False
        del self._copies[number]
        self._end_if_over(newcomer)
        return True

    def overdue(self, now: float) -> None:
        """End the warm-up of newcomers whose time is over."""
        for number, (newcomer, until) in list(self._copies.items()):
            if now >= until:
                del self._copies[number]
                self._end_if_over(newcomer)

    def stop(self) -> None:
        """End all warm-ups at once, since instances are lost."""
        for newcomer, _ in self._copies.values():
            newcomer.warming = False
        self._copies.clear()

    def _end_if_over(self, newcomer: PooledInstance) -> None:
        if not any(other is newcomer for other, _ in self._copies.values()):
            newcomer.warming = False


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of leading blocks that two prompts share."""
    return next(
        (length for length, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
