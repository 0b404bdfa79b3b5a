"""The choice among many instances at once, in columns (pure).

:mod:`router.dispatch.policy` has the rules, for one candidate after the other: some milliseconds for 1,024 of
them. Here the same rules are applied to arrays with one entry per instance, which are kept from choice to
choice. Only the rows of instances that have changed are made again. Every sum is the same, in the same order,
so the choice is the same to the last bit, with one exception: ``exp`` may differ in the last one. Prices that
depend on it and are about the lowest are computed again by the rule itself.

numpy is loaded with this module, so a router imports it when its mesh has become large.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from engine.transfers.price import FEWEST, WORTH
from router.dispatch import policy
from router.dispatch.ledger import Entry
from router.dispatch.policy import Policy, Wish
from router.dispatch.pool import CROWD_TIME, Instance, Pool

COLUMNS = (
    "rank",
    "able",  # ready, not stalled
    "usable",  # the same, with room in its queue
    "work",  # tokens that wait there, and what decoding takes
    "context",  # cost of the blocks that are in use
    "room",  # blocks that are not in use
    "queued_with_room",
    "queued_without_room",
    "requests",
    "dispatches",
    "waiting",
    "crowd",
    "crowd_at",
    "vacant_tokens",
    "block_size",
    "held",  # tokens that a request may have
    "at_once",
    "host",
    "identity",  # number of the cache's; 0 if it lends and fetches nothing
    "fetch_price",
    "admitted",
)
"""What a choice needs of an instance.

Sums are of whole numbers, which are exact in any order."""
COLUMN = {name: number for number, name in enumerate(COLUMNS)}
NO_BLOCKS, ALL_BLOCKS = -(2**40), 2**40
"""Blocks of a request for which there is always room, and never."""
CLOSE = 1e-9
"""Relative difference of prices that may be an error of ``exp``."""
HOMES_KEPT = 8
"""Candidates for the home of a session that are remembered."""
MAX_SESSIONS = 10_000
MAX_JOINED = 1024
"""Instances that joined lately, in which remembered sessions look for a new home."""

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def _rows(count: int) -> Floats:
    """Rows of no instance, which is never ready."""
    rows: Floats = np.zeros((len(COLUMNS), count))
    rows[COLUMN["block_size"]] = 1.0
    rows[COLUMN["at_once"]] = math.inf
    return rows


class Homes:
    """The first homes of each session, as :func:`router.dispatch.policy.affinity` ranks them.

    To rank 1,024 instances takes a millisecond, so the best few are remembered.
    """

    def __init__(self) -> None:
        self._first: OrderedDict[str, tuple[int, list[tuple[bytes, int]]]] = OrderedDict()
        """By session: number of the last instance that was looked at, and the best ranks."""
        self._joined: list[int] = []
        self._before = 0
        """Instances that joined before those."""

    def joined(self, rank: int) -> None:
        """Note that an instance with this rank has come."""
        self._joined.append(rank)
        if len(self._joined) > MAX_JOINED:
            self._before += len(self._joined) // 2
            del self._joined[: len(self._joined) // 2]

    def of(self, key: str, ranks: Iterable[int]) -> list[int]:
        """The best ranks of a session, best first; others of ``ranks`` come after them."""
        at, first = self._first.pop(key, (-1, []))
        newest = self._before + len(self._joined)
        if at < self._before:
            found = sorted((policy.affinity(key, rank), rank) for rank in set(ranks))
        else:
            new = set(self._joined[at - self._before :])
            found = sorted({*first, *((policy.affinity(key, rank), rank) for rank in new)})
        self._first[key] = newest, found[:HOMES_KEPT]
        if len(self._first) > MAX_SESSIONS:
            self._first.popitem(last=False)
        return [rank for _, rank in found[:HOMES_KEPT]]

    def forget(self, key: str) -> None:
        """Have all instances looked at the next time."""
        self._first.pop(key, None)


class Many:
    """The instances of a pool in columns."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._table: Floats = _rows(64)
        self._instances: list[Instance | None] = []
        self._slots: dict[str, int] = {}
        self._slot_of_rank: dict[int, int] = {}
        self._free: list[int] = []
        self._hosts: dict[str, int] = {}
        self._identities: dict[str, int] = {"": 0}
        self._on_trial: set[int] = set()
        """Slots of instances that failed lately: time decides whether they are admitted."""
        self._shares_cores = False
        """Whether any instance computes on cores that others may share."""
        self._homes = Homes()
        self._bit_slots: npt.NDArray[np.intp] = np.zeros(0, np.intp)
        """Slots by the bit that the prefix index has for an instance; -1 for none."""
        self._bits_of: object = None
        for instance in pool:
            self._fill(instance)

    def __repr__(self) -> str:
        return f"<Many {len(self._slots)} instances>"

    def choose(
        self, kind: Policy, entry: Entry, blocks: Sequence[int], wish: Wish, now: float
    ) -> Instance | None:
        """The instance that :meth:`router.dispatch.chooser.Chooser.choose` chooses.

        None where that one must choose: an instance has failed the request, it has to stay in a class, no
        instance may take it, or the policy looks at single instances.
        """
        if entry.failed_ranks or entry.owed or wish.numerics is not None or kind is Policy.POWER_OF_TWO:
            return None
        self._refresh(now)
        free = self._free_for(entry)
        if free is None:
            return None
        match kind:
            case Policy.ROUND_ROBIN:
                ranks = np.sort(self._column("rank")[free])
                return self._of_rank(int(ranks[wish.turn % len(ranks)]))
            case Policy.CONSISTENT_HASH:
                return self._home(wish.key, free) if wish.key else None
            case Policy.LEAST_LOADED:
                cached = self._cached(self._pool.index.prefix_groups(blocks))
                costs = self._costs(wish.tokens, cached, None) + cached
                return self._instances[self._cheapest(costs, free)]
            case _:
                cached = self._cached(self._pool.index.prefix_groups(blocks))
                return self._prefix_aware(cached, self._spared(blocks, cached), wish, free, now)

    # ---- filters

    def _free_for(self, entry: Entry) -> Bools | None:
        """The instances that may take a request.

        None if none may, or if it is too long for all."""
        held = self._column("held")
        fits = held > entry.most
        if entry.prompt.asked and not (fits & (held < math.inf)).any():
            return None
        free: Bools = fits & (self._column("usable") > 0)
        if self._on_trial:
            admitted = self._column("admitted") > 0
            if (admitted & (self._column("able") > 0)).any():
                free &= admitted
        return free if free.any() else None

    # ---- prices

    def _prefix_aware(
        self, cached: Floats, spared: Floats | None, wish: Wish, free: Bools, now: float
    ) -> Instance | None:
        longest = float(cached[free].max())
        elsewhere = longest - cached if longest else None
        crowd = None if elsewhere is None else self._crowds(now)
        prices = self._costs(wish.tokens, cached, elsewhere, crowd, spared)
        if self._shares_cores:
            prices /= self._shares(free)
        doubtful = free & (cached < longest)
        if longest:
            doubtful &= self._column("crowd") != self._column("waiting")
            if doubtful.any():
                self._settle(prices, free, doubtful, cached, spared, wish, now)
        best = self._cheapest(prices, free)
        if not wish.key:
            return self._instances[best]
        home = self._home(wish.key, free)
        if home is None:
            return None
        slot = self._slots[home.name]
        slack = float(prices[slot]) - float(prices[best])
        if doubtful[slot] and abs(slack - policy.SESSION_SLACK) < CLOSE * policy.SESSION_SLACK:
            return None  # too close to call here
        stays = slack <= policy.SESSION_SLACK and cached[slot] >= cached[best]
        return home if stays else self._instances[best]

    def _costs(
        self,
        tokens: int,
        cached: Floats,
        elsewhere: Floats | None,
        crowd: Floats | None = None,
        spared: Floats | None = None,
    ) -> Floats:
        """As :func:`router.dispatch.policy.cost`, for all."""
        column, uncached = self._column, tokens - cached
        found: Floats = column("work") + uncached
        if spared is not None:
            found -= spared
            elsewhere = None if elsewhere is None else np.maximum(0.0, elsewhere - spared)
        if elsewhere is not None and crowd is not None:
            found += (policy.COPY_COST + crowd * (1.0 + crowd)) * elsewhere
        share = self._pool.index.evictions.share
        if share:
            displaced = np.maximum(0.0, uncached - column("vacant_tokens"))
            found += displaced * share / (1.0 - share)
        found += column("context")
        no_room = np.ceil(tokens / column("block_size")) > column("room")
        queued = np.where(no_room, column("queued_without_room"), column("queued_with_room"))
        if queued.any():
            found += policy.QUEUE_COST * queued
        return found

    def _crowds(self, now: float) -> Floats:
        """Requests that wait, now or lately: the larger number.

        Exact but for the last bit of ``exp``."""
        waiting, before = self._column("waiting"), self._column("crowd")
        kept = np.exp((self._column("crowd_at") - now) / CROWD_TIME)
        lately = np.where(waiting == before, waiting, kept * before + (1.0 - kept) * waiting)
        return np.maximum(waiting, lately)

    def _settle(
        self,
        prices: Floats,
        free: Bools,
        doubtful: Bools,
        cached: Floats,
        spared: Floats | None,
        wish: Wish,
        now: float,
    ) -> None:
        """Correct the prices that hang on ``exp`` and might be the lowest."""
        lowest, longest = float(prices[free].min()), float(cached[free].max())
        shares = self._shares(free)
        for slot in np.flatnonzero(doubtful & (prices <= lowest + CLOSE * max(1.0, abs(lowest)))):
            instance = self._instances[slot]
            assert instance is not None
            candidate = self._pool.candidate(instance, now, int(cached[slot]))
            if spared is not None and spared[slot]:
                price = float(self._column("fetch_price")[slot])
                candidate = msgspec.structs.replace(
                    candidate, fetchable_tokens=round(float(spared[slot]) / (1.0 - price))
                )
            exact = policy.cost(candidate, wish.tokens, int(longest - cached[slot]))
            prices[slot] = exact / float(shares[slot])

    def _shares(self, free: Bools) -> Floats:
        """As :func:`router.dispatch.policy.core_shares`."""
        at_once, requests = self._column("at_once"), self._column("requests")
        shares = np.ones_like(at_once)
        sharing = free & (at_once < math.inf)
        if sharing.any():
            hosts = self._column("host").astype(np.intp)
            busy = np.bincount(hosts[sharing & (requests > 0)], minlength=len(self._hosts))
            rivals = busy[hosts] + (requests == 0)
            shares[sharing] = np.minimum(1.0, at_once[sharing] / rivals[sharing])
        return shares

    def _cheapest(self, prices: Floats, free: Bools) -> int:
        """The lowest price; among equals the least used, then by rank."""
        found = np.where(free, prices, math.inf)
        equal = np.flatnonzero(found == found.min())
        if len(equal) > 1:
            dispatches = self._column("dispatches")[equal]
            equal = equal[dispatches == dispatches.min()]
            equal = equal[[np.argmin(self._column("rank")[equal])]]
        return int(equal[0])

    def _spared(self, blocks: Sequence[int], cached: Floats) -> Floats | None:
        """As :func:`router.dispatch.policy.spared_by_fetching`, for all; None if that is 0 everywhere."""
        groups = self._pool.index.stored_groups(blocks) if len(self._identities) > 1 else {}
        if not groups:
            return None
        identities = self._column("identity").astype(np.intp)
        lendable = np.zeros(len(self._identities))
        np.maximum.at(lendable, identities, self._cached(groups))
        lendable[0] = 0.0
        prices, fetchable = self._column("fetch_price"), lendable[identities] - cached
        spared: Floats = np.where((fetchable >= FEWEST) & (prices <= WORTH), fetchable * (1.0 - prices), 0.0)
        return spared if spared.any() else None

    def _cached(self, groups: dict[int, int]) -> Floats:
        """Tokens of the prompt that each instance has, from groups of the index."""
        cached = np.zeros(self._table.shape[1])
        if not groups:
            return cached
        if self._bits_of is not self._pool.index.names:
            self._bits_of = self._pool.index.names
            self._bit_slots = np.array(
                [self._slots.get(name, -1) for name in self._pool.index.names], np.intp
            )
        block_size = self._column("block_size")
        for bits, length in groups.items():
            packed = np.frombuffer(bits.to_bytes(-(-bits.bit_length() // 8), "little"), np.uint8)
            slots = self._bit_slots[np.flatnonzero(np.unpackbits(packed, bitorder="little"))]
            slots = slots[slots >= 0]
            cached[slots] = length * block_size[slots]
        return np.where(self._column("held") < math.inf, cached, 0.0)

    def _home(self, key: str, free: Bools) -> Instance | None:
        """The home of a key among free instances; None if it is not remembered."""
        for _ in range(2):
            for rank in self._homes.of(key, self._slot_of_rank):
                slot = self._slot_of_rank.get(rank)
                if slot is not None and free[slot]:
                    return self._instances[slot]
            self._homes.forget(key)  # all of them may have left by now
        return None

    # ---- rows

    def _column(self, name: str) -> Floats:
        column: Floats = self._table[COLUMN[name]]
        return column

    def _of_rank(self, rank: int) -> Instance | None:
        return self._instances[self._slot_of_rank[rank]]

    def _refresh(self, now: float) -> None:
        """Make the rows of what has changed since the last choice."""
        touched = self._pool.take_touched()
        for name in touched:
            instance = self._pool.get(name)
            if instance is None or self._instance_at(name) not in (instance, None):
                self._drop(name)
        for name in touched:
            instance = self._pool.get(name)
            if instance is not None:
                self._fill(instance)
        for slot in list(self._on_trial):
            on_trial = self._instances[slot]
            if on_trial is None or not on_trial.breaker.failures:
                self._on_trial.discard(slot)
            self._table[COLUMN["admitted"], slot] = on_trial is None or on_trial.breaker.admits(now)

    def _instance_at(self, name: str) -> Instance | None:
        slot = self._slots.get(name)
        return None if slot is None else self._instances[slot]

    def _drop(self, name: str) -> None:
        slot = self._slots.pop(name, None)
        if slot is None:
            return
        instance, self._instances[slot] = self._instances[slot], None
        if instance is not None and self._slot_of_rank.get(instance.rank) == slot:
            del self._slot_of_rank[instance.rank]
        self._table[:, slot : slot + 1] = _rows(1)
        self._free.append(slot)
        self._bits_of = None

    def _slot_for(self, instance: Instance) -> int:
        slot = self._slots.get(instance.name)
        if slot is None:
            slot = self._free.pop() if self._free else len(self._instances)
            if slot == len(self._instances):
                self._instances.append(None)
            if slot == self._table.shape[1]:
                self._table = np.concatenate([self._table, _rows(slot)], axis=1)
            self._slots[instance.name] = slot
            self._instances[slot] = instance
            self._bits_of = None
        if self._slot_of_rank.get(instance.rank) != slot:
            self._slot_of_rank[instance.rank] = slot
            self._homes.joined(instance.rank)
        return slot

    def _identity_of(self, instance: Instance) -> int:
        if not instance.lends or instance.capacity is None:
            return 0
        return self._identities.setdefault(instance.capacity.cache_identity, len(self._identities))

    def _fill(self, instance: Instance) -> None:
        slot = self._slot_for(instance)
        seen = self._pool.candidate(instance, instance.crowd_at)
        limits = seen.capacity
        able = seen.ready and seen.stalled_for < policy.STALLED_AFTER
        self._table[:, slot] = (
            seen.rank,
            able,
            able and not policy.is_full(seen),
            seen.waiting_tokens + policy.DECODE_COST * seen.requests,
            0.0 if limits is None else policy.CONTEXT_COST * min(1.0, seen.blocks / limits.num_blocks),
            math.inf if limits is None else limits.num_blocks - seen.blocks,
            policy.num_queued(seen, NO_BLOCKS),
            policy.num_queued(seen, ALL_BLOCKS),
            seen.requests,
            seen.dispatches,
            seen.waiting,
            instance.crowd_before,
            instance.crowd_at,
            math.inf if limits is None or seen.vacant is None else seen.vacant * limits.block_size,
            1.0 if limits is None else limits.block_size,
            math.inf if limits is None else limits.num_blocks * limits.block_size,
            math.inf if limits is None or limits.at_once is None else limits.at_once,
            self._hosts.setdefault(seen.host, len(self._hosts)),
            self._identity_of(instance),
            seen.fetch_price,
            True,
        )
        self._shares_cores |= limits is not None and limits.at_once is not None
        if instance.breaker.failures:
            self._on_trial.add(slot)
