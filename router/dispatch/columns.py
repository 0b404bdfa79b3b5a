"""The instances of a pool in columns, with a row of numbers each (pure).

A row is made again when its instance has changed. :mod:`router.dispatch.many` chooses by them.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from engine.transfers.price import WORTH
from router.dispatch import policy
from router.dispatch.homes import Homes
from router.dispatch.pool import NO_REPORT, Pool, PooledInstance

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
"""Columns that reports and dispatches change."""
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
"""Columns that a choice needs of an instance.

Sums are of whole numbers, which are exact in any order."""
COLUMN = {name: number for number, name in enumerate(COLUMNS)}
LINE = 8
"""Numbers in a line of a CPU's cache.

Columns have an odd number of lines: with a power of two all entries of a row share one set of the cache.
"""
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Slots = npt.NDArray[np.intp]


def _rows(count: int) -> Floats:
    """Rows of no instance, which is never ready."""
    rows: Floats = np.zeros((len(COLUMNS), count))
    rows[COLUMN["at_once"]] = math.inf
    return rows


class InstanceColumns:
    """Table of all instances of a pool, a column per figure of a choice."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._table: Floats = _rows(9 * LINE)
        self._columns: list[Floats] = list(self._table)
        self._loads = self._table[: len(LOADS)]
        self._instances: list[PooledInstance | None] = [None]
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
        self._bits_of: object = None
        """Names in the prefix index, by bit; None once a slot has changed."""
        for instance in pool:
            self._fill(instance.name, instance)

    def _column(self, name: str) -> Floats:
        return self._columns[COLUMN[name]]

    def _of_rank(self, rank: int) -> PooledInstance | None:
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

    def _new_slot(self, name: str, instance: PooledInstance) -> int:
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

    def _identity_of(self, instance: PooledInstance) -> int:
        if not instance.lends or instance.capacity is None:
            return 0
        return self._identities.setdefault(instance.capacity.cache_identity, len(self._identities))

    def _fill_loads(self, name: str, slot: int, instance: PooledInstance) -> None:
        """Fill the columns of a row that reports and dispatches change."""
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

    def _fill(self, name: str, instance: PooledInstance) -> None:
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

    def _fill_facts(self, slot: int, instance: PooledInstance) -> None:
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
