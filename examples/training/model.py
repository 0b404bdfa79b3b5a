"""The model: its architecture, made from nothing, and dropout for its training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from examples.training.tokenizer import VOCAB_SIZE

AUX_COEFFICIENT = 0.01


def model_config() -> Qwen3MoeConfig:
    """The architecture of the model."""
    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=192,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        router_aux_loss_coef=AUX_COEFFICIENT,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def build_model(experts: str) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM._from_config(
        model_config(), dtype=torch.float32, attn_implementation="sdpa", experts_implementation=experts
    )


class Dropout:
    """Dropout while training, on embeddings and the output of each layer's two parts.

    The parts are attention and mixture of experts.

    The architecture has none of its own at these places, so hooks bring it in; the saved model knows nothing
    of it.
    """

    def __init__(self, model: Qwen3MoeForCausalLM) -> None:
        self.rate = 0.0
        model.model.embed_tokens.register_forward_hook(self.apply)
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(self.apply)
            layer.mlp.register_forward_hook(self.apply)

    def apply(self, module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        if not module.training or not self.rate:
            return output
        if isinstance(output, tuple):
            return (F.dropout(output[0], self.rate), *output[1:])
        return F.dropout(output, self.rate)


def active_parameters(model: Qwen3MoeForCausalLM) -> tuple[int, int]:
    """All parameters, and those that one token passes through."""
    config = model.config
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    return total, total - experts + experts * config.num_experts_per_tok // config.num_experts
