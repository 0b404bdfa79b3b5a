"""Boundary pieces of running requests: slots that rows read and fill (pure).

A request goes on from the boundary piece at the last multiple of the grid that it has passed. What a row
reads is never written by it: it fills another slot, and the one before goes back when the step is answered.
So the step can run again. Pieces at kept positions, and the last one of a request that ends or is preempted,
get names and are found by others, as full blocks are. Without boundary kinds all of this does nothing.
"""

from __future__ import annotations

from collections import deque

from engine.pieces.kinds import kept_positions
from engine.pieces.pool import BlockHash, PiecePool
from engine.scheduling.request import Request
from engine.scheduling.step_making import StepRows
from engine.step import RowPieces

NO_LIMIT = 1 << 30
"""Tokens of a draft where nothing limits them."""


class Boundaries:
    """Boundary pieces of one scheduler's requests."""

    def __init__(self, pool: PiecePool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self.step = pool.kinds.step
        """Tokens between two positions that can have pieces; 0: the model has none."""
        self._pending: list[tuple[Request, list[int], BlockHash]] = []
        """Slots that a step fills for a request, with the chain hash of their position."""
        self._wrong: list[Request] = []
        """Requests whose pending slots are not named."""
        self._retiring: list[int] = []
        """Slots that the step in the making is the last one to read."""
        self._retired: deque[list[int]] = deque()
        """The same of each step in flight, oldest first."""

    def __repr__(self) -> str:
        return f"<Boundaries every {self.step} tokens, {self._pool.num_free_boundaries} free>"

    # ---- requests

    def admit(self, request: Request, num_blocks: int) -> None:
        """Hold the pieces behind the known blocks of a request that is admitted."""
        if not self.step:
            return
        request.boundary = self._pool.find_boundary(request.hashes[:num_blocks])
        self._pool.hold(request.boundary)
        request.boundary_at = num_blocks * self._block_size
        parted_at = len(self._pool.find_blocks(request.prefix_hashes(self._block_size))) * self._block_size
        kept = kept_positions(len(request.token_ids), self.step, parted_at)
        request.kept_positions = sorted({*kept, *request.compared_at}) if request.compared_at else kept

    def vacate(self, request: Request, *, is_wrong: bool) -> None:
        """Release a request's pieces, and name the last one unless it is wrong.

        One that steps in flight read or fill is kept until they are answered: they may run again.
        """
        if is_wrong and self._pending:
            self._wrong.append(request)
        if request.boundary:
            if not is_wrong:
                self._name(request.boundary, self._chain_at(request, request.boundary_at))
            if request.num_in_flight:
                self._retired[-1] += request.boundary
            else:
                self._pool.release(request.boundary)
        request.boundary, request.boundary_at, request.kept_positions = [], 0, []

    def most_drafted(self, request: Request) -> int:
        """Most drafted tokens of a row.

        A drafted token may be refused, so none may be part of a boundary piece.
        """
        if not self.step:
            return NO_LIMIT
        return max(0, self.step - request.num_computed % self.step - 2)

    # ---- rows

    def lacks(self, request: Request, end: int) -> bool:
        """Whether slots lack for the pieces that a row up to ``end`` has to fill."""
        return self._passes(request, end) and not self._pool.num_free_boundaries

    def lacks_beside(self, request: Request, count: int) -> bool:
        """Whether slots lack for a waiting request's first row beside what it has found."""
        if not self._passes(request, request.num_computed + count):
            return False
        found = self._pool.find_boundary(request.hashes[: request.num_computed // self._block_size])
        return self._pool.num_free_boundaries <= any(not self._pool.num_holders(slot) for slot in found)

    def cross(self, request: Request, rows: StepRows, count: int) -> None:
        """Choose the slots that the newest row fills.

        ``count``: its tokens without drafted ones.
        """
        if not self.step:
            return
        start, end = request.num_computed, request.num_computed + count
        begins = request.boundary_at, request.boundary
        fills: dict[int, list[int]] = {}
        if self._passes(request, end):
            last = end // self.step * self.step
            filled = self._pool.take_boundary()
            assert filled is not None, "lacks() comes first"
            fills = self._snapshots(request, start, last)
            fills[last] = filled
            if last in request.kept_positions:
                self._keep(filled, request, last)
            self._retiring += request.boundary
            request.boundary, request.boundary_at = filled, last
        is_first = not request.num_in_flight and start == begins[0]
        is_new = is_first or bool(fills)
        rows.add_pieces(begins, RowPieces(begins if is_first else None, fills) if is_new else None)

    def begun(self) -> None:
        """The rows of a step are chosen; it is in flight from now on."""
        self._retired.append(self._retiring)
        self._retiring = []

    def answered(self) -> None:
        """The oldest step in flight is answered, and not run again."""
        self.settle()
        self._pool.release(self._retired.popleft())

    def settle(self) -> None:
        """Name what was filled, for rows of later steps only."""
        for request, slots, chain in self._pending:
            if request not in self._wrong:
                self._name(slots, chain)
            self._pool.release(slots)
        self._pending.clear()
        self._wrong.clear()

    # ---- helpers

    def _passes(self, request: Request, end: int) -> bool:
        return self.step > 0 and end // self.step > request.num_computed // self.step

    def _snapshots(self, request: Request, start: int, last: int) -> dict[int, list[int]]:
        """Slots for kept positions within a row, as far as there are free ones."""
        fills = {}
        for position in request.kept_positions:
            if start < position < last and (slots := self._pool.take_boundary()) is not None:
                fills[position] = slots
                self._pending.append((request, slots, self._chain_at(request, position)))
        return fills

    def _keep(self, slots: list[int], request: Request, position: int) -> None:
        self._pool.hold(slots)
        self._pending.append((request, slots, self._chain_at(request, position)))

    def _chain_at(self, request: Request, position: int) -> BlockHash:
        num_blocks = position // self._block_size
        return request.hashes_up_to(num_blocks, self._block_size)[-1]

    def _name(self, slots: list[int], chain: BlockHash) -> None:
        for slot, name in zip(slots, self._pool.kinds.boundary_names(chain), strict=True):
            self._pool.name(slot, name)
