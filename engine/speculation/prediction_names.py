"""Names of multi-token prediction (MTP) layers in checkpoints, by family (no torch)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.model.checkpoint import CheckpointError, ModelInfo


@dataclass(frozen=True)
class PredictionNames:
    """Names of a prediction layer's tensors, and what its config differs in."""

    layer: str
    """Prefix of the layer's own tensors, with {} for the number of the model's layers."""
    parts: dict[str, str]
    """Names of the parts around the layer, by role."""
    config: dict[str, Any]
    first_sees_nothing: bool = False
    """Whether the first position gets no token."""


BEHIND = PredictionNames(
    "model.layers.{}.",
    {
        "token_norm": "model.layers.{}.enorm.weight",
        "hidden_norm": "model.layers.{}.hnorm.weight",
        "join": "model.layers.{}.eh_proj.weight",
        "norm": "model.layers.{}.shared_head.norm.weight",
    },
    {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    first_sees_nothing=True,
)
"""A layer behind the model's last, with its own output norm."""
BEHIND_LISTED = replace(BEHIND, config={"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]})
"""The same of a model whose config lists the kinds of its layers."""
APART = PredictionNames(
    "mtp.layers.0.",
    {
        "token_norm": "mtp.pre_fc_norm_embedding.weight",
        "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
        "join": "mtp.fc.weight",
        "norm": "mtp.norm.weight",
    },
    {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": []},
)
"""A layer under a name of its own."""
SHARING = PredictionNames(
    "model.mtp_block.0.",
    {
        "token_norm": "model.mtp_emb_norm.0.weight",
        "hidden_norm": "model.mtp_hidden_norm.0.weight",
        "join": "model.mtp_linear_proj.0.weight",
        "norm": "model.norm.weight",
    },
    {"num_hidden_layers": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 0},
)
"""A dense layer whose results go through the model's own norm."""
NAMES = {
    "deepseek_v3": BEHIND,
    "ernie4_5_moe": SHARING,
    "glm4_moe": BEHIND,
    "glm4_moe_lite": BEHIND_LISTED,
    "qwen3_next": APART,
}
"""By model type."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def names_of(info: ModelInfo) -> tuple[PredictionNames, int]:
    """How a checkpoint names its prediction layer, and the number of the model's layers.

    Raises:
        CheckpointError: it has none that is known.
    """
    names = NAMES.get(info.model_type)
    if names is None:
        raise CheckpointError(
            f'--speculative-config: method "mtp" reads the prediction layers of {", ".join(NAMES)}, and '
            f"{info.directory} is {info.model_type}: draft by ngram or by a small model"
        )
    return names, info.num_layers
