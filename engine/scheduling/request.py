"""Request on an instance: its tokens, how many are computed, and its blocks."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from engine.messages import FinishReason, RoutedExperts, Submit, TokenLogprobs
from engine.pieces.pool import BlockHash, hash_block, rooted
from engine.pooling_params import Pooled, PoolingParams
from engine.prompt_images import PromptImage, names_between
from engine.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.scheduling.grammar import Grammar
    from engine.speculation.speculation import Drafter

RequestKey = tuple[bytes, int]
"""The router's connection, and the router's number of the request."""


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


NO_SEED = 2**64 - 1
"""The seed -1 in 64 bits, by which requests ask for a new one."""


def stream_seed(seed: int, sample_index: int) -> int:
    """Seed of one of a request's ``n`` samples; sample 0 uses the request's own.

    A request can ask for each of them, so :data:`NO_SEED` is none: the number before it takes its place.
    """
    made = (seed + sample_index * 0x9E3779B97F4A7C15) & (2**64 - 1)
    return made if made != NO_SEED else NO_SEED - 1


@dataclass(eq=False, slots=True)
class Request:
    """State of a request, changed by the scheduler only.

    It has slots, since an object with more than 30 attributes has a table of its own to look them up in.
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
    """Tokens barred before ``params.min_tokens``: stop tokens, and end-of-sequence in any case."""
    max_output: int
    """Output tokens after which it ends, with regard to the context length."""
    num_emitted: int
    """Output tokens that the router already has."""
    arrival: int
    """Order of arrival on this instance."""
    priority: int = 0
    cache_salt: str = ""
    weights: str = ""
    """Version of the weights that its blocks are named by; see :func:`engine.pieces.pool.root_of`."""
    adapter: str = ""
    """Digest of its low-rank adapter; empty for none."""
    turn: int = 0
    """Turn among those of other adapters (:mod:`engine.scheduling.adapter_turns`); 0 without any."""
    adapter_number: int = 0
    """Number of that while it runs (:mod:`engine.scheduling.adapter_numbers`)."""
    traceparent: str = ""
    status: Status = Status.WAITING
    slot: int | None = None
    num_computed: int = 0
    """Tokens whose keys and values are cached, counting the steps in flight.

    With a row ahead, one more than ``token_ids`` has.
    """
    blocks: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of the full blocks of ``token_ids``, as far as they were needed."""
    num_expected: int = 0
    """Tokens that it will have to compute, as estimated when it was queued."""
    expected_blocks: list[BlockHash] = field(default_factory=list)
    """Blocks that other requests count on, until they are computed."""
    num_in_flight: int = 0
    """Steps in flight that compute some of it."""
    needs_tokens: bool = False
    """Whether the choice of its next token needs the one before on the host.

    See :mod:`engine.scheduling.ahead`.
    """
    is_asked_for: bool = False
    """Whether another instance waits for it to be in no step."""
    boundary: list[int] = field(default_factory=list)
    """Slots of the boundary pieces that it goes on from; none at the position 0."""
    boundary_at: int = 0
    """Position of these."""
    kept_positions: list[int] = field(default_factory=list)
    """Positions of its prompt whose boundary pieces are kept for others."""
    num_named: int = 0
    """Blocks of this request that the pool knows by hash."""
    num_cached: int = 0
    """Prompt tokens found in the cache at first admission."""
    num_found: int = 0
    """Tokens of it that its newest admission found in the cache."""
    num_cached_output: int = 0
    """Tokens of an earlier try's output found in the cache at first admission."""
    copy: int = 0
    """Number of the copy of its blocks, made while it ran elsewhere; 0 for none."""
    blocks_at: str = ""
    """Address of an instance that has more of its blocks; empty for none."""
    num_fetched: int = 0
    """Tokens whose blocks came from there."""
    most_cached: int | None = None
    """Most blocks that its first admission takes from the cache; None: all that are there."""
    compared_at: Sequence[int] = ()
    """Positions whose boundary pieces it computes for a check."""
    checked: tuple[str, Sequence[BlockHash]] | None = None
    """Source and blocks of a transfer whose last block it computes (:mod:`engine.transfers.checking`)."""
    was_admitted: bool = False
    arrived_at: float = 0.0
    """Arrival in seconds of ``time.perf_counter``; 0 once its times were sent."""
    began_at: float = 0.0
    """The same arrival time, never reset."""
    admitted_at: float = 0.0
    """When it was first put into a step."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    scored_from: int = 0
    """First prompt token whose log-probability is wanted, where those of its prompt are."""
    routed_until: int | None = None
    """Position up to which the experts of its tokens are known; None: nobody wants them."""
    routed: list[RoutedExperts] = field(default_factory=list)
    """Experts of its tokens that were not sent yet."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    grammar: Grammar | None = None
    """Grammar that the output must follow, up to the last token of ``token_ids``."""
    error: str = ""
    """Why it failed, with ``FinishReason.ERROR``."""
    images: tuple[PromptImage, ...] = ()
    """Those of its prompt."""
    num_put_off: int = 0
    """Steps that had no room for its next image so far."""
    drafter: Drafter | None = None
    """Drafts next tokens, where speculation is on."""
    pooling: PoolingParams | None = None
    """What it is answered with in place of tokens; None: it generates."""
    pooled: Pooled | None = None
    """That answer, once it is computed."""

    def __repr__(self) -> str:
        return (
            f"<Request {self.request_id} {self.status.name.lower()} "
            f"{self.num_computed}/{len(self.token_ids)} computed, {len(self.blocks)} blocks>"
        )

    @property
    def root(self) -> str:
        """Root of the names of its blocks."""
        return rooted(self.cache_salt, self.adapter)

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

    def note_experts(self, found: RoutedExperts) -> None:
        """Take in the experts of tokens that a step computed."""
        assert self.routed_until is not None
        new = found.between(self.routed_until, found.end)
        if new.ids:
            self.routed.append(new)
            self.routed_until = new.end

    def take_experts(self) -> RoutedExperts | None:
        """Experts of the tokens before its newest one that were not sent yet.

        Those of refused drafts are dropped.
        """
        if self.routed_until is None or not self.routed:
            return None
        first, end = self.routed[0], len(self.token_ids) - 1
        whole = RoutedExperts(
            first.first, first.num_layers, first.top_k, b"".join(each.ids for each in self.routed)
        )
        self.routed, self.routed_until = [], min(self.routed_until, end)
        return whole.between(whole.first, end)

    @property
    def num_before_scores(self) -> int:
        """Tokens to compute next whose logits are not wanted, before those that give log-probabilities."""
        return max(0, self.scored_from - 1 - self.num_computed)

    def no_scores(self) -> list[TokenLogprobs | None]:
        """Prompt log-probabilities before any is computed: None of tokens that get none."""
        return [None] * max(1, self.scored_from)

    @property
    def order(self) -> tuple[int, bool, int, int]:
        """Sort key: lower goes first.

        Requests resumed from a lost instance, whose clients have a part of their answers, go before requests
        without any output.
        """
        return (self.priority, self.num_emitted == 0, self.turn, self.arrival)

    def hashes_up_to(self, num_blocks: int, block_size: int) -> list[BlockHash]:
        """Hashes of the first ``num_blocks`` full blocks, computed once."""
        while len(self.hashes) < num_blocks:
            start = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else None
            self.hashes.append(self._name_of_block(parent, start, start + block_size))
        return self.hashes[:num_blocks]

    def _name_of_block(self, parent: BlockHash | None, start: int, end: int) -> BlockHash:
        images = names_between(self.images, start, end) if self.images else b""
        return hash_block(parent, self.token_ids[start:end], self.root, self.weights, images)

    def name_by(self, weights: str) -> None:
        """Name its blocks by another version of the weights.

        Nothing that was fetched for it under the old names is used or checked any more.
        """
        self.weights, self.hashes = weights, []
        self.most_cached = self.checked = None
        self.compared_at = ()

    def prefix_hashes(self, block_size: int) -> list[BlockHash]:
        """Hashes of the blocks that a request may find in the cache.

        At least one token is left to compute, and all whose log-probabilities or experts are wanted.
        """
        if self.prompt_logprobs is not None:
            most = 0 if self.routed_until is not None else max(0, self.scored_from - 1)
            return self.hashes_up_to(most // block_size, block_size)
        if self.routed_until is not None:
            most = min(len(self.token_ids) - 1, self.routed_until)
            return self.hashes_up_to(most // block_size, block_size)
        return self.hashes_up_to((len(self.token_ids) - 1) // block_size, block_size)

    def name_of_part(self, block_size: int) -> BlockHash | None:
        """Name of the block that the newest token will go on in.

        The block holds what is before that token. None if that is nothing.
        """
        num_full, rest = divmod(len(self.token_ids) - 1, block_size)
        if not rest or self.prompt_logprobs is not None:
            return None
        parent = self.hashes_up_to(num_full, block_size)[-1] if num_full else None
        start = num_full * block_size
        return self._name_of_block(parent, start, start + rest)


def from_submit(
    submit: Submit, peer: bytes, *, arrival: int, eos_ids: tuple[int, ...], max_model_len: int
) -> Request:
    """Make a request from a router's message."""
    params = msgspec.structs.replace(submit.params, grammar=None)  # workers need masks only
    own_ids = frozenset(params.stop_token_ids)
    barred_ids = own_ids.union(eos_ids)
    room = max_model_len - len(submit.prompt_ids)
    request = Request(
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
        adapter=submit.adapter,
        traceparent=submit.traceparent,
        copy=submit.copy,
        blocks_at=submit.blocks_at,
        scored_from=submit.scored_from,
        pooling=submit.pooling,
        routed_until=_known_experts(submit) if submit.routed_experts else None,
        images=submit.images,
    )
    if params.prompt_logprobs is not None and not submit.output_ids:
        request.prompt_logprobs = request.no_scores()
    return request


def _known_experts(submit: Submit) -> int:
    """Tokens whose experts the router has: with each token come those of all before it."""
    return len(submit.prompt_ids) + len(submit.output_ids) - 1 if submit.output_ids else 0
