"""Tiny configurations of text families: ones that the native kernels compute, and similar ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoModelForCausalLM

from tests.engine.tiny_models import COMMON, VOCAB, WINDOW, save, widen
from tests.nightly import NIGHTLY

CONTEXT = 4096
ORIGINAL = 64
"""Context of the first training of models that were extended."""
SMALL: dict[str, Any] = COMMON | {"max_position_embeddings": CONTEXT, "num_hidden_layers": 3}
WIDTH_OF_TWO = 128
"""Width of MLPs of which two ranks have whole parts."""
WIDER = SMALL | {"intermediate_size": WIDTH_OF_TWO}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
TWO_SHARED: dict[str, Any] = {"moe_intermediate_size": WIDTH_OF_TWO // 2}
"""Two ranks have whole parts of two shared experts, which are one MLP."""
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | more}


def extended(kind: str, factor: float = CONTEXT / ORIGINAL, **more: Any) -> dict[str, Any]:
    return rope(kind, factor=factor, original_max_position_embeddings=ORIGINAL, **more)


def longrope(pairs: int, **more: Any) -> dict[str, Any]:
    """Angles with a factor for each pair of a head, another one in long requests."""
    return rope(
        "longrope",
        original_max_position_embeddings=ORIGINAL,
        factor=CONTEXT / ORIGINAL,
        short_factor=[1.0 + 0.1 * each for each in range(pairs)],
        long_factor=[2.0 + 0.5 * each for each in range(pairs)],
        **more,
    )


LLAMA3 = extended("llama3", low_freq_factor=1.0, high_freq_factor=4.0)
MINISTRAL3 = extended("yarn", beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)[
    "rope_parameters"
]

BY_LAYER = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}


GROUPED: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
"""Experts beside a shared one, behind a dense layer."""
LATENT: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 40,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
"""Heads that are made from latents, which are cached."""
FEW = {"num_attention_heads": 4, "num_key_value_heads": 4}
NOT_KEPT = LATENT | FEW | {"kv_lora_rank": 24, "v_head_dim": 48}
"""Latents that fill no panels, with values wider than keys: both are cached."""
DEEPSEEK_YARN = extended("yarn", beta_fast=32.0, beta_slow=1.0, mscale=0.7, mscale_all_dim=0.9)


GEMMA4: dict[str, Any] = SMALL | {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "final_logit_softcapping": 20.0,
}
"""Layers of two kinds, with heads of different sizes."""

MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}


def granite(**multipliers: float) -> Any:
    """A Granite model in which no other multipliers than these have an effect."""
    without = {"residual_multiplier": 1.0, "embedding_multiplier": 1.0, "logits_scaling": 1.0}
    return transformers.GraniteConfig(**SMALL | without | multipliers, attention_multiplier=0.25)


GATED_ATTENTION: dict[str, Any] = WIDER | {
    "head_dim": 16,
    "layer_types": ["full_attention"] * 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
"""Attention of families that have layers with a gated delta rule, without those layers."""


NATIVE: dict[str, Callable[[], Any]] = {
    "gated_attention": lambda: transformers.Qwen3_5TextConfig(**GATED_ATTENTION),
    "gated_attention_biases": lambda: transformers.Qwen3_5TextConfig(**GATED_ATTENTION, attention_bias=True),
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "llama_biases": lambda: transformers.LlamaConfig(**SMALL, attention_bias=True),
    "llama_linear": lambda: transformers.LlamaConfig(**SMALL | rope("linear", factor=8.0)),
    "llama_dynamic": lambda: transformers.LlamaConfig(**SMALL | rope("dynamic", factor=8.0)),
    "llama_yarn": lambda: transformers.LlamaConfig(**SMALL | extended("yarn")),
    "llama_longrope": lambda: transformers.LlamaConfig(**SMALL | longrope(pairs=8)),
    "llama_llama3": lambda: transformers.LlamaConfig(**SMALL | LLAMA3),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=WINDOW, head_dim=32),
    "ministral": lambda: transformers.MinistralConfig(
        **SMALL, sliding_window=WINDOW, head_dim=16, layer_types=ALTERNATING
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=32),
    "seed_oss": lambda: transformers.SeedOssConfig(
        **SMALL, head_dim=16, attention_bias=True, attention_out_bias=True, residual_dropout=0.0
    ),
    "cwm": lambda: transformers.CwmConfig(
        **SMALL | LLAMA3, head_dim=16, sliding_window=WINDOW, layer_types=ALTERNATING
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, **EXPERTS, head_dim=16, num_experts=8, norm_topk_prob=True, decoder_sparse_step=1
    ),
    "qwen3_moe_not_normalised": lambda: transformers.Qwen3MoeConfig(
        **SMALL, **EXPERTS, head_dim=16, num_experts=8, norm_topk_prob=False, mlp_only_layers=[1]
    ),
    "smollm3_with_positions": lambda: transformers.SmolLM3Config(**SMALL, no_rope_layers=[1, 1, 1]),
    "smollm3": lambda: transformers.SmolLM3Config(**SMALL, no_rope_layers=[1, 1, 0]),
    "ministral3": lambda: transformers.Ministral3Config(
        **SMALL,
        sliding_window=None,
        head_dim=16,
        rope_parameters=MINISTRAL3 | {"llama_4_scaling_beta": 0.1},
    ),
    "ministral3_far": lambda: transformers.Ministral3Config(
        **SMALL,
        sliding_window=None,
        head_dim=16,
        rope_parameters=MINISTRAL3
        | {"llama_4_scaling_beta": 0.01, "original_max_position_embeddings": CONTEXT - 2},
    ),
    "granite": lambda: granite(embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=8.0),
    "helium": lambda: transformers.HeliumConfig(**SMALL, head_dim=16),
    "ernie4_5": lambda: transformers.Ernie4_5Config(**SMALL, head_dim=16),
    "gemma": lambda: transformers.GemmaConfig(**SMALL, head_dim=32),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=20.0,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SMALL,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
        rope_parameters=BY_LAYER,
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(**GEMMA4, attention_k_eq_v=True),
    "gemma4_small": lambda: transformers.Gemma4TextConfig(
        **GEMMA4
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
            "use_double_wide_mlp": True,
        }
    ),
    "phi3": lambda: transformers.Phi3Config(**SMALL, sliding_window=WINDOW),
    "phi4": lambda: transformers.Phi3Config(
        **SMALL | rope("default", partial_rotary_factor=0.5), sliding_window=None
    ),
    "phi4_mini": lambda: transformers.Phi3Config(
        **SMALL | longrope(pairs=6, partial_rotary_factor=0.75) | {"tie_word_embeddings": True},
        original_max_position_embeddings=ORIGINAL,
        sliding_window=None,
    ),
    "phi": lambda: transformers.PhiConfig(
        **SMALL, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "glm": lambda: transformers.GlmConfig(**SMALL, head_dim=32, attention_bias=True),
    "glm4": lambda: transformers.Glm4Config(**SMALL, head_dim=32),
    "olmo": lambda: transformers.OlmoConfig(**SMALL),
    "olmo2": lambda: transformers.Olmo2Config(**SMALL),
    "olmo3": lambda: transformers.Olmo3Config(**SMALL, sliding_window=WINDOW, layer_types=ALTERNATING),
    "cohere": lambda: transformers.CohereConfig(**SMALL, logit_scale=0.5),
    "cohere_head_norms": lambda: transformers.CohereConfig(**SMALL, use_qk_norm=True),
    "cohere2": lambda: transformers.Cohere2Config(**SMALL, sliding_window=WINDOW, layer_types=ALTERNATING),
    "exaone4": lambda: transformers.Exaone4Config(
        **SMALL, head_dim=16, sliding_window=WINDOW, sliding_window_pattern=2, layer_types=ALTERNATING
    ),
    "hunyuan": lambda: transformers.HunYuanDenseV1Config(**SMALL, head_dim=16),
    "starcoder2": lambda: transformers.Starcoder2Config(**SMALL, sliding_window=None),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=CONTEXT, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=1
    ),
    "arcee": lambda: transformers.ArceeConfig(**SMALL, head_dim=16),
    "apertus": lambda: transformers.ApertusConfig(
        **SMALL, hidden_act="xielu", rope_parameters=LLAMA3["rope_parameters"]
    ),
    "minicpm3": lambda: transformers.MiniCPM3Config(**SMALL | NOT_KEPT),
    "youtu": lambda: transformers.YoutuConfig(**SMALL | LATENT | FEW, attention_bias=True),
}
"""The kernels compute these, and have to go on doing so."""

MIXTURES: dict[str, Callable[[], Any]] = {
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **WIDER, **EXPERTS, shared_expert_intermediate_size=80, num_experts=8, mlp_only_layers=[1]
    ),
    "dots1": lambda: transformers.Dots1Config(
        **WIDER, **EXPERTS, **GROUPED, n_group=4, topk_group=2, head_dim=16, sliding_window=None
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **WIDER,
        **EXPERTS,
        **GROUPED,
        n_group=1,
        topk_group=1,
        head_dim=32,
        attention_bias=True,
        use_qk_norm=True,
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **WIDER, num_experts=8, num_experts_per_tok=3, norm_topk_prob=False
    ),
    "granite_moe": lambda: transformers.GraniteMoeConfig(
        **WIDER, **MULTIPLIERS, num_local_experts=8, num_experts_per_tok=3
    ),
    "granite_moe_shared": lambda: transformers.GraniteMoeSharedConfig(
        **WIDER, **MULTIPLIERS, num_local_experts=8, num_experts_per_tok=3, shared_intermediate_size=80
    ),
    "granite4": lambda: transformers.GraniteMoeHybridConfig(
        **WIDER,
        **MULTIPLIERS,
        num_local_experts=8,
        num_experts_per_tok=3,
        shared_intermediate_size=80,
        layer_types=["attention"] * 3,
        position_embedding_type="rope",
    ),
    "gemma4_moe": lambda: transformers.Gemma4TextConfig(
        **GEMMA4 | WIDER, enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=48
    ),
    "ernie4_5_moe": lambda: transformers.Ernie4_5_MoeConfig(
        **WIDER | TWO_SHARED, moe_num_experts=8, moe_k=3, moe_layer_start_index=1
    ),
    "hunyuan_moe": lambda: transformers.HunYuanMoEV1Config(**WIDER, head_dim=16, num_experts=8, moe_topk=3),
    "minimax_m2": lambda: transformers.MiniMaxM2Config(
        **WIDER, head_dim=32, num_local_experts=8, num_experts_per_tok=3, rotary_dim=16
    ),
    "phimoe": lambda: transformers.PhimoeConfig(
        **WIDER,
        num_local_experts=8,
        num_experts_per_tok=2,
        router_jitter_noise=0.05,
        lm_head_bias=True,
        attention_bias=True,
        sliding_window=None,
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **WIDER | NOT_KEPT | DEEPSEEK_YARN,
        **EXPERTS,
        **GROUPED | {"norm_topk_prob": False},
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
    ),
    "deepseek_v2_lite": lambda: transformers.DeepseekV2Config(
        **WIDER | LATENT | {"q_lora_rank": None},
        **EXPERTS | TWO_SHARED,
        **GROUPED | {"n_shared_experts": 2},
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **WIDER | LATENT | DEEPSEEK_YARN, **EXPERTS, **GROUPED, n_group=4, topk_group=2
    ),
    "kimi_k2": lambda: transformers.DeepseekV3Config(
        **WIDER | LATENT | {"v_head_dim": 64}, **EXPERTS, **GROUPED, n_group=1, topk_group=1
    ),
    "axk1": lambda: transformers.AXK1Config(
        **WIDER | NOT_KEPT, **EXPERTS, **GROUPED, n_group=4, topk_group=2
    ),
    "glm4_moe_lite": lambda: transformers.Glm4MoeLiteConfig(
        **WIDER | LATENT,
        **EXPERTS,
        **{name: value for name, value in GROUPED.items() if name != "first_k_dense_replace"},
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **WIDER | rope("default"),
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
        num_local_experts=8,
        num_experts_per_tok=3,
    ),
}
"""Mixtures that choose experts in other ways than Mixtral, or whose experts are others."""
NATIVE.update(MIXTURES)
SOME_MIXTURES = ["qwen2_moe", "deepseek_v3", "gpt_oss", "gemma4_moe"]
"""Those of them that are tried for each push; at night all are."""
TRIED = [family for family in NATIVE if NIGHTLY or family not in MIXTURES or family in SOME_MIXTURES]

ASKED = [
    *("gpt_oss", "gemma", "gemma2", "gemma3", "gemma4", "gemma4_small", "gemma4_moe"),
    *("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "kimi_k2", "glm4", "glm4_moe", "phi3", "phi4"),
    *("phi4_mini", "phimoe", "qwen2_moe", "olmo2", "olmo3", "olmoe", "granite", "granite_moe", "cohere"),
    *("cohere2", "minimax_m2", "ernie4_5", "ernie4_5_moe", "exaone4", "smollm3", "hunyuan", "hunyuan_moe"),
    *("dots1", "starcoder2", "gpt2"),
]
"""Families that people serve: speed and closeness to float32 are measured for each."""

ALIKE: dict[str, Callable[[], Any]] = {
    "bitnet": lambda: transformers.BitNetConfig(**SMALL),
    "gemma3n": lambda: transformers.Gemma3nTextConfig(
        **SMALL,
        head_dim=16,
        vocab_size_per_layer_input=VOCAB,
        layer_types=["full_attention"] * 3,
        num_kv_shared_layers=0,
    ),
}
"""Families with nearly the same parts, which compute something else."""


def make_family(directory: Path, family: str, seed: int = 0, width: int | None = None) -> Path:
    """Write a tiny model of one of these, as ``make_tiny_model`` does.

    ``width``: of its MLPs, where it names one.
    """
    config = (NATIVE | ALIKE)[family]()
    if width is not None and hasattr(config, "intermediate_size"):
        config.intermediate_size = width
    model = AutoModelForCausalLM.from_config(config)
    widen(model, seed)
    return save(model, directory)
