"""EAGLE-3 head: a decoder layer that drafts tokens from the hidden states of a model.

Parts and names are those of EAGLE-3 (Li et al. 2025) and of the files that SGLang and vLLM read.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3MoeForCausalLM

FEATURE_LAYERS = (2, 4, 5)
"""Layers of the model whose outputs are read, counted from 1.

EAGLE-3 reads 2, n // 2 and n - 3, which are two layers in a model of six.
"""
DRAFT_VOCAB = 1536
"""Tokens that the head can propose: the most frequent ones."""
INTERMEDIATE = 256
"""Width of the head's feed-forward part."""
FEATURE_DROPOUT = 0.1


class Attention(nn.Module):
    """Causal attention over what the model computed, and over each chain of drafts."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, self.size = config.hidden_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(2 * hidden, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(2 * hidden, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(2 * hidden, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, hidden, bias=False)
        self.theta = config.rope_parameters["rope_theta"]

    def _turned(self, rows: torch.Tensor, first: int) -> torch.Tensor:
        """Rows [batch, heads, tokens, size] with rotary positions from ``first`` on."""
        half = self.size // 2
        frequency = self.theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = (torch.arange(rows.shape[2]) + first).unsqueeze(1) * frequency
        cos, sin = angle.cos(), angle.sin()
        left, right = rows.float().split(half, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(rows.dtype)

    def forward(self, rows: torch.Tensor, earlier: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Attention of one step; ``earlier``: keys and values of the steps before it, extended.

        A position sees all keys of the first step up to its own, and one of each later step: its chain.
        """
        batch, tokens, _ = rows.shape

        def split(projected: torch.Tensor, heads: int) -> torch.Tensor:
            return projected.view(batch, tokens, heads, self.size).transpose(1, 2)

        step, groups = len(earlier), self.heads // self.kv_heads
        query = self._turned(split(self.q_proj(rows), self.heads), step)
        key = self._turned(split(self.k_proj(rows), self.kv_heads), step).repeat_interleave(groups, 1)
        value = split(self.v_proj(rows), self.kv_heads).repeat_interleave(groups, 1)
        earlier.append((key, value))
        if not step:
            found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scale = self.size**-0.5
            unseen = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
            scores = (query @ earlier[0][0].transpose(2, 3) * scale).masked_fill(unseen, -torch.inf)
            chain = [(query * each).sum(-1, keepdim=True) * scale for each, _ in earlier[1:]]
            weights = torch.cat([scores, *chain], dim=-1).float().softmax(-1).to(value.dtype)
            found = weights[..., :tokens] @ earlier[0][1]
            for index, (_, each) in enumerate(earlier[1:]):
                found = found + weights[..., tokens + index : tokens + index + 1] * each
        result: torch.Tensor = self.o_proj(found.transpose(1, 2).reshape(batch, tokens, -1))
        return result


class FeedForward(nn.Module):
    """Gated feed-forward part."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(hidden, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, hidden, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(F.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return result


class MidLayer(nn.Module):
    """Decoder layer over a token's embedding beside the state of the position before it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = FeedForward(hidden)

    def forward(
        self,
        embedded: torch.Tensor,
        states: torch.Tensor,
        earlier: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        joined = torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], dim=-1)
        states = states + self.self_attn(joined, earlier)
        return states + self.mlp(self.post_attention_layernorm(states))


class DraftHead(nn.Module):
    """The head's parameters, under the names of its file."""

    def __init__(self, model: Qwen3MoeForCausalLM, tokens: torch.Tensor) -> None:
        """Begins from the model's own output layer; ``tokens``: ids that are proposed, in order."""
        super().__init__()
        hidden = model.config.hidden_size
        self.fc = nn.Linear(len(FEATURE_LAYERS) * hidden, hidden, bias=False)
        self.midlayer = MidLayer(model.config)
        self.norm = nn.RMSNorm(hidden, model.config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, len(tokens), bias=False)
        self.register_buffer("tokens", tokens)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        with torch.no_grad():  # without the layer, it proposes what the model's last state does
            self.fc.weight[:, -hidden:] += torch.eye(hidden)
            self.norm.weight.copy_(model.model.norm.weight)
            self.lm_head.weight.copy_(model.lm_head.weight[tokens])

    def logits(self, embedded: torch.Tensor, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Logits [batch, positions, draft vocabulary] of each step of a chain of drafts.

        ``embedded`` [batch, positions + steps - 1, hidden] are the tokens behind those of the ``features``.
        Every step after the first reads the head's own state, as it does where it is served.
        """
        states = self.fc(F.dropout(features, FEATURE_DROPOUT, self.training))
        earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
        found, length = [], features.shape[1]
        for step in range(steps):
            states = self.midlayer(embedded[:, step : step + length], states, earlier)
            found.append(self.lm_head(self.norm(states)))
        return found


class Features:
    """Hidden states of the model that the head reads, caught during a forward pass."""

    def __init__(self, model: Qwen3MoeForCausalLM) -> None:
        self._found: dict[int, torch.Tensor] = {}
        layers = model.model.layers
        for number in FEATURE_LAYERS:
            if number < len(layers):  # what a layer gets is what the one before it gave
                layers[number].register_forward_pre_hook(self._keep(number), with_kwargs=True)
            else:
                model.model.norm.register_forward_pre_hook(self._keep(number), with_kwargs=True)

    def _keep(self, number: int) -> Any:
        def keep(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._found[number] = inputs[0] if inputs else named["hidden_states"]

        return keep

    def joined(self) -> torch.Tensor:
        """The states of the last forward pass [batch, tokens, layers * hidden]."""
        return torch.cat([self._found[number].float() for number in FEATURE_LAYERS], dim=-1)
