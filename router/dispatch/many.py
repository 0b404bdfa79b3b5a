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
from collections.abc import Sequence

import msgspec
import numpy as np

from engine.transfers.price import FEWEST
from router.dispatch import policy
from router.dispatch.columns import Bools, Floats, InstanceColumns, Slots
from router.dispatch.ledger import Entry
from router.dispatch.policy import Policy, Wish
from router.dispatch.pool import CROWD_TIME, Pool, PooledInstance

GROUPS_KEPT = 256
"""Sets of instances whose slots are remembered."""
FEW = 4
"""Instances that the rule itself looks at, rather than all in columns."""
CLOSE = 1e-9
"""Relative difference of prices that may be an error of ``exp``."""


def _about(price: float) -> float:
    """The highest of the prices that may be equal to this one."""
    return price + CLOSE * max(1.0, abs(price))


class _Prompt(msgspec.Struct, frozen=True):
    """A request as the prices see it: what each instance has of it."""

    tokens: int
    cached: Floats
    """Tokens in the cache of each instance."""
    spared: Floats | None
    """Tokens to compute that each spares by fetching; None if that is 0 everywhere."""
    longest: float
    """Most cached tokens among the instances that may take the request."""
    shares: Floats | None
    """As :func:`router.dispatch.policy.core_shares`; None if that is 1 everywhere."""
    now: float


class Many(InstanceColumns):
    """Chooser among many instances, which computes all prices at once in columns."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._bit_slots: Slots = np.zeros(0, np.intp)
        """Slots by the bit that the prefix index has for an instance; 0 for none."""
        self._slots_of: dict[int, Slots] = {}
        """Slots by bits, as lately asked for."""

    def __repr__(self) -> str:
        return f"<Many {len(self._slots)} instances>"

    def choose(
        self, kind: Policy, entry: Entry, blocks: Sequence[int], wish: Wish, now: float
    ) -> PooledInstance | None:
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
                prompt = _Prompt(wish.tokens, cached, None, 0.0, None, now)
                prices = np.where(free, self._costs(prompt) + cached, math.inf)
                return self._instances[self._first(np.flatnonzero(prices == prices.min()))]
            case _:
                return self._prefix_aware(self._seen(blocks, wish, free, now), wish, free)

    # ---- filters

    def _free_for(self, entry: Entry) -> Bools | None:
        """The instances that may take a request.

        None if none may, or if it is too long for all."""
        if entry.prompt.asked:
            held = self._column("held")
            if not ((held > entry.most) & (held < math.inf)).any():
                return None
        free: Bools = self._column("taken") > entry.most
        if self._on_trial:
            admitted = self._column("admitted") > 0
            if (admitted & (self._column("able") > 0)).any():
                free &= admitted
        return free if free.any() else None

    # ---- prices

    def _seen(self, blocks: Sequence[int], wish: Wish, free: Bools, now: float) -> _Prompt:
        index = self._pool.index
        stored = index.stored_groups(blocks)
        groups = index.prefix_groups(blocks) if index.expects_any else stored
        cached = self._cached(groups)
        longest = float(cached[free].max()) if groups else 0.0
        shares = self._shares(free) if self._shares_cores else None
        return _Prompt(wish.tokens, cached, self._spared(stored, cached), longest, shares, now)

    def _prefix_aware(self, prompt: _Prompt, wish: Wish, free: Bools) -> PooledInstance | None:
        best = self._cheapest(prompt, free)
        if not wish.key:
            return self._instances[best]
        home = self._home(wish.key, free)
        if home is None:
            return None
        slot = self._slots[home.name]
        slack = self._exact(slot, prompt) - self._exact(best, prompt)
        stays = slack <= policy.SESSION_SLACK and prompt.cached[slot] >= prompt.cached[best]
        return home if stays else self._instances[best]

    def _cheapest(self, prompt: _Prompt, free: Bools) -> int:
        """The slot with the lowest price.

        A price is at least the work that is there, and what is left of the prompt with the least cost of
        copies. Most often few instances have so little of both that the others need not be looked at.
        """
        there = prompt.cached if prompt.spared is None else prompt.cached + prompt.spared
        least = self._column("base") - (1.0 + policy.COPY_COST) * there
        least = np.where(free, least, math.inf)
        guess = int(least.argmin())
        price = self._exact(guess, prompt)
        is_close = least <= _about(price - prompt.tokens - policy.COPY_COST * prompt.longest)
        num_close = np.count_nonzero(is_close)
        if num_close == 1:
            return guess
        if num_close > FEW:
            return self._cheapest_of_many(prompt, free)
        close = np.flatnonzero(is_close)
        prices = np.array([price if slot == guess else self._exact(slot, prompt) for slot in close.tolist()])
        return self._first(close[prices == prices.min()])

    def _cheapest_of_many(self, prompt: _Prompt, free: Bools) -> int:
        """Slot with the lowest price among many, computed in columns.

        Prices about as low as the lowest are computed again where ``exp`` decides.
        """
        prices = self._costs(prompt)
        if prompt.shares is not None:
            prices /= prompt.shares
        prices = np.where(free, prices, math.inf)
        close = np.flatnonzero(prices <= _about(float(prices.min())))
        for slot in self._doubtful(close, prompt).tolist():
            prices[slot] = self._exact(slot, prompt)
        lowest = prices[close]
        return self._first(close[lowest == lowest.min()])

    def _costs(self, prompt: _Prompt) -> Floats:
        """As :func:`router.dispatch.policy.cost`, for all; exact but for the last bit of ``exp``."""
        column, tokens, spared = self._column, prompt.tokens, prompt.spared
        uncached = tokens - prompt.cached
        found: Floats = column("work") + uncached
        if spared is not None:
            found -= spared
        if prompt.longest:
            elsewhere = prompt.longest - prompt.cached
            if spared is not None:
                elsewhere = np.maximum(0.0, elsewhere - spared)
            found += self._delayed(prompt.now) * elsewhere
        share = self._pool.index.evictions.share
        if share:
            displaced = np.maximum(0.0, uncached - column("vacant_tokens"))
            found += displaced * share / (1.0 - share)
        found += column("context")
        found += np.where(column("room") < tokens, column("queued_without_room"), column("queued_with_room"))
        return found

    def _delayed(self, now: float) -> Floats:
        """Cost to others of a token that another instance has, for all.

        The crowd is the number of requests that wait, now or lately: the larger one.
        """
        crowd: Floats = np.exp((self._column("changed_at") - now) / CROWD_TIME)
        crowd *= self._column("surplus")
        crowd += self._column("waiting")
        others: Floats = crowd * (1.0 + crowd)
        others += policy.COPY_COST
        return others

    def _doubtful(self, slots: Slots, prompt: _Prompt) -> Slots:
        """Those of some slots whose prices hang on ``exp`` in the last bits."""
        if not prompt.longest:
            return slots[:0]
        return slots[(self._column("unsettled")[slots] > 0) & (prompt.cached[slots] < prompt.longest)]

    def _exact(self, slot: int, prompt: _Prompt) -> float:
        """The price of one instance by the rule itself."""
        instance, cached = self._instances[slot], int(prompt.cached[slot])
        assert instance is not None
        candidate = self._pool.candidate(instance, prompt.now, cached)
        if prompt.spared is not None and prompt.spared[slot]:
            fetchable = round(float(prompt.spared[slot]) / float(self._column("saving")[slot]))
            candidate = msgspec.structs.replace(candidate, fetchable_tokens=fetchable)
        cost = policy.cost(candidate, prompt.tokens, int(prompt.longest) - cached)
        return cost if prompt.shares is None else cost / float(prompt.shares[slot])

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

    def _first(self, equal: Slots) -> int:
        """Slot among equal prices: the least used, then the lowest rank."""
        if len(equal) > 1:
            dispatches = self._column("dispatches")[equal]
            equal = equal[dispatches == dispatches.min()]
            equal = equal[[np.argmin(self._column("rank")[equal])]]
        return int(equal[0])

    def _spared(self, stored: dict[int, int], cached: Floats) -> Floats | None:
        """As :func:`router.dispatch.policy.spared_by_fetching`, for all; None if that is 0 everywhere.

        ``stored``: groups of the index with what instances can lend.
        """
        if not stored or len(self._identities) == 1:
            return None
        lent, lendable = self._column("lent_tokens"), np.zeros(len(self._identities))
        if len(lendable) == 2:  # of one model: all that lend have the same identity
            most = max(length * float(lent[self._slots_with(bits)].max()) for bits, length in stored.items())
            fetchable = most - cached
        else:
            identities = self._column("identity").astype(np.intp)
            for bits, length in stored.items():
                slots = self._slots_with(bits)
                np.maximum.at(lendable, identities[slots], length * lent[slots])
            most, fetchable = float(lendable.max()), lendable[identities] - cached
        if most < FEWEST:
            return None
        return np.where(fetchable >= FEWEST, fetchable * self._column("saving"), 0.0)

    def _cached(self, groups: dict[int, int]) -> Floats:
        """Tokens of the prompt that each instance has, from groups of the index."""
        cached = np.zeros(self._table.shape[1])
        block_tokens = self._column("block_tokens")
        for bits, length in groups.items():
            slots = self._slots_with(bits)
            cached[slots] = length * block_tokens[slots]
        return cached

    def _slots_with(self, bits: int) -> Slots:
        """The slots of instances that the index names by bits."""
        names = self._pool.index.names
        if self._bits_of is not names:
            self._bits_of = names
            self._bit_slots = np.array([self._slots.get(name, 0) for name in names], np.intp)
            self._slots_of.clear()
        slots = self._slots_of.get(bits)
        if slots is None:
            packed = np.frombuffer(bits.to_bytes(-(-len(names) // 8), "little"), np.uint8)
            named = np.unpackbits(packed, bitorder="little", count=len(names)).view(np.bool_)
            if len(self._slots_of) >= GROUPS_KEPT:
                self._slots_of.clear()
            self._slots_of[bits] = slots = self._bit_slots[named]
        return slots

    def _home(self, key: str, free: Bools) -> PooledInstance | None:
        """The home of a key among free instances; None if it is not remembered."""
        for _ in range(2):
            for rank in self._homes.of(key, self._slot_of_rank):
                slot = self._slot_of_rank.get(rank)
                if slot is not None and free[slot]:
                    return self._instances[slot]
            self._homes.forget(key)  # all of them may have left by now
        return None
