"""Attention over sequences that are packed into one row of tokens, each computed by itself.

It stands behind transformers' attention interface. The masks are those that a model makes there: whole,
causal, of a window, or any other function of two positions. A sequence is computed in shapes that depend on
its own length alone, so its bits do not depend on what is packed beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

IMPLEMENTATION = "lockstep_packed"
"""Name of this attention in transformers' registries."""
BLOCK_QUERIES = 512
"""Queries that are computed at once where a mask leaves out keys."""


class _Bounds(threading.local):
    """Bounds of the packed sequences of the call that runs in this thread."""

    def __init__(self) -> None:
        self.of_call: Sequence[tuple[int, int]] = ()
        self.sees_all = False
        """Whether each token sees all others, whatever the model's masks are."""


BOUNDS = _Bounds()


class UnknownAttention(Exception):
    """Error: a layer wants something that this attention does not compute."""


class Mask:
    """Which keys a layer's queries see, as a function of two positions in a sequence."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.is_whole = function is bidirectional_mask_function
        self.is_causal = function is causal_mask_function
        self._blocks: dict[int, list[tuple[slice, slice, torch.Tensor]]] = {}

    def __repr__(self) -> str:
        return f"<Mask {self._function!r}>"

    def blocks(self, length: int) -> list[tuple[slice, slice, torch.Tensor]]:
        """Blocks of queries, and which keys each of them sees."""
        if length not in self._blocks:
            self._blocks[length] = list(self._made(length))
        return self._blocks[length]

    def _made(self, length: int) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        first, keys = torch.tensor(0), torch.arange(length)
        for begin in range(0, length, BLOCK_QUERIES):
            end = min(length, begin + BLOCK_QUERIES)
            queries = torch.arange(begin, end)[:, None]
            seen = self._function(first, first, queries, keys[None, :]).expand(end - begin, length)
            columns = seen.any(dim=0).nonzero()
            low, high = int(columns[0]), int(columns[-1]) + 1
            yield slice(begin, end), slice(low, high), seen[:, low:high].contiguous()


WHOLE, CAUSAL = Mask(bidirectional_mask_function), Mask(causal_mask_function)


def register() -> None:
    """Make this attention known to transformers."""
    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)


@contextmanager
def packed(bounds: Sequence[tuple[int, int]], *, sees_all: bool = False) -> Iterator[None]:
    """Context of a call on sequences with these bounds, [first, behind the last) each.

    ``sees_all``: each token sees all of its sequence, also in a model that is made to be causal.
    """
    BOUNDS.of_call, BOUNDS.sees_all = bounds, sees_all
    try:
        yield
    finally:
        BOUNDS.of_call = ()


def _mask(*_: Any, mask_function: Callable[..., Any] = causal_mask_function, **__: Any) -> Mask:
    """Mask of a kind of layers, in place of a tensor for all tokens."""
    return Mask(mask_function)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a layer; called by transformers.

    Args:
        query: [1, heads, tokens, numbers]; ``key`` and ``value`` may have fewer heads.

    Raises:
        UnknownAttention: the layer wants more than a mask.
    """
    for name in ("softcap", "s_aux", "position_bias", "sinks"):
        if options.get(name) is not None:
            raise UnknownAttention(name)
    mask = attention_mask
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = CAUSAL if causal else WHOLE
    if BOUNDS.sees_all:
        mask = WHOLE
    if not isinstance(mask, Mask):
        raise UnknownAttention("a mask of its own")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    made = []
    for begin, end in BOUNDS.of_call:
        parts = [each[:, :, begin:end].contiguous() for each in (query, key, value)]
        made.append(_attend_one(parts, mask, scaling))
    return torch.cat(made, dim=1), None


def _attend_one(parts: Sequence[torch.Tensor], mask: Mask, scaling: float | None) -> torch.Tensor:
    """[1, tokens, heads, numbers] results of one sequence."""
    queries, keys, values = parts
    length = queries.shape[2]
    if mask.is_whole or mask.is_causal or length == 1:
        causal = mask.is_causal and length > 1
        found = F.scaled_dot_product_attention(queries, keys, values, is_causal=causal, scale=scaling)
        return found.transpose(1, 2)
    found = torch.cat(
        [
            F.scaled_dot_product_attention(
                queries[:, :, rows].contiguous(),
                keys[:, :, seen].contiguous(),
                values[:, :, seen].contiguous(),
                attn_mask=allowed,
                scale=scaling,
            )
            for rows, seen, allowed in mask.blocks(length)
        ],
        dim=2,
    )
    return found.transpose(1, 2)
