"""The factor on what a model's embedding has for a token.

Its own code runs on made-up numbers, with stand-ins for what is in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engine.attention.base import PLAN_KEYWORD
from engine.kernels.core.stand_ins import Gives, NotRecognised, distance, made_up, with_parts
from engine.model.sharding.shard import StageOutput

CLOSE = 1e-5
TOKENS = 3


class _WithWeights(StageOutput):
    """Stand-in for a layer that gives attention's weights beside its rows."""

    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options), None


def embedding_factor(base: Any, names: Mapping[str, str], hidden: int, dtype: torch.dtype) -> float:
    """The factor on what the embedding has for a token.

    ``names``: of the base model's parts, by role.
    """
    embedding = getattr(base, names["embedding"])
    own = getattr(embedding, "embed_scale", 1.0)  # a module's own: rounded to its type
    own = float(torch.as_tensor(own).to(dtype)) if hasattr(embedding, "embed_scale") else 1.0
    given, placed = made_up(1, TOKENS, hidden, seed=1), made_up(1, TOKENS, hidden, seed=2)
    first = next(iter(getattr(base, names["layers"])))
    parts = {names["embedding"]: Gives(given), names["norm"]: Gives(lambda rows: rows)}
    if "positions" in names:
        parts[names["positions"]] = Gives(placed)
    ids = torch.arange(TOKENS)[None]
    for kind in (StageOutput, _WithWeights):
        seen = kind().looks_like(first)
        parts[names["layers"]] = torch.nn.ModuleList([seen])
        try:
            with_parts(base, parts)(input_ids=ids, position_ids=ids, use_cache=False, **{PLAN_KEYWORD: None})
        except ValueError:  # what a layer gives is taken apart
            if kind is _WithWeights:
                raise
        else:
            break
    found = seen.hidden.double() - (placed if "positions" in names else 0)
    factor = float((found * given).sum() / given.square().sum())
    if distance(found, factor * given) > CLOSE:
        raise NotRecognised("it changes what the embedding gives")
    return own * factor
