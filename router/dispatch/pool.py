"""A router's knowledge of each instance (pure).

It is the instance's entry in the world, its last report, and what was dispatched to it since that report.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from coordinator.messages import Member, Role, State, View
from coordinator.numerics import Numerics
from coordinator.views import ViewNews
from engine.messages import Capacity, Counters, InstanceReport, WeightsInUse
from router.dispatch.circuit_breaker import CircuitBreaker
from router.dispatch.ledger import LOADED_WEIGHTS
from router.dispatch.policy import Candidate
from router.dispatch.prefix_index import PrefixIndex

ANSWER_TIMEOUT = 5.0
"""Seconds within which an instance answers on a new connection, if it ever does."""
CROWD_TIME = 0.3
"""Seconds after which a number of waiting requests weighs a third."""
NO_REPORT = InstanceReport(0, 0, 0, 0, 0, 0, Counters())


class Sent(msgspec.Struct, frozen=True):
    """What a dispatch adds to an instance until a report includes it."""

    number: int
    tokens: int
    """Tokens to compute."""
    uncached: int
    """Tokens of these that the prefix cache does not hold."""
    blocks: int
    """KV blocks that the request will hold."""


NOTHING_SENT = Sent(0, 0, 0, 0)
NOTHING: Mapping[str, int] = {}


def _sum(total: Sent, part: Sent, sign: int) -> Sent:
    return Sent(
        part.number,
        total.tokens + sign * part.tokens,
        total.uncached + sign * part.uncached,
        total.blocks + sign * part.blocks,
    )


@dataclass(slots=True)
class PooledInstance:
    """Instance of the mesh, with what this router knows of it."""

    member: Member
    report: InstanceReport | None = None
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    """Breaker of the rank: a process that is started again inherits its failures."""
    attached: bool = False
    """Whether it has answered on our connection."""
    leaves: bool = False
    """Whether it refuses new requests, perhaps before a view shows that."""
    seen_at: float = 0.0
    """Time at which it entered the pool."""
    idle_since: float | None = None
    """When a view first had it loaded but without a group to serve in.

    None while it serves, loads or drains.
    """
    capacity: Capacity | None = None
    warming: bool = False
    """It copies prefixes first (:mod:`router.dispatch.warm_up`), and gets requests then."""
    asked_back: bool = False
    """Requests were recalled from it, and its answer has not come."""
    moved: bool = False
    """Whether a report since the newest view counted further steps."""
    last_dispatch: int = 0
    unreported: deque[Sent] = field(default_factory=deque)
    """Dispatches that the last report does not include."""
    sent: Sent = NOTHING_SENT
    """Sum over the unreported dispatches."""
    crowd_before: float = 0.0
    """The average that :meth:`crowd` had at ``crowd_at``."""
    crowd_at: float = 0.0
    touched: set[str] | None = field(default=None, repr=False, compare=False)
    """Names of instances that have changed; this one is added with each change."""

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if (touched := getattr(self, "touched", None)) is not None:
            touched.add(self.member.instance)

    @property
    def name(self) -> str:
        return self.member.instance

    @property
    def rank(self) -> int:
        return self.member.rank

    @property
    def weights(self) -> WeightsInUse:
        """Weights of the tokens that come from it now."""
        return LOADED_WEIGHTS if self.capacity is None else self.capacity.in_use

    @property
    def numerics(self) -> Numerics | None:
        """Its numerics class; None if its version names none.

        Where the newest view has other weights than the instance itself has named, the instance is right.
        """
        seen, own = self.member.numerics, self.weights.numerics
        if own is not None and (seen is None or (seen.invariant and seen.weights != own.weights)):
            return own
        return seen

    @property
    def fingerprint(self) -> str | None:
        """Name of its numerics class; None if its version names none."""
        numerics = self.numerics
        return None if numerics is None else numerics.fingerprint

    @property
    def role(self) -> Role:
        """Role of the instance in the newest view."""
        return self.member.role

    @property
    def ready(self) -> bool:
        is_here = self.member.state is State.READY and self.attached
        return is_here and not self.leaves and not self.warming

    @property
    def is_leaving(self) -> bool:
        """Whether it leaves by drain, which no request has brought about."""
        return self.leaves or not self.member.state.stays

    def is_answering(self, now: float) -> bool:
        """Whether it serves, and should answer on a new connection within ANSWER_TIMEOUT."""
        is_new = now < self.seen_at + ANSWER_TIMEOUT
        return is_new and self.member.state is State.READY and not self.attached

    def sees(self, member: Member, now: float, *, complete: bool = True) -> bool:
        """Take over its entry in a new view; returns whether its numerics class changed.

        While the view is not ``complete``, a coordinator that has just started may not know of its group,
        whose class it has.
        """
        before = self.member.numerics
        if not complete and before is not None:
            member = msgspec.structs.replace(member, numerics=before)
        self.member, self.moved = member, False
        if member.state is not State.LOADED:
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = now
        return member.numerics != before

    def dispatch(self, tokens: int, now: float, *, cached: int = 0) -> int:
        """Number the next request to this instance, and count it until a report does.

        It has ``tokens`` to compute, of which the prefix cache has ``cached``.
        """
        self.breaker.dispatched(now)
        self.crowd_before, self.crowd_at = self.crowd(now), now
        self.last_dispatch += 1
        blocks = -(-tokens // self.capacity.block_size) if self.capacity else 0
        sent = Sent(self.last_dispatch, tokens, tokens - cached, blocks)
        self.unreported.append(sent)
        self.sent = _sum(self.sent, sent, 1)
        return self.last_dispatch

    @property
    def waiting(self) -> int:
        """Requests there that no step has begun, as far as is known."""
        return (self.report or NO_REPORT).waiting + len(self.unreported)

    def crowd(self, now: float) -> float:
        """Moving average of ``waiting`` until now."""
        waiting = self.waiting
        if waiting == self.crowd_before:  # most often none
            return waiting
        kept = math.exp((self.crowd_at - now) / CROWD_TIME)
        return kept * self.crowd_before + (1.0 - kept) * waiting

    def take_report(self, report: InstanceReport, now: float) -> None:
        """Take over a report, which includes every dispatch up to its ``last_dispatch``.

        Only later dispatches remain to be added to it.
        """
        self.crowd_before, self.crowd_at = self.crowd(now), now
        before, self.report = self.report, report
        if before is not None and report.counters.steps > before.counters.steps:
            self.moved = True
        while self.unreported and self.unreported[0].number <= report.last_dispatch:
            self.sent = _sum(self.sent, self.unreported.popleft(), -1)

    def lost(self, now: float) -> bool:
        """Record that its connection broke, or that it was taken out of the world.

        Returns False if it was lost already. What was sent to it continues elsewhere. It is not used before
        it answers on a new connection, and then on trial.
        """
        was_attached, self.attached = self.attached, False
        if was_attached and self.member.state is State.READY:
            self.breaker.failed(now)
        self.unreported.clear()
        self.sent = NOTHING_SENT
        self.asked_back = False
        return was_attached

    @property
    def lends(self) -> bool:
        """Whether KV blocks can be fetched from it, and by it."""
        return self.attached and self.capacity is not None and bool(self.capacity.blocks_at)

    @property
    def num_requests(self) -> int:
        """Requests there, the unreported ones included."""
        report = self.report or NO_REPORT
        return report.running + report.waiting + len(self.unreported)

    def candidate(
        self,
        now: float,
        *,
        cached_tokens: int = 0,
        vacant: int | None = None,
        wanted_share: float = 0.0,
        fetchable_tokens: int = 0,
    ) -> Candidate:
        """This instance for the policy; :meth:`Pool.candidate` adds what is known of its cache."""
        report, sent = self.report or NO_REPORT, self.sent
        return Candidate(
            rank=self.rank,
            host=self.member.host,
            ready=self.ready,
            admitted=self.breaker.admits(now),
            stalled_for=0.0 if self.moved else self.member.load.stalled_for,
            waiting_tokens=report.uncached_tokens + sent.uncached,
            requests=self.num_requests,
            dispatches=self.last_dispatch,
            cached_tokens=cached_tokens,
            blocks=report.blocks_used + sent.blocks,
            queued_tokens=report.waiting_tokens + sent.tokens,
            queued=report.queued,
            waiting=self.waiting,
            crowd=self.crowd(now),
            vacant=vacant,
            wanted_share=wanted_share,
            capacity=self.capacity,
            role=self.member.role,
            numerics=self.fingerprint,
            fetchable_tokens=fetchable_tokens,
            fetch_price=report.fetch_price,
        )


class InstanceHealth(msgspec.Struct, frozen=True):
    """Health of an instance as one router sees it, for operators."""

    attached: bool
    """Whether it answers on this router's connection."""
    failures: int
    """Failures in a row, without tokens in between; above 0 it is on trial."""
    in_flight: int
    """Requests of this router there."""


class Changes(msgspec.Struct, frozen=True):
    """Changes of the pool by a new view."""

    added: list[PooledInstance]
    removed: list[PooledInstance]
    reclassed: list[PooledInstance]
    """Instances that compute in another numerics class than before."""
    with_new_role: list[PooledInstance]


class Pool:
    """The instances that this router may talk to, by name."""

    def __init__(self) -> None:
        self._instances: dict[str, PooledInstance] = {}
        self.index = PrefixIndex()
        self._touched: set[str] = set()
        self._breakers: dict[int, CircuitBreaker] = {}
        """By rank, also for ranks that are away."""
        self._size = 0
        """Instances that the mesh starts with, as far as is known."""
        self._is_complete = False
        self._with_role: set[str] = set()

    def __repr__(self) -> str:
        return f"<Pool {' '.join(f'{i.rank}:{i.member.state}' for i in self)}>"

    def __len__(self) -> int:
        return len(self._instances)

    def __iter__(self) -> Iterator[PooledInstance]:
        return iter(self._instances.values())

    @property
    def has_roles(self) -> bool:
        """Whether an instance is preferred for some requests (:mod:`router.dispatch.roles`)."""
        return bool(self._with_role)

    def get(self, name: str) -> PooledInstance | None:
        return self._instances.get(name)

    def expects(self, rank: int) -> bool:
        """Whether an absent rank is one that the mesh starts with, or was lost lately."""
        return rank < self._size or rank in self._breakers

    def take_touched(self) -> set[str]:
        """Names of the instances that have come, gone or changed since the last call."""
        touched = self._touched | self.index.touched
        self._touched.clear()
        self.index.touched.clear()
        return touched

    def candidate(
        self,
        instance: PooledInstance,
        now: float,
        cached_tokens: int = 0,
        lendable: Mapping[str, int] = NOTHING,
    ) -> Candidate:
        """An instance for the policy, with its cache.

        ``cached_tokens`` are those of the prompt that its cache holds. ``lendable``: those that any instance
        can lend, by the identity of the cache.
        """
        if instance.capacity is None:
            return instance.candidate(now)
        used = (instance.report or NO_REPORT).blocks_used + instance.sent.blocks
        kept = self.index.blocks_kept(instance.name, used)
        return instance.candidate(
            now,
            cached_tokens=cached_tokens,
            vacant=max(0, instance.capacity.num_blocks - kept),
            wanted_share=self.index.evictions.share,
            fetchable_tokens=self._fetchable(instance, cached_tokens, lendable),
        )

    def _fetchable(self, instance: PooledInstance, cached_tokens: int, lendable: Mapping[str, int]) -> int:
        if instance.capacity is None or not instance.lends:
            return 0
        return max(0, lendable.get(instance.capacity.cache_identity, 0) - cached_tokens)

    def lendable(self, blocks: Sequence[int]) -> Mapping[str, int]:
        """Tokens of a prompt that an instance can lend, by the identity of its cache."""
        found: dict[str, int] = {}
        for name, length in self.index.stored_lengths(blocks).items() if blocks else ():
            instance = self._instances.get(name)
            if instance is not None and instance.lends and instance.capacity is not None:
                identity = instance.capacity.cache_identity
                found[identity] = max(found.get(identity, 0), length * instance.capacity.block_size)
        return found

    def lender(
        self, taker: PooledInstance, blocks: Sequence[int], least_tokens: int = 0
    ) -> tuple[PooledInstance, int] | None:
        """The instance that can lend most of a prompt to another, and its tokens there.

        Among equals it is the one with the fewest requests. None if it has fewer than ``least_tokens``.
        """
        if not blocks or not taker.lends or taker.capacity is None:
            return None
        identity, size = taker.capacity.cache_identity, taker.capacity.block_size
        for length, names in self.index.stored_longest_first(blocks):
            if length * size < least_tokens:
                break
            able = [
                other
                for name in names
                if (other := self._instances.get(name)) is not None
                and other is not taker
                and other.lends
                and other.capacity is not None
                and other.capacity.cache_identity == identity
            ]
            if able:
                return min(able, key=lambda each: (each.num_requests, each.rank)), length * size
        return None

    def without_group(self, now: float, patience: float) -> list[PooledInstance]:
        """Instances that no group has taken in for ``patience`` seconds.

        What they have is not computed.
        """
        return [
            instance
            for instance in self
            if instance.idle_since is not None and now > instance.idle_since + patience
        ]

    def apply(self, view: View, now: float) -> Changes:
        """Bring the pool up to a view.

        An instance enters once it has an address. One that is missing leaves, unless the coordinator has just
        started and may not know of it yet. A rank that another instance has by now is lost to its old holder
        in any case.
        """
        self._size, self._is_complete = view.size or 0, view.complete
        members = {member.instance: member for member in view.members if member.address}
        taken = {member.rank: member.instance for member in view.members}
        missing = [
            name
            for name, instance in self._instances.items()
            if name not in members and (view.complete or taken.get(instance.rank, name) != name)
        ]
        return self._change(missing, members, now)

    def can_follow(self, news: ViewNews, head: View) -> bool:
        """Whether news are the whole difference between two complete views."""
        return not news.whole and head.complete and self._is_complete and head.size == (self._size or None)

    def follow(self, news: ViewNews, now: float) -> Changes:
        """Bring the pool up to the next view by what has changed in it."""
        gone = [*news.left, *(member.instance for member in news.members if not member.address)]
        members = {member.instance: member for member in news.members if member.address}
        missing = [name for name in dict.fromkeys(gone) if name in self._instances]
        return self._change(missing, members, now)

    def _change(self, missing: Sequence[str], members: Mapping[str, Member], now: float) -> Changes:
        removed = [self._instances.pop(name) for name in missing]
        self._touched.update(missing)
        self._with_role.difference_update(missing)
        added, reclassed, with_new_role = [], [], []
        for name, member in members.items():
            (self._with_role.discard if member.role is Role.MIXED else self._with_role.add)(name)
            instance = self._instances.get(name)
            if instance is not None and instance.role is not member.role:
                with_new_role.append(instance)
            if instance is None:
                breaker = self._breakers.setdefault(member.rank, CircuitBreaker())
                instance = PooledInstance(member, breaker=breaker, seen_at=now, touched=self._touched)
                self._instances[name] = instance
                instance.sees(member, now)
                added.append(instance)
            elif instance.sees(member, now, complete=self._is_complete):
                reclassed.append(instance)
        if len(self._breakers) > len(self._instances):
            self._forget_breakers(now)
        return Changes(added, removed, reclassed, with_new_role)

    def _forget_breakers(self, now: float) -> None:
        here = {instance.rank for instance in self}
        for rank in [rank for rank in self._breakers if rank not in here]:
            if self._breakers[rank].is_forgotten(now):
                del self._breakers[rank]
