"""Routers of experts whose choice of few tokens is one launch, checked before use."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from engine.gpu import fused_layers
from engine.gpu.fused_layers import are_alike, random_rows

ROUTED_TOKENS = 32
"""Tokens up to which a kernel chooses, as many as layers' own products take."""


class FewRouter:
    """``forward`` of a router of experts."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.most_rows = ROUTED_TOKENS
        """Tokens up to which a kernel chooses."""

    def __call__(self, hidden_states: torch.Tensor, *rest: Any, **more: Any) -> Any:
        module = self._module
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        is_few = 0 < len(rows) <= self.most_rows and hidden_states.device.type in fused_layers.DEVICES
        if rest or more or not is_few:
            return type(module).forward(module, hidden_states, *rest, **more)
        return self.choose(rows)

    def choose(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, shares and numbers of experts, by tokens."""
        from engine.gpu.few_experts import choose_experts

        logits = F.linear(rows, self._module.weight)
        normalised = bool(self._module.norm_topk_prob)
        return logits, *choose_experts(logits, self._module.top_k, normalised=normalised)

    def agrees(self) -> bool:
        """Whether the router's own choice has the same shares, but for equal experts."""
        module = self._module
        rows = random_rows(module.weight, module.weight.shape[1])[0]

        def shares_of(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            shares = logits.float().softmax(dim=-1).gather(1, chosen)
            return shares / shares.sum(dim=-1, keepdim=True) if module.norm_topk_prob else shares

        def own() -> torch.Tensor:
            _, scores, _ = type(module).forward(module, rows)
            return torch.cat([scores, scores]).float()

        def ours() -> torch.Tensor:
            logits, scores, chosen = self.choose(rows)
            if any(len(set(line)) < module.top_k for line in chosen.tolist()):
                raise ValueError("an expert was chosen twice")
            return torch.cat([scores.float(), shares_of(logits, chosen)])

        return are_alike(ours, own, dtype=module.weight.dtype)


def fuse_routers(model: Any) -> int:
    """Let a kernel choose the experts of few tokens; returns how many routers there are."""
    count, seen = 0, dict[type, bool]()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        is_router = (
            hasattr(module, "top_k") and hasattr(module, "norm_topk_prob") and "forward" not in vars(module)
        )
        if not is_router or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            continue
        router = FewRouter(module)
        if type(module) not in seen:
            seen[type(module)] = router.agrees()
        if seen[type(module)]:
            module.forward = router
            count += 1
    return count
