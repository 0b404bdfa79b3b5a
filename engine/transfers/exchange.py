"""The step loop's part in transfers of KV blocks, in both directions (pure).

Only the step loop knows which blocks are free, named, or about to be filled. It holds blocks that are lent
(:mod:`engine.transfers.loans`) and room for those that come (:mod:`engine.transfers.incoming`). A request
waits here while its prefix is fetched, and is then queued like any other: it finds the blocks that came by
their names. If none came it is computed. Blocks of a request that is about to move here are fetched the same
way, while it still runs elsewhere (:mod:`engine.transfers.copies`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.messages import TransferCounters
from engine.pieces.pool import BlockHash, PiecePool
from engine.scheduling.request import Request, RequestKey
from engine.transfers.cache_checks import CacheChecks
from engine.transfers.copies import RequestCopies
from engine.transfers.fetching import Source, TransferEnded, TransferOutcome
from engine.transfers.handing_over import Find, nobody
from engine.transfers.incoming import IncomingTransfer, IncomingTransfers
from engine.transfers.lending import Key, Lookup, Return
from engine.transfers.loans import Loans
from engine.transfers.messages import MOST_BLOCKS, NO_BLOCK, Holder
from engine.transfers.sources import Sources
from engine.transfers.spot_checks import SpotChecks
from engine.transfers.totals import TransferTotals
from engine.transfers.waiting_requests import WaitingRequests

AHEAD = 3
"""Blocks that a request may have beyond those known when it is taken over.

The partly filled one is among them.
"""


class BlockExchange:
    """Transfers of one cache: loans, blocks that come, and requests that wait for them."""

    def __init__(
        self,
        pool: PiecePool,
        sources: Sources,
        block_size: int,
        *,
        checks: bool = False,
        check_interval: int = 0,
        in_flight: Callable[[], set[int]] = set,
    ) -> None:
        """``checks``: some fetched blocks are computed as well, since their bits must be equal.

        So is one of ``check_interval`` pieces that requests find; 0: none. ``in_flight``: blocks that steps
        under way read or write, held by a request or not.
        """
        self._pool = pool
        self._block_size = block_size
        self._totals = totals = TransferTotals()
        self.sources = sources
        self.checks: CacheChecks | None = None
        """None where nothing can be checked, since bits may differ."""
        if checks:
            self.checks = CacheChecks(pool, block_size, check_interval, sources, totals, self.reset)
        self._loans = Loans(pool, sources.mover, block_size, totals)
        self._incoming = IncomingTransfers(
            pool, sources, block_size, totals, in_flight=in_flight,
            origins=None if self.checks is None else self.checks.origins,
        )  # fmt: skip
        self._copies = RequestCopies(pool, block_size)
        self.waiting = WaitingRequests(block_size)

    def __repr__(self) -> str:
        return f"<BlockExchange {self._loans!r} {self._incoming!r}>"

    @property
    def is_open(self) -> bool:
        """Whether blocks are moved at all.

        They are not while the source of a wrong one is looked for.
        """
        spot_checks = self.spot_checks
        is_looking = spot_checks is not None and spot_checks.is_looking
        return not self.sources.mover.has_ended and self._pool.is_caching and not is_looking

    @property
    def is_idle(self) -> bool:
        """Whether no block is held for a transfer."""
        return self._loans.is_idle and not self._incoming

    @property
    def spot_checks(self) -> SpotChecks | None:
        """Checks of what requests find; None: there are none."""
        return None if self.checks is None else self.checks.spot_checks

    @property
    def num_checked(self) -> tuple[int, int]:
        """Cached pieces that were computed again and compared, and those that differed."""
        return self._totals.num_checked

    def counters(self, prompt_tokens: int = 0) -> TransferCounters:
        """Totals so far; ``prompt_tokens`` are those that the scheduler has counted."""
        return self._totals.counters(prompt_tokens)

    # ---- requests that wait for blocks

    def takes(self, request: Request) -> bool:
        """Whether a request waits here for blocks; else it is queued at once."""
        transfer = self._taken_over(request) or self._transfer_for(request)
        if transfer is None:
            return False
        self.waiting.add(request, transfer)
        return True

    def forget(self, key: RequestKey) -> bool:
        """Stop waiting with a request; False if it does not wait here."""
        transfer = self.waiting.remove(key)
        if transfer is not None:
            self._incoming.cancel_unwanted(transfer)
        return transfer is not None

    def _taken_over(self, request: Request) -> IncomingTransfer | None:
        """The transfer by which a request is handed over, while it is under way."""
        key = (request.key[0], request.copy)
        return self._incoming.find_copy(key) if request.copy and key in self._copies else None

    def _transfer_for(self, request: Request) -> IncomingTransfer | None:
        """The transfer of what a request lacks, which may begin now."""
        request.blocks_at = self.sources.reachable(request.blocks_at)
        if not self.is_open or not (request.blocks_at or self.sources.has_files):
            return None
        names = request.prefix_hashes(self._block_size)
        known = len(self._pool.find_prefix(names))
        missing = names[known : known + MOST_BLOCKS]
        if not missing:
            return None
        if (transfer := self._incoming.find(missing[0])) is not None:
            return transfer
        best = self.sources.best(missing, request.blocks_at)
        return None if best is None else self._incoming.begin(*best)

    # ---- copies of requests that run elsewhere

    def copy(self, key: Key, names: Sequence[BlockHash], source: Source) -> None:
        """Fetch what is missing of these blocks, whatever it costs: their request runs on meanwhile.

        Ends by one of :meth:`take_copied`.
        """
        known = self._copies.begin(key, names)
        missing = list(names[known : known + MOST_BLOCKS])
        if not missing or not source or not self.is_open or self._copies.are_too_many:
            self._copies.end(key)
            return
        transfer = self._incoming.find(missing[0])
        transfer = transfer or self._incoming.begin(missing, source, at_any_price=True)
        if transfer is None:
            self._copies.end(key)
        else:
            transfer.copies.add(key)

    def take_over(self, key: Key, names: Sequence[BlockHash], source: Source, holder: Holder) -> None:
        """Have a request handed over to this instance, with what is missing of its blocks.

        ``names`` are its full blocks, as far as they are known. Ends like :meth:`copy`. The request itself
        comes from its router.
        """
        known = self._copies.begin(key, names)
        lacking = len(names) - known
        is_possible = bool(source) and self.is_open and not self._copies.are_too_many
        if lacking > AHEAD:  # its request waits for them
            is_possible = is_possible and self.sources.pays(source, lacking * self._block_size)
        last = names[known - 1] if known else NO_BLOCK
        transfer = self._incoming.take_over(last, lacking + AHEAD, source, holder) if is_possible else None
        if transfer is None:
            self._copies.end(key)
        else:
            transfer.copies.add(key)

    def take_copied(self) -> list[tuple[Key, int, bool]]:
        """Copies that have ended: see :meth:`engine.transfers.copies.RequestCopies.take_ended`."""
        return self._copies.take_ended()

    def take_handed_over(self) -> list[RequestKey]:
        """Requests that go no further here, and are to be forgotten before the next step."""
        return self._loans.take_handed_over()

    def forget_copies(self, peer: bytes) -> None:
        """Forget the copies of a router that is gone."""
        self._copies.forget(peer)
        self._incoming.forget_copies(peer)

    # ---- events

    def turn(self, being_filled: Callable[[], set[int]], find: Find = nobody) -> list[Request]:
        """Act on events of the sources; returns requests to queue.

        ``being_filled``: blocks whose content is not computed yet, though they may have names. ``find``:
        finds requests that others ask for; see :meth:`take_handed_over`.
        """
        ready: list[Request] = []
        for event in self.sources.take_events(being_filled):
            match event:
                case Lookup(loan, names, None):
                    self._loans.lend(loan, names, being_filled())
                case Lookup():
                    self._loans.add_hand_over(event)
                case Return(loan):
                    self._loans.returned(loan)
                case TransferEnded():
                    ready += self._ended(event)
        self._loans.hand_over_due(find)
        if self.checks is not None:
            self.checks.of_transfers.drop_ended()
        if self._incoming and self.sources.may_hang:
            ready += self._overdue()
        if self.sources.mover.has_ended and not self.is_idle:
            ready += self._give_up()
        return ready

    def reset(self) -> None:
        """Forget all names, also of blocks on their way; requests keep what they hold."""
        self._pool.unname()
        self._incoming.void()
        if (spot_checks := self.spot_checks) is not None:
            spot_checks.forget()

    def _ended(self, end: TransferEnded) -> list[Request]:
        """End a transfer; returns the requests that waited for it."""
        transfer = self._incoming.ended(end)
        is_hand_over = transfer.wanted.holder is not None
        if end.for_good:
            is_wrong = end.outcome is TransferOutcome.WRONG
            why = "what it sent is not what it named" if is_wrong else "its cache differs"
            self.sources.distrust(end.source, why, is_wrong=is_wrong)
        found = self.waiting.take(transfer)
        for request in found:
            request.num_fetched = transfer.num_came * self._block_size
        is_whole = not is_hand_over and not transfer.is_void
        if found and transfer.num_came and is_whole and self.checks is not None:
            self.checks.of_transfers.fetched(found[0], end.source, transfer.wanted.names[: transfer.num_came])
        for key in transfer.copies:
            self._copies.end(key, is_taken=end.was_lent and is_hand_over)
        return found

    def _overdue(self) -> list[Request]:
        """Requests that wait no longer for reads that hang."""
        found: list[Request] = []
        for transfer in self._incoming.take_overdue():
            found += self.waiting.take(transfer)
            self._incoming.cancel_unwanted(transfer)
        return found

    def _give_up(self) -> list[Request]:
        """Let go of all that the ended mover held; returns the requests that waited."""
        self._loans.release_all()
        found = [request for each in self._incoming.abandon() for request in self.waiting.take(each)]
        self._copies.end_all()
        return found
