"""Tiny configurations of every causal language model that transformers has.

A class gets those of :data:`SIZES` whose fields it has. :data:`CHANGES` has what some classes need beside
them. :data:`VARIANTS` has families that one class serves in several forms.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.model.model_sources import LAYER_TYPES
from tests.engine.model.test_weights import LARGER_MODELS
from tests.engine.tiny_models import ALTERNATING, VOCAB

LAYERS = 4

WIDTHS = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "ffn_hidden_size": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "hidden_size_per_layer_input": 16,
    "head_dim": 16,
    "sliding_window": 12,
}
DEPTHS = dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), LAYERS)
HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
}
POSITIONS = dict.fromkeys(
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), 512
)
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False}
EXPERTS = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "expert_ffn_hidden_size": 48,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_topk": 16,
    "index_n_heads": 16,
    "index_head_dim": 16,
}
RECURRENT = {
    "mamba_d_state": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_ssm": 128,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_n_groups": 1,
    "ssm_state_size": 16,
    "state_size": 16,
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
}
SIZES: dict[str, Any] = WIDTHS | DEPTHS | HEADS | POSITIONS | TOKENS | EXPERTS | LATENT | RECURRENT
"""Field -> a small number for it."""

MLA = {"num_key_value_heads": 4}
"""Latent attention has a key for each head."""
CHUNKED = {"attention_chunk_size": 12, "floor_scale": 8, "attn_scale": 0.5}
"""Llama 4's chunks of attention, and its queries' temperature, for short contexts."""
ENCODERS = (
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
)
"""Types whose causal language models are decoders only where their config.json has ``is_decoder``."""
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "deepseek_v32": MLA,
    "glm_moe_dsa": MLA,
    "axk2": MLA,
    "hy_v4": MLA,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
        "index_n_heads": 2,
        "index_block_size": 8,
        "index_topk_blocks": 3,
        "rotary_dim": 8,
    },
    "glm4_moe_lite": MLA,
    "axk1": MLA,
    "minicpm3": MLA,
    "mistral4": MLA,
    "youtu": MLA | {"head_dim": 16},
    "longcat_flash": MLA | {"head_dim": 16, "zero_expert_num": 4, "num_layers": 2},
    "cohere2": {"layer_types": ALTERNATING},
    "olmo3": {"layer_types": ALTERNATING},
    "ministral": {"layer_types": ALTERNATING},
    "exaone4": {"layer_types": ALTERNATING, "sliding_window_pattern": 2},
    "gpt_oss": {"layer_types": ALTERNATING, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "gemma3_text": {"layer_types": ALTERNATING},
    "gemma3n_text": {
        "layer_types": ALTERNATING,
        "intermediate_size": [96] * LAYERS,
        "num_kv_shared_layers": 0,
    },
    "gemma4_text": {"layer_types": ALTERNATING, "num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "phi3": {"sliding_window": None},
    "phimoe": {"sliding_window": None, "attention_bias": True},
    "mixtral": {"sliding_window": None},
    "ministral3": {"sliding_window": None},
    "qwen2_moe": {"mlp_only_layers": [], "decoder_sparse_step": 1},
    "qwen3_moe": {"mlp_only_layers": [], "decoder_sparse_step": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 12},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "gpt_neox": {"hidden_act": "gelu"},
    "apertus": {"hidden_act": "xielu"},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_num_shared_experts": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "llama4_text": CHUNKED,
    **{name: {"is_decoder": True} for name in ENCODERS},
    "xmod": {"is_decoder": True, "default_language": "en_XX", "languages": ["en_XX"]},
    "bamba": {"attn_layer_indices": [1, 3]},
    "bailing_hybrid": MLA | {"layer_group_size": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": MLA | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
    "kolibri1": {"layer_types": ALTERNATING},
    "inkling_text": {"layer_types": ["hybrid", "hybrid_sliding"] * 2},
    "inkling2_text": {"layer_types": ["hybrid", "hybrid_sliding"] * 2},
    "nemotron_h": {
        "n_groups": 1,
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "n_group": 1,
        "topk_group": 1,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1},
    "mamba2": {"num_heads": 4, "head_dim": 32, "expand": 2, "n_groups": 1},
}
"""Fields that a model type's class needs beside the sizes."""

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * number for number in range(8)],
    "long_factor": [2.0 + 0.3 * number for number in range(8)],
}
SCALED_QUERIES = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
ALL_ATTEND = {"layer_types": ["attention"] * LAYERS, "position_embedding_type": "rope"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V2-Lite": ("deepseek_v2", MLA | {"q_lora_rank": None}),
    "DeepSeek-V3.2, short contexts": ("deepseek_v32", MLA | {"index_topk": 512}),
    "Falcon, new decoder": ("falcon", {"new_decoder_architecture": True}),
    "Falcon, ALiBi": ("falcon", {"alibi": True, "multi_query": False, "num_kv_heads": 4}),
    "Gemma 3n, shared caches": (
        "gemma3n_text",
        {"layer_types": ALTERNATING, "intermediate_size": [96] * LAYERS, "num_kv_shared_layers": 2},
    ),
    "Gemma 4, shared caches": ("gemma4_text", {"layer_types": ALTERNATING, "num_kv_shared_layers": 2}),
    "Gemma 4, experts": (
        "gemma4_text",
        {
            "layer_types": ALTERNATING,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "top_k_experts": 2,
        },
    ),
    "GLM-5.2, short contexts": (
        "glm_moe_dsa",
        MLA | {"indexer_types": ["full", "shared"] * 2, "index_topk": 512},
    ),
    "GLM-5.2, shared choices": ("glm_moe_dsa", MLA | {"indexer_types": ["full", "shared"] * 2}),
    "Granite 4.0, all attention": ("granitemoehybrid", ALL_ATTEND),
    "Granite 4.0 micro": (
        "granitemoehybrid",
        ALL_ATTEND | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96},
    ),
    "Llama 4 without chunks": ("llama4_text", CHUNKED | {"layer_types": ["full_attention"] * LAYERS}),
    "Ministral 3, scaled queries": (
        "ministral3",
        {"sliding_window": None, "rope_parameters": SCALED_QUERIES},
    ),
    "Phi-3, long context": (
        "phi3",
        {"sliding_window": None, "original_max_position_embeddings": 64, "rope_parameters": LONG_ROPE},
    ),
    "Qwen2, sliding window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    "SmolLM3, layers without positions": ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
}
"""Name -> model type, and fields of its class."""


PUBLISHED: dict[str, set[str]] = {
    "bamba": {"linear_attention", "full_attention"},
    "granitemoehybrid": {"linear_attention", "full_attention"},
    "lfm2": {"conv", "full_attention"},
    "lfm2_moe": {"conv", "full_attention"},
    "minimax_m3_vl_text": {"full_attention", "minimax_m3_sparse"},
    "ministral": {"sliding_attention", "full_attention"},
}
"""Types of published models' layers, where their class takes others if a config.json is silent."""


def layer_types(config: PreTrainedConfig) -> set[str]:
    """Types of a configuration's layers, as its class names them; empty where it names none."""
    text = config.get_text_config(decoder=True)
    lists = (getattr(text, field, None) for field in LAYER_TYPES)
    return {str(each) for listed in lists for each in listed or ()}


def families() -> list[str]:
    """All names that :func:`make_config` takes: model types, variants, and larger models."""
    types = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not _is_part_of_itself(name)]
    return [*types, *VARIANTS, *(f"{kind} (language part)" for kind in LARGER_MODELS)]


def _is_part_of_itself(model_type: str) -> bool:
    """Whether a type is a larger model whose language part has another type."""
    return f"{model_type}_text" in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def make_config(family: str, **other_sizes: Any) -> PreTrainedConfig:
    """The tiny configuration of a family.

    ``other_sizes``: in place of those of :data:`SIZES`.

    Raises:
        Exception: its class does not take these sizes; the message is the class's own.
    """
    if family.endswith(" (language part)"):
        config: PreTrainedConfig = LARGER_MODELS[family.removesuffix(" (language part)")]()
        return config
    model_type, changes = VARIANTS.get(family, (family, CHANGES.get(family, {})))
    config_class = CONFIG_MAPPING[model_type]
    fields = {name for each in config_class.__mro__ for name in vars(each).get("__annotations__", {})}
    mapped = set(getattr(config_class, "attribute_map", None) or {})
    known = SIZES | other_sizes
    sizes = {name: size for name, size in known.items() if name in fields - mapped or name in TOKENS}
    return config_class(**(sizes | changes))
