"""Names of multi-token prediction (MTP) layers in checkpoints, by family (no torch)."""

from __future__ import annotations

from dataclasses import dataclass
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
NAMES = {"deepseek_v3": BEHIND, "glm4_moe": BEHIND, "qwen3_next": APART}
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
