"""Launches the kernels of norms, rotary embeddings, gates and races (loads triton)."""

from __future__ import annotations

import torch

from engine.gpu import fused_kernels as kernels
from engine.gpu.late_rotary import LateRotation

GATE_BLOCK = 1024
"""Numbers of a program of a gate."""
RACE_BLOCK = 4096
"""Tokens of a program of a race."""
CROWD_BLOCK = 2048
"""Tokens of a program that counts them by their distance from the best one."""
REACHES = 16
"""Distances by which they are counted."""
NUCLEUS_BLOCK = 2048
"""Tokens that a program of top-k and top-p looks at together."""
NUCLEUS_WARPS = 8
"""Warps of such a program."""
NEAR_TOKENS = 1 << 15
"""Most tokens of a row that such a program looks at apart from all others."""


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, *, plus_one: bool) -> torch.Tensor:
    """Normalised hidden [..., width], contiguous."""
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
    """Queries and keys [1, heads, tokens, dim], turned by angles [1, tokens, dim]."""
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
    turn: LateRotation,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Queries [heads, tokens, dim], turned; keys, turned as well, and values go to the cache.

    Where the rotation has norms, queries and keys are normalised first.

    key and value are [kv_heads, tokens, dim]; keys and values [slots, kv_heads, dim], slots [tokens].
    """
    heads, tokens, dim = query.shape
    kv_heads, value_dim = value.shape[0], value.shape[2]
    query_norm, key_norm = turn.norms or (None, None)
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
            query if query_norm is None else query_norm.weight,
            key if key_norm is None else key_norm.weight,
            0.0 if query_norm is None else query_norm.epsilon,
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
            NORMED=turn.norms is not None,
            PLUS_ONE=query_norm is not None and query_norm.plus_one,
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
        cut, last = _limits(logits, best, temperatures, lowest, *limits)
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


def _limits(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperatures: torch.Tensor,
    lowest: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's lowest scaled logit that may come, and the last token with just that.

    All programs of a device count tokens by their distance from the best, and copy the few that matter; one
    for each row then looks closely at these.
    """
    rows, width = logits.shape
    parts = -(-width // CROWD_BLOCK)
    sizes = {"PARTS": 1 << (parts - 1).bit_length(), "REACHES": REACHES, "NEAR": NEAR_TOKENS}
    masses = torch.empty(rows, parts, REACHES, dtype=torch.float32, device=logits.device)
    counts = torch.empty_like(masses, dtype=torch.int32)
    near = torch.empty(rows, NEAR_TOKENS, dtype=torch.float32, device=logits.device)
    near_ids = torch.empty_like(near, dtype=torch.int32)
    cut, last = torch.empty_like(lowest), torch.empty_like(top_k)
    row_facts = (logits, best, temperatures, lowest)
    place = (logits.stride(0), width, parts)
    kernels.crowd[(rows, parts)](
        *row_facts, masses, counts, *place, BLOCK=CROWD_BLOCK, REACHES=REACHES, num_warps=NUCLEUS_WARPS
    )
    crowds = (top_k, top_p, masses, counts, near, near_ids)
    kernels.pick_near[(rows, parts)](
        *row_facts, *crowds, *place, BLOCK=CROWD_BLOCK, **sizes, num_warps=NUCLEUS_WARPS
    )
    kernels.nucleus[(rows,)](
        *row_facts, *crowds, cut, last, *place, BLOCK=NUCLEUS_BLOCK, **sizes, num_warps=NUCLEUS_WARPS
    )
    return cut, last
