"""Scheduling ahead: rows that follow tokens which the device is still choosing (pure).

A device computes while the host schedules the next step. The token that such a row computes is not known on
the host yet. It stands on the device, and the row is listed in :attr:`engine.step.Step.ahead`. If the token
ends its request, the row runs all the same, and what it chooses is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.pieces.pool import PiecePool
from engine.scheduling.request import Request, Status
from engine.scheduling.step_making import UnderWay
from engine.scheduling.waiting_queue import WaitingQueue
from engine.step import Step


class SchedulingAhead:
    """Chooses rows that may follow an unknown token, and steps that must wait for it."""

    def __init__(self, pool: PiecePool, block_size: int, *, is_on: bool) -> None:
        """``is_on``: the executor takes such rows, and another step while one is under way."""
        self._pool = pool
        self._block_size = block_size
        self.is_on = is_on
        self.lacks_blocks = False
        """Whether a request lacks blocks that only requests in no step can give back."""

    def __repr__(self) -> str:
        return f"<SchedulingAhead {'on' if self.is_on else 'off'}>"

    def waits(self, running: Sequence[Request], waiting: WaitingQueue) -> bool:
        """Whether the next step is scheduled only once no step is under way.

        So it is where a request needs its newest token on the host: without its row in each step it would
        get half of the tokens. It is so, too, where a request has to give way, which none in a step can.
        """
        if not self.is_on:
            return False
        if self._pool.kinds.step:  # boundary pieces are named by the tokens before them
            return True
        if self.lacks_blocks or (running and waiting.goes_before(running[-1])):
            return True
        return any(
            (request.needs_tokens or request.is_asked_for)
            and request.num_in_flight > 0
            and request.num_uncomputed == 0
            for request in running
        )

    def follows(self, request: Request) -> int:
        """Number of tokens, 1 or 0, that may follow one still being chosen.

        0 where that token is certainly the last one of the request.
        """
        known = len(request.token_ids)
        if not self.is_on or request.num_computed != known or not request.num_in_flight:
            return 0
        return int(known + 1 < request.num_prompt + request.max_output)

    def known_part(self, under_way: UnderWay) -> UnderWay | None:
        """A step to run again, without rows whose token is not known; None: no others.

        Their requests go on from before these rows, without the blocks for them.
        """
        step, kept = under_way.step, []
        for index, request in enumerate(under_way.requests):
            if index not in step.ahead or step.starts[index] < len(request.token_ids):
                kept.append(index)
                continue
            request.num_in_flight -= 1
            if request.status is Status.RUNNING:
                request.num_computed = start = step.starts[index]
                needed = -(-start // self._block_size)
                self._pool.release(request.blocks[needed:])
                del request.blocks[needed:]  # in place: the steps before have the same table
        if len(kept) == len(step.slots):
            return under_way
        if not kept:
            return None
        return UnderWay(
            _rows_of(step, kept),
            [under_way.requests[index] for index in kept],
            [under_way.tables[index] for index in kept],
        )


def needs_tokens(request: Request) -> bool:
    """Whether the choice of a request's next token needs the one before on the host."""
    params = request.params
    return (
        request.grammar is not None
        or request.drafter is not None
        or params.shapes_logits_by_history
        or params.thinking is not None
        or any(len(word) > 1 for word in params.bad_words)
    )


def _rows_of(step: Step, kept: Sequence[int]) -> Step:
    """A step of some of the rows of another, which are admitted anew."""
    new_index = {index: new for new, index in enumerate(kept)}
    return msgspec.structs.replace(
        step,
        slots=[step.slots[index] for index in kept],
        starts=[step.starts[index] for index in kept],
        counts=[step.counts[index] for index in kept],
        partial=[new_index[index] for index in step.partial if index in new_index],
        proposes={new_index[index]: count for index, count in step.proposes.items() if index in new_index},
        ahead=[],
    )
