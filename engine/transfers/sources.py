"""Sources of KV blocks: other instances, files, and the memory of dead instances (pure).

Each kind of source has something that carries out transfers from it, and a price. Which blocks are fetched is
decided in :mod:`engine.transfers.exchange`. Here is where from, whether that pays, how long it may take, and
which sources are not asked again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from engine.pieces.pool import BlockHash
from engine.transfers.checking import BlockCheck
from engine.transfers.fetching import DEAD, FILES, Source, TransferEnded, Wanted
from engine.transfers.lending import Key, Lookup, Return
from engine.transfers.price import FetchPrice

logger = logging.getLogger(__name__)

LEAST_SECONDS, MOST_SECONDS = 0.25, 10.0
"""Seconds that a transfer may take, where computing would take less or more."""
MOST_DISTRUSTED = 256
"""Sources that are remembered for having been wrong."""


class Carrier(Protocol):
    """Whatever carries out transfers from one kind of source."""

    def fetch(self, wanted: Wanted) -> None: ...
    def cancel(self, number: int) -> None: ...


class LocalCarrier(Carrier, Protocol):
    """Carrier whose threads read files or memory of this host, as :class:`engine.inheritance.heir.Heir`."""

    def take_events(self) -> list[TransferEnded]: ...


class Tier(LocalCarrier, Protocol):
    """Further blocks of this cache, which :class:`engine.tiers.file_tier.FileTier` has in files."""

    def count(self, names: Sequence[BlockHash]) -> int: ...
    def usable(self, names: Sequence[BlockHash]) -> int: ...
    def turn(self, being_filled: Callable[[], set[int]]) -> None: ...
    def forget(self, names: Sequence[BlockHash]) -> None: ...
    def drop_written(self) -> None: ...
    def abandon(self) -> None: ...


class Mover(Carrier, Protocol):
    """The part of :class:`engine.transfers.mover.BlockMover` that the step loop uses."""

    @property
    def has_ended(self) -> bool: ...
    def take_events(self) -> list[Lookup | Return | TransferEnded]: ...
    def found(self, loan: Key, blocks: Sequence[int]) -> None: ...
    def handed_over(
        self, loan: Key, names: Sequence[BlockHash], blocks: Sequence[int], *, has_part: bool
    ) -> None: ...
    def refuse(self, loan: Key, reason: str) -> None: ...
    def same(self, one: int, other: int) -> bool: ...


class Sources:
    """All sources of one cache, with their prices and those that are not trusted."""

    def __init__(
        self,
        mover: Mover,
        price: FetchPrice,
        clock: Callable[[], float] = time.monotonic,
        *,
        tier: Tier | None = None,
        heir: LocalCarrier | None = None,
    ) -> None:
        """``price`` of other instances. ``tier``: blocks in files. ``heir``: copies those of the dead."""
        self.mover = mover
        self.price = price
        self._clock = clock
        self._tier, self._tier_price = tier, FetchPrice(price.token_bytes, price.end_bytes)
        self._heir, self._heir_price = heir, FetchPrice(price.token_bytes, price.end_bytes)
        self._distrusted: dict[Source, None] = {}

    def __repr__(self) -> str:
        return f"<Sources {self._tier!r} {self._heir!r} {len(self._distrusted)} distrusted>"

    @property
    def has_files(self) -> bool:
        """Whether blocks are looked up in files, too."""
        return self._tier is not None

    @property
    def may_hang(self) -> bool:
        """Whether there are sources whose reads may hang."""
        return self._tier is not None or self._heir is not None

    def take_events(self, being_filled: Callable[[], set[int]]) -> list[Lookup | Return | TransferEnded]:
        """Events of all carriers since the last call; files take note of the blocks ``being_filled``."""
        events = self.mover.take_events()
        if self._tier is not None:
            self._tier.turn(being_filled)
            events = [*events, *self._tier.take_events()]
        if self._heir is not None:
            events = [*events, *self._heir.take_events()]
        return events

    def carrier(self, source: Source) -> Carrier:
        """What carries out transfers from a source."""
        if source == FILES and self._tier is not None:
            return self._tier
        return self._heir if is_dead(source) and self._heir is not None else self.mover

    def reachable(self, source: Source) -> Source:
        """The source itself, or none: nothing reads the memory of the dead without an heir."""
        return "" if is_dead(source) and self._heir is None else source

    def best(self, names: list[BlockHash], source: Source) -> tuple[list[BlockHash], Source] | None:
        """The best source of some blocks, with those that it may have; None without any.

        Files are the best one if they have all blocks, or if no instance has some.
        """
        count = 0 if self._tier is None or not self.trusts(FILES) else self._tier.count(names)
        if count and (count == len(names) or not source):
            return names[:count], FILES
        return (names, source) if source else None

    def usable(self, names: Sequence[BlockHash], source: Source) -> Sequence[BlockHash]:
        """Leading blocks that a source is asked for, of those that there is room for."""
        if source != FILES or self._tier is None:
            return names  # who has them sees what is usable
        return names[: self._tier.usable(names)]

    # ---- prices

    def price_now(self) -> float:
        """Price of a token fetched from an instance, in computed ones; 1: nothing is fetched."""
        return 1.0 if self.mover.has_ended else min(1.0, self.price.at(self._clock()))

    def computed(self, tokens: int, seconds: float) -> None:
        """Take in a step with prompt tokens, for all prices."""
        for price in (self.price, self._tier_price, self._heir_price):
            price.computed(tokens, seconds)

    def fetched(self, source: Source, num_bytes: int, seconds: float) -> None:
        """Take in a transfer, for the price of its source."""
        self._price_of(source).fetched(num_bytes, seconds, self._clock())

    def pays(self, source: Source, tokens: int) -> bool:
        """Whether to fetch so many tokens; memory of this host is always worth it."""
        return is_dead(source) or self._price_of(source).pays(tokens, self._clock())

    def seconds_for(self, source: Source, tokens: int) -> float:
        """Most seconds that a transfer may take: about as long as computing."""
        computing = self._price_of(source).seconds_to_compute(tokens)
        return MOST_SECONDS if computing is None else min(MOST_SECONDS, max(LEAST_SECONDS, computing))

    def due_at(self, source: Source, seconds: float) -> float:
        """When requests stop waiting for a transfer.

        Never for one of the mover, which ends it in time itself.
        """
        return self._clock() + seconds if is_here(source) else float("inf")

    def is_past(self, due_at: float) -> bool:
        """Whether a time of :meth:`due_at` is over."""
        return self._clock() > due_at

    def _price_of(self, source: Source) -> FetchPrice:
        if source == FILES:
            return self._tier_price
        return self._heir_price if is_dead(source) else self.price

    # ---- trust

    def trusts(self, source: Source) -> bool:
        """Whether a source is asked for blocks."""
        return source not in self._distrusted

    def distrust(self, source: Source, why: str, *, is_wrong: bool) -> None:
        """Ask a source no more; ``is_wrong``: what it has is not what it names."""
        level = logging.ERROR if is_wrong else logging.INFO
        logger.log(level, "KV blocks of %s are not asked for any more: %s", source, why)
        self._distrusted[source] = None
        while len(self._distrusted) > MOST_DISTRUSTED:
            del self._distrusted[next(iter(self._distrusted))]

    def blame(self, source: Source | None, names: Sequence[BlockHash]) -> None:
        """Act on a wrong cached piece; ``source``: None if it could not be found out."""
        if source is None:
            logger.error("the source of the wrong piece is not known: there was no room to look for it")
            if self._tier is not None:
                self._tier.forget(names)
        elif source:
            self.distrust(source, "a block of it is not what is computed here", is_wrong=True)
        else:
            logger.error("the fault is of this instance: its memory, or what it computed")
        self._drop_files(source, names)

    def drop_files(self, wrong: Iterable[BlockCheck]) -> None:
        """Delete files that are wrong, or may be written on top of wrong blocks."""
        for check in wrong:
            self._drop_files(check.source, check.names)

    def _drop_files(self, source: Source | None, names: Sequence[BlockHash]) -> None:
        if self._tier is None:
            return
        if source == FILES:
            self._tier.forget(names)
            self._tier.abandon()
        else:
            self._tier.drop_written()


def kind_of(source: Source | None) -> str:
    """Kind of a source, as metrics name it; one without an address is this instance."""
    if source is None:
        return "unknown"
    if not source:
        return "own"
    if is_dead(source):
        return "memory"
    return "file" if source == FILES else "instance"


def is_dead(source: Source) -> bool:
    """Whether a source is the memory of a dead instance."""
    return source.startswith(DEAD)


def is_here(source: Source) -> bool:
    """Whether a source is read on this host, by a thread that may hang."""
    return source == FILES or is_dead(source)
