"""Spot checks of the cache: some pieces that requests find are computed again (pure).

Wherever a piece came from (this instance, another one, a file, a dead instance's memory), it has one right
content. A request of nobody computes it once more behind the cached ones before it, in a step that has room
for it, and the two are compared. Where they differ, something before may be what is wrong. So a second
request computes the context from its beginning, and the first block that differs names the source.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.messages import Submit
from engine.pieces.kinds import kept_positions
from engine.pieces.pool import BlockHash, PiecePool
from engine.sampling import SamplingParams
from engine.scheduling.request import Request, RequestKey, Status, from_submit
from engine.transfers.checking import MOST_AGAIN, Filled, Origins
from engine.transfers.fetching import Source
from engine.transfers.recent_finds import RecentFinds

NOBODY = b""
"""Peer of these requests: no router has this name."""
LAST_PRIORITY = (1 << 64) - 1
"""Priority of a check: behind all requests."""
FIRST_PRIORITY = -(1 << 64)
"""Priority of the search for a source: nothing is fetched until it is over."""
MOST_KEPT = 4
"""Samples that wait to be computed."""
MOST_WITHOUT_ROOM = 2
"""Turns without any other request after which a check gives up waiting."""
OWN: Source = ""
"""Source of what was computed here."""


class Sample(NamedTuple):
    """Context up to a piece that a request has found in the cache."""

    token_ids: list[int]
    salt: str
    adapter: str
    names: list[BlockHash]
    """Chain of the context's blocks."""
    weights: str = ""
    """Version of the weights that they are named by."""


@dataclass(frozen=True)
class Piece:
    """A cached piece that is compared, with its slot held."""

    chain: BlockHash
    """Chain hash of the position where it ends."""
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
    boundary: Mapping[int, Sequence[Piece]]
    """Cached boundary pieces, by position."""
    is_second: bool = False
    """Whether a piece is known to be wrong, and its source is looked for."""
    differing: dict[int, Sequence[Piece]] = field(default_factory=dict)
    """Boundary pieces that were compared and differ, by position; none where they are right."""

    @property
    def slots(self) -> list[int]:
        """Slots of all these pieces."""
        return [piece.slot for pieces in (self.blocks, *self.boundary.values()) for piece in pieces]

    def compare_boundary(self, same: Callable[[int, int], bool], filled: Mapping[int, Sequence[int]]) -> None:
        """Compare the boundary pieces that the last step has filled."""
        for position in self.boundary.keys() & filled.keys():
            pairs = zip(self.boundary[position], filled[position], strict=True)
            self.differing[position] = [piece for piece, slot in pairs if not same(piece.slot, slot)]

    def first_wrong(self, wrong: Mapping[int, Piece]) -> Sequence[Piece]:
        """The first piece that differs, of the blocks by their end and the boundary pieces.

        Where none does it is one of the boundary pieces that could not be compared.
        """
        found = [(position, False, piece) for position, piece in wrong.items()]
        for position, pieces in self.differing.items():
            found += [(position, True, piece) for piece in pieces]
        if found:
            return [min(found, key=lambda each: each[:2])[2]]
        left = self.boundary.keys() - self.differing.keys()
        return [piece for position in left for piece in self.boundary[position]]


@dataclass(frozen=True)
class Verdict:
    """Result of a spot check."""

    is_right: bool
    source: Source | None
    """Source of the piece; None: it is wrong, and nobody knows its source."""
    names: Sequence[BlockHash]
    """Chain of the context's blocks."""
    is_looking: bool = False
    """Whether the source of a wrong piece is looked for now."""
    suspects: Set[BlockHash] = frozenset()
    """Chain hashes of the pieces that may be the wrong one."""


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
        self._num_without_room = 0
        """Turns in which nothing else ran, and the check found no room."""
        self.finds = RecentFinds()
        """What requests have found, since a piece was wrong last."""
        self.finds_before = RecentFinds()
        """What they had found before that."""

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

    @property
    def request(self) -> Request | None:
        """The request of the check that is under way."""
        return None if self._running is None else self._running.request

    @property
    def num_blocks(self) -> int:
        """Blocks that are held for checks, and by nobody else."""
        checks = [check for check in (self._running, self._next) if check is not None]
        if not checks:
            return 0
        held = Counter(piece.slot for check in checks for piece in check.blocks)
        held.update(self._running.request.blocks if self._running is not None else ())
        return sum(self._pool.num_holders(slot) == count for slot, count in held.items())

    # ---- events

    def found(self, request: Request, num_blocks: int) -> None:
        """Note that a request has found its first ``num_blocks`` blocks in the cache."""
        if request.key[0] == NOBODY:
            return
        self.finds.add(request.request_id, request.hashes[:num_blocks])
        before, self._num_pieces = self._num_pieces, self._num_pieces + num_blocks
        if before // self._interval == self._num_pieces // self._interval:
            return
        names = request.hashes[: self._sampled(request.hashes[:num_blocks])]
        if self._num_again(names) * self._block_size <= MOST_AGAIN:
            ids = request.token_ids[: len(names) * self._block_size]
            self._samples.append(Sample(ids, request.cache_salt, request.adapter, names, request.weights))

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
                first, end = len(sample.names) - 1, len(sample.token_ids)
                self._running = self._check(sample, first, [end])
                return self._running.request
        return None

    def compare(self, same: Callable[[int, int], bool], filled: Filled) -> Verdict | None:
        """Compare what the last step has computed; None: there is no result yet."""
        check = self._running
        if check is None or check.request.status is not Status.RUNNING:
            return None
        names, request, size = check.sample.names, check.request, self._block_size
        if check.boundary:
            check.compare_boundary(same, filled(request))
        if request.num_computed < len(names) * size:
            return None
        if not check.is_second and len(self._pool.find_blocks(names)) < len(names):  # forgotten meanwhile
            self._end()
            return None
        pairs = enumerate(
            zip(check.blocks, request.blocks[check.first : len(names)], strict=True), check.first + 1
        )
        wrong = {number * size: piece for number, (piece, slot) in pairs if not same(piece.slot, slot)}
        is_right = not wrong and not any(check.differing.values()) and not check.is_second
        if not is_right and not check.is_second:
            self._next = self._check(check.sample, 0, self._positions(names), is_second=True)
            self.finds_before, self.finds = self.finds, RecentFinds()
        self._end()
        if is_right:
            return Verdict(True, check.blocks[0].source, names)
        if not check.is_second:
            return Verdict(False, None, names, is_looking=True, suspects=frozenset(names))
        suspects = check.first_wrong(wrong)
        sources = {piece.source for piece in suspects} or {OWN}  # else it was the first check that went wrong
        source = sources.pop() if len(sources) == 1 else None
        return Verdict(False, source, names, suspects={piece.chain for piece in suspects} or set(names))

    def drop_ended(self, *, nothing_runs: bool) -> Verdict | None:
        """End a check whose request gave way, or will never find room.

        A search that ends so has a verdict that names no source.
        """
        check = self._running
        if check is None or check.request.status is Status.RUNNING:
            return None
        self._num_without_room += nothing_runs
        if self._num_without_room < MOST_WITHOUT_ROOM and (check.is_second or not check.request.was_admitted):
            return None
        self._end()
        names = check.sample.names
        return Verdict(False, None, names, suspects=frozenset(names)) if check.is_second else None

    def forget(self, *, searches: bool = False) -> None:
        """The cache forgets all names: nothing that was found before is checked any more.

        ``searches``: nor is the source of a wrong piece looked for.
        """
        self._samples.clear()
        if self._running is not None and (searches or not self._running.is_second):
            self._end()
        if searches and self._next is not None:
            self._pool.release(self._next.slots)
            self._next = None

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
        self, sample: Sample, first: int, positions: Iterable[int], *, is_second: bool = False
    ) -> SpotCheck:
        """A check from the block ``first`` on, and of the boundary pieces at some positions."""
        self._num_requests += 1
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        submit = Submit(
            self._num_requests,
            "cache check",
            sample.token_ids,
            params,
            0,
            cache_salt=sample.salt,
            adapter=sample.adapter,
        )
        most = len(sample.token_ids) + 1
        request = from_submit(submit, NOBODY, arrival=self._num_requests, eos_ids=(), max_model_len=most)
        request.weights = sample.weights
        request.priority = FIRST_PRIORITY if is_second else LAST_PRIORITY
        request.most_cached, request.hashes = first, list(sample.names)
        names = sample.names[first:]
        boundary = {position: self._boundary_at(position, sample.names) for position in positions}
        boundary = {position: pieces for position, pieces in boundary.items() if pieces}
        request.compared_at = sorted(boundary)
        check = SpotCheck(request, sample, first, self._pieces(names, names), boundary, is_second)
        self._pool.hold(check.slots)
        return check

    def _positions(self, names: Sequence[BlockHash]) -> set[int]:
        """Positions of a context whose boundary pieces a search for a source compares.

        They are those that a prompt keeps, and that from which the first check has gone on.
        """
        step, size = self._pool.kinds.step, self._block_size
        begin = len(self._pool.find_prefix(names[:-1])) * size
        return {*kept_positions(len(names) * size, step), begin} if step else set()

    def _boundary_at(self, position: int, names: Sequence[BlockHash]) -> list[Piece]:
        """Cached boundary pieces at a position of a context; empty where any lacks."""
        if not self._pool.kinds.step or not position:
            return []
        chain = names[position // self._block_size - 1]
        wanted = self._pool.kinds.boundary_names(chain)
        found = self._pieces(wanted, [chain] * len(wanted))
        return found if len(found) == len(wanted) else []

    def _pieces(self, names: Sequence[BlockHash], chains: Sequence[BlockHash]) -> list[Piece]:
        """Cached pieces of these names, which end where the chain hashes do."""
        slots = ((name, chain, self._pool.slot_of(name)) for name, chain in zip(names, chains, strict=True))
        return [
            Piece(chain, slot, self._origins.source_of(name) or OWN)
            for name, chain, slot in slots
            if slot is not None
        ]

    def _end(self) -> None:
        self._num_without_room = 0
        if self._running is not None:
            self._pool.release(self._running.slots)
            self._over.append(self._running.request.key)
            self._running = None
