"""Factors behind a model's embedding and its output layer, and the cap of logits.

Its own code runs on made-up numbers, with stand-ins for what is in between.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import MoeModelOutputWithPast

from engine.attention.base import PLAN_KEYWORD
from engine.kernels.core.stand_ins import Gives, NotUsual, distance, made_up, with_parts
from engine.model.shard import StageOutput

CLOSE = 1e-5
TOKENS = 3
SMALL, HUGE = 1e-3, 1e30


class _Outputs(MoeModelOutputWithPast):  # type: ignore[misc]
    """What a base model gives: whatever else is asked for is not there."""

    def __getattr__(self, _name: str) -> None:
        return None


def embedding_factor(base: Any, names: dict[str, str], hidden: int, dtype: torch.dtype) -> float:
    """The factor on what the embedding has for a token.

    ``names``: of the base model's parts, by role.
    """
    embedding = getattr(base, names["embedding"])
    own = getattr(embedding, "embed_scale", 1.0)  # a module's own: rounded to its type
    own = float(torch.as_tensor(own).to(dtype)) if hasattr(embedding, "embed_scale") else 1.0
    given, placed = made_up(1, TOKENS, hidden, seed=1), made_up(1, TOKENS, hidden, seed=2)
    first = next(iter(getattr(base, names["layers"])))
    seen = StageOutput().looks_like(first)
    parts = {
        names["embedding"]: Gives(given),
        names["layers"]: torch.nn.ModuleList([seen]),
        names["norm"]: Gives(lambda rows: rows),
    }
    if "positions" in names:
        parts[names["positions"]] = Gives(placed)
    ids = torch.arange(TOKENS)[None]
    with_parts(base, parts)(input_ids=ids, position_ids=ids, use_cache=False, **{PLAN_KEYWORD: None})
    found = seen.hidden.double() - (placed if "positions" in names else 0)
    factor = float((found * given).sum() / given.square().sum())
    if distance(found, factor * given) > CLOSE:
        raise NotUsual("it changes what the embedding gives")
    return own * factor


def of_logits(module: Any, hidden: int) -> tuple[float, float]:
    """Factor on the logits, and their cap.

    A cap c makes c * tanh(logits / c) of them; 0 stands for none.
    """
    rows = made_up(1, TOKENS, hidden, seed=1)
    tried = torch.tensor([SMALL, 1.0, -2.0, 50.0, HUGE], dtype=torch.float64)
    head = Gives(tried.expand(1, TOKENS, -1))
    base = Gives(_Outputs(last_hidden_state=rows))
    ids = torch.arange(TOKENS)[None]
    found = (
        with_parts(module, {module.base_model_prefix: base, "lm_head": head})(
            input_ids=ids, position_ids=ids, use_cache=False
        )
        .logits[0, 0]
        .double()
    )
    before = float((head.given[0] * rows).sum() / rows.square().sum())
    cap = float(found[-1]) if float(found[-1]) < HUGE**0.5 else 0.0
    slope = float(found[1]) if not cap else float(torch.atanh(found[0] / cap)) * cap / SMALL
    expected = slope * tried
    if cap:
        expected = cap * torch.tanh(expected / cap)
    if distance(found[:-1], expected[:-1]) > CLOSE:
        raise NotUsual("it changes what the output layer gives")
    return before * slope, cap
