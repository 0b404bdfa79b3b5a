"""Experts of few tokens as products of matrices and vectors, checked before use (loads triton)."""

from __future__ import annotations

from typing import Any

import torch

from engine.gpu import few_experts_kernels as kernels

BLOCK_OUTPUTS, BLOCK_INPUTS = 8, 256
"""Outputs of a program, and inputs that it multiplies at once."""


def few_forward(
    module: Any, hidden: torch.Tensor, expert_ids: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Layer of experts: hidden [tokens, H], ids and shares [tokens, k] -> [tokens, H]."""
    up, down = module.gate_up_proj, module.down_proj
    experts, width = up.shape[0], up.shape[1] // 2
    tokens, top_k = expert_ids.shape
    rows = hidden.to(up.dtype)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    ids, shares = expert_ids.contiguous(), shares.contiguous()
    inner = rows.new_empty(tokens * top_k, width)
    outputs = hidden.new_empty(tokens, down.shape[1])
    kernels.few_up[(-(-width // BLOCK_OUTPUTS), tokens * top_k)](
        rows,
        ids,
        up,
        inner,
        top_k,
        rows.stride(0),
        up.stride(0),
        up.stride(1),
        IN=up.shape[2],
        OUT=width,
        EXPERTS=experts,
        BLOCK_N=BLOCK_OUTPUTS,
        BLOCK_K=_block(up.shape[2]),
        TANH=module._apply_gate.tanh,
    )
    kernels.few_down[(-(-down.shape[1] // BLOCK_OUTPUTS), tokens)](
        inner,
        ids,
        shares,
        down,
        outputs,
        top_k,
        down.stride(0),
        down.stride(1),
        IN=width,
        OUT=down.shape[1],
        EXPERTS=experts,
        BLOCK_N=BLOCK_OUTPUTS,
        BLOCK_K=_block(width),
    )
    return outputs


def choose_experts(
    logits: torch.Tensor, top_k: int, *, normalised: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares and numbers [tokens, k] of the most likely experts, by logits [tokens, experts]."""
    tokens, experts = logits.shape
    logits = logits.contiguous()
    scores = logits.new_empty(tokens, top_k)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    kernels.choose_experts[(tokens,)](
        logits,
        scores,
        chosen,
        EXPERTS=experts,
        TOP_K=top_k,
        BLOCK_E=1 << (experts - 1).bit_length(),
        BLOCK_C=1 << (top_k - 1).bit_length(),
        NORMALISED=normalised,
    )
    return scores, chosen


def _block(inputs: int) -> int:
    return min(BLOCK_INPUTS, max(16, 1 << (inputs - 1).bit_length()))
