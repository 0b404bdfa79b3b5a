"""The contract between model layers and the paged KV cache.

transformers calls one registered function per attention layer; everything that function needs about
the step reaches it as one keyword argument, the :class:`AttentionPlan`, which the runner builds once
per step. A backend is a file in this folder that implements :class:`PagedAttention`; nothing else
knows how the cache is laid out.

Tokens of a step are packed: row after row, no padding. Each row is a run of consecutive positions of
one request, whose earlier positions are in the cache already.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.current_call import CURRENT
from engine.attention.kv_codes import SCALE_TYPE, KVCodes
from engine.attention.prompt_size import PromptSize
from engine.gpu.late_rotary import LATE

PLAN_KEYWORD = "attention_plan"
"""Name under which the plan travels through ``model(...)`` to the attention function."""

REACH_KEYWORD = "own_reach"
"""Keyword of attention functions: the :class:`KeyReach` of modules that make their mask themselves."""

BIASES_KEYWORD = "bias_numbers"
"""Keyword of attention functions: how many numbers of a key are biases, the last ones."""

IMPLEMENTATION = "lockstep"
"""Name of our function in transformers' attention registry."""

LAYER_ATTRIBUTE = "lockstep_layer"
"""Attribute of an attention module: its index among the cached layers, or :class:`LayersInTurn`."""

TEMPERATURE_ATTRIBUTE = "lockstep_temperature"
"""Attribute of an attention module: the factor on its queries by position.

Few have one: see :mod:`engine.attention.temperature`.
"""

INDEXER_ATTRIBUTE = "lockstep_indexer"
"""Attribute of an attention module: its indexer, if it attends to chosen keys."""

CHOSEN_KEYS = "prev_topk_indices"
"""Argument of layers that take over and return the keys that an indexer chose."""

NO_MASK = torch.zeros(1, 1, 1, 1)
"""Mask for modules that cut one before they attend: nothing is hidden by it."""

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


class KeyReach(NamedTuple):
    """Keys that a query sees by its position.

    All up to it, a window of them, or those of its chunk.
    """

    window: int | None = None
    """Keys that a query sees, itself included; None: no window."""
    chunk: int | None = None
    """Positions of a chunk; None: no chunks.

    Chunks begin at multiples of it, and a query sees keys of its own chunk.
    """

    def first_key(self, positions: Int64s) -> Int64s:
        """Position of the first key that a query at each position sees."""
        if self.window is not None:
            return np.maximum(positions - self.window + 1, 0)
        if self.chunk is not None:
            return positions - positions % self.chunk
        return np.zeros_like(positions)

    @property
    def is_whole(self) -> bool:
        """Whether a query sees all keys up to its position."""
        return self == WHOLE_CONTEXT

    def within(self, longest: int) -> KeyReach:
        """The same for contexts of at most ``longest`` tokens."""
        return self if (self.window or self.chunk or longest) < longest else WHOLE_CONTEXT


WHOLE_CONTEXT = KeyReach()


class LayersInTurn:
    """Cached layers of a module that attends several times per token, by call."""

    def __init__(self, first: int) -> None:
        self.layers = [first]
        self._plan: object = None
        self._calls = 0

    def next(self, plan: object) -> int:
        """The layer of the module's next call with this plan."""
        if plan is not self._plan:
            self._plan, self._calls = plan, 0
        layer = self.layers[self._calls % len(self.layers)]
        self._calls += 1
        return layer


@dataclass(frozen=True)
class LayerShape:
    """Shape of what an attention layer caches of a token, and its queries' reach."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    """Window of a layer; None: a query sees all keys up to its position.

    A query at position q sees keys k with q - window < k <= q.
    """
    apart: int = 0
    """First numbers of a key that stay in 16 bits beside codes."""
    chunk: int | None = None
    """Positions of a chunk; None: there are no chunks. See :class:`KeyReach`."""
    index_dim: int = 0
    """Numbers of a key of the layer's indexer, never codes; 0: there is none."""
    bias_numbers: int = 0
    """Last numbers of a key that are linear biases, which codes would round away."""

    @property
    def reach(self) -> KeyReach:
        """Keys that a query sees."""
        return KeyReach(self.window, self.chunk)

    def bytes_per_token(self, dtype: torch.dtype, codes: KVCodes | None = None) -> int:
        """Bytes of a token's keys and values; codes take one each, and a scale."""
        index_bytes = self.index_dim * int(dtype.itemsize)
        if codes is not None:
            codes_and_apart = self.key_dim + self.apart + self.value_dim
            return self.kv_heads * (codes_and_apart + 2 * int(SCALE_TYPE.itemsize)) + index_bytes
        return self.kv_heads * (self.key_dim + self.value_dim) * int(dtype.itemsize) + index_bytes


@dataclass(frozen=True)
class PackedRows:
    """The rows of one step, in packing order (host arrays)."""

    starts: Int64s
    """[rows] position of each row's first token."""
    counts: Int64s
    """[rows] tokens of each row. Rows of one token come first."""
    block_tables: Int32s
    """[rows, width] KV blocks of each row's request; entries beyond its last block are arbitrary."""
    positions: Int64s
    """[tokens] position of each packed token in its request."""
    num_single: int
    """Number of leading rows that have exactly one token."""
    adapters: Int64s | None = None
    """[rows] number of each row's low-rank adapter, 0 for none; None: no row has one."""
    axes: Int64s | None = None
    """[3, tokens] positions by which heads are turned, where images have one on each axis.

    None: all are those in ``positions``.
    """
    sees: Int64s | None = None
    """[tokens] position of the last key that a token sees; None: its own.

    It rises in a row. Rows of some images see all of theirs: no step has a part of one.
    """
    windows_see: bool = False
    """Whether only layers with a window have ``sees``."""

    def seen_within(self, reach: KeyReach) -> Int64s | None:
        """What ``sees`` has for layers of this reach."""
        return None if self.windows_see and reach.window is None else self.sees


@dataclass
class AttentionUse:
    """Calls and seconds of attention over one cache so far."""

    calls: int = 0
    """Layers of steps."""
    seconds: float = 0.0
    """Seconds in attention; on an asynchronous device, the host's share only."""


@dataclass(frozen=True)
class KeyChoice:
    """Keys that the queries of a step attend to, as an indexer chose them."""

    visible: list[torch.Tensor]
    """By row: [groups of KV heads, queries, keys], whether a query attends to a key.

    Empty where each attends to all keys up to its own.
    """


class Scoring(NamedTuple):
    """Scoring of attention: scale, soft cap, sinks and chosen keys."""

    scale: float
    """Factor on the products."""
    softcap: float | None = None
    """If given, scaled products s become softcap * tanh(s / softcap)."""
    sinks: torch.Tensor | None = None
    """[heads] logits that take part in the softmax and add nothing; None: there are none."""
    chosen: KeyChoice | None = None
    """Keys that take part; None: all that the layer's reach has."""


class AttentionPlan(Protocol):
    """One step's view of the cache: built once, used by every layer."""

    use: AttentionUse
    """Use of the cache that this plan belongs to."""

    @property
    def positions(self) -> torch.Tensor:
        """[tokens] positions of the step's tokens, on the device."""
        ...

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Store this step's keys and values of ``layer``, then attend over each row's context.

        Args:
            layer: index into the layer shapes that the backend was made with.
            query: [heads, tokens, key_dim]; heads are grouped by KV head (head = kv_head * group + g).
            key: [kv_heads, tokens, key_dim].
            value: [kv_heads, tokens, value_dim].
            scoring: how products of queries and keys become weights of the values.

        Returns:
            [tokens, heads, value_dim]
        """
        ...


class PagedAttention(Protocol):
    """A KV cache and the attention over it, on one device.

    Made with the layers' shapes.
    """

    use: AttentionUse

    @property
    def stored(self) -> list[torch.Tensor]:
        """Tensors of keys, values and scales, each beginning with the first block."""
        ...

    def plan(self, rows: PackedRows) -> AttentionPlan:
        """Prepare a step. Two steps may not be computed at the same time."""
        ...


class DecodeBuffers(Protocol):
    """Buffers of a decode step at fixed device addresses, which captured graphs read."""

    inputs: torch.Tensor
    """[2, rows] int64, token ids and positions of the step that has a plan."""
    chosen: torch.Tensor
    """[rows or more] int64, tokens chosen by the step before, for rows that follow them."""

    def fill(
        self, rows: PackedRows, size: int, input_ids: Int64s | None = None, sources: Int64s | None = None
    ) -> None:
        """Fill in the rows of the next step, each of one token.

        Rows after them, up to ``size``, write and read a block that belongs to no request.

        Args:
            rows: of one token each.
            size: rows with those that fill the step up.
            input_ids: [rows] tokens; None: zeros.
            sources: [rows] index into ``chosen`` of a row's token, negative where ``input_ids`` has it; None:
                it has all.
        """
        ...

    def plan(self, size: int) -> AttentionPlan:
        """Plan of the first ``size`` rows, which were filled in.

        It does nothing that depends on numbers on the device, so it is captured with what follows.
        """
        ...


class PromptBuffers(Protocol):
    """Buffers of steps with prompts at fixed device addresses, which captured graphs read."""

    inputs: torch.Tensor
    """[2, tokens] int64, token ids and positions of the step that has a plan."""
    wanted: torch.Tensor
    """[tokens or fewer] int64, the tokens whose logits that step gives."""
    chosen: torch.Tensor
    """As :attr:`DecodeBuffers.chosen`."""

    def fill(
        self, rows: PackedRows, size: PromptSize, ids: Int64s, wanted: Int64s, sources: Int64s | None = None
    ) -> None:
        """Fill in the next step, which fits ``size``.

        Args:
            rows: those of one token first.
            size: to which the step is filled up.
            ids: [tokens].
            wanted: numbers of packed tokens; behind them come others.
            sources: [rows], see :meth:`DecodeBuffers.fill`; those of longer rows do not count.
        """
        ...

    def plan(self, size: PromptSize) -> AttentionPlan:
        """Plan of the step that was filled in; see :meth:`DecodeBuffers.plan`."""
        ...


class CapturableAttention(PagedAttention, Protocol):
    """Paged attention whose steps can be captured."""

    def decode_buffers(self, max_rows: int, max_tokens: int, most_chosen: int = 0) -> DecodeBuffers:
        """Buffers for up to ``max_rows`` rows.

        None of their contexts has more than ``max_tokens`` tokens. No step chooses more than ``most_chosen``
        tokens, or ``max_rows`` if that is more.
        """
        ...

    def prompt_buffers(self, largest: PromptSize, max_tokens: int, most_chosen: int = 0) -> PromptBuffers:
        """Buffers for steps with prompts, once each layer has attended in a step.

        ``largest`` has the largest of each number of their sizes. For the others see :meth:`decode_buffers`.
        """
        ...


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function that transformers' models call.

    It takes [1, heads, tokens, dim] and returns [1, tokens, heads, dim]. Windows and causality come from the
    plan. Queries and keys may still have to be turned (:mod:`engine.gpu.late_rotary`). transformers builds no
    mask for an implementation that has no mask builder of the same name, so none is expected.
    """
    assert attention_mask is None or attention_mask is NO_MASK, "transformers built a mask"
    plan: AttentionPlan = (kwargs if PLAN_KEYWORD in kwargs else CURRENT.options)[PLAN_KEYWORD]
    temperature = vars(module).get(TEMPERATURE_ATTRIBUTE)
    if temperature is not None:
        query = temperature.scaled(query, plan.positions)
    layer = getattr(module, LAYER_ATTRIBUTE)
    if isinstance(layer, LayersInTurn):
        layer = layer.next(plan)
    turn = LATE.take(query, key)
    late = {} if turn is None else {"turn": turn}  # of plans that turn late, and of no others
    chosen = kwargs.get("indices", kwargs.get("block_indices"))  # transformers' names
    if chosen is not None and not chosen.visible:
        chosen = None
    began = time.perf_counter()
    attended = plan.attend(
        layer,
        query[0],
        key[0],
        value[0],
        Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux, chosen),
        **late,
    )
    plan.use.calls += 1
    plan.use.seconds += time.perf_counter() - began
    return attended.unsqueeze(0), None
