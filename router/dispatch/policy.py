"""Which instance gets a request (pure): filter, score, pick.

Each step is a function over :class:`Candidate` values; none of them keeps state, so front ends that know the
same choose the same.
"""

from __future__ import annotations

import enum
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from engine.messages import Capacity

STALLED_AFTER = 15.0
"""Seconds without a step, having work, after which an instance gets nothing new."""
COPY_COST = 0.2
"""What a token costs somebody at least that is computed though another instance has it or is computing it."""
DECODE_COST = 32.0
"""What a running request costs, in prompt tokens: it takes a token of every step to come. For the first
token at hand alone it would be 5 or so; but conversations stay where they begin, as do shared prefixes."""
CONTEXT_COST = 512.0
"""What a KV cache full of running requests costs, in prompt tokens: every step to come reads it."""
QUEUE_COST = 2048.0
"""What a request costs that waits for another to end, in prompt tokens."""
SESSION_SLACK = 64.0
"""Prompt tokens more that the home of a session may cost, where nothing else speaks for another instance."""


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
    """Takes requests: in the world, connected, not draining."""
    admitted: bool = True
    """Has not failed lately, or may be tried again."""
    stalled_for: float
    """Seconds without progress although it has work."""
    waiting_tokens: int
    """Prompt tokens that it has to compute before a new prompt's, the unreported ones included."""
    requests: int
    """Requests there, the unreported ones included."""
    dispatches: int
    """Requests ever sent to it; breaks ties in turn."""
    cached_tokens: int = 0
    """Of the prompt at hand, from its first token on: those whose keys and values it has."""
    blocks: int = 0
    """KV blocks of what is there, the unreported requests included."""
    queued_tokens: int = 0
    """All tokens of requests that wait there, as ``--max-num-queued-tokens`` counts them."""
    queued: int = 0
    """Requests for whom it has no room yet."""
    host: str = ""
    """Instances of the same host may share its cores."""
    waiting: int = 0
    """Requests that no step has begun, the unreported ones included."""
    crowd: float = 0.0
    """How many these were lately, on average."""
    vacant: int | None = None
    """Blocks that new tokens fill before they take the place of cached ones; None: that is not known."""
    wanted_share: float = 0.0
    """Of the blocks that caches drop to make room, those that are computed again."""
    capacity: Capacity | None = None
    """None until it has answered."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """A request, as far as the choice depends on it."""

    tokens: int
    """To have keys and values before the next one comes out."""
    key: str = ""
    """Requests of the same session have the same; empty: of none."""
    request_id: str = ""
    turn: int = 0
    """Number of this choice, counted by the front end that makes it."""


# ---- filter


def eligible(candidates: Sequence[Candidate], excluded: frozenset[int] = frozenset()) -> list[Candidate]:
    """Those that may get a request.

    ``excluded`` ranks (they just failed it) and those that have failed others lately only if nobody else is
    there, stalled ones never.
    """
    able = [
        candidate for candidate in candidates if candidate.ready and candidate.stalled_for < STALLED_AFTER
    ]
    fresh = [candidate for candidate in able if candidate.rank not in excluded]
    return [candidate for candidate in fresh if candidate.admitted] or fresh or able


def with_room(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those whose queues are not full, as far as is known here.

    The instances have the last word.
    """
    return [candidate for candidate in candidates if not is_full(candidate)]


def that_hold(candidates: Sequence[Candidate], tokens: int) -> list[Candidate]:
    """Those whose KV cache holds a request of so many tokens, and one more: caches of one mesh may differ."""
    return [
        candidate
        for candidate in candidates
        if candidate.capacity is None
        or tokens < candidate.capacity.num_blocks * candidate.capacity.block_size
    ]


def longest(candidates: Sequence[Candidate]) -> int | None:
    """Tokens of prompt and answer that one of these can hold at most; None if none has answered yet."""
    capacities = [each.capacity for each in candidates if each.capacity is not None]
    return max((each.num_blocks * each.block_size for each in capacities), default=None)


def is_full(candidate: Candidate) -> bool:
    limits = candidate.capacity
    if limits is None:
        return False
    most_tokens = limits.max_num_queued_tokens
    return num_queued(candidate, 1) > limits.max_num_queued_reqs or (
        most_tokens is not None and candidate.queued_tokens >= most_tokens
    )


# ---- score


def cost(candidate: Candidate, tokens: int, elsewhere: int = 0) -> float:
    """The work before the first token of a prompt of so many tokens, in prompt tokens to compute: those that
    wait there, the prompt's own that are not cached, and what decoding takes of each step meanwhile; and what
    that costs others. ``elsewhere``: of those that are not cached, so many are on another instance, and need
    not be computed at all."""
    uncached = tokens - candidate.cached_tokens
    found = candidate.waiting_tokens + uncached + DECODE_COST * candidate.requests
    found += (COPY_COST + delayed(candidate)) * elsewhere
    limits = candidate.capacity
    if limits is None:
        return found
    found += eviction_cost(candidate, uncached)
    found += CONTEXT_COST * min(1.0, candidate.blocks / limits.num_blocks)
    return found + QUEUE_COST * num_queued(candidate, -(-tokens // limits.block_size))


def delayed(candidate: Candidate) -> float:
    """Requests that wait longer for each token more that is computed here: those that come before the queue
    is empty again. As many come while a prompt waits as wait there (Little's law), now or lately, and more
    come while these are served: in an M/M/1 queue of n, n * (1 + n) in all."""
    those = max(candidate.waiting, candidate.crowd)
    return those * (1.0 + those)


def eviction_cost(candidate: Candidate, uncached: int) -> float:
    """The tokens that will be computed again because so many take the place of theirs, and of others again
    when they are: a geometric series."""
    if candidate.vacant is None or candidate.capacity is None:
        return 0.0
    displaced = max(0, uncached - candidate.vacant * candidate.capacity.block_size)
    return displaced * candidate.wanted_share / (1.0 - candidate.wanted_share)


def core_shares(candidates: Sequence[Candidate]) -> dict[int, float]:
    """The part of its speed that each would have with one more request, by rank: instances that compute on
    the same cores slow each other down, and one that is idle now would be one more. Without those that
    have devices of their own."""
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
    no_slot = candidate.requests + 1 - limits.max_num_seqs
    no_blocks = candidate.queued + 1 if candidate.blocks + blocks > limits.num_blocks else 0
    return max(0, no_slot, no_blocks)


# ---- pick


def pick(policy: Policy, candidates: Sequence[Candidate], wish: Wish) -> Candidate:
    """One of some eligible candidates (at least one)."""
    return _PICKS[policy](candidates, wish)


def _prefix_aware(candidates: Sequence[Candidate], wish: Wish) -> Candidate:
    """The lowest cost.

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
    """The lowest cost, were nothing cached; among equals the one used least, then by rank."""
    return min(
        candidates,
        key=lambda each: (cost(each, wish.tokens) + each.cached_tokens, each.dispatches, each.rank),
    )


def _round_robin(candidates: Sequence[Candidate], wish: Wish) -> Candidate:
    return sorted(candidates, key=lambda each: each.rank)[wish.turn % len(candidates)]


def _power_of_two(candidates: Sequence[Candidate], wish: Wish) -> Candidate:
    """The better of two, drawn by the request's id."""
    drawn = sorted(candidates, key=lambda each: _affinity(wish.request_id, each.rank))[:2]
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
    """Rendezvous hashing (Thaler and Ravishankar, 1998): when an instance comes or goes, only its own
    sessions move."""
    return min(candidates, key=lambda each: (_affinity(key, each.rank), each.rank))


def _affinity(key: str, rank: int) -> bytes:
    return hashlib.blake2b(f"{rank}|{key}".encode(), digest_size=8).digest()
