"""One request on an instance: its tokens, how far they are computed, and the blocks they stand in."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from engine.messages import FinishReason, Submit, TokenLogprobs
from engine.sampling import SamplingParams
from engine.scheduling.blocks import BlockHash, hash_block

if TYPE_CHECKING:
    from engine.scheduling.grammar import Grammar
    from engine.scheduling.speculation import Drafter

RequestKey = tuple[bytes, int]
"""The router's connection, and the router's number of the request."""


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


def stream_seed(seed: int, sample_index: int) -> int:
    """The seed of one of the ``n`` samples; sample 0 uses the request's own."""
    return (seed + sample_index * 0x9E3779B97F4A7C15) & (2**64 - 1)


@dataclass(eq=False, slots=True)
class Request:
    """State of a request.

    Changed by the scheduler only. (With slots: beyond 30 attributes an object has a table of its own to look
    them up in.)
    """

    key: RequestKey
    request_id: str
    params: SamplingParams
    seed: int
    token_ids: list[int]
    """Prompt, then output."""
    num_prompt: int
    stop_ids: frozenset[int]
    """End-of-sequence (unless ignored) and the request's own stop tokens."""
    barred_ids: frozenset[int]
    """Tokens that may not come before ``params.min_tokens``: the same, and end-of-sequence in any case."""
    max_output: int
    """Output tokens after which it ends, the context length considered."""
    num_emitted: int
    """Output tokens that the router already has."""
    arrival: int
    """Order of arrival on this instance."""
    priority: int = 0
    cache_salt: str = ""
    traceparent: str = ""
    status: Status = Status.WAITING
    slot: int | None = None
    num_computed: int = 0
    """Tokens whose keys and values are in the cache, or will be after the step in flight."""
    blocks: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    """Of the full blocks of ``token_ids``, as far as they were needed."""
    num_expected: int = 0
    """While it waits: tokens that it will have to compute, as far as could be told when it was queued."""
    promised: list[BlockHash] = field(default_factory=list)
    """Blocks that others may count on, until they are computed."""
    num_in_flight: int = 0
    """Steps under way that compute some of it."""
    num_named: int = 0
    """Blocks of this request that the pool knows by hash."""
    num_cached: int = 0
    """Prompt tokens found in the cache at first admission."""
    was_admitted: bool = False
    arrived_at: float = 0.0
    """Seconds, on the clock of ``time.perf_counter``; 0 once its times were told."""
    began_at: float = 0.0
    """The same, for good."""
    admitted_at: float = 0.0
    """When it was first put into a step."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    grammar: Grammar | None = None
    """What its output must follow, up to the last token of ``token_ids``."""
    error: str = ""
    """Why it failed, with ``FinishReason.ERROR``."""
    drafter: Drafter | None = None
    """Guesses what comes next, where that is wanted."""

    def __repr__(self) -> str:
        return (
            f"<Request {self.request_id} {self.status.name.lower()} "
            f"{self.num_computed}/{len(self.token_ids)} computed, {len(self.blocks)} blocks>"
        )

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def tells_prompt(self) -> bool:
        """Whether the next tokens to compute are of a prompt whose log-probabilities are wanted."""
        return self.prompt_logprobs is not None and self.num_computed < self.num_prompt

    @property
    def order(self) -> tuple[int, bool, int]:
        """Sort key: lower goes first.

        Who comes from a lost instance, its client in the middle of an answer, goes before those whose clients
        have nothing yet.
        """
        return (self.priority, self.num_emitted == 0, self.arrival)

    def hashes_up_to(self, num_blocks: int, block_size: int) -> list[BlockHash]:
        """Hashes of the first ``num_blocks`` full blocks, computed once."""
        while len(self.hashes) < num_blocks:
            start = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else None
            self.hashes.append(
                hash_block(parent, self.token_ids[start : start + block_size], self.cache_salt)
            )
        return self.hashes[:num_blocks]

    def prefix_hashes(self, block_size: int) -> list[BlockHash]:
        """Hashes of the blocks that it may find in the cache.

        At least one token is left to compute, and prompts whose log-probabilities are wanted are computed
        whole.
        """
        if self.prompt_logprobs is not None:
            return []
        return self.hashes_up_to((len(self.token_ids) - 1) // block_size, block_size)


def from_submit(
    submit: Submit, peer: bytes, *, arrival: int, eos_ids: tuple[int, ...], max_model_len: int
) -> Request:
    """A request as it comes from a router."""
    params = msgspec.structs.replace(submit.params, grammar=None)  # workers need masks only
    own_ids = frozenset(params.stop_token_ids)
    barred_ids = own_ids.union(eos_ids)
    room = max_model_len - len(submit.prompt_ids)
    return Request(
        key=(peer, submit.request),
        request_id=submit.request_id,
        params=params,
        seed=stream_seed(submit.seed, submit.sample_index),
        token_ids=submit.prompt_ids + submit.output_ids,
        num_prompt=len(submit.prompt_ids),
        stop_ids=own_ids if params.ignore_eos else barred_ids,
        barred_ids=barred_ids,
        max_output=room if params.max_tokens is None else min(params.max_tokens, room),
        num_emitted=len(submit.output_ids),
        arrival=arrival,
        priority=submit.priority,
        cache_salt=submit.cache_salt,
        traceparent=submit.traceparent,
        prompt_logprobs=[None] if params.prompt_logprobs is not None and not submit.output_ids else None,
    )
