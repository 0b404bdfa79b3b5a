"""Which instance gets a request (pure): filter, score, pick.

Each step is a function over :class:`Candidate` values; none of them keeps state, so routers that know the
same choose the same.
"""

from __future__ import annotations

import enum
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from coordinator.messages import Role
from engine.messages import Capacity
from engine.transfers.price import FEWEST, WORTH

STALLED_AFTER = 15.0
"""Seconds without a step despite work after which an instance gets no new requests."""
COPY_COST = 0.2
"""Least cost to others of computing a token that another instance has or computes."""
DECODE_COST = 32.0
"""Cost of a running request in prompt tokens: it takes part in every later step.

For the first token at hand alone it would be 5 or so; but conversations stay where they begin, as do shared
prefixes.
"""
CONTEXT_COST = 512.0
"""Cost of a KV cache full of running requests, in prompt tokens.

Every later step reads it.
"""
QUEUE_COST = 2048.0
"""Cost of a request that waits for another to end, in prompt tokens."""
SESSION_SLACK = 64.0
"""Extra cost in prompt tokens at which a session's requests still stay at its home.

It decides where nothing else speaks for another instance.
"""
NUMERICS_COST = 32768.0
"""Extra cost in prompt tokens at which requests stay in their numerics class.

It is as much as 16 requests that wait before it, or some seconds of prompts.
"""


class Policy(enum.StrEnum):
    """Values of ``--load-balancing-policy``."""

    PREFIX_AWARE = "prefix_aware"
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"
    POWER_OF_TWO = "power_of_two"
    CONSISTENT_HASH = "consistent_hash"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as the policy sees it: its last report, plus what was sent since."""

    rank: int
    ready: bool
    """Whether it takes requests: in the world, connected, not draining."""
    admitted: bool = True
    """Whether it has not failed lately, or may be tried again."""
    stalled_for: float
    """Seconds without progress although it has work."""
    waiting_tokens: int
    """Prompt tokens that it has to compute before a new prompt's, the unreported ones included."""
    requests: int
    """Requests there, the unreported ones included."""
    dispatches: int
    """Requests ever sent to it; breaks ties in turn."""
    cached_tokens: int = 0
    """Tokens of the prompt, from the first one on, whose keys and values it has."""
    blocks: int = 0
    """KV blocks of what is there, the unreported requests included."""
    queued_tokens: int = 0
    """All tokens of requests that wait there, as ``--max-num-queued-tokens`` counts them."""
    queued: int = 0
    """Requests that wait because it has no room for them yet."""
    host: str = ""
    """Instances of the same host may share its cores."""
    waiting: int = 0
    """Requests that no step has begun, the unreported ones included."""
    crowd: float = 0.0
    """Average number of such requests lately."""
    vacant: int | None = None
    """Blocks that new tokens fill before cached ones are evicted; None if unknown."""
    wanted_share: float = 0.0
    """Share of evicted blocks that are computed again."""
    capacity: Capacity | None = None
    """Its limits; None until it has answered."""
    role: Role = Role.MIXED
    numerics: str | None = None
    """Name of its numerics class; None if unknown."""
    fetchable_tokens: int = 0
    """Tokens of the prompt that it does not have, and another instance could lend it."""
    fetch_price: float = 1.0
    """Cost of fetching a token, in tokens to compute."""
    adapter_cost: float = 0.0
    """Cost of the request's adapter there, in tokens to compute."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a request that the choice depends on."""

    tokens: int
    """Tokens that need keys and values before the next one comes out."""
    key: str = ""
    """Name of the request's session; empty if it has none."""
    request_id: str = ""
    turn: int = 0
    """Number of this choice, counted by the router that makes it."""
    numerics: str | None = None
    """Name of the numerics class of its newest token; None if any class will do."""


# ---- filter


def eligible(candidates: Sequence[Candidate], excluded: frozenset[int] = frozenset()) -> list[Candidate]:
    """Candidates that may get a request.

    ``excluded`` ranks just failed it. They, and those that have failed others lately, are used only if there
    is no other; stalled ones never are.
    """
    able = [
        candidate for candidate in candidates if candidate.ready and candidate.stalled_for < STALLED_AFTER
    ]
    fresh = [candidate for candidate in able if candidate.rank not in excluded]
    return [candidate for candidate in fresh if candidate.admitted] or fresh or able


def not_older(candidates: list[Candidate], weights: int) -> list[Candidate]:
    """Candidates whose weights have at least this number: requests never go back."""
    if not weights:
        return candidates
    known = [(each, each.capacity) for each in candidates if each.capacity is not None]
    return [each for each, capacity in known if capacity.in_use.number >= weights]


def with_room(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates whose queues are not full, as far as is known here.

    The instances decide in the end.
    """
    return [candidate for candidate in candidates if not is_full(candidate)]


def that_hold(candidates: Sequence[Candidate], tokens: int) -> list[Candidate]:
    """Candidates whose KV cache holds a request of so many tokens, and one token more.

    Caches of one mesh may differ in size.
    """
    return [
        candidate
        for candidate in candidates
        if candidate.capacity is None
        or tokens < candidate.capacity.num_blocks * candidate.capacity.block_size
    ]


def of_class(candidates: Sequence[Candidate], wish: Wish) -> Sequence[Candidate]:
    """Candidates of the numerics class in which a request should go on.

    All of them if none of the class may take it: its queue is full, or it costs NUMERICS_COST more than the
    cheapest of all. ``candidates`` are eligible, and hold the request.
    """
    if wish.numerics is None:
        return candidates
    alike = [each for each in candidates if each.numerics == wish.numerics]
    if len(alike) in (0, len(candidates)):
        return candidates
    most = NUMERICS_COST + min(cost(each, wish.tokens) for each in candidates)
    return [each for each in with_room(alike) if cost(each, wish.tokens) <= most] or candidates


def longest(candidates: Sequence[Candidate]) -> int | None:
    """Most tokens of prompt and answer that one candidate holds; None if none has answered."""
    capacities = [each.capacity for each in candidates if each.capacity is not None]
    return max((each.num_blocks * each.block_size for each in capacities), default=None)


def is_full(candidate: Candidate) -> bool:
    limits = candidate.capacity
    return limits is not None and exceeds(limits, num_queued(candidate, 1), candidate.queued_tokens)


def exceeds(limits: Capacity, queued: int, queued_tokens: int) -> bool:
    """Whether a queue of so many requests and tokens takes no more."""
    most_tokens = limits.max_num_queued_tokens
    return queued > limits.max_num_queued_reqs or (most_tokens is not None and queued_tokens >= most_tokens)


# ---- score


def cost(candidate: Candidate, tokens: int, elsewhere: int = 0) -> float:
    """Work before the first token of a prompt, in prompt tokens to compute.

    It is the tokens that wait there, those of the prompt's ``tokens`` that are not cached, what decoding
    takes of each step meanwhile, and what that costs other requests. ``elsewhere`` of the uncached tokens are
    cached on another instance, and need not be computed at all. Some of them may be fetched instead.
    """
    uncached = tokens - candidate.cached_tokens
    found = candidate.waiting_tokens + uncached + DECODE_COST * candidate.requests + candidate.adapter_cost
    fetched = spared_by_fetching(candidate)
    found -= fetched
    found += (COPY_COST + delayed(candidate)) * max(0.0, elsewhere - fetched)
    limits = candidate.capacity
    if limits is None:
        return found
    found += eviction_cost(candidate, uncached)
    found += CONTEXT_COST * min(1.0, candidate.blocks / limits.num_blocks)
    return found + QUEUE_COST * num_queued(candidate, -(-tokens // limits.block_size))


def spared_by_fetching(candidate: Candidate) -> float:
    """Tokens to compute that are spared if what another instance can lend is fetched.

    It is if the instance finds that faster: see :mod:`engine.transfers.price`.
    """
    return spared(candidate.fetchable_tokens, candidate.fetch_price)


def spared(tokens: int, price: float) -> float:
    """Tokens to compute that fetching so many spares; 0 if it is too dear."""
    return tokens * (1.0 - price) if tokens >= FEWEST and price <= WORTH else 0.0


def delayed(candidate: Candidate) -> float:
    """Number of requests that each further token computed here delays.

    These are the ones that come before the queue is empty again. As many come while a prompt waits as wait
    there (Little's law), now or lately. More come while these are served: in an M/M/1 queue of n, n * (1 + n)
    in all.
    """
    those = max(candidate.waiting, candidate.crowd)
    return those * (1.0 + those)


def eviction_cost(candidate: Candidate, uncached: int) -> float:
    """Tokens to compute again because so many uncached ones evict theirs.

    Computing them evicts others in turn: a geometric series.
    """
    if candidate.vacant is None or candidate.capacity is None:
        return 0.0
    displaced = max(0, uncached - candidate.vacant * candidate.capacity.block_size)
    return displaced * candidate.wanted_share / (1.0 - candidate.wanted_share)


def core_shares(candidates: Sequence[Candidate]) -> dict[int, float]:
    """Share of its speed that each instance would have with one more request, by rank.

    Instances that compute on the same cores slow each other down, and one that is idle now would be one more.
    Instances with devices of their own are left out.
    """
    sharing = [each for each in candidates if each.capacity is not None and each.capacity.at_once is not None]
    busy = Counter(each.host for each in sharing if each.requests)
    return {
        each.rank: min(1.0, each.capacity.at_once / (busy[each.host] + (not each.requests)))
        for each in sharing
        if each.capacity is not None and each.capacity.at_once is not None
    }


def num_queued(candidate: Candidate, blocks: int) -> int:
    """Requests that would wait for room if one with so many blocks came."""
    limits = candidate.capacity
    if limits is None:
        return 0
    has_blocks = candidate.blocks + blocks <= limits.num_blocks
    return queue_with(limits, candidate.requests, candidate.queued, has_blocks=has_blocks)


def queue_with(limits: Capacity, requests: int, queued: int, *, has_blocks: bool) -> int:
    """Requests that would wait of one more than ``requests``.

    ``has_blocks``: there are blocks for it.
    """
    return max(0, requests + 1 - limits.max_num_seqs, 0 if has_blocks else queued + 1)


# ---- pick


def pick(policy: Policy, candidates: Sequence[Candidate], wish: Wish) -> Candidate:
    """One of some eligible candidates (at least one)."""
    return _PICKS[policy](candidates, wish)


def _prefix_aware(candidates: Sequence[Candidate], wish: Wish) -> Candidate:
    """Candidate with the lowest cost.

    A cached prefix is worth the work that it spares this request and others: affinity ends where waiting for
    the instance that has it costs more than computing it again.
    """
    longest = max(each.cached_tokens for each in candidates)
    shares = core_shares(candidates)

    def price(each: Candidate) -> float:
        return cost(each, wish.tokens, longest - each.cached_tokens) / shares.get(each.rank, 1.0)

    best = min(candidates, key=lambda each: (price(each), each.dispatches, each.rank))
    if not wish.key:
        return best
    home = _home(candidates, wish.key)
    slack = price(home) - price(best)
    return home if slack <= SESSION_SLACK and home.cached_tokens >= best.cached_tokens else best


def _least_loaded(candidates: Sequence[Candidate], wish: Wish) -> Candidate:
    """The lowest cost if nothing were cached; among equals the least used, then by rank."""
    return min(
        candidates,
        key=lambda each: (cost(each, wish.tokens) + each.cached_tokens, each.dispatches, each.rank),
    )


def _round_robin(candidates: Sequence[Candidate], wish: Wish) -> Candidate:
    return sorted(candidates, key=lambda each: each.rank)[wish.turn % len(candidates)]


def _power_of_two(candidates: Sequence[Candidate], wish: Wish) -> Candidate:
    """The better of two, drawn by the request's id."""
    drawn = sorted(candidates, key=lambda each: affinity(wish.request_id, each.rank))[:2]
    return _least_loaded(drawn, wish)


def _consistent_hash(candidates: Sequence[Candidate], wish: Wish) -> Candidate:
    """The session's home; a request without a session has one of its own."""
    return _home(candidates, wish.key or wish.request_id)


_PICKS: dict[Policy, Callable[[Sequence[Candidate], Wish], Candidate]] = {
    Policy.PREFIX_AWARE: _prefix_aware,
    Policy.LEAST_LOADED: _least_loaded,
    Policy.ROUND_ROBIN: _round_robin,
    Policy.POWER_OF_TWO: _power_of_two,
    Policy.CONSISTENT_HASH: _consistent_hash,
}


def _home(candidates: Sequence[Candidate], key: str) -> Candidate:
    """The home of a key by rendezvous hashing (Thaler and Ravishankar, 1998).

    When an instance comes or goes, only its own sessions move.
    """
    return min(candidates, key=lambda each: (affinity(key, each.rank), each.rank))


def affinity(key: str, rank: int) -> bytes:
    """Where a rank stands among the homes of a key: the lowest is its home."""
    return hashlib.blake2b(f"{rank}|{key}".encode(), digest_size=8).digest()
