"""A step in the making, and what is kept of it in flight (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from engine.scheduling.request import Request
from engine.step import Admit, RowPieces, Step


class UnderWay(msgspec.Struct, frozen=True):
    """A step that was scheduled and not yet answered."""

    step: Step
    requests: list[Request]
    tables: list[list[int]]
    """Block tables of the requests, also of those that are aborted meanwhile."""
    begins: list[tuple[int, list[int]]] = []
    """Position and slots of the boundary pieces of each row, where the model has such."""


class StepRows:
    """Rows of a step in the making, and the token budgets that are left."""

    def __init__(self, budget: int, prompts: int, prompt_logprobs: int) -> None:
        self.budget = budget
        self._prompts = prompts
        self.prompt_logprobs = prompt_logprobs
        """Budget of prompt tokens whose log-probabilities are wanted."""
        self.put_off: list[Request] = []
        """Requests whose next image has no room."""
        self.requests: list[Request] = []
        self._slots: list[int] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._new_blocks: dict[int, list[int]] = {}
        self._partial: list[int] = []
        self._ahead: list[int] = []
        self._drafts: dict[int, list[int]] = {}
        self._pieces: dict[int, RowPieces] = {}
        self.proposes: dict[int, int] = {}
        """Tokens that the drafting model is to propose, by row."""
        self.begins: list[tuple[int, list[int]]] = []
        """Boundary pieces that each row goes on from, where the model has such."""
        self._in_order = True
        self._last_kind = 0

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def prompt_budget(self) -> int:
        """Tokens that prompts may take of the budget."""
        return min(self.budget, self._prompts)

    def is_full_for(self, request: Request) -> bool:
        """Whether there is no room for the log-probabilities of a request's prompt."""
        return self.prompt_logprobs <= 0 and request.tells_prompt

    def add(
        self, request: Request, count: int, new_blocks: list[int], draft: list[int] | None = None
    ) -> None:
        """Add the next ``count`` tokens of a request, the last of which are its draft."""
        assert request.slot is not None
        index, start = len(self.requests), request.num_computed
        self.budget -= count
        if request.tells_prompt:
            self.prompt_logprobs -= max(0, count - request.num_before_scores)
        if new_blocks:
            self._new_blocks[index] = new_blocks
        if draft:
            self._drafts[index] = draft
        end, known = start + count, len(request.token_ids)
        is_partial = end < known
        if is_partial:
            self._partial.append(index)
        elif start == known:
            self._ahead.append(index)
        kind = 0 if count == 1 else 1 if draft else 2
        if kind == 2 or is_partial:
            self._prompts -= count
        self._in_order = self._in_order and kind >= self._last_kind
        self._last_kind = kind
        self.requests.append(request)
        self._slots.append(request.slot)
        self._starts.append(start)
        self._counts.append(count)

    def add_pieces(self, begins: tuple[int, list[int]], pieces: RowPieces | None) -> None:
        """Boundary pieces of the row that was added last."""
        self.begins.append(begins)
        if pieces is not None:
            self._pieces[len(self.requests) - 1] = pieces

    def is_partial(self, index: int) -> bool:
        """Whether a row ends before its request's newest token."""
        return index in self._partial

    def step(self, admits: list[Admit], *, tells_tokens: bool) -> Step:
        """The finished step: decode rows first, then rows with drafts, then prefill chunks."""
        if not self._in_order:
            self._sort()
        starts, counts = self._starts, self._counts
        firsts: list[int] = []
        if tells_tokens:
            decoding = (index for index, count in enumerate(counts) if count == 1 or index in self._drafts)
            firsts = [self.requests[index].token_ids[starts[index]] for index in decoding]
        return Step(
            admits,
            self._slots,
            starts,
            counts,
            self._new_blocks,
            self._partial,
            firsts,
            None,
            self._drafts,
            self._pieces,
            self.proposes,
            self._ahead,
        )

    def _sort(self) -> None:
        order = sorted(
            range(len(self)), key=lambda index: (self._counts[index] > 1, index not in self._drafts)
        )
        new_index = {index: new for new, index in enumerate(order)}
        self.requests = [self.requests[index] for index in order]
        self._slots = [self._slots[index] for index in order]
        self._starts = [self._starts[index] for index in order]
        self._counts = [self._counts[index] for index in order]
        self._new_blocks = {new_index[index]: blocks for index, blocks in self._new_blocks.items()}
        self._partial = sorted(new_index[index] for index in self._partial)
        self._ahead = sorted(new_index[index] for index in self._ahead)
        self._drafts = {new_index[index]: draft for index, draft in self._drafts.items()}
        self.proposes = {new_index[index]: count for index, count in self.proposes.items()}
        if self.begins:
            self.begins = [self.begins[index] for index in order]
            self._pieces = {new_index[index]: pieces for index, pieces in self._pieces.items()}


def admit_of(request: Request, slot: int, start: int) -> Admit:
    """Admission of a request to a slot; ``start``: position of its first row."""
    params = request.params
    if request.prompt_logprobs is None and params.prompt_logprobs is not None:  # sent with its first delta
        params = msgspec.structs.replace(params, prompt_logprobs=None)
    return Admit(
        slot=slot,
        token_ids=request.token_ids[:],
        num_prompt=request.num_prompt,
        params=params,
        seed=request.seed,
        barred_ids=tuple(sorted(request.barred_ids)),
        adapter=request.adapter_number,
        adapter_digest=request.adapter,
        scored_from=request.scored_from,
        keeps_experts=request.routed_until is not None,
        pooling=request.pooling,
        images=tuple(each if each.end > start else each.without_pixels() for each in request.images),
    )


def made_anew(under_way: UnderWay) -> UnderWay:
    """The same step, as if it admitted all its requests."""
    old = under_way.step
    step = msgspec.structs.replace(
        old,
        admits=[
            admit_of(request, slot, start)
            for slot, start, request in zip(old.slots, old.starts, under_way.requests, strict=True)
        ],
        new_blocks={index: table[:] for index, table in enumerate(under_way.tables)},
        masks=None,
        ahead=[],
        pieces={
            index: RowPieces(begins, old.pieces[index].fills if index in old.pieces else {})
            for index, begins in enumerate(under_way.begins)
        },
    )
    return msgspec.structs.replace(under_way, step=step)


def filled_by(step: Step) -> Callable[[Request], Mapping[int, Sequence[int]]]:
    """Finds the slots of boundary pieces that a step fills for a request, by position."""

    def find(request: Request) -> Mapping[int, Sequence[int]]:
        row = step.slots.index(request.slot) if request.slot in step.slots else -1
        return step.pieces[row].fills if row in step.pieces else {}

    return find


def slots_filled(step: Step) -> set[int]:
    """Slots of boundary pieces that a step fills."""
    return {slot for row in step.pieces.values() for slots in row.fills.values() for slot in slots}
