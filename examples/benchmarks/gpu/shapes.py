"""Shapes of the models, and what a step must read at least."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 1000,
}
"""Sizes in place of the real ones, to try the script itself on a CPU."""
COMMON = {
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_theta": 1e6,
}


def config_of(shape: str, tiny: bool) -> dict[str, Any]:
    """Contents of config.json."""
    config = COMMON | SHAPES[shape]
    return config | {name: size for name, size in TINY.items() if name in config} if tiny else config


def layers_that_fit(config: dict[str, Any], device_bytes: int) -> int:
    """How many layers' weights leave a quarter of a device free."""
    hidden, heads, kv_heads = (
        config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    attention = 2 * hidden * (heads + kv_heads) * config["head_dim"]
    inner = config.get("moe_intermediate_size", 0) * config.get("num_experts", 0)
    layer = 2 * (attention + 3 * hidden * (inner or config["intermediate_size"]))
    outside = 2 * config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
    room = device_bytes * 3 // 4 - outside
    return max(1, min(int(config["num_hidden_layers"]), room // layer))


def write_config(
    shape: str, tiny: bool, directory: Path, device_bytes: int | None = None, longest: int = 0
) -> dict[str, Any]:
    """Write config.json into a directory; weights are random, so that there are no other files.

    With ``device_bytes`` the model has fewer layers where all would not fit. ``longest``: tokens that a
    context has at least.
    """
    config = config_of(shape, tiny)
    config["max_position_embeddings"] = max(config["max_position_embeddings"], longest)
    if device_bytes is not None:
        config["num_hidden_layers"] = layers_that_fit(config, device_bytes)
    (directory / "config.json").write_text(json.dumps(config))
    return config


def read_bytes(config: dict[str, Any], weight_bytes: int, rows: int, context: int, kv_bytes: int) -> float:
    """Bytes that a decode step reads at least.

    Weights once, experts as far as tokens choose them, and contexts.

    Args:
        config: of the model.
        weight_bytes: of all weights.
        rows: requests, each with one token.
        context: tokens of each.
        kv_bytes: of a token, over all layers.
    """
    experts = config.get("num_experts", 0)
    of_experts = 3 * config.get("moe_intermediate_size", 0) * config["hidden_size"] * experts * 2
    of_experts *= config["num_hidden_layers"]
    chosen = 1.0 if not experts else 1 - (1 - config["num_experts_per_tok"] / experts) ** rows
    embedding = config["vocab_size"] * config["hidden_size"] * 2 * (not config["tie_word_embeddings"])
    return weight_bytes - embedding - of_experts * (1 - chosen) + rows * context * kv_bytes
