"""Launches the kernels of norms, rotary embeddings, gates and races (loads triton)."""

from __future__ import annotations

import torch

from engine.gpu import fused_kernels as kernels
from engine.gpu.late_rotary import Turn

GATE_BLOCK = 1024
"""Numbers of a program of a gate."""
RACE_BLOCK = 4096
"""Tokens of a program of a race."""
NUCLEUS_BLOCK = 2048
"""Tokens that a program of top-k and top-p looks at together."""


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, *, plus_one: bool) -> torch.Tensor:
    """hidden [..., width], in any pieces -> the same, in one."""
    width = hidden.shape[-1]
    if hidden.stride(-1) != 1:
        hidden = hidden.contiguous()
    lines = hidden if hidden.dim() == 4 else hidden.unsqueeze(-2)
    outer, inner = lines.shape[-3], lines.shape[-2]
    if lines[..., 0].numel() != outer * inner:  # several batches
        lines = hidden.contiguous().view(-1, 1, width)
        outer, inner = lines.shape[:2]
    dtype = hidden.dtype if plus_one else torch.promote_types(hidden.dtype, weight.dtype)
    normed = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
    if not normed.numel():
        return normed
    kernels.rms_norm[(outer, inner)](
        lines,
        weight,
        normed,
        lines.stride(-3),
        lines.stride(-2),
        inner,
        epsilon,
        WIDTH=width,
        BLOCK=1 << (width - 1).bit_length(),
        PLUS_ONE=plus_one,
    )
    return normed


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, heads, tokens, dim] of queries and keys, turned by angles [1, tokens, dim]."""
    heads, tokens, dim = query.shape[1:]
    kv_heads = key.shape[1]
    turned_query, turned_key = query.new_empty(tokens, heads, dim), key.new_empty(tokens, kv_heads, dim)
    if tokens:
        kernels.rotate[(tokens, heads + kv_heads)](
            query,
            key,
            cos,
            sin,
            turned_query,
            turned_key,
            query.stride(1),
            query.stride(2),
            key.stride(1),
            key.stride(2),
            cos.stride(1),
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            BLOCK=1 << max(dim // 2 - 1, 0).bit_length(),
        )
    return turned_query.transpose(0, 1).unsqueeze(0), turned_key.transpose(0, 1).unsqueeze(0)


def rotate_and_store(
    turn: Turn,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Queries [heads, tokens, dim], turned; keys, turned as well, and values go to the cache.

    key and value are [kv_heads, tokens, dim]; keys and values [slots, kv_heads, dim], slots [tokens].
    """
    heads, tokens, dim = query.shape
    kv_heads, value_dim = value.shape[0], value.shape[2]
    turned_query = query.new_empty(tokens, heads, dim)
    if tokens:
        kernels.rotate_and_store[(tokens, heads + kv_heads)](
            query,
            key,
            value,
            turn.cos,
            turn.sin,
            turned_query,
            keys,
            values,
            slots,
            query.stride(0),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            turn.cos.stride(1),
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            VALUE_DIM=value_dim,
            BLOCK=1 << max(dim // 2 - 1, 0).bit_length(),
            BLOCK_V=1 << max(value_dim - 1, 0).bit_length(),
        )
    return turned_query.transpose(0, 1)


def gated(rows: torch.Tensor, *, tanh: bool) -> torch.Tensor:
    """Activations of the first half of rows [..., 2 width] times the second half.

    SiLU, or with ``tanh`` GELU by its tanh.
    """
    rows = rows.contiguous()
    width = rows.shape[-1] // 2
    results = rows.new_empty(*rows.shape[:-1], width)
    if results.numel():
        block = min(GATE_BLOCK, 1 << (width - 1).bit_length())
        kernels.gated[(results.numel() // width, -(-width // block))](
            rows, results, 2 * width, WIDTH=width, BLOCK=block, TANH=tanh
        )
    return results


def race(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperatures: torch.Tensor,
    lowest: torch.Tensor,
    keys: torch.Tensor,
    limits: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Winners [rows] int64 of the races of logits [rows, vocabulary].

    Of each row: best logit, temperature and the lowest scaled logit that may come, float32 [rows]; keys int32
    [rows, 2]; ``limits``: top-k int32 and top-p float32 [rows].
    """
    rows, width = logits.shape
    last = keys  # not looked at without limits
    if limits is not None:
        cut, last = torch.empty_like(lowest), torch.empty_like(keys[:, 0])
        kernels.nucleus[(rows,)](
            logits,
            best,
            temperatures,
            lowest,
            *limits,
            cut,
            last,
            logits.stride(0),
            width,
            BLOCK=NUCLEUS_BLOCK,
        )
        lowest = cut
    parts = -(-width // RACE_BLOCK)
    speeds = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    winners = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    kernels.race[(rows, parts)](
        logits,
        best,
        temperatures,
        lowest,
        last,
        keys,
        speeds,
        winners,
        logits.stride(0),
        width,
        parts,
        BLOCK=RACE_BLOCK,
        LIMITED=limits is not None,
    )
    return winners.gather(1, speeds.argmax(1, keepdim=True))[:, 0]
