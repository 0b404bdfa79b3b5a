"""Drafts of a step: rows with drafted tokens, and the blocks for them (pure)."""

from __future__ import annotations

from engine.pieces.pool import PiecePool
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import Request, RequestKey, Status
from engine.scheduling.request_queues import RequestQueues
from engine.scheduling.rules import SchedulerRules
from engine.scheduling.step_making import StepRows
from engine.scheduling.totals import SchedulerTotals
from engine.speculation.speculation import Speculation

DRAFTS_BESIDE_PROMPTS = 4
"""Divisor of the budget left for drafts while prompts are to be computed."""
PENALISED_DRAFTS = 1 << 14
"""Bound on a request's tokens times its drafted tokens, where it has penalties."""


class Drafting:
    """Chooses rows with drafts, within a step's spare tokens and free blocks."""

    def __init__(
        self,
        rules: SchedulerRules,
        pool: PiecePool,
        queues: RequestQueues,
        prefixes: PrefixCache,
        speculation: Speculation | None,
        totals: SchedulerTotals,
    ) -> None:
        self._rules = rules
        self._pool = pool
        self._queues = queues
        self._prefixes = prefixes
        self._speculation = speculation
        self._totals = totals
        self._blocks_for_drafts = 0
        """Blocks that drafts of the step in the making may take."""

    def __repr__(self) -> str:
        return f"<Drafting by {self._speculation!r}>"

    def drafts(self, most_rows: int) -> dict[RequestKey, list[int]]:
        """Drafts behind the newest tokens, by request.

        They get what is left of the budget. That is little where prompts are to be computed, since drafts
        only hasten what comes anyway.
        """
        running = len(self._queues.running)
        if self._speculation is None or self._speculation.is_off(running):
            return {}
        room = max(0, self._rules.max_num_batched_tokens - running)
        self._blocks_for_drafts = max(0, self._pool.num_free - running)  # each may need one in this step
        if self._queues.waiting or self._queues.in_prefill():
            room = room // DRAFTS_BESIDE_PROMPTS if self._rules.enable_chunked_prefill else 0
            self._blocks_for_drafts = 0
        keys, texts = [], []
        for request in self._queues.running:
            if request.drafter is not None and len(request.token_ids) - request.num_computed == 1:
                keys.append(request.key)
                most = min(_most_drafted(request), self._queues.boundaries.most_drafted(request))
                texts.append((request.drafter, request.token_ids, most))
                if len(keys) == most_rows:
                    break
        drafts = self._speculation.draft(texts, min(running, most_rows), room)
        found = {key: draft for key, draft in zip(keys, drafts, strict=True) if draft}
        return self._within_grammars(found) if self._queues.has_grammars else found

    def _within_grammars(self, drafts: dict[RequestKey, list[int]]) -> dict[RequestKey, list[int]]:
        """Drafts as far as the grammars of their requests allow them."""
        assert self._speculation is not None
        found = {}
        for key, draft in drafts.items():
            request = self._queues.find(key)
            assert request is not None, "it runs"
            if request.grammar is None:
                found[key] = draft
            elif count := request.grammar.follow(draft, request.num_output):
                found[key] = draft[:count]
            elif request.drafter is not None:
                self._speculation.learn(request.drafter, len(draft), 0)
        return found

    def ask(self, rows: StepRows) -> None:
        """Choose how many tokens a model is to propose for each row.

        It takes in prompts meanwhile, unless proposing does not pay at the moment.
        """
        speculation = self._speculation
        if speculation is None or not speculation.asks:
            return
        if speculation.is_off(len(self._queues.running)):
            return  # what proposes from rows of each step begins anew later, behind these tokens
        if speculation.follows:
            every = (index for index, request in enumerate(rows.requests) if request.drafter is not None)
            rows.proposes = dict.fromkeys(every, 0)
        keys, wanting = [], []
        for index, request in enumerate(rows.requests):
            if request.drafter is None:
                continue
            if not rows.is_partial(index):
                keys.append(index)
                wanting.append((request.drafter, _most_drafted(request) - 1))
            elif not speculation.rests:
                rows.proposes[index] = 0
        lengths = speculation.ask(wanting, len(rows))
        rows.proposes |= {index: length for index, length in zip(keys, lengths, strict=True) if length}

    def fill(self, rows: StepRows, request: Request, draft: list[int]) -> bool:
        """Add a request's newest token and its draft; False if blocks are lacking.

        No request waits or is preempted for a draft.
        """
        count = 1 + len(draft)
        needed = self._rules.blocks_for(request.num_computed + count) - len(request.blocks)
        if needed > self._blocks_for_drafts:
            return False
        self._blocks_for_drafts -= needed
        new_blocks = self._pool.take(needed)
        assert new_blocks is not None
        request.blocks += new_blocks
        rows.add(request, count, new_blocks, draft)
        self._queues.boundaries.cross(request, rows, 1)
        request.num_in_flight += 1
        self._prefixes.advance(request, 1)  # whether drafted tokens count is not known yet
        self._totals.on_draft(len(draft))
        return True

    def taken(self, request: Request, drafted: int, accepted: int) -> None:
        """Take in that ``accepted`` tokens were taken, and release the blocks of the others."""
        self._totals.on_taken(accepted)
        if request.drafter is not None and self._speculation is not None:
            self._speculation.learn(request.drafter, drafted, accepted)
        if request.status is Status.RUNNING:
            surplus = request.blocks[self._rules.blocks_for(request.num_computed) :]
            if surplus:
                request.blocks = request.blocks[: -len(surplus)]
                self._pool.release(surplus)


def _most_drafted(request: Request) -> int:
    """Most tokens worth drafting for a request.

    One token of its output comes in any case.


    Penalties look at the whole text for each token.
    """
    left = request.max_output - request.num_output - 1
    if request.params.shapes_logits_by_history:
        left = min(left, PENALISED_DRAFTS // len(request.token_ids))
    return left
