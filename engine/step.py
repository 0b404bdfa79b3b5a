"""What the scheduler tells the workers to compute, and what they answer (no torch).

Workers keep the state of the running requests in numbered slots (token ids, block table, sampling
parameters), so a step carries only what changed. All structs are plain msgspec: an executor may send
them to another process as they are.
"""

from __future__ import annotations

import msgspec

from engine.messages import TokenLogprobs
from engine.sampling import SamplingParams


class Admit(msgspec.Struct, frozen=True):
    """A request takes a slot: new, resumed, or back after preemption. Whatever the slot held is gone."""

    slot: int
    token_ids: list[int]
    """Prompt, then the output so far."""
    num_prompt: int
    params: SamplingParams
    seed: int
    """The stream of this sample (sample index already mixed in)."""
    stop_ids: tuple[int, ...]
    """Tokens that may not be sampled before ``params.min_tokens`` output tokens."""


class Row(msgspec.Struct, frozen=True):
    """Compute positions [start, start + count) of the request in ``slot``."""

    slot: int
    start: int
    count: int
    new_blocks: list[int]
    """Of an admitted slot: the whole table. Else those that its table lacks for this row, which stand behind
    the ceil(start / block size) that it needed before; so a row that is run again puts them there again."""
    sample: bool
    """Whether the last position is the newest token, so that the next one is sampled. The worker
    appends the sampled token to the slot's ids by itself."""
    token: int | None = None
    """The token at ``start`` of a row of one, for workers that did not sample it themselves."""


class Masks(msgspec.Struct, frozen=True):
    """Which tokens some rows may sample. A part of the step, so that the step run again has the same ones."""

    rows: list[int]
    """Indices of rows of the step, rising."""
    bits: bytes
    """[rows, vocabulary / 8 rounded up], the lowest bit of a byte first."""


class Step(msgspec.Struct, frozen=True):
    """One forward pass. Rows of one sampled token each come first, then the longer ones."""

    admits: list[Admit]
    rows: list[Row]
    masks: Masks | None = None

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


class Sampled(msgspec.Struct, frozen=True):
    """The outcome of one row."""

    slot: int
    token_id: int | None
    """None if the row did not sample."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """For rows of requests with ``params.prompt_logprobs``: the entries of prompt positions
    start + 1 ... min(start + count, num_prompt - 1), that is, of the tokens predicted by this row."""


class StepResult(msgspec.Struct, frozen=True):
    """One :class:`Sampled` per row of the step, in the same order."""

    sampled: list[Sampled]


class KVSpec(msgspec.Struct, frozen=True):
    """What one token of context costs, found by running the loaded model once."""

    num_layers: int
    bytes_per_token: int
    """Over all layers, keys and values."""


class ModelFacts(msgspec.Struct, frozen=True):
    """What is known of a model once it is loaded."""

    architecture: str
    num_parameters: int
    weight_bytes: int
    vocab_size: int
    dtype: str
    device: str
    kv: KVSpec
