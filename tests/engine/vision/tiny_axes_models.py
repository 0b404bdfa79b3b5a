"""Tiny vision-language models whose images have positions on three axes."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

PATCH, MERGE = 4, 2
GRIDS = ((8, 6), (4, 12), (6, 6), (2, 4))
"""Patches along height and width."""
VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": PATCH, "out_hidden_size": 64,
    "spatial_merge_size": MERGE,
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def patches(numbers: torch.Generator) -> Tensors:
    """An image of one of :data:`GRIDS` as patches."""
    height, width = GRIDS[int(torch.randint(len(GRIDS), (1,), generator=numbers))]
    pixels = torch.randn(height * width, 3 * 2 * PATCH * PATCH, generator=numbers)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}


def num_rows(tensors: Tensors) -> int:
    """Placeholders of an image."""
    return int(tensors["image_grid_thw"].prod()) // MERGE**2


def config_of(family: str, text: dict[str, Any], placeholder: int) -> Any:
    """Configuration of a family; ``text``: sizes of the text model."""
    ids = {"image_token_id": placeholder, "video_token_id": placeholder + 1}
    sections = {"rope_type": "default", "rope_theta": 10000.0}
    side_by_side = sections | {"mrope_section": [2, 3, 3]}
    interleaved = sections | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    moe = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
    deep = VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    states = {
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 32,
        "rope_parameters": sections | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
    }  # fmt: skip
    glm = sections | {"mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}
    match family:
        case "qwen2_vl":
            vision: dict[str, Any] = {
                "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": PATCH,
            }  # fmt: skip
            return hf.Qwen2VLConfig(
                text_config=text | {"rope_parameters": side_by_side}, vision_config=vision, **ids
            )
        case "qwen2_5_vl":
            vision = VISION | {"window_size": 16, "fullatt_block_indexes": [1]}
            return hf.Qwen2_5_VLConfig(
                text_config=text | {"rope_parameters": side_by_side}, vision_config=vision, **ids
            )
        case "qwen3_vl":
            own = text | {"head_dim": 16, "rope_parameters": interleaved}
            return hf.Qwen3VLConfig(text_config=own, vision_config=deep, **ids)
        case "qwen3_vl_moe":
            own = text | {"head_dim": 16, "rope_parameters": interleaved, "num_experts": 4} | moe
            return hf.Qwen3VLMoeConfig(text_config=own, vision_config=deep, **ids)
        case "qwen3_5":
            vision = VISION | {"num_position_embeddings": 64}
            return hf.Qwen3_5Config(text_config=text | states, vision_config=vision, **ids)
        case "qwen3_5_moe":
            vision = VISION | {"num_position_embeddings": 64}
            own = text | states | moe | {"num_experts": 4, "shared_expert_intermediate_size": 32}
            return hf.Qwen3_5MoeConfig(text_config=own, vision_config=vision, **ids)
        case "glm4v":
            vision = VISION | {"image_size": 32}
            return hf.Glm4vConfig(text_config=text | {"rope_parameters": glm}, vision_config=vision, **ids)
        case "glm4v_moe":
            vision = VISION | {"image_size": 32}
            own = text | moe | {"rope_parameters": glm, "n_routed_experts": 4, "head_dim": 16}
            return hf.Glm4vMoeConfig(text_config=own, vision_config=vision, **ids)
    raise ValueError(family)
