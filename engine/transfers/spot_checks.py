"""Spot checks of the cache: some pieces that requests find are computed again (pure).

Wherever a piece came from (this instance, another one, a file, a dead instance's memory), it has one right
content. A request of nobody computes it once more behind the cached ones before it, in a step that has room
for it, and the two are compared. Where they differ, something before may be what is wrong. So a second
request computes the context from its beginning, and the first block that differs names the source.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.messages import Submit
from engine.pieces.pool import BlockHash, PiecePool
from engine.sampling import SamplingParams
from engine.scheduling.request import Request, RequestKey, Status, from_submit
from engine.transfers.checking import MOST_AGAIN, Filled, Origins
from engine.transfers.fetching import Source

NOBODY = b""
"""Peer of these requests: no router has this name."""
LAST_PRIORITY = (1 << 64) - 1
"""Their priority: behind all others."""
MOST_KEPT = 4
"""Samples that wait to be computed."""
OWN: Source = ""
"""Source of what was computed here."""


class Sample(NamedTuple):
    """Context up to a piece that a request has found in the cache."""

    token_ids: list[int]
    salt: str
    names: list[BlockHash]
    """Chain of the context's blocks."""


@dataclass(frozen=True)
class Piece:
    """A cached piece that is compared, with its slot held."""

    name: BlockHash
    slot: int
    source: Source


@dataclass(frozen=True)
class SpotCheck:
    """A request that computes pieces again, and the cached ones that it is compared with."""

    request: Request
    sample: Sample
    first: int
    """Index of the first block that is compared."""
    blocks: Sequence[Piece]
    """Cached blocks from there on."""
    boundary: Sequence[Piece]
    """Cached boundary pieces at the context's end.

    In a second check those that the first one has begun from.
    """
    is_second: bool = False
    """Whether a piece is known to be wrong, and its source is looked for."""

    @property
    def slots(self) -> list[int]:
        return [piece.slot for piece in (*self.blocks, *self.boundary)]


@dataclass(frozen=True)
class Verdict:
    """Result of a spot check."""

    source: Source | None
    """Source of the piece; None: it is wrong, and its source is looked for."""
    is_right: bool
    names: Sequence[BlockHash]
    """Chain of the context's blocks."""


class SpotChecks:
    """Samples of what requests find in one cache, and the one check that runs."""

    def __init__(self, interval: int, pool: PiecePool, block_size: int, origins: Origins) -> None:
        """``interval``: pieces of which one is checked."""
        self._interval = interval
        self._pool = pool
        self._block_size = block_size
        self._origins = origins
        self._num_pieces = self._num_requests = 0
        self._samples: deque[Sample] = deque(maxlen=MOST_KEPT)
        self._next: SpotCheck | None = None
        """The check that looks for a source; its slots are held."""
        self._running: SpotCheck | None = None
        self._over: list[RequestKey] = []

    def __repr__(self) -> str:
        return f"<SpotChecks: {len(self._samples)} wait, {self._running!r} runs>"

    @property
    def wants_step(self) -> bool:
        """Whether a check is to be computed, if need be by itself."""
        return bool(self._samples) or self._next is not None or self._running is not None

    @property
    def is_looking(self) -> bool:
        """Whether the source of a wrong piece is looked for."""
        return self._next is not None or (self._running is not None and self._running.is_second)

    # ---- events

    def found(self, request: Request, num_blocks: int) -> None:
        """Note that a request has found its first ``num_blocks`` blocks in the cache."""
        if request.key[0] == NOBODY:
            return
        before, self._num_pieces = self._num_pieces, self._num_pieces + num_blocks
        if before // self._interval == self._num_pieces // self._interval:
            return
        names = request.hashes[: self._sampled(request.hashes[:num_blocks])]
        if self._num_again(names) * self._block_size <= MOST_AGAIN:
            ids = request.token_ids[: len(names) * self._block_size]
            self._samples.append(Sample(ids, request.cache_salt, names))

    def begin(self, *, is_busy: bool) -> Request | None:
        """The next request to compute; None: there is none for now.

        While the instance ``is_busy``, a check waits until there are several.
        """
        if self._running is None and self._next is not None:
            self._running, self._next = self._next, None
            return self._running.request
        while self._running is None and len(self._samples) > (MOST_KEPT // 2 if is_busy else 0):
            sample = self._samples.popleft()
            if len(self._pool.find_blocks(sample.names)) == len(sample.names):
                first = len(sample.names) - 1
                self._running = self._check(sample, first, self._boundary_behind(sample.names))
                return self._running.request
        return None

    def compare(self, same: Callable[[int, int], bool], filled: Filled) -> Verdict | None:
        """Compare what the last step has computed; None: there is nothing yet."""
        check = self._running
        if check is None or check.request.status is not Status.RUNNING:
            return None
        names, request = check.sample.names, check.request
        end = len(names) * self._block_size
        if request.num_computed < end:
            return None
        if not check.is_second and len(self._pool.find_blocks(names)) < len(names):  # forgotten meanwhile
            self._end()
            return None
        own = request.blocks[check.first : len(names)]
        pairs = list(zip(check.blocks, own, strict=True))
        if not check.is_second:
            pairs += zip(check.boundary, filled(request).get(end, ()), strict=False)
        wrong = [piece for piece, slot in pairs if not same(piece.slot, slot)]
        if wrong and not check.is_second:
            found = len(self._pool.find_prefix(names[:-1]))
            self._next = self._check(check.sample, 0, self._boundary_behind(names[:found]), is_second=True)
        self._end()
        if wrong and not check.is_second:
            return Verdict(None, False, names)
        first_wrong = wrong or (check.boundary if check.is_second else check.blocks)
        return Verdict(first_wrong[0].source if first_wrong else OWN, not check.is_second, names)

    def drop_ended(self, *, nothing_runs: bool) -> None:
        """End a check whose request gave way, or will never find room."""
        check = self._running
        if check is None or check.request.status is Status.RUNNING:
            return
        if check.request.was_admitted or nothing_runs:
            self._end()

    def forget(self) -> None:
        """The cache forgets all names: nothing that was found before is checked any more."""
        self._samples.clear()
        if self._running is not None and not self._running.is_second:
            self._end()

    def take_over(self) -> list[RequestKey]:
        """Requests that are over, and are to be forgotten before they get a token."""
        found, self._over = self._over, []
        return found

    # ---- helpers

    def _sampled(self, names: Sequence[BlockHash]) -> int:
        """Blocks of a context up to a piece chosen among those found.

        The choice follows from the number of pieces so far. With boundary kinds it is a block behind which
        their pieces stand.
        """
        digest = hashlib.blake2b(self._num_pieces.to_bytes(8, "little"), digest_size=8).digest()
        count = int.from_bytes(digest, "little") % len(names) + 1
        if (step := self._pool.kinds.step) == 0:
            return count
        links = step // self._block_size
        count = min(-(-count // links) * links, len(names))
        return count if self._pool.find_prefix(names[:count])[count - 1 :] else len(names)

    def _num_again(self, names: Sequence[BlockHash]) -> int:
        """Blocks that a check of the last of these computes."""
        return len(names) - len(self._pool.find_prefix(names[:-1]))

    def _check(
        self, sample: Sample, first: int, boundary: Sequence[Piece], *, is_second: bool = False
    ) -> SpotCheck:
        """A check from the block ``first`` on, whose cached pieces are held."""
        self._num_requests += 1
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        submit = Submit(
            self._num_requests, "cache check", sample.token_ids, params, 0, cache_salt=sample.salt
        )
        most = len(sample.token_ids) + 1
        request = from_submit(submit, NOBODY, arrival=self._num_requests, eos_ids=(), max_model_len=most)
        request.priority, request.most_cached = LAST_PRIORITY, first
        blocks = self._pieces(sample.names[first:])
        check = SpotCheck(request, sample, first, blocks, boundary, is_second)
        self._pool.hold(check.slots)
        return check

    def _boundary_behind(self, names: Sequence[BlockHash]) -> list[Piece]:
        return self._pieces(self._pool.kinds.boundary_names(names[-1])) if names else []

    def _pieces(self, names: Sequence[BlockHash]) -> list[Piece]:
        slots = ((name, self._pool.slot_of(name)) for name in names)
        return [
            Piece(name, slot, self._origins.source_of(name) or OWN)
            for name, slot in slots
            if slot is not None
        ]

    def _end(self) -> None:
        if self._running is not None:
            self._pool.release(self._running.slots)
            self._over.append(self._running.request.key)
            self._running = None
