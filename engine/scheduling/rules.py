"""Limits of an instance's steps and requests (pure)."""

from __future__ import annotations

import msgspec

from engine.scheduling.request import Request


class SchedulerRules(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that the scheduler of one instance keeps."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    prompt_tokens_beside_decodes: int | None = None
    """Most prompt tokens of a step while requests decode, with chunked prefill.

    Requests that decode wait for no more tokens of others' prompts. None: as many as the budget has.
    """
    prompt_seconds_beside_decodes: float | None = None
    """Seconds that those prompt tokens may take; None: no limit.

    Where they take longer, there are fewer.
    """
    largest_lone_chunk: int = 0
    """Most tokens of a step while there is one request only (in lockstep, anywhere).

    0: ``max_num_batched_tokens``, as always.
    """
    lone_chunk_seconds: float = 0.5
    """Seconds that such a step may take beyond ``max_num_batched_tokens``: who arrives waits for its rest."""
    micro_batches: int = 1
    """Steps of different requests that are in flight at once.

    Each takes its share of the requests.
    """
    runs_ahead: bool = False
    """Whether rows may follow tokens that are not known yet (:mod:`engine.scheduling.ahead`)."""
    tells_tokens: bool = False
    """Whether decode rows carry their tokens, for workers that do not sample."""

    images_are_whole: bool = False
    """Whether no step may have a part of an image."""
    max_loras: int = 0
    """Low-rank adapters that running requests have at once."""

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def problem_with(self, request: Request, num_blocks: int) -> str | None:
        """Why a request can never run with a cache of ``num_blocks``, None if it can."""
        most_tokens = request.num_prompt + request.max_output
        if request.pooling is not None:
            most_tokens = request.num_prompt
        elif request.max_output < 1:
            return f"the prompt has {request.num_prompt} tokens, which leaves no room to generate"
        capacity = num_blocks * self.block_size
        if most_tokens > capacity:
            return f"the request may need {most_tokens} tokens, but the KV cache holds only {capacity}"
        budget = self.max_num_batched_tokens
        longest = max((each.end - each.first for each in request.images), default=0)
        if self.images_are_whole and longest > budget:
            return (
                f"an image of {longest} tokens is computed in one step, and steps have {budget}: raise "
                "--max-num-batched-tokens"
            )
        if not self.enable_chunked_prefill and most_tokens > budget:
            return (
                f"the request may need {most_tokens} tokens in one step, more than the budget of {budget}, "
                "and chunked prefill is off"
            )
        return None
