"""Tiny models of Gemma 4, and prompts of patches for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

PATCH, POOLED, MOST_PATCHES = 4, 2, 64
"""Pixels along a patch, patches along a row of the encoder, patches of an image."""
KINDS: dict[str, dict[str, Any]] = {
    "gemma4": {"use_bidirectional_attention": "vision", "attention_k_eq_v": True},
    "gemma4_small": {
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "use_double_wide_mlp": True,
        "pad_token_id": 5,
    },
    "gemma4_moe": {
        "use_bidirectional_attention": "vision",
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 48,
    },
}
"""Dense, small with inputs of each layer and shared caches, and a mixture."""
AUDIO = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "output_proj_dims": 24,
}
"""Encoder of audio that the small one has, and that is not read."""


def config_of(kind: str, text: dict[str, Any], placeholder: int, window: int = 9) -> Any:
    """A configuration whose layers see windows and whole contexts in turn."""
    return hf.Gemma4Config(
        vision_config=hf.Gemma4VisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            patch_size=PATCH,
            pooling_kernel_size=POOLED,
            position_embedding_size=64,
            standardize=kind == "gemma4",
            use_clipped_linears=kind == "gemma4_small",
        ),
        text_config=hf.Gemma4TextConfig(
            **text
            | {"num_hidden_layers": 4, "hidden_size_per_layer_input": 0, "pad_token_id": 0}
            | {"vocab_size_per_layer_input": text["vocab_size"]}
            | KINDS[kind],
            head_dim=16,
            global_head_dim=32,
            num_global_key_value_heads=2,
            sliding_window=window,
            layer_types=["sliding_attention", "full_attention"] * 2,
            tie_word_embeddings=False,
        ),
        audio_config=AUDIO if kind == "gemma4_small" else None,
        image_token_id=placeholder,
        tie_word_embeddings=False,
    )


def patches(numbers: torch.Generator) -> dict[str, torch.Tensor]:
    """An image of 6 x 8 patches, which becomes 12 rows, with padding."""
    rows, columns = torch.meshgrid(torch.arange(6), torch.arange(8), indexing="ij")
    places = torch.full((1, MOST_PATCHES, 2), -1)
    places[0, : rows.numel()] = torch.stack([columns.flatten(), rows.flatten()], dim=1)
    pixels = torch.rand(1, MOST_PATCHES, 3 * PATCH**2, generator=numbers)
    return {"pixel_values": pixels * (places[:, :, :1] >= 0), "image_position_ids": places}
