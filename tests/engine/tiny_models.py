"""Tiny random models of many families, on disk in the layout of the hub.

The weights are wide: with transformers' own initialisation all logits are nearly equal and the argmax
is decided by rounding. Here a product keeps the size of its input, so that logits differ by about one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

VOCAB = 384
WINDOW = 12
"""Sliding windows, shorter than what the tests generate."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}

ALTERNATING = ["sliding_attention", "full_attention"] * 2

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=24),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=WINDOW, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(
        **COMMON
        | {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 20.0,
        }
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **COMMON
        | {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
        }
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **COMMON
        | {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON,
        head_dim=16,
        moe_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **COMMON | {"num_key_value_heads": 4}, num_experts=8, num_experts_per_tok=2
    ),
    "granitemoe": lambda: transformers.GraniteMoeConfig(
        **COMMON,
        num_local_experts=4,
        num_experts_per_tok=2,
        embedding_multiplier=2.0,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
        logits_scaling=1.5,
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **COMMON,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **COMMON | {"num_key_value_heads": 4, "num_hidden_layers": 3},
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=20,
        moe_intermediate_size=48,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
    ),
}
"""Family name -> its tiny config."""


def make_tiny_model(
    directory: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    layers: int | None = None,
    **changes: Any,
) -> Path:
    """Write a tiny model of ``family`` and return its directory.

    The model has safetensors, config and generation config. ``layers``: how many, if not the family's usual
    number; ``changes``: other fields of its config.
    """
    config = FAMILIES[family]()
    if layers is not None:
        changes["num_hidden_layers"] = layers
        if getattr(config, "layer_types", None):
            changes["layer_types"] = (config.layer_types * layers)[:layers]
    if changes:
        config = type(config)(**(config.to_dict() | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    widen(model, seed)
    return save(model.to(dtype), directory)


def save(model: Any, directory: Path) -> Path:
    """Write a model with its generation config, and return the directory."""
    model.generation_config.bos_token_id = 0
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 2
    model.save_pretrained(directory)
    return directory


def widen(model: Any, seed: int) -> None:
    """Seeded weights whose products neither grow nor vanish.

    Norms, sinks and biases get some noise too.
    """
    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, weight in sorted(model.state_dict(keep_vars=True).items()):
            if not weight.is_floating_point() or "inv_freq" in name or "embed_scale" in name:
                continue
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:  # near what the initialisation put there: 1, or 0 where 1 is added
                weight.add_(0.1 * noise)
            elif weight.ndim == 0 or "alpha" in name:  # numbers of an activation
                continue
            elif weight.ndim == 1 or name.endswith("bias") or "sinks" in name:
                weight.copy_(0.2 * noise)
            elif "embed_tokens" in name and not tied:
                weight.copy_(noise)
            else:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
