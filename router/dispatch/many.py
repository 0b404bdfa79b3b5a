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
from router.dispatch.pool import CROWD_TIME, NO_REPORT, Instance, Pool

LOADS = (
    "taken",  # tokens that a request may have; 0 while it takes none
    "work",  # tokens that wait there, and what decoding takes
    "context",  # cost of the blocks that are in use
    "base",  # the sum of both
    "room",  # tokens for which there are unused blocks
    "queued_with_room",  # cost of requests that wait for another to end
    "queued_without_room",
    "requests",
    "dispatches",
    "waiting",
    "surplus",  # by so many the average of those was higher at the last change
    "unsettled",  # whether it was another one
    "changed_at",
    "vacant_tokens",
    "saving",  # share of a token's cost that fetching it spares
)
"""What reports and dispatches change."""
FACTS = (
    "rank",
    "able",  # ready, not stalled
    "block_tokens",  # tokens of a block; 0 while unknown
    "lent_tokens",  # the same; 0 if it lends and fetches nothing
    "held",  # tokens that its cache holds; infinite while unknown
    "at_once",
    "host",
    "identity",  # number of the cache's; 0 if it lends and fetches nothing
    "admitted",
)
COLUMNS = LOADS + FACTS
"""What a choice needs of an instance.

Sums are of whole numbers, which are exact in any order."""
COLUMN = {name: number for number, name in enumerate(COLUMNS)}
GROUPS_KEPT = 256
"""Sets of instances whose slots are remembered."""
LINE = 8
"""Numbers in a line of a CPU's cache.

Columns have an odd number of lines: with a power of two all entries of a row share one set of the cache.
"""
FEW = 4
"""Instances that the rule itself looks at, rather than all in columns."""
CLOSE = 1e-9
"""Relative difference of prices that may be an error of ``exp``."""
HOMES_KEPT = 8
"""Candidates for the home of a session that are remembered."""
MAX_SESSIONS = 10_000
MAX_JOINED = 1024
"""Instances that joined lately, in which remembered sessions look for a new home."""

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Slots = npt.NDArray[np.intp]


def _rows(count: int) -> Floats:
    """Rows of no instance, which is never ready."""
    rows: Floats = np.zeros((len(COLUMNS), count))
    rows[COLUMN["at_once"]] = math.inf
    return rows


def _about(price: float) -> float:
    """The highest of the prices that may be equal to this one."""
    return price + CLOSE * max(1.0, abs(price))


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


class _Prompt(msgspec.Struct, frozen=True):
    """A request as the prices see it: what each instance has of it."""

    tokens: int
    cached: Floats
    """Tokens in the cache of each instance."""
    spared: Floats | None
    """Tokens to compute that each spares by fetching; None if that is 0 everywhere."""
    longest: float
    """The most that an instance which may take it has cached."""
    shares: Floats | None
    """As :func:`router.dispatch.policy.core_shares`; None if that is 1 everywhere."""
    now: float


class Many:
    """The instances of a pool in columns."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._table: Floats = _rows(9 * LINE)
        self._columns: list[Floats] = list(self._table)
        self._loads = self._table[: len(LOADS)]
        self._instances: list[Instance | None] = [None]
        """By slot; the first one is never taken."""
        self._facts: list[tuple[object, ...]] = [()]
        """By slot: what the facts of its row were made of."""
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
        self._bit_slots: Slots = np.zeros(0, np.intp)
        """Slots by the bit that the prefix index has for an instance; 0 for none."""
        self._bits_of: object = None
        self._slots_of: dict[int, Slots] = {}
        """Slots by bits, as lately asked for."""
        for instance in pool:
            self._fill(instance.name, instance)

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

    def _prefix_aware(self, prompt: _Prompt, wish: Wish, free: Bools) -> Instance | None:
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
        """The same in columns.

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
        """Among equal prices the least used, then by rank."""
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
        return self._columns[COLUMN[name]]

    def _of_rank(self, rank: int) -> Instance | None:
        return self._instances[self._slot_of_rank[rank]]

    def _refresh(self, now: float) -> None:
        """Make the rows of what has changed since the last choice."""
        for name in self._pool.take_touched():
            instance = self._pool.get(name)
            if instance is None:
                self._drop(name)
            else:
                self._fill(name, instance)
        for slot in list(self._on_trial):
            on_trial = self._instances[slot]
            if on_trial is None or not on_trial.breaker.failures:
                self._on_trial.discard(slot)
            self._column("admitted")[slot] = on_trial is None or on_trial.breaker.admits(now)

    def _drop(self, name: str) -> None:
        slot = self._slots.pop(name, None)
        if slot is None:
            return
        instance, self._instances[slot] = self._instances[slot], None
        if instance is not None and self._slot_of_rank.get(instance.rank) == slot:
            del self._slot_of_rank[instance.rank]
        self._table[:, slot : slot + 1] = _rows(1)
        self._facts[slot] = ()
        self._free.append(slot)
        self._bits_of = None

    def _new_slot(self, name: str, instance: Instance) -> int:
        slot = self._free.pop() if self._free else len(self._instances)
        if slot == len(self._instances):
            self._instances.append(None)
            self._facts.append(())
        if slot == self._table.shape[1]:
            self._table = np.concatenate([self._table, _rows(slot + LINE)], axis=1)
            self._columns, self._loads = list(self._table), self._table[: len(LOADS)]
        self._slots[name] = slot
        self._instances[slot] = instance
        self._bits_of = None
        return slot

    def _identity_of(self, instance: Instance) -> int:
        if not instance.lends or instance.capacity is None:
            return 0
        return self._identities.setdefault(instance.capacity.cache_identity, len(self._identities))

    def _fill_loads(self, name: str, slot: int, instance: Instance) -> None:
        """The part of a row that reports and dispatches change."""
        limits, report, sent = instance.capacity, instance.report or NO_REPORT, instance.sent
        waiting = report.waiting + len(instance.unreported)
        requests = report.running + waiting
        work = report.uncached_tokens + sent.uncached + policy.DECODE_COST * requests
        taken, context, room, vacant, saving = math.inf, 0.0, math.inf, math.inf, 0.0
        with_room = without_room = 0
        if limits is not None:
            num_blocks, size, used = limits.num_blocks, limits.block_size, report.blocks_used + sent.blocks
            with_room = policy.queue_with(limits, requests, report.queued, has_blocks=True)
            without_room = max(with_room, report.queued + 1)
            queued = with_room if used < num_blocks else without_room
            is_full = policy.exceeds(limits, queued, report.waiting_tokens + sent.tokens)
            taken = 0 if is_full else num_blocks * size
            context = policy.CONTEXT_COST * min(1.0, used / num_blocks)
            room = (num_blocks - used) * size
            vacant = max(0, num_blocks - self._pool.index.blocks_kept(name, used)) * size
            if limits.blocks_at and report.fetch_price <= WORTH:
                saving = 1.0 - report.fetch_price
        self._loads[:, slot] = (
            taken if self._column("able")[slot] else 0,
            work,
            context,
            work + context,
            room,
            policy.QUEUE_COST * with_room,
            policy.QUEUE_COST * without_room,
            requests,
            instance.last_dispatch,
            waiting,
            max(0.0, instance.crowd_before - waiting),
            instance.crowd_before != waiting,
            instance.crowd_at,
            vacant,
            saving,
        )

    def _fill(self, name: str, instance: Instance) -> None:
        slot = self._slots.get(name)
        if slot is None or self._instances[slot] is not instance:
            self._drop(name)
            slot = self._new_slot(name, instance)
        facts = (instance.member, instance.capacity, instance.attached, instance.leaves, instance.moved)
        if self._facts[slot] != facts:
            self._facts[slot] = facts
            self._fill_facts(slot, instance)
        self._fill_loads(name, slot, instance)
        if instance.breaker.failures:
            self._on_trial.add(slot)

    def _fill_facts(self, slot: int, instance: Instance) -> None:
        member, limits = instance.member, instance.capacity
        stalled_for = 0.0 if instance.moved else member.load.stalled_for
        shares_cores = limits is not None and limits.at_once is not None
        self._table[len(LOADS) :, slot] = (
            member.rank,
            instance.ready and stalled_for < policy.STALLED_AFTER,
            0.0 if limits is None else limits.block_size,
            limits.block_size if limits is not None and instance.lends else 0.0,
            math.inf if limits is None else limits.num_blocks * limits.block_size,
            math.inf if limits is None or limits.at_once is None else limits.at_once,
            self._hosts.setdefault(member.host, len(self._hosts)),
            self._identity_of(instance),
            True,
        )
        self._shares_cores |= shares_cores
        if self._slot_of_rank.get(member.rank) != slot:
            self._slot_of_rank[member.rank] = slot
            self._homes.joined(member.rank)
