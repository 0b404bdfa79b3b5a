"""Steps from the scheduler to the workers, and their results (no torch).

Workers keep the state of the running requests in numbered slots (token ids, block table, sampling
parameters), so a step carries only what changed. All structs are plain msgspec: an executor may send
them to another process as they are.
"""

from __future__ import annotations

import msgspec

from engine.messages import RoutedExperts, TokenLogprobs
from engine.pieces.kinds import BoundaryKind
from engine.pooling_params import Pooled, PoolingParams
from engine.prompt_images import PromptImage
from engine.sampling import SamplingParams

Span = tuple[float, float]
"""When a worker computed: seconds of the monotonic clock, from and to."""


class Admit(msgspec.Struct, frozen=True):
    """Admission of a request to a slot: new, resumed, or back after preemption.

    Whatever the slot held is gone.
    """

    slot: int
    token_ids: list[int]
    """Prompt, then the output so far."""
    num_prompt: int
    params: SamplingParams
    seed: int
    """The stream of this sample (sample index already mixed in)."""
    barred_ids: tuple[int, ...]
    """Tokens that may not be sampled before ``params.min_tokens`` output tokens."""
    adapter: int = 0
    """Number of its low-rank adapter; 0 for none."""
    adapter_digest: str = ""
    """Digest of that: what else had the number is laid aside."""
    scored_from: int = 0
    """First prompt token whose log-probability is wanted, if those of its prompt are."""
    keeps_experts: bool = False
    """Whether results have the experts of its tokens."""
    pooling: PoolingParams | None = None
    """What it is answered with in place of tokens; None: it generates."""
    images: tuple[PromptImage, ...] = ()
    """Those of its prompt; with grids alone where no row of it reaches them."""


class RowPieces(msgspec.Struct, frozen=True):
    """Slots of boundary pieces that a row reads and fills.

    One of each kind belongs to a position.
    """

    begins: tuple[int, list[int]] | None = None
    """Position and slots from which the row goes on, at least after an admission.

    Position 0 has no slots: the context begins empty. None: from what the request's rows filled last.
    """
    fills: dict[int, list[int]] = {}
    """Slots by position, behind the row's start and up to its end.

    The request goes on from the last of them.
    """


class Masks(msgspec.Struct, frozen=True):
    """Grammar masks: which tokens some rows may sample.

    A part of the step, so that the step run again has the same ones.
    """

    rows: list[int]
    """Indices of rows of the step, rising: one for each token that a row samples."""
    bits: bytes
    """[rows, vocabulary / 8 rounded up], the lowest bit of a byte first."""


class Step(msgspec.Struct, frozen=True):
    """One forward pass, stored as columns of its rows.

    Row i computes positions [starts[i], starts[i] + counts[i]) of the request in slot slots[i]. Rows of one
    token come first, then those with drafts, then prompts.

    Columns, not one object a row: most steps are the one before with each row a token further, and what is
    equal then is compared and passed on as a whole.
    """

    admits: list[Admit] = []
    slots: list[int] = []
    starts: list[int] = []
    counts: list[int] = []
    new_blocks: dict[int, list[int]] = {}
    """By row.

    Of an admitted slot: the whole table. Else those that its table lacks for this row, which stand behind the
    ceil(start / block size) that it needed before; so a row that runs again puts them there again.
    """
    partial: list[int] = []
    """Rows whose last position is not the newest token, so that none is sampled.

    Of the others, the worker appends the sampled token to the slot's ids by itself.
    """
    tokens: list[int] = []
    """First token of each decode row and row with a draft.

    For workers that did not sample them themselves; else empty.
    """
    masks: Masks | None = None
    drafts: dict[int, list[int]] = {}
    """Draft tokens by row, computed behind the newest token.

    They count as far as they equal those that are sampled.
    """
    pieces: dict[int, RowPieces] = {}
    """By row, of models that have pieces beside keys and values (:mod:`engine.pieces.kinds`)."""
    proposes: dict[int, int] = {}
    """Tokens that the drafting model is to propose behind the newest one, by row.

    0 where it only takes in the row's tokens.
    """
    ahead: list[int] = []
    """Rows of one token that the step before was still choosing.

    It was so when this step was scheduled. The token may be known only where that step is computed, see
    :mod:`engine.scheduling.ahead`.
    """

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def ends(self) -> list[int]:
        """Position behind the last one of each row."""
        return [start + count for start, count in zip(self.starts, self.counts, strict=True)]


class ExtraTokens(msgspec.Struct, frozen=True):
    """Tokens of a row beyond its first, one for each accepted draft token."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] = []
    """One for each, where asked for."""


class StepResult(msgspec.Struct, frozen=True):
    """Results of the rows of a step, in the same order."""

    tokens: list[int | None]
    """None of rows that did not sample."""
    logprobs: dict[int, TokenLogprobs] = {}
    """By row, where asked for."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """By row, of requests with ``params.prompt_logprobs``: the entries of prompt positions
    start + 1 ... min(end, num_prompt - 1), that is, of the tokens predicted by this row."""
    further: dict[int, ExtraTokens] = {}
    """Tokens behind the first, by row with a draft that was accepted in part."""
    proposals: dict[int, list[int]] = {}
    """Tokens that the drafting model proposes behind the newest one, by row."""
    proposal_seconds: float = 0.0
    """Part of the step's time that proposing took."""
    routed_experts: dict[int, RoutedExperts] = {}
    """Experts of a row's tokens, refused drafts included, by row that keeps them."""
    pooled: dict[int, Pooled] = {}
    """Answers to pooled requests, by row.

    A row without one had numbers that are not finite. The tokens of these rows count for nothing.
    """
    failed_images: list[int] = []
    """Rows with an image that could not be encoded, rising.

    Their tokens and what they wrote to the cache count for nothing.
    """


class KVSpec(msgspec.Struct, frozen=True):
    """KV cache cost of one token, found by running the loaded model once."""

    num_layers: int
    bytes_per_token: int
    """Over all layers, keys and values."""


class ModelFacts(msgspec.Struct, frozen=True):
    """Facts of a loaded model."""

    architecture: str
    num_parameters: int
    weight_bytes: int
    vocab_size: int
    dtype: str
    device: str
    kv: KVSpec
    has_all_layers: bool = True
    """Whether one worker has all layers; without, they are in stages (``-pp``)."""
    boundaries: list[BoundaryKind] = []
    """Kinds of its requests' state beside keys and values, with the bytes of one worker."""
