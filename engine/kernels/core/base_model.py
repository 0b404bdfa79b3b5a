"""The parts of a transformers base model, by role."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from engine.attention.base import LAYER_ATTRIBUTE
from engine.kernels.core.stand_ins import NotRecognised
from engine.model.sharding.shard import PassThrough
from engine.states.layers import has_state

TABLE, PROJECTION, TABLE_NORM = (
    "embed_tokens_per_layer",
    "per_layer_model_projection",
    "per_layer_projection_norm",
)
"""Names of the parts that make inputs which layers have beside the stream."""
NAMES = {
    "embedding": ("embed_tokens", "wte", "embeddings"),
    "layers": ("layers", "h"),
    "norm": ("norm", "ln_f", "final_layernorm", "embedding_norm", "norm_f"),
    "rotary": ("rotary_emb", "pos_emb"),
    "positions": ("wpe",),
    "table": (TABLE,),
    "projection": (PROJECTION,),
    "table_norm": (TABLE_NORM,),
}
"""Names that families have for the parts of a base model, by role."""


@dataclass
class BaseModel:
    """A base model whose layers are recognised."""

    module: Any
    hidden: int
    dtype: torch.dtype
    rotaries: dict[tuple[str, ...], Any] = field(default_factory=dict)
    """Rotary embeddings that mixers use, by kind of layer, in the order of their numbers."""

    def __post_init__(self) -> None:
        self.names = base_parts(self.module)
        """Names of its parts, by role."""

    @property
    def all_layers(self) -> list[Any]:
        """All layers of the model, including those of other stages."""
        return [*getattr(self.module, self.names["layers"])]

    @property
    def layers(self) -> list[Any]:
        """The layers that are computed here."""
        return [layer for layer in self.all_layers if not isinstance(layer, PassThrough)]


def base_parts(base: Any) -> dict[str, str]:
    """Names of the parts of a base model, by role.

    Raises:
        NotRecognised: it has other parts.
    """
    if base is None:
        raise NotRecognised("no base model of the usual name")
    found = [name for name, part in base.named_children() if not isinstance(part, torch.nn.Dropout)]
    names = {role: name for role, each in NAMES.items() for name in each if name in found}
    is_known = len(names) == len(found) and names.keys() >= {"embedding", "layers", "norm"}
    if not is_known or any(True for _ in base.named_parameters(recurse=False)):
        raise NotRecognised(f"{type(base).__name__} has the parts {', '.join(sorted(found))}")
    return names


def is_mixer(module: Any) -> bool:
    """Whether a module of a layer looks at other tokens: attention, or a recurrence."""
    return hasattr(module, LAYER_ATTRIBUTE) or has_state(module)


def mixer_module(layer: Any) -> Any:
    """Module of a layer that mixes tokens; a list of two, or None."""
    found = [part for _, part in layer.named_children() if is_mixer(part)]
    return found if len(found) > 1 else next(iter(found), None)
