"""Choice of an instance for a request, and its booking there (pure).

Puts the pool, the policy and the prefix index together. :mod:`router.dispatch.mover` sends the messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from engine.pieces.pool import prefix_names
from engine.transfers.price import FEWEST
from router.dispatch import policy, roles
from router.dispatch.adapter_costs import adapter_cost
from router.dispatch.ledger import Entry, Ledger
from router.dispatch.policy import Candidate, Policy, Wish
from router.dispatch.pool import NO_REPORT, Pool, PooledInstance
from router.dispatch.warm_up import HotPrefixes
from router.mesh import MeshError, Prompt

if TYPE_CHECKING:
    from router.dispatch.many import Many

MAX_NAMED_TOKENS = 262_144
"""Tokens of a prompt that are looked up in the prefix index.

Naming their blocks takes about 15 ms.
"""
MANY = 32
"""Instances from which on the choice is made in columns."""
RETRY_AFTER = 1
"""Seconds in Retry-After when no instance can take a request."""


class Chooser:
    """Chooses an instance of a pool for each request, and books it there.

    Keeps the prefix index up to date.
    """

    def __init__(self, pool: Pool, ledger: Ledger, kind: Policy = Policy.PREFIX_AWARE) -> None:
        self._pool = pool
        self._ledger = ledger
        self._policy = kind
        self._turn = 0
        self._many: Many | None = None
        self.hot = HotPrefixes()
        self.counts: Counter[str] = Counter()
        """Dispatches to instances that had some of the prompt (``affinity_hits``) or none
        (``affinity_misses``), and requests refused for full queues (``queue_full``)."""
        self._named: tuple[object, tuple[str, str], list[int]] = (None, ("", ""), [])
        """The last prompt whose blocks were named: the samples of a request share it."""

    def __repr__(self) -> str:
        return f"<Chooser {self._policy} {self._pool!r}>"

    @property
    def wants_blocks(self) -> bool:
        """Whether instances send block events of their prefix caches."""
        return self._policy is Policy.PREFIX_AWARE

    def candidates(self, now: float) -> list[Candidate]:
        return [instance.candidate(now) for instance in self._pool]

    def check_room(self, now: float) -> None:
        """Refuse a request early, before its prompt is made, which may take long.

        Raises:
            MeshError: every queue is full (503).
        """
        for instance in self._pool:
            candidate = instance.candidate(now)
            if policy.eligible([candidate]) and not policy.is_full(candidate):
                return
        if able := policy.eligible(self.candidates(now)):
            self.counts["queue_full"] += 1
            raise full(len(able))

    def choose(
        self, entry: Entry, now: float, waiting_for: str = "", *, decodes: bool = False
    ) -> PooledInstance:
        """Choose the instance that gets a request.

        ``decodes``: its KV blocks come along, so nothing long is left to compute.

        Raises:
            MeshError: no instance, or not the one of the rank that it names, can take it now (503). That rank
                does not exist, or the request asks for more tokens than any instance holds (400).
        """
        if (preferred := self._preferred(entry, now)) is not None:
            return preferred
        blocks, wish = self._blocks_of(entry), self._wish(entry)
        adapter = entry.prompt.adapter
        if len(self._pool) >= MANY and entry.prompt.rank is None and not (adapter or self._pool.has_roles):
            chosen = self._columns().choose(self._policy, entry, blocks, wish, now)
            if chosen is not None:
                self._turn += 1
                return chosen
        instances = self._instances_for(entry)
        lengths, lendable = self._pool.index.prefix_lengths(blocks), self._pool.lendable(blocks)
        found = [
            self._pool.candidate(instance, now, self._cached(instance, lengths), lendable)
            for instance in instances
        ]
        if adapter:
            found = [
                msgspec.structs.replace(each, adapter_cost=self._adapter_cost(adapter, instance))
                for each, instance in zip(found, instances, strict=True)
                if has_adapter(instance, adapter)
            ]
        found = policy.not_older(found, entry.least_weights)
        able = policy.eligible(found, entry.failed_ranks)
        if not able:
            raise unavailable(_why_nobody(entry, waiting_for))
        limit = policy.longest(found)
        if limit is not None and entry.most >= limit and entry.prompt.asked and not entry.owed:
            raise _too_long(entry.prompt, limit)
        holding = (
            policy.that_hold(able, entry.most)  # or one that failed, rather than end early
            or policy.that_hold(policy.eligible(found), entry.most)
            or policy.that_hold(able, entry.work)
        )
        if holding:
            able = holding
        elif entry.owed:  # else the instance says what is wrong with it
            raise unavailable(f"no instance that is ready holds the {entry.work} tokens of the request")
        free = able if entry.owed else policy.with_room(able)
        if not free:
            self.counts["queue_full"] += 1
            raise full(len(able))
        if self._pool.has_roles:
            images = entry.prompt.images
            end = images[-1].end if images else 0
            free = list(roles.suited(free, entry.work, decodes=decodes, images_end=end))
        self._turn += 1
        rank = policy.pick(self._policy, policy.of_class(free, wish), wish).rank
        return next(instance for instance in instances if instance.rank == rank)

    def _adapter_cost(self, adapter: str, instance: PooledInstance) -> float:
        use = (instance.report or NO_REPORT).adapters
        return adapter_cost(adapter, use, self._ledger.adapters_at(instance.name))

    def _preferred(self, entry: Entry, now: float) -> PooledInstance | None:
        """The instance that an endpoint picker chose, if it can take a new request now."""
        rank = entry.prompt.preferred
        if rank is None or entry.owed or entry.failed_ranks or entry.prompt.rank is not None:
            return None
        instance = next((each for each in self._pool if each.rank == rank), None)
        if instance is None:
            return None
        if not has_adapter(instance, entry.prompt.adapter):
            return None
        able = [each for each in policy.eligible([instance.candidate(now)]) if each.admitted]
        return instance if policy.with_room(policy.that_hold(able, entry.most)) else None

    def _wish(self, entry: Entry) -> Wish:
        return Wish(
            tokens=entry.work,
            key=entry.prompt.session,
            request_id=entry.prompt.request_id,
            turn=self._turn,
            numerics=entry.newest_class if entry.has_begun and entry.prompt.repeatable else None,
        )

    def _columns(self) -> Many:
        if self._many is None:
            from router.dispatch.many import Many  # loads numpy, which small meshes do without

            self._many = Many(self._pool)
        return self._many

    def may_soon_choose(self, entry: Entry, now: float) -> bool:
        """Whether an instance that could take the request will have answered in a moment."""
        return any(instance.is_answering(now) for instance in self._instances_for(entry))

    def dispatch(self, entry: Entry, instance: PooledInstance, now: float) -> int:
        """Book the next try of a request at an instance; returns its number there."""
        self.settle(entry)
        blocks = self._blocks_of(entry)
        length = self._pool.index.prefix_length(instance.name, blocks)
        cached = length * instance.capacity.block_size if instance.capacity is not None else 0
        entry.blocks_at, spared = self._source_for(instance, blocks, cached)
        if _may_inherit(entry, instance):
            inherited = max(0, min(entry.inherits, entry.work - 1) - cached)
            if inherited > spared or not entry.blocks_at:  # what the dead one had may be more than is known
                entry.blocks_at, spared = entry.inherits_at, inherited
        entry.uncached = entry.work - cached - spared
        if not entry.prompt.background:
            self.counts["affinity_hits" if cached else "affinity_misses"] += 1
            if not entry.owed:
                prompt = entry.prompt
                self.hot.saw(prompt.prompt_ids, prompt.cache_salt, blocks, prompt.adapter)
        number = instance.dispatch(entry.work, now, cached=cached + spared)
        self._ledger.place(entry, instance.name, number)
        entry.is_computed_in(instance.numerics, instance.weights)
        if instance.capacity is not None and instance.capacity.caches_prefixes:
            self._pool.index.expect(instance.name, number, blocks[length:])
        return number

    def _source_for(self, instance: PooledInstance, blocks: Sequence[int], cached: int) -> tuple[str, int]:
        """Where an instance fetches what it lacks, and the tokens to compute that this spares."""
        found = self._pool.lender(instance, blocks, cached + FEWEST)
        if found is None or found[0].capacity is None:
            return "", 0
        source, tokens = found
        price = (instance.report or NO_REPORT).fetch_price
        spared = policy.spared(tokens - cached, price)
        return (source.capacity.blocks_at, int(spared)) if spared and source.capacity else ("", 0)

    def settle(self, entry: Entry) -> None:
        """End the booking of a try's blocks: its first token came, or never will.

        From then on the blocks of its prompt count as the instance reports them, no longer as expected there.
        """
        if entry.address is not None:
            self._pool.index.settle(*entry.address)

    # ---- helpers

    def _instances_for(self, entry: Entry) -> Sequence[PooledInstance]:
        """All instances, or the one that the client named.

        A request that an instance has already taken may continue on any.
        """
        pinned = entry.prompt.rank
        instances = list(self._pool)
        if pinned is None or entry.owed:
            return instances
        found = [instance for instance in instances if instance.rank == pinned]
        if not found and self._pool.expects(pinned):
            raise unavailable(f"instance {pinned} is not there now: it starts, or is started again")
        if not found:
            ranks = ", ".join(str(instance.rank) for instance in sorted(instances, key=lambda i: i.rank))
            raise MeshError(
                400,
                "BadRequestError",
                f"there is no instance with data-parallel rank {pinned}; ranks now: {ranks or 'none'}",
                param="X-data-parallel-rank",
            )
        return found

    def _blocks_of(self, entry: Entry) -> Sequence[int]:
        """Hashes of the prompt's blocks that a prefix cache may hold."""
        prompt = entry.prompt
        most = MAX_NAMED_TOKENS
        if prompt.routed_experts:
            most = 0
        elif prompt.params.prompt_logprobs is not None:
            most = min(most, prompt.scored_from - 1)
        if not self.wants_blocks or most <= 0:
            return ()
        if entry.blocks is None:
            ids, root, names = self._named
            capacities = (instance.capacity for instance in self._pool)
            one = next((each for each in capacities if each and each.caches_prefixes), None)
            if one is None:
                return ()
            if ids is not prompt.prompt_ids or root != (prompt.root, one.weights):
                root = prompt.root, one.weights
                names = prefix_names(prompt.prompt_ids[:most], one.block_size, *root, prompt.images)
                self._named = (prompt.prompt_ids, root, names)
            entry.blocks = names
        return entry.blocks

    def _cached(self, instance: PooledInstance, lengths: dict[str, int]) -> int:
        length = lengths.get(instance.name, 0)
        return length * instance.capacity.block_size if instance.capacity is not None else 0


def has_adapter(instance: PooledInstance, adapter: str) -> bool:
    """Whether an instance has an adapter; one that joined later may lack a retired one."""
    return instance.capacity is None or adapter not in instance.capacity.lacks_adapters


def _may_inherit(entry: Entry, instance: PooledInstance) -> bool:
    """Whether an instance can read the cache that died with the request's last one."""
    capacity = instance.capacity
    reads = capacity is not None and bool(capacity.inherited_at)
    return reads and bool(entry.inherits_at) and entry.inherits_on == instance.member.host


def _too_long(prompt: Prompt, limit: int) -> MeshError:
    """Error for a prompt that no instance holds, worded as the API's."""
    num_prompt = len(prompt.prompt_ids)
    return MeshError(
        400,
        "BadRequestError",
        f"This model's maximum context length is {limit} tokens as it is served here (the largest KV cache "
        f"holds no more). However, you requested {num_prompt + prompt.asked} tokens ({num_prompt} in the "
        f"prompt, {prompt.asked} in the completion). Please reduce the length of the prompt or completion.",
        param="max_tokens",
    )


def _why_nobody(entry: Entry, waiting_for: str) -> str:
    if entry.prompt.rank is not None and not entry.owed:
        return f"instance {entry.prompt.rank} takes no requests now"
    newer = f" with weights {entry.least_weights} or newer" if entry.least_weights else ""
    return f"no instance{newer} is ready" + (f"; waiting for {waiting_for}" if waiting_for else "")


def full(num_instances: int) -> MeshError:
    """The error for full queues of ``num_instances`` instances."""
    return unavailable("the queues of all instances are full" if num_instances > 1 else "the queue is full")


def unavailable(message: str, *, is_final: bool = False) -> MeshError:
    kind = "ServiceUnavailableError"
    return MeshError(503, kind, message, retry_after=RETRY_AFTER, is_final=is_final)
