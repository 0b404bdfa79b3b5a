"""Attention temperature: a factor on a layer's queries that grows with their positions (Llama 4).

transformers' module counts the tokens of its call for it. Where it is called for packed rows of requests,
that is left out, and the paged attention multiplies by the positions of the step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from engine.attention.base import PLAN_KEYWORD, TEMPERATURE_ATTRIBUTE

SWITCH = "attn_temperature_tuning"
"""Attribute of a module that says whether it scales its queries itself."""


class Temperature(NamedTuple):
    """Factor 1 + scale * log(1 + floor((position + 1) / floor))."""

    floor: float
    scale: float

    def scaled(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries [1, heads, tokens, dim] at positions [tokens], in the order of transformers' operations."""
        steps = torch.floor((positions.float() + 1.0) / self.floor)
        factors = torch.log1p(steps) * self.scale + 1.0
        return (query * factors.view(1, 1, -1, 1)).to(query.dtype)


def scale_by_position(module: Any) -> None:
    """Have the layers of a model that scale their queries do so by position."""
    for part in module.modules():
        if vars(part).get(SWITCH) and not getattr(part, "use_rope", True):
            setattr(part, TEMPERATURE_ATTRIBUTE, Temperature(part.floor_scale, part.attn_scale))
            part.register_forward_pre_hook(_switch, with_kwargs=True)


def _switch(module: Any, _: Any, options: dict[str, Any]) -> None:
    """Leave the scaling to the paged attention in calls that have a plan."""
    setattr(module, SWITCH, PLAN_KEYWORD not in options)
