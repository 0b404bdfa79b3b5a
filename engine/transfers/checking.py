"""Self-check: some fetched blocks are computed as well, and compared (pure).

A digest shows what a transfer did to a block, not what its source had computed. So a request of every so many
transfers takes one block less from the cache than it could, and computes that one. A block has one right
content: where the two differ, the source is wrong. Files may be of anybody, so the first blocks that are read
from them are checked as well. With boundary pieces such a request goes on from an earlier one, or from its
beginning, and both its block and its boundary pieces at the end of the transfer are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.pieces.pool import BlockHash, PiecePool
from engine.scheduling.request import Request, Status
from engine.transfers.fetching import FILES, Source

CHECK_INTERVAL = 32
"""Transfers of which one has a block checked."""
MOST_AGAIN = 4096
"""Most tokens that a check of states computes again.

Behind more, a later transfer is checked."""


Filled = Callable[[Request], Mapping[int, Sequence[int]]]
"""Slots of boundary pieces that a step has filled for a request, by position."""


def nothing(_: Request) -> dict[int, Sequence[int]]:
    """Finds that no boundary piece was filled."""
    return {}


@dataclass(frozen=True)
class BlockCheck:
    """Fetched pieces at the end of a transfer, and the same ones computed here."""

    request: Request
    source: Source
    names: Sequence[BlockHash]
    """Pieces of the transfer."""
    position: int
    """Tokens before their end."""
    fetched: Sequence[int]
    """Slots of the last block, and of the boundary pieces behind it."""
    own: Sequence[int] = ()
    """Slots of what was computed here; empty until then."""


class Origins:
    """Source of each fetched block: an :class:`engine.pieces.pool.Observer` of a cache.

    Blocks that were computed here have no origin.
    """

    def __init__(self) -> None:
        self._source_of: dict[BlockHash, Source] = {}

    def __repr__(self) -> str:
        return f"<Origins of {len(self._source_of)} blocks>"

    def __len__(self) -> int:
        return len(self._source_of)

    def came(self, name: BlockHash, source: Source) -> None:
        """Record that a block, which the cache has by now, came from a source."""
        self._source_of[name] = source

    def stored(self, block_hash: BlockHash) -> None:
        """Ignore a new block: it has no source before :meth:`came`."""

    def dropped(self, block_hash: BlockHash) -> None:
        """Forget the source of a block that the cache has dropped."""
        self._source_of.pop(block_hash, None)

    def source_of(self, name: BlockHash) -> Source | None:
        """Source of a block; None: it was computed here, or is not cached."""
        return self._source_of.get(name)

    def names(self, sources: Iterable[Source]) -> set[BlockHash]:
        """Names of the cache's blocks that came from some sources."""
        wanted = set(sources)
        return {name for name, source in self._source_of.items() if source in wanted}


class BlockChecks:
    """Checks of one cache; both blocks of each are held until they are compared."""

    def __init__(self, pool: PiecePool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self.origins = Origins()
        """Where fetched pieces came from."""
        pool.observe(self.origins, every_kind=True)
        self._num_transfers = 0
        self._is_due = False
        """Whether the next transfer that can be checked is checked."""
        self._files_are_new = True
        """Whether nothing of a file was checked yet."""
        self._pending: list[BlockCheck] = []

    def __repr__(self) -> str:
        return f"<BlockChecks: {len(self._pending)} pending>"

    def __len__(self) -> int:
        return len(self._pending)

    def fetched(self, request: Request, source: Source, names: Sequence[BlockHash]) -> None:
        """Note a transfer of named blocks for a request, which is about to be queued."""
        self._num_transfers += 1
        self._is_due |= self._num_transfers % CHECK_INTERVAL == 0
        is_due = self._is_due or (source == FILES and self._files_are_new)
        if not is_due or names[-1] not in request.hashes:
            return
        most = request.hashes.index(names[-1])
        if self._pool.kinds.step:
            again = most + 1 - len(self._pool.find_prefix(request.hashes[:most]))
            if again * self._block_size > MOST_AGAIN:
                return
            request.compared_at = [(most + 1) * self._block_size]
        self._is_due = False
        request.most_cached, request.checked = most, (source, names)

    def admitted(self, request: Request) -> None:
        """Begin the check of a request that is in a step by now.

        A block is compared after this step, and not at all if the step does not compute the whole of it. With
        boundary pieces, the request goes on from an earlier one. So steps may pass before it is there again.
        """
        most, checked = request.most_cached, request.checked
        request.most_cached = request.checked = None
        if most is None or checked is None:
            return
        source, names = checked
        named = self._pool.kinds.names_behind(names)
        fetched = [self._pool.slot_of(name) for name in named[len(names) - 1 :]]
        found, position = [slot for slot in fetched if slot is not None], (most + 1) * self._block_size
        if len(found) < len(fetched):
            return
        check = BlockCheck(request, source, named, position, found)
        if not self._pool.kinds.step:
            if request.num_computed < position or (own := request.blocks[most]) in found:
                return
            check = replace(check, own=[own])
            self._files_are_new &= source != FILES
        self._pool.hold([*check.fetched, *check.own])
        self._pending.append(check)

    def compare(
        self, same: Callable[[int, int], bool], filled: Filled = nothing
    ) -> tuple[int, list[BlockCheck]]:
        """Compare what the last step has computed; returns how many checks, and wrong ones."""
        pending, self._pending = self._pending, []
        count, wrong = 0, []
        for check in pending:
            own = check.own or self._own(check, filled)
            if own is None:
                self._pending.append(check)
                continue
            self._pool.release([*check.fetched, *check.own])
            count += bool(own)
            if not all(map(same, check.fetched, own)):
                wrong.append(check)
        return count, wrong

    def drop_ended(self) -> None:
        """Let go of checks whose requests run no more, between two steps."""
        pending, self._pending = self._pending, []
        for check in pending:
            if check.own or check.request.status is Status.RUNNING:
                self._pending.append(check)
            else:
                self._pool.release(check.fetched)

    def forget(self) -> None:
        """Let go of all checks."""
        pending, self._pending = self._pending, []
        for check in pending:
            self._pool.release([*check.fetched, *check.own])

    def _own(self, check: BlockCheck, filled: Filled) -> Sequence[int] | None:
        """Slots of a request's own pieces; None: it has not come so far.

        Empty where it has no boundary piece there: slots lacked, or it goes on from what was fetched.
        """
        request = check.request
        if request.status is Status.RUNNING and request.num_computed < check.position:
            return None
        found = filled(request).get(check.position) if request.status is Status.RUNNING else None
        if found is None:
            return ()
        self._files_are_new &= check.source != FILES
        return [request.blocks[check.position // self._block_size - 1], *found]
