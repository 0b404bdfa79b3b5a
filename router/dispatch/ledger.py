"""A router's record of each request in flight (pure).

The router owns a request until its last token is delivered: from an entry any instance can finish it. Each
try has an address, (instance, dispatch number). What comes in under an address that is no longer the entry's
is late and is dropped.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from coordinator.numerics import Numerics
from engine.messages import Delta, Submit, WeightsInUse
from router.mesh import NumericsSwitch, Prompt, TokenSink, WeightSpan

logger = logging.getLogger(__name__)

LOADED_WEIGHTS = WeightsInUse()
ID_BYTES = 5
"""Most bytes of a token id in a message."""
BESIDE_OUTPUT = 1 << 12
"""Bytes of a resumed request's message beside its output: numbers, flags and one address."""
Address = tuple[str, int]
"""Instance name, dispatch number there."""

MAX_FRUITLESS = 8
"""Fruitless tries of a request in a row after which it ends with a 503.

A request that ends instances would otherwise end one after the other.
"""

MAX_NAMED = 8
"""Requests that a log line names, of those that it is about."""


def named(request_ids: Iterable[str]) -> str:
    """The first of some requests, for a log line; a request's samples share one id."""
    each = list(dict.fromkeys(request_ids))
    more = f" and {len(each) - MAX_NAMED} more" if len(each) > MAX_NAMED else ""
    return ", ".join(each[:MAX_NAMED]) + more


@dataclass
class Loss:
    """Requests that lost their instance together; times are in seconds.

    It lasts until each of them has a token again, has ended, or is given up. Then a line of the log says how
    those that have one fared.
    """

    rank: int
    """Rank of the lost instance."""
    at: float
    """Time at which the router noticed the loss."""
    away: int
    """Requests that have no new token yet."""
    waits: list[float] = field(default_factory=list)
    """Seconds until the first new token, for each request that has one."""
    computed: int = 0
    """Tokens of prompts and outputs that were computed again."""
    cached: int = 0
    """Tokens that the other instance's prefix cache had."""
    planned: bool = False
    """Whether nothing was lost, as when requests move for an instance's role."""

    def __str__(self) -> str:
        count, first, last = len(self.waits), 1000 * min(self.waits), 1000 * max(self.waits)
        return (
            f"{count} requests of instance {self.rank} are back after {first:.0f} to {last:.0f} ms: "
            f"{self.computed} tokens computed again, {self.cached} were cached"
        )

    def less(self) -> None:
        """Count a request as away no more: it is back, stays or has ended."""
        self.away -= 1
        if not self.away and self.waits:
            logger.log(logging.DEBUG if self.planned else logging.INFO, "%s", self)

    def back(self, work: int, cached: int, seconds: float) -> None:
        """Count a request of ``work`` tokens whose first new token came after ``seconds``.

        The last of them is never computed before the token that follows it, so it is not computed again.
        """
        self.waits.append(seconds)
        self.computed += max(0, work - 1 - cached)
        self.cached += cached
        self.less()


@dataclass(eq=False)
class Entry:
    """One request in flight."""

    prompt: Prompt
    address: Address | None = None
    attempts: int = 0
    fruitless: int = 0
    """Tries in a row without a token, less those uncounted by :meth:`uncount_try`.

    0 once the current try has given a token.
    """
    num_lost: int = 0
    """Instances that ended under it since its last token; those that leave do not count."""
    emitted: list[int] = field(default_factory=list)
    """Every output token already passed on, over all attempts."""
    has_begun: bool = False
    """Whether a delta of any try has come."""
    fingerprint: str | None = None
    """Name of the numerics class that gives the first token."""
    first_class: Numerics | None = None
    """That class; None where its name alone is known."""
    numerics: str | None = None
    """Name of the numerics class in which its current try is computed."""
    numerics_changes: list[NumericsSwitch] = field(default_factory=list)
    """Changes of class after the first token; its stream's readers see new ones."""
    weights: WeightsInUse = LOADED_WEIGHTS
    """Weights with which its current try is computed."""
    weight_spans: list[WeightSpan] = field(default_factory=list)
    """Weight versions that made its tokens; its stream's readers see new ones."""
    owed: bool = False
    """Whether an instance had taken the request, so that the next one must."""
    blocks: list[int] | None = None
    """Hashes of the prompt's blocks; None until they are needed."""
    uncached: int = 0
    """Tokens to compute before the first one comes out, as known at dispatch."""
    recalled: bool = False
    """The request was recalled from its current instance.

    That happens once per try: a request that stays has begun.
    """
    failed_ranks: frozenset[int] = frozenset()
    """Ranks that failed the request since its last token: others are preferred."""
    waits_until: float = 0.0
    """When the request is given up for want of an instance, on the monotonic clock."""
    computed_at: tuple[str, ...] = ()
    """Instances of its tries since the last one that began without any token."""
    begun_at: float = 0.0
    """When the client's request came, on the monotonic clock."""
    loss: Loss | None = None
    """The loss that made the request move, until it has a token again."""
    left_at: float = 0.0
    """Time at which it left its instance, if later than the loss."""
    blocks_at: str = ""
    """Where the instance of its current try may fetch KV blocks (``Submit.blocks_at``)."""
    inherits_at: str = ""
    """Place of the KV blocks left by its dead instance; empty once it continues."""
    inherits_on: str = ""
    """Host of ``inherits_at``."""
    inherits: int = 0
    """Tokens whose blocks are known to be at ``inherits_at``."""
    sink: TokenSink | None = None
    """Consumer of single tokens without a task: see :meth:`router.mesh.Generation.hand_over`.

    None while the reader is busy. The first delta of a try never goes there: its times make it more than a
    single token (:func:`engine.scheduling.outcomes.outgoing_tokens_of`).
    """

    def submit(self, number: int, copy: int = 0) -> Submit:
        """The message that makes an instance continue where the last one stopped.

        ``copy``: its number of a copy of the request's blocks.
        """
        return Submit(
            request=number,
            request_id=self.prompt.request_id,
            prompt_ids=self.prompt.prompt_ids,
            params=self.prompt.params,
            seed=self.prompt.seed,
            sample_index=self.prompt.sample_index,
            output_ids=self.emitted,
            priority=self.prompt.priority,
            cache_salt=self.prompt.cache_salt,
            adapter=self.prompt.adapter,
            owed=self.owed,
            traceparent=self.prompt.traceparent,
            scored_from=self.prompt.scored_from,
            routed_experts=self.prompt.routed_experts,
            background=self.prompt.background,
            pooling=self.prompt.pooling,
            blocks_at=self.blocks_at,
            copy=copy,
            images=self.prompt.images,
        )

    @property
    def growth(self) -> int:
        """Bytes by which its message may grow from its first try to its last.

        They are checked before the first one: a request that was taken once is never too large later.
        """
        if self.owed or self.emitted:
            return 0
        most = 0 if self.prompt.pooling is not None else self.prompt.params.max_tokens or 0
        return ID_BYTES * most + BESIDE_OUTPUT

    def moves(self, loss: Loss, now: float = 0.0) -> None:
        """Record that the request lost its instance.

        A request that has not come back from an earlier loss counts for the later one.
        """
        self.ends_its_move()
        self.loss, self.left_at = loss, max(now, loss.at)

    def uncount_try(self) -> None:
        """Take the current try out of the count of fruitless tries.

        It was recalled or refused, or its instance leaves: a try without a token is not the request's fault.
        """
        self.fruitless = max(0, self.fruitless - 1)

    def failed_at(self, rank: int) -> None:
        """Record that the try at an instance failed."""
        self.failed_ranks |= {rank}

    def ends_its_move(self) -> None:
        """Take the request out of its loss: it is given up, or moves again."""
        if self.loss is not None:
            self.loss.less()
            self.loss = None

    @property
    def newest_class(self) -> str | None:
        """Name of the numerics class that computed its newest token."""
        return self.numerics_changes[-1].after if self.numerics_changes else self.fingerprint

    def is_computed_in(self, numerics: Numerics | None, weights: WeightsInUse | None = None) -> None:
        """Record numerics class and weights of its current try, which may not have begun."""
        self.numerics = None if numerics is None else numerics.fingerprint
        if weights is not None and weights != self.weights:
            self.weights, self.blocks = weights, None  # names of blocks begin with the weights
        if not self.has_begun:
            self.fingerprint, self.first_class = self.numerics, numerics

    @property
    def least_weights(self) -> int:
        """Number of the weights that made its last token: older ones may not continue it."""
        num_tokens = len(self.emitted)
        return next((each.number for each in reversed(self.weight_spans) if each.first_token < num_tokens), 0)

    def changes_weights(self) -> bool:
        """Record that its next token is made by the weights of its current try.

        Returns whether others made the last one.
        """
        spans, begin = self.weight_spans, len(self.emitted)
        while spans and spans[-1].first_token == begin:  # weights that made no token
            spans.pop()
        span = WeightSpan(begin, self.weights.number, self.weights.label)
        if spans and (spans[-1].number, spans[-1].label) == (span.number, span.label):
            return False
        spans.append(span)
        return len(spans) > 1

    def changes_class(self) -> NumericsSwitch | None:
        """Record that its next token is of the class of its current try.

        Returns the change, if that is one.
        """
        if not self.has_begun or self.numerics == self.newest_class:
            return None
        change = NumericsSwitch(len(self.emitted), self.newest_class, self.numerics)
        self.numerics_changes.append(change)
        return change

    def returns(self, delta: Delta, now: float) -> None:
        """Record the first delta after a loss, which is booked already."""
        loss, self.loss = self.loss, None
        if loss is not None:
            cached = delta.num_cached_tokens + delta.num_cached_output
            loss.back(self.work - len(delta.token_ids), cached, now - self.left_at)

    @property
    def work(self) -> int:
        """Tokens to compute before the next one comes out."""
        return len(self.prompt.prompt_ids) + len(self.emitted)

    @property
    def most(self) -> int:
        """Tokens with keys and values at the request's end, by what its client asked for."""
        return max(self.work, len(self.prompt.prompt_ids) + self.prompt.asked - 1)


NONE: Mapping[int, Entry] = {}


class Flight(msgspec.Struct, frozen=True):
    """One request in flight, for operators: nothing of its text or tokens."""

    request_id: str
    rank: int | None
    """Rank of its instance; None while it waits for one."""
    prompt_tokens: int
    output_tokens: int
    """Tokens passed on so far."""
    attempts: int
    """Tries so far; above 1 it was resumed."""
    age: float
    """Seconds since the request came."""


def entry_of(prompt: Prompt, now: float) -> Entry:
    """The entry of a new request, which may go on behind known tokens."""
    if prompt.known is None:
        return Entry(prompt, begun_at=now)
    known = prompt.known
    entry = Entry(prompt, emitted=list(known.token_ids), has_begun=True, owed=True, begun_at=now)
    entry.fingerprint, entry.weight_spans = known.numerics, list(known.weight_spans)
    return entry


class Ledger:
    """All entries, by the address of their current try."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[int, Entry]] = {}
        self._size = 0
        self._adapters: dict[str, Counter[str]] = {}
        """Requests with an adapter by instance, and by its digest."""

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"<Ledger {len(self)} in flight>"

    def place(self, entry: Entry, instance: str, number: int) -> None:
        """Begin a new try at an instance; an earlier one is void."""
        self.drop(entry)
        entry.address, entry.attempts, entry.recalled = (instance, number), entry.attempts + 1, False
        entry.fruitless += 1
        entry.computed_at = (*entry.computed_at, instance) if entry.emitted else (instance,)
        self._entries.setdefault(instance, {})[number] = entry
        self._size += 1
        if entry.prompt.adapter:
            self._adapters.setdefault(instance, Counter())[entry.prompt.adapter] += 1

    def at(self, instance: str) -> Mapping[int, Entry]:
        """Requests whose current try is at an instance, by number."""
        return self._entries.get(instance, NONE)

    def book(self, entry: Entry, delta: Delta) -> Delta:
        """Book a delta of an entry's current try; returns the delta to pass on.

        After its last delta, an entry is dropped.
        """
        if entry.has_begun and delta.prompt_logprobs is not None:
            delta = msgspec.structs.replace(delta, prompt_logprobs=None)  # sent by an earlier try
        entry.emitted += delta.token_ids
        entry.fruitless, entry.num_lost, entry.failed_ranks = 0, 0, frozenset()
        entry.has_begun = True
        if delta.finish_reason is not None:
            self.drop(entry)
        return delta

    def find(self, instance: str, number: int) -> Entry | None:
        """The entry whose current try this is, if there is one."""
        there = self._entries.get(instance)
        return there.get(number) if there else None

    def adapters_at(self, instance: str) -> Collection[str]:
        """Digests of adapters of the requests whose current try is at an instance."""
        return self._adapters.get(instance, ())

    def of_instance(self, instance: str) -> list[Entry]:
        """Requests whose current try is at an instance, in the order of dispatch."""
        return list(self._entries.get(instance, {}).values())

    def drop(self, entry: Entry) -> Address | None:
        """Forget an entry; returns the address of its current try, if it has one."""
        address, entry.address = entry.address, None
        if address is not None:
            there = self._entries[address[0]]
            del there[address[1]]
            self._size -= 1
            if not there:
                del self._entries[address[0]]
            if adapter := entry.prompt.adapter:
                counts = self._adapters[address[0]]
                counts[adapter] -= 1
                if not counts[adapter]:
                    del counts[adapter]
                if not counts:
                    del self._adapters[address[0]]
        return address
