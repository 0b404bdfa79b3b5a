"""The step loop's part in transfers: references, room for blocks, and requests that wait (pure).

Only the step loop knows which blocks are free, named, or about to be filled. It holds blocks that are lent
until the mover's :class:`.Return`, and those that are being written until its :class:`.TransferEnded`; no
clock ends either. A request waits here while its prefix is fetched, and is then queued like any other: it
finds the blocks that came by their names. If none came it is computed. Blocks of a request that is about to
move here are fetched the same way, while it still runs elsewhere (a *copy*).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from engine.messages import TransferCounters
from engine.scheduling.blocks import BlockHash, BlockPool
from engine.scheduling.request import Request, RequestKey
from engine.transfers.checking import BlockChecks, Origins
from engine.transfers.fetching import DEAD, FILES, Source, TransferEnded, TransferOutcome, Wanted
from engine.transfers.handing_over import Find, HandOvers, Tail, nobody
from engine.transfers.lending import Key, Lookup, Return
from engine.transfers.messages import MOST_BLOCKS, NO_BLOCK, Holder
from engine.transfers.price import FetchPrice

logger = logging.getLogger(__name__)

LENT_PART = 4
"""Divisor of the cache: blocks that loans keep from requests, at most."""
FETCHED_PART = 2
"""Divisor of the free blocks: those that one transfer may take."""
FILES_PART = 2
"""Divisor of the cache: blocks that all transfers from files take together, at most."""
LEAST_SECONDS, MOST_SECONDS = 0.25, 10.0
"""Seconds that a transfer may take, where computing would take less or more."""
MOST_COPIES = 16
"""Copies at once; further ones are answered by what is here."""
AHEAD = 3
"""Blocks that a request may have beyond those known when it is taken over.

The partly filled one is among them.
"""
MOST_SHUNNED = 256
"""Sources that are remembered for having been wrong."""


class Mover(Protocol):
    """The part of :class:`engine.transfers.mover.BlockMover` that is used here."""

    @property
    def has_ended(self) -> bool: ...
    def take_events(self) -> list[Lookup | Return | TransferEnded]: ...
    def fetch(self, wanted: Wanted) -> None: ...
    def cancel(self, number: int) -> None: ...
    def found(self, loan: Key, blocks: Sequence[int]) -> None: ...
    def handed_over(
        self, loan: Key, names: Sequence[BlockHash], blocks: Sequence[int], *, has_part: bool
    ) -> None: ...
    def refuse(self, loan: Key, reason: str) -> None: ...
    def same(self, one: int, other: int) -> bool: ...


class Tier(Protocol):
    """Further blocks of this cache, which :class:`engine.tiers.file_tier.FileTier` has in files."""

    def count(self, names: Sequence[BlockHash]) -> int: ...
    def fetch(self, wanted: Wanted) -> None: ...
    def cancel(self, number: int) -> None: ...
    def take_events(self) -> list[TransferEnded]: ...
    def turn(self, being_filled: Callable[[], set[int]]) -> None: ...
    def forget(self, names: Sequence[BlockHash]) -> None: ...
    def drop_written(self) -> None: ...
    def abandon(self) -> None: ...


class Heir(Protocol):
    """Blocks of dead instances: :class:`engine.inheritance.heir.Heir`."""

    def fetch(self, wanted: Wanted) -> None: ...
    def cancel(self, number: int) -> None: ...
    def take_events(self) -> list[TransferEnded]: ...


@dataclass
class _Transfer:
    """Blocks on their way here, and the requests that wait for them."""

    wanted: Wanted
    requests: dict[RequestKey, Request] = field(default_factory=dict)
    copies: set[Key] = field(default_factory=set)
    is_cancelled: bool = False
    is_void: bool = False
    """Whether what comes is not to be found by anyone: the cache was reset meanwhile."""
    due_at: float = math.inf
    """When its requests wait no longer; the mover sees to that itself."""

    @property
    def is_wanted(self) -> bool:
        return bool(self.requests or self.copies)


class BlockExchange:
    """References of transfers in both directions, and the requests that wait for one."""

    def __init__(
        self,
        pool: BlockPool,
        mover: Mover,
        price: FetchPrice,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        checks: bool = False,
        tier: Tier | None = None,
        heir: Heir | None = None,
        in_flight: Callable[[], set[int]] = set,
    ) -> None:
        """``checks``: some fetched blocks are computed as well, since their bits must be equal.

        ``in_flight``: blocks that steps under way read or write, held by a request or not. ``tier``: where
        blocks are looked up that the cache has not. ``heir``: copies those of the dead.
        """
        self._in_flight = in_flight
        self._heir = heir
        self._dead_price = FetchPrice(price.token_bytes)
        self._estates: dict[Source, tuple[int, int, int]] = {}
        """Transfers from each dead instance so far, blocks that came, and those asked for."""
        self._tier = tier
        self._tier_price = FetchPrice(price.token_bytes)
        self._pool = pool
        self._mover = mover
        self._clock = clock
        self._block_size = block_size
        self.price = price
        self._lent: dict[Key, list[int]] = {}
        self._kept: dict[Key, int] = {}
        """Number of blocks that were free before they were lent."""
        self._num_kept = 0
        self._transfers: dict[int, _Transfer] = {}
        self._numbers = 0
        self._on_the_way: dict[BlockHash, _Transfer] = {}
        self._waiting: dict[RequestKey, _Transfer] = {}
        self._copies: dict[Key, Sequence[BlockHash]] = {}
        """Copies under way, by the router and its number: the names of all their blocks."""
        self._copied: list[tuple[Key, int, bool]] = []
        self._hand_overs = HandOvers(pool, block_size)
        self._handed_over: list[RequestKey] = []
        self._shunned: dict[Source, None] = {}
        self._counters = TransferCounters()
        self._checks = BlockChecks(pool, block_size) if checks else None
        self._origins = Origins()
        if checks:
            pool.observe(self._origins)

    def __repr__(self) -> str:
        return f"<BlockExchange {len(self._lent)} lent, {len(self._transfers)} on the way>"

    def __len__(self) -> int:
        """Requests that wait for blocks."""
        return len(self._waiting)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._waiting

    @property
    def requests(self) -> list[Request]:
        return [transfer.requests[key] for key, transfer in self._waiting.items()]

    @property
    def is_open(self) -> bool:
        """Whether blocks are moved at all."""
        return not self._mover.has_ended and self._pool.is_caching

    @property
    def is_idle(self) -> bool:
        """Whether no block is held for a transfer."""
        return not self._lent and not self._transfers and not self._hand_overs

    @property
    def num_tokens(self) -> int:
        """Tokens of waiting requests."""
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def num_uncached(self) -> int:
        """Tokens of waiting requests that have to be computed in any case."""
        return sum(
            max(1, len(request.token_ids) - len(self._waiting[request.key].wanted.names) * self._block_size)
            for request in self.requests
        )

    def counters(self, prompt_tokens: int = 0) -> TransferCounters:
        """Totals so far; ``prompt_tokens`` are those that the scheduler has counted."""
        return msgspec.structs.replace(self._counters, prompt_tokens=prompt_tokens)

    # ---- requests

    def takes(self, request: Request) -> bool:
        """Whether a request waits here for blocks; else it is queued at once."""
        if (taken := self._taken(request)) is not None:
            taken.requests[request.key] = request
            self._waiting[request.key] = taken
            return True
        if _is_dead(request.blocks_at) and self._heir is None:
            request.blocks_at = ""
        if not self.is_open or (not request.blocks_at and self._tier is None):
            return False
        names = request.prefix_hashes(self._block_size)
        known = len(self._pool.find_prefix(names))
        missing = names[known : known + MOST_BLOCKS]
        if not missing:
            return False
        transfer = self._on_the_way.get(missing[0]) or self._begin_best(missing, request.blocks_at)
        if transfer is None:
            return False
        transfer.requests[request.key] = request
        self._waiting[request.key] = transfer
        return True

    def forget(self, key: RequestKey) -> bool:
        """Stop waiting with a request; False if it does not wait here."""
        transfer = self._waiting.pop(key, None)
        if transfer is None:
            return False
        del transfer.requests[key]
        self._cancel_unwanted(transfer)
        return True

    def copy(self, key: Key, names: Sequence[BlockHash], source: Source) -> None:
        """Fetch what is missing of these blocks, whatever it costs: their request runs on meanwhile.

        Ends by one of :meth:`take_copied`.
        """
        self._copies[key] = names
        known = len(self._pool.find_prefix(names))
        missing = list(names[known : known + MOST_BLOCKS])
        if not missing or not source or not self.is_open or len(self._copies) > MOST_COPIES:
            self._end_copy(key)
            return
        transfer = self._on_the_way.get(missing[0]) or self._begin(missing, source, at_any_price=True)
        if transfer is None:
            self._end_copy(key)
        else:
            transfer.copies.add(key)

    def take_over(self, key: Key, names: Sequence[BlockHash], source: Source, holder: Holder) -> None:
        """Have a request handed over to this instance, with what is missing of its blocks.

        ``names`` are its full blocks, as far as they are known. Ends like :meth:`copy`. The request itself
        comes from its router.
        """
        self._copies[key] = names
        known = len(self._pool.find_prefix(names))
        lacking = len(names) - known
        room = lacking + AHEAD
        is_possible = source and source not in self._shunned and self.is_open
        if lacking > AHEAD:  # its request waits for them
            is_possible = is_possible and self.price.pays(lacking * self._block_size, self._clock())
        blocks = self._take(room) if is_possible and len(self._copies) <= MOST_COPIES else None
        if blocks is None:
            self._end_copy(key)
            return
        last = names[known - 1] if known else NO_BLOCK
        self._numbers += 1
        wanted = Wanted(self._numbers, source, [last], blocks, MOST_SECONDS, holder)
        self._transfers[self._numbers] = transfer = _Transfer(wanted, copies={key})
        self._mover.fetch(transfer.wanted)

    def take_copied(self) -> list[tuple[Key, int, bool]]:
        """Copies that have ended.

        Each has the tokens of it that the cache has, and whether its request is taken over.
        """
        found, self._copied = self._copied, []
        return found

    def take_handed_over(self) -> list[RequestKey]:
        """Requests that go no further here, and are to be forgotten before the next step."""
        found, self._handed_over = self._handed_over, []
        return found

    def forget_copies(self, peer: bytes) -> None:
        """Forget the copies of a router that is gone."""
        self._copied = [each for each in self._copied if each[0][0] != peer]
        for key in [key for key in self._copies if key[0] == peer]:
            del self._copies[key]
        for transfer in self._transfers.values():
            transfer.copies = {key for key in transfer.copies if key[0] != peer}
            self._cancel_unwanted(transfer)

    def admitted(self, request: Request) -> None:
        """Begin the check of what was fetched for a request that begins to be computed."""
        if self._checks is not None:
            self._checks.admitted(request)

    def wrong_requests(self, running: Iterable[Request] = ()) -> list[Request]:
        """Requests to compute anew, by the checks of the step that just ended.

        They are those that were checked, and those of the ``running`` ones that hold blocks of the same
        source.
        """
        if not self._checks:
            return []
        count, wrong = self._checks.compare(self._mover.same)
        self._count(
            checked_blocks=self._counters.checked_blocks + count,
            wrong_blocks=self._counters.wrong_blocks + len(wrong),
        )
        if not wrong:
            return []
        found = {check.request.key: check.request for check in wrong}
        of_source = self._origins.names(check.source for check in wrong)
        found |= {each.key: each for each in running if not of_source.isdisjoint(each.hashes)}
        for check in wrong:
            if self._tier is not None and check.source == FILES:
                self._tier.forget(check.names)
        for source in {check.source for check in wrong}:
            self._distrust(source)
        return list(found.values())

    def price_now(self) -> float:
        """What a fetched token costs, in tokens to compute; 1 where nothing is fetched."""
        return 1.0 if self._mover.has_ended else min(1.0, self.price.at(self._clock()))

    # ---- events

    def turn(self, being_filled: Callable[[], set[int]], find: Find = nobody) -> list[Request]:
        """Act on what the mover did; returns requests to queue.

        ``being_filled``: blocks whose content is not computed yet, though they may have names. ``find``:
        finds requests that others ask for; see :meth:`take_handed_over`.
        """
        ready: list[Request] = []
        events = self._mover.take_events()
        if self._tier is not None:
            self._tier.turn(being_filled)
            events = [*events, *self._tier.take_events()]
        if self._heir is not None:
            events = [*events, *self._heir.take_events()]
        for event in events:
            match event:
                case Lookup(loan, names, None):
                    self._lend(loan, names, being_filled())
                case Lookup():
                    self._hand_overs.add(event)
                case Return(loan):
                    self._pool.release(self._lent.pop(loan))
                    self._num_kept -= self._kept.pop(loan)
                case TransferEnded():
                    ready += self._ended(event)
        for loan, request, answer in self._hand_overs.due(find) if self._hand_overs else ():
            self._hand_over(loan, request, answer)
        if self._transfers and (self._tier is not None or self._heir is not None):
            ready += self._overdue()
        if self._mover.has_ended and not self.is_idle:
            ready += self._give_up()
        return ready

    def reset(self) -> None:
        """Forget all names, also of blocks on their way; requests keep what they hold."""
        self._pool.unname(list(self._pool.known))
        for transfer in self._transfers.values():
            transfer.is_void = True
            self._set_aside(transfer)

    def computed(self, tokens: int, seconds: float) -> None:
        """Take in a step with prompt tokens, for the prices of what is fetched."""
        self.price.computed(tokens, seconds)
        self._tier_price.computed(tokens, seconds)
        self._dead_price.computed(tokens, seconds)

    def _overdue(self) -> list[Request]:
        """Requests that wait no longer: a read may hang, and keeps its room."""
        now, found = self._clock(), []
        for transfer in [each for each in self._transfers.values() if now > each.due_at]:
            transfer.due_at = math.inf
            found += self._leave(transfer)
            self._set_aside(transfer)
            self._cancel_unwanted(transfer)
        return found

    def _leave(self, transfer: _Transfer) -> list[Request]:
        """The requests of a transfer, which wait for it no longer."""
        found, transfer.requests = list(transfer.requests.values()), {}
        for request in found:
            del self._waiting[request.key]
        return found

    def _set_aside(self, transfer: _Transfer) -> None:
        """Let nobody wait for a transfer from now on."""
        for name in transfer.wanted.names:
            if self._on_the_way.get(name) is transfer:
                del self._on_the_way[name]

    def _hand_over(self, loan: Key, request: Request | None, answer: Tail | str) -> None:
        """Lend the last blocks of a request, which then lets go of them; or refuse."""
        if isinstance(answer, str) or request is None:
            self._mover.refuse(loan, str(answer))
            return
        if answer.has_part:
            self._pool.name_part(answer.blocks[-1], answer.names[-1])
        self._pool.hold(answer.blocks)
        self._lent[loan], self._kept[loan] = list(answer.blocks), 0
        self._handed_over.append(request.key)
        self._count(lent_blocks=self._counters.lent_blocks + len(answer.blocks))
        self._mover.handed_over(loan, answer.names, answer.blocks, has_part=answer.has_part)

    def _taken(self, request: Request) -> _Transfer | None:
        """The transfer by which this request is handed over, while it is under way."""
        key = (request.key[0], request.copy)
        if not request.copy or key not in self._copies:
            return None
        return next((each for each in self._transfers.values() if key in each.copies), None)

    def _lend(self, loan: Key, names: Sequence[BlockHash], being_filled: set[int]) -> None:
        """Hold the first of these blocks that are here and computed.

        Those that requests hold cost nothing. Of the others, which requests may need, loans keep a part.
        """
        blocks = self._pool.find_prefix(names)
        room = self._pool.num_blocks // LENT_PART - self._num_kept
        whole = next((index for index, block in enumerate(blocks) if block in being_filled), len(blocks))
        blocks = blocks[:whole]
        kept = self._pool.num_free - self._pool.num_free_beside(blocks)
        while kept > max(0, room):
            blocks.pop()
            kept = self._pool.num_free - self._pool.num_free_beside(blocks)
        self._pool.hold(blocks)
        self._num_kept += kept
        self._kept[loan] = kept
        self._lent[loan] = blocks
        self._count(lent_blocks=self._counters.lent_blocks + len(blocks))
        self._mover.found(loan, blocks)

    def _end_copy(self, key: Key, *, is_taken: bool = False) -> None:
        names = self._copies.pop(key)
        self._copied.append((key, len(self._pool.find_prefix(names)) * self._block_size, is_taken))

    def _cancel_unwanted(self, transfer: _Transfer) -> None:
        if not transfer.is_wanted and not transfer.is_cancelled:
            transfer.is_cancelled = True
            self._mover_of(transfer.wanted.source).cancel(transfer.wanted.number)

    def _mover_of(self, source: Source) -> Mover | Tier | Heir:
        if source == FILES and self._tier is not None:
            return self._tier
        return self._heir if _is_dead(source) and self._heir is not None else self._mover

    def _begin_best(self, names: list[BlockHash], source: Source) -> _Transfer | None:
        """Begin a transfer from files that have all blocks, or if no instance has some."""
        count = 0 if self._tier is None or FILES in self._shunned else self._tier.count(names)
        if count and (count == len(names) or not source):
            return self._begin(names[:count], FILES)
        return self._begin(names, source) if source else None

    def _begin(
        self, names: list[BlockHash], source: Source, *, at_any_price: bool = False
    ) -> _Transfer | None:
        now = self._clock()
        room = self._pool.num_free // FETCHED_PART
        if source == FILES:
            reads = (each.wanted for each in self._transfers.values() if each.wanted.source == FILES)
            taken = sum(len(wanted.blocks) for wanted in reads)
            room = max(0, min(room, self._pool.num_blocks // FILES_PART - taken))
        names = names[:room]
        tokens = len(names) * self._block_size
        if not names or source in self._shunned:
            return None
        price = self._price_of(source)
        if not at_any_price and not _is_dead(source) and not price.pays(tokens, now):
            return None
        blocks = self._take(len(names))
        if blocks is None:
            return None
        computing = None if at_any_price else price.seconds_to_compute(tokens)
        seconds = MOST_SECONDS if computing is None else min(MOST_SECONDS, max(LEAST_SECONDS, computing))
        self._numbers += 1
        wanted = Wanted(self._numbers, source, names, blocks, seconds, in_background=at_any_price)
        transfer = _Transfer(wanted)
        self._transfers[self._numbers] = transfer
        for name in names:
            self._on_the_way.setdefault(name, transfer)
        self._count(queried_tokens=self._counters.queried_tokens + tokens)
        if _is_here(source):
            transfer.due_at = now + seconds
        self._mover_of(source).fetch(transfer.wanted)
        return transfer

    def _take(self, count: int) -> list[int] | None:
        """Free blocks that no step touches; None if too few are free.

        Workers may still compute a step for a request that was aborted meanwhile, whose blocks are free.
        Later steps are computed behind it, but what comes from elsewhere is written at once.
        """
        blocks = self._pool.take(count)
        if blocks is not None and not self._in_flight().isdisjoint(blocks):
            self._pool.release(blocks)
            return None
        return blocks

    def _price_of(self, source: Source) -> FetchPrice:
        if source == FILES:
            return self._tier_price
        return self._dead_price if _is_dead(source) else self.price

    def _ended(self, end: TransferEnded) -> list[Request]:
        transfer = self._transfers.pop(end.number)
        wanted, now = transfer.wanted, self._clock()
        names = end.names if wanted.holder else wanted.names
        num_full = end.count - end.has_part
        if not transfer.is_void:
            for block, name in zip(wanted.blocks[:num_full], names, strict=False):
                self._pool.name(block, name)
                if self._checks is not None and self._pool.find_prefix([name]) == [block]:
                    self._origins.came(name, end.source)
            if end.has_part:
                self._pool.name_part(wanted.blocks[num_full], names[num_full])
        self._pool.release(wanted.blocks)
        self._set_aside(transfer)
        tokens = num_full * self._block_size
        outcomes = self._counters.outcomes
        self._count(
            fetched_tokens=self._counters.fetched_tokens + tokens,
            inherited_tokens=self._counters.inherited_tokens + (tokens if _is_dead(end.source) else 0),
            fetched_bytes=self._counters.fetched_bytes + end.num_bytes,
            fetch_seconds=self._counters.fetch_seconds + end.seconds,
            outcomes={**outcomes, end.outcome.value: outcomes.get(end.outcome.value, 0) + 1},
            wrong_blocks=self._counters.wrong_blocks + (end.outcome is TransferOutcome.WRONG),
        )
        if end.outcome in (TransferOutcome.WHOLE, TransferOutcome.SLOW) and wanted.holder is None:
            self._price_of(end.source).fetched(end.num_bytes, end.seconds, now)
        if end.for_good:
            is_wrong = end.outcome is TransferOutcome.WRONG
            why = "what it sent is not what it named" if is_wrong else "its cache differs"
            self._shun(end.source, why, is_wrong=is_wrong)
        if _is_dead(end.source):
            self._inherited(end.source, num_full, len(wanted.names))
        found = self._leave(transfer)
        for request in found:
            request.num_fetched = tokens
        is_whole = wanted.holder is None and not transfer.is_void
        if found and end.count and is_whole and self._checks is not None:
            self._checks.fetched(found[0], end.source, wanted.names[: end.count])
        for key in transfer.copies:
            self._end_copy(key, is_taken=end.was_lent and wanted.holder is not None)
        return found

    def _inherited(self, source: Source, count: int, asked: int) -> None:
        """Log what a dead instance left, once all that is wanted of it has come."""
        before = self._estates.pop(source, (0, 0, 0))
        now = before[0] + 1, before[1] + count, before[2] + asked
        if any(each.wanted.source == source for each in self._transfers.values()):
            self._estates[source] = now
        else:
            logger.info("%d requests inherit %d of %d KV blocks of a dead instance", *now)

    def _distrust(self, source: Source) -> None:
        """Drop all that came from a source whose block was not what was computed here.

        Other blocks may have been computed on top of it, and nobody knows which. So all names are forgotten,
        and the files that this instance has written.
        """
        self._shun(source, "a block of it is not what was computed here", is_wrong=True)
        self.reset()
        if self._tier is not None and source == FILES:
            self._tier.abandon()
        elif self._tier is not None:
            self._tier.drop_written()

    def _shun(self, source: Source, why: str, *, is_wrong: bool) -> None:
        level = logging.ERROR if is_wrong else logging.INFO
        logger.log(level, "KV blocks of %s are not asked for any more: %s", source, why)
        self._shunned[source] = None
        while len(self._shunned) > MOST_SHUNNED:
            del self._shunned[next(iter(self._shunned))]

    def _give_up(self) -> Iterable[Request]:
        """The mover is gone: nothing is read or written any more."""
        for blocks in self._lent.values():
            self._pool.release(blocks)
        found: list[Request] = []
        for number, transfer in list(self._transfers.items()):
            if not _is_here(transfer.wanted.source):  # whose thread may still write
                self._pool.release(transfer.wanted.blocks)
                found += self._leave(transfer)
                self._set_aside(transfer)
                del self._transfers[number]
        self._num_kept = 0
        self._kept.clear()
        self._lent.clear()
        self._hand_overs.clear()
        for key in list(self._copies):
            self._end_copy(key)
        return found

    def _count(self, **changes: object) -> None:
        self._counters = msgspec.structs.replace(self._counters, **changes)


def _is_dead(source: Source) -> bool:
    return source.startswith(DEAD)


def _is_here(source: Source) -> bool:
    """Whether a thread of its own reads it, which may hang."""
    return source == FILES or _is_dead(source)
